"""``PrivacyEngine``: Opacus's engine with batch clipping. Wiring only; the parts live elsewhere."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from opacus_bc._opacus import DPOptimizer
from opacus_bc.alc.config import ALC
from opacus_bc.engine.accounted import AccountedEngine
from opacus_bc.engine.booking import check_accountant, check_protected
from opacus_bc.engine.budget import calibrated, warn_of_large_delta
from opacus_bc.engine.keywords import takes_no_budget, takes_no_noise_multiplier
from opacus_bc.engine.release import finished_module, recalibrate
from opacus_bc.engine.request import Request
from opacus_bc.engine.resume.checkpoints import Checkpoints, check_savable
from opacus_bc.engine.resume.parts import Parts
from opacus_bc.engine.starting import start
from opacus_bc.mechanism.noise import SecureNoise
from opacus_bc.mechanism.numbers import check_positive
from opacus_bc.mechanism.warn import users_level
from opacus_bc.optimizers.private import COPIES
from opacus_bc.parallel.wrappers import unwrap


class PrivacyEngine(AccountedEngine):
    """Opacus's ``PrivacyEngine`` with ``clipping="batch"``, which leaves BatchNorm in place.

    Args:
        accountant: ``"fdp"`` (certified upper bounds, every sampling), or Opacus's ``"prv"``, ``"rdp"`` and
            ``"gdp"`` (Poisson sampling only; ``"gdp"`` is an approximation and no bound).
        secure_mode: Draw noise and batches from a cryptographic generator (extra ``secure``).

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        >>> engine = PrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=DataLoader(data, batch_size=16), noise_multiplier=1.0, max_grad_norm=0.5,
        ...     clipping="batch", batch_norm="batch",
        ... )
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        >>> len(engine.accountant)
        4
    """

    def __init__(self, *, accountant: str = "fdp", secure_mode: bool = False) -> None:
        """See the class."""
        super().__init__(accountant=accountant)
        self._secure_noise: SecureNoise | None = SecureNoise() if secure_mode else None
        self.secure_mode = secure_mode
        self._checkpoints = Checkpoints()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(COPIES)

    @takes_no_budget
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str | None = None,
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        mini_batch_size: int | None = None,
        sampling: str | None = None,
        batch_norm: Any = None,
        batch_norm_refresh: int = 1,
        alc: ALC | DataLoader[Any] | None = None,
        compare_public: bool = True,
        unit: Any = None,
        views: int = 1,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Make a training set-up private; arguments as in Opacus, and eight more.

        **Formal guarantee**: if it raises, module, optimizer, accountant and data loader are what they were.

        Args:
            module: The model. With ``clipping="batch"`` the very same object is returned.
            optimizer: Any first-order torch optimizer.
            criterion: Used by Opacus's ghost clipping, and by ALC on public data (default: cross entropy).
            data_loader: The private data. Its ``generator`` decides the draws if it has one (not in secure
                mode); otherwise the operating system seeds Poisson draws, and torch a shuffled order.
            noise_multiplier: Sigma. The noise standard deviation is sigma times the L2-sensitivity. In
                Opacus's modes without ``alc=`` it is ``sigma * C``: a shuffled run has sigma_eff = sigma / 2.
            max_grad_norm: C.
            batch_first: See Opacus.
            loss_reduction: ``"mean"`` or ``"sum"``, what the loss does over a batch.
            poisson_sampling: ``False`` keeps the loader's own order, accounted as shuffling.
            clipping: ``"batch"``, or Opacus's ``"flat"``, ``"per_layer"``, ``"adaptive"``.
            noise_generator: torch generator of the noise, for repeatable runs; with ``"flat"`` and
                ``"per_layer"`` it also means Opacus's own arithmetic, bit for bit.
            grad_sample_mode: Opacus's ``"hooks"``, ``"ghost"``, ``"ew"`` and ``"functorch"``, or ``"bk"``:
                every sample's gradient is clipped in one ordinary backward, at little more than SGD's price,
                and the module comes back unwrapped. None, the default, is ``"bk"`` for ``"flat"`` and
                ``"per_layer"`` where ``batch_norm=`` or ``alc=`` answers for BatchNorm in the model, and
                ``"hooks"`` otherwise, with ``noise_generator=`` (Opacus bit for bit) and for what ``"bk"``
                cannot do, as far as ``make_private`` can see it. ``"bk"`` takes each layer's norms in the
                cheaper way; ``"bk-ghost"`` never instantiates a sample's gradient where Gram matrices give
                its norm, ``"bk-rows"`` always does. Batch clipping needs no per-sample gradients.
            wrap_model: See Opacus.
            rand_on_empty: See Opacus; the gradient of a made-up row is discarded.
            mini_batch_size: s, the samples that are clipped together; None clips the whole batch (BC), a
                divisor of the batch size gives GBC. With ``unit=`` the most samples of one user in a step.
            sampling: ``"poisson"``, ``"partition"``, ``"shuffle"``; None goes by ``poisson_sampling``.
            batch_norm: What happens to BatchNorm's running statistics: a public DataLoader, ``"private"``,
                ``"batch"``, ``"frozen"`` or ``"unprotected"``; see ``opacus_bc.batch_norm.policy``.
            batch_norm_refresh: With individual clipping and public statistics: steps between new ones.
            alc: Adaptive layerwise clipping, with ``clipping="batch"`` or ``"flat"``: a public loader, or an
                :class:`opacus_bc.ALC`. Its loader also serves BatchNorm if ``batch_norm`` is None.
            compare_public: Whether the contents of public samples are compared with private ones, as far as
                that is cheap; see ``opacus_bc.public.contents``.
            unit: Protect users with all their samples: one user id for each sample of the data set, or an
                :class:`opacus_bc.Units`. The loader's ``batch_size`` then counts users, and a drawn user is
                one clipped vector. With ``clipping="batch"`` or ``"flat"``.
            views: With individual clipping: how often a drawn sample is delivered (the data set's transform
                is random); the mean gradient of its views is clipped.
            **kwargs: What Opacus's adaptive clipping takes; anything else is a TypeError.

        Returns:
            As Opacus: ``(module, optimizer, data_loader)``, with ghost clipping's criterion in third place.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "kwargs")}
        request = Request.of({**arguments, **kwargs})
        if noise_generator is not None and self.secure_mode:
            raise ValueError("noise_generator cannot be given with secure_mode=True: a known seed voids it")
        if noise_multiplier == 0:
            warnings.warn("noise_multiplier=0 adds no noise: epsilon is infinite", stacklevel=users_level())
        run = start(request, self.accountant, self._secure_noise, self._runs, self.dataset, self._limit)
        self.dataset = data_loader.dataset
        self._runs.append(run)
        if self._limit is not None:
            run.obey(self._limit)
        return run.returned

    @takes_no_noise_multiplier
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """:meth:`make_private` with the noise multiplier that spends at most the given budget.

        The calibration counts the very steps that the accountant will count: ``epochs * len(data_loader)`` at
        sample rate ``1 / len(data_loader)`` (with ``unit=`` users are counted, not samples), through the same
        blocks. The other arguments are
        :meth:`make_private`'s.

        Args:
            target_epsilon: The budget's epsilon.
            target_delta: The budget's delta.
            epochs: Passes over the data that will be made.
        """
        if len(self.accountant) > 0:
            warnings.warn(
                "some privacy budget is already spent: the calibrated noise_multiplier assumes a fresh "
                "accountant, so the total will be higher than target_epsilon",
                stacklevel=users_level(),
            )
        check_positive("target_epsilon", target_epsilon)
        given = {"module": module, "optimizer": optimizer, "data_loader": data_loader, **kwargs}
        given["max_grad_norm"] = max_grad_norm
        request = Request.of({**given, "noise_multiplier": 1.0})
        check_accountant(self.accountant, request.kind)
        check_protected(self.accountant, request.plan, [run.plan for run in self._runs])
        warn_of_large_delta(target_delta, [request.plan], "target_delta")
        multiplier = calibrated(
            request, self.accountant, epsilon=target_epsilon, delta=target_delta, epochs=epochs
        )
        result = self.make_private(**given, noise_multiplier=multiplier)
        self._runs[-1].optimizer.licence.planned_steps = epochs * request.plan.steps_per_epoch
        return result

    def recalibrate_batch_norm(
        self, *, noise_multiplier: float | None = None, bound: float | None = None
    ) -> None:
        """Release the running statistics of ``batch_norm="private"`` at the current weights, with noise.

        **Formal guarantee**: the release is ``G_mu``-DP with ``mu = sqrt(layers) / noise_multiplier``, and
        the accountant is told so before anything is released.

        Args:
            noise_multiplier: Noise standard deviation over L2-sensitivity for each layer; None takes the
                policy's (50).
            bound: L2 bound R of a sample's channel means and second moments; None takes the policy's.

        Raises:
            ValueError: No model of this engine has the policy ``"private"``.
            BudgetSpentError: :meth:`stop_at` has set a budget that does not cover it; nothing was released.
        """
        if noise_multiplier is not None:
            check_positive("noise_multiplier", noise_multiplier)
        if bound is not None:
            check_positive("bound", bound)
        runs = [run for run in self._runs if run.policy.name == "private"]
        if not runs:
            raise ValueError("recalibrate_batch_norm() needs a model made private with batch_norm='private'")
        for run in runs:
            recalibrate(
                run, self.accountant, noise_multiplier=noise_multiplier, bound=bound, limit=self._limit
            )

    def finalize(self, module: nn.Module) -> nn.Module:
        """The plain, releasable module: the object that was made private, without anything added to it.

        Running statistics are brought up to date (public data) or released (``"private"``, unless that was
        done at these weights). All other buffers and the parameters that were not trained are compared with
        what was there before. Layers get their plain types back, and Opacus's hooks and private activations
        and gradients are removed.

        Args:
            module: What ``make_private`` returned, or the module inside.

        Returns:
            The plain module. Its optimizer refuses further steps.

        Raises:
            ValueError: This engine did not make the module private.
            RuntimeError: The private optimizer made more steps than the accountant knows.
            MovingBufferError: A buffer or an untrained parameter holds what nobody released.
        """
        run = self._run_of(module, None)
        if run is None:
            raise ValueError(f"this engine has not made this {type(unwrap(module)).__name__} private")
        self._check_booked()
        return finished_module(run, self.accountant)

    def save_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
        lr_scheduler: Any = None,
        exact: bool = False,
    ) -> None:
        """Save everything that a resume needs, atomically.

        Weights, optimizer, schedulers, accountant, ALC, BatchNorm and the step go into ``path``; none of it
        is more than what the accountant has counted. A resume draws fresh randomness, and epsilon is right.
        Arguments that are not named below are Opacus's.

        With ``exact=True`` generator states go into ``path + ".secret"`` (mode 0600), and a resume that finds
        them goes on bit by bit. Whoever holds that file knows past and future noise, so do not hand it out.
        With ``secure_mode=True`` it is never written.

        **Edge cases**: of several ranks rank 0 writes, and its file serves all of them. A pass that is under
        way is continued by the first pass after the resume (a shuffled one starts anew and is booked as a new
        pass). Where a batch has been drawn and not used, no resume could be exact: a warning says so, and no
        generator states are written. Two continuations of one checkpoint that are both looked at have spent
        both; no accountant sees that. If they used the ``.secret`` file and differ in anything (step size,
        loss, augmentation), they share their noise, which then cancels, and no epsilon covers that: ask for
        ``exact=True`` only to repeat the very same run.

        Args:
            path: Where to; an open binary file is possible, without atomicity and generator states.
            module: What ``make_private`` returned, or the module inside.
            checkpoint_dict: More to save: tensors, plain values and containers of these.
            lr_scheduler: torch's learning rate scheduler.
            exact: Whether to write generator states.

        Raises:
            CheckpointError: Something could not be loaded again, so nothing is written.
            MovingBufferError: A buffer or an untrained parameter holds what nobody released.
            RuntimeError: The model was finalized, or weights moved without the accountant.
        """
        parts = self._parts(module, optimizer, noise_scheduler, grad_clip_scheduler, lr_scheduler)
        run = parts.run
        check_savable(run)
        if (module_state_dict_kwargs or {}).get("keep_vars"):
            raise ValueError("keep_vars=True would save what hangs on the parameters, raw gradients too")
        self._check_booked()
        if run is not None:
            run.policy.check_untrained(run.optimizer.licence.moved, run.steps)
            if run.ranks is not None and run.ranks.rank != 0:
                return
        self._checkpoints.save(
            path,
            parts,
            extra=checkpoint_dict or {},
            module_state=module.state_dict(**(module_state_dict_kwargs or {})),
            exact=exact and not self.secure_mode,
            torch_save_kwargs=torch_save_kwargs or {},
        )

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
        lr_scheduler: Any = None,
    ) -> dict[str, Any]:
        """Resume: call ``make_private`` as in the run that was saved, then this.

        With the ``.secret`` file of :meth:`save_checkpoint` beside it the run goes on bit by bit; without it
        every random stream is seeded anew from the operating system, so that no noise is used twice.
        Arguments that are not named below are those of :meth:`save_checkpoint`.

        **Formal guarantee**: either everything is loaded, or an exception is raised and module, optimizer,
        schedulers, accountant and random streams are what they were. No code from the file is run.

        Args:
            path: A checkpoint of this engine or of Opacus's.
            torch_load_kwargs: For ``torch.load``; ``weights_only`` is always True.

        Returns:
            The checkpoint without what was loaded from the optimizer and the schedulers.

        Raises:
            CheckpointError: The file is truncated, was changed, or is no checkpoint.
            ValueError: It belongs to another set-up, or this engine has booked steps that it lacks.
        """
        return self._checkpoints.load(
            path,
            self._parts(module, optimizer, noise_scheduler, grad_clip_scheduler, lr_scheduler),
            module_load_kwargs=module_load_dict_kwargs or {},
            torch_load_kwargs=torch_load_kwargs or {},
            secret=not self.secure_mode,
        )

    def _parts(self, module: nn.Module, optimizer: DPOptimizer | None, *schedulers: Any) -> Parts:
        return Parts(
            module=module,
            optimizer=optimizer,
            schedulers=schedulers,
            accountant=self.accountant,
            run=self._run_of(module, optimizer),
        )
