"""``PrivacyEngine``: Opacus's engine with batch clipping. Wiring only; the parts live elsewhere."""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from opacus_bc._opacus import DPOptimizer, StockPrivacyEngine
from opacus_bc.alc.choice import effective_per_multiplier, trainable
from opacus_bc.alc.config import ALC
from opacus_bc.alc.report import LayerReport
from opacus_bc.batch_norm.choices import UnprotectedStatisticsError, keeps_statistics
from opacus_bc.engine import statement as st
from opacus_bc.engine.batch import build_batch
from opacus_bc.engine.book_keeping import build_book_keeping
from opacus_bc.engine.booking import check_accountant, check_booked, check_protected
from opacus_bc.engine.budget import effective_multiplier, warn_of_large_delta
from opacus_bc.engine.card import model_card, write_card
from opacus_bc.engine.individual import build_individual
from opacus_bc.engine.keywords import takes_no_budget, takes_no_noise_multiplier
from opacus_bc.engine.limit import Limit
from opacus_bc.engine.logs import loggable
from opacus_bc.engine.release import final_release, finished_module, recalibrate, reserved_releases
from opacus_bc.engine.reports import public_report, warn_at_start
from opacus_bc.engine.request import Request
from opacus_bc.engine.resume.checkpoints import Checkpoints, check_savable
from opacus_bc.engine.resume.parts import Parts
from opacus_bc.engine.run import Run
from opacus_bc.mechanism.noise import SecureNoise
from opacus_bc.mechanism.numbers import check_positive
from opacus_bc.mechanism.warn import users_level
from opacus_bc.optimizers.private import COPIES
from opacus_bc.parallel.wrappers import bare, unwrap


class PrivacyEngine(StockPrivacyEngine):  # type: ignore[misc]  # Opacus is untyped
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
        with warnings.catch_warnings():
            # Opacus's advice to turn its own secure mode on, which imports a package that no current torch
            # can load; the statement says which generator was used.
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            super().__init__(accountant=accountant, secure_mode=False)
        self._secure_noise: SecureNoise | None = SecureNoise() if secure_mode else None
        self.secure_mode = secure_mode
        self.dataset: Any = None
        self._runs: list[Run] = []
        self._limit: Limit | None = None
        self._checkpoints = Checkpoints()
        if accountant == "gdp":
            warnings.warn(
                "accountant='gdp' is a central-limit approximation, not an upper bound: it can claim less "
                "than is attained. Use accountant='fdp' for a certified value.",
                stacklevel=users_level(),
            )

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
        build = build_individual
        if request.batch or request.book_keeping:
            build = build_batch if request.batch else build_book_keeping
        with ExitStack() as undo:
            undo.callback(_restore, [(p, p.grad, set(vars(p))) for p in module.parameters()])
            run = build(request, self.accountant, self._secure_noise, undo)
            for guest in run.guests:
                undo.callback(guest.remove)
            check_protected(self.accountant, run.plan, [earlier.plan for earlier in self._runs])
            _warn_of_idle_policy(request, run)
            self._warn_of_others(run)
            warn_at_start(run)
            undo.pop_all()
        self.dataset = data_loader.dataset
        run.optimizer.licence.take_over(run.policy.keeper.after_step)
        self._runs.append(run)
        if self._limit is not None:
            run.obey(self._limit)
        return run.returned

    def _warn_of_others(self, run: Run) -> None:
        if self.dataset is not None and self.dataset is not run.data_loader.dataset:
            warnings.warn(
                "this engine has accounted another data set object before, and its epsilon adds both up. "
                "That is right where people are in both (folds of one data set); use a new PrivacyEngine for "
                "the data of other people",
                stacklevel=users_level(),
            )
        former = run.optimizer.licence.holder()
        own = [earlier.optimizer.licence for earlier in self._runs]
        if former is not None and former.steps_taken and former not in own:
            warnings.warn(
                f"another PrivacyEngine has made {former.steps_taken} steps with this optimizer, and this "
                "one does not count them: go on with that engine, or start with a new model and optimizer",
                stacklevel=users_level(),
            )

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
        effective = effective_multiplier(
            self.accountant.mechanism(),
            epsilon=target_epsilon,
            delta=target_delta,
            steps_per_epoch=request.plan.steps_per_epoch,
            epochs=epochs,
            sampling=request.kind,
            releases=reserved_releases(self.accountant, bare(module), request.policy),
            stock=not request.batch and request.config is None and request.users is None,
        )
        params, adjacency = trainable(bare(module), request.inner_optimizer), request.plan.adjacency
        share = effective_per_multiplier(request.config, params, unit=request.clipped, adjacency=adjacency)
        result = self.make_private(**given, noise_multiplier=effective / share)
        self._runs[-1].optimizer.licence.planned_steps = epochs * request.plan.steps_per_epoch
        return result

    def stop_at(self, epsilon: float, delta: float) -> None:
        """End training before more than ``(epsilon, delta)`` is spent by all runs of this engine together.

        Loaders that ``make_private`` returned, and will return, deliver no draw whose step the budget does
        not cover: loops over them end by themselves. A step beyond it is refused before anything moves. The
        final release of ``batch_norm="private"`` is reserved.

        **Formal guarantee**: :meth:`get_epsilon` at ``delta`` stays at most ``epsilon``, ``finalize``
        included. When training ends follows from public constants alone.

        **Edge cases**: what was spent already counts. ``recalibrate_batch_norm`` during training is booked
        as ever and shortens the rest. A new call replaces the budget.

        Args:
            epsilon: The most that may be spent.
            delta: At which delta.
        """
        warn_of_large_delta(delta, [run.plan for run in self._runs])
        limit = Limit(self.accountant, epsilon=epsilon, delta=delta, reserved=self._reserved)
        if self.accountant.history and self.get_epsilon(delta, allow_unprotected=True) > epsilon:
            raise ValueError(
                f"epsilon={epsilon:g} at delta={delta:g} is spent already: "
                f"{self.get_epsilon(delta, allow_unprotected=True):.4g}"
            )
        self._limit = limit
        for run in self._runs:
            run.obey(limit)

    def remaining(self, epsilon: float, delta: float) -> int:
        """How many more steps of the latest run fit into a budget, at its present noise.

        **Formal guarantee**: if that many are taken, :meth:`get_epsilon` at ``delta`` is at most ``epsilon``,
        ``finalize`` included; one step more and it is not. The number follows from public constants alone.

        **Edge cases**: see :meth:`opacus_bc.engine.limit.Limit.more_steps`. Shuffled data are counted in
        whole passes, the one under way included.

        Args:
            epsilon: The most that may be spent by all runs of this engine together.
            delta: At which delta.

        Raises:
            ValueError: Nothing was made private yet.
            UnprotectedStatisticsError: Running statistics leak.
        """
        limit = Limit(self.accountant, epsilon=epsilon, delta=delta, reserved=self._reserved)
        self._check_protected(False)
        run = self._latest("remaining()")
        return run.booking.more_steps(run.optimizer, limit)

    def _latest(self, what: str) -> Run:
        if not self._runs:
            raise ValueError(f"{what} speaks of a run: call make_private first")
        return self._runs[-1]

    def _reserved(self) -> tuple[tuple[float, Any], ...]:
        return tuple(found for run in self._runs if (found := final_release(run)) is not None)

    def get_epsilon(self, delta: float, *, allow_unprotected: bool = False) -> float:
        """Epsilon spent so far at ``delta``; infinite if any step was taken without noise.

        Args:
            delta: The delta of (epsilon, delta)-DP.
            allow_unprotected: Answer for the gradients alone where running statistics leak.

        Raises:
            UnprotectedStatisticsError: Running statistics leak.
        """
        self._check_protected(allow_unprotected)
        warn_of_large_delta(delta, [run.plan for run in self._runs])
        if any(entry[0] == 0 for entry in self.accountant.history):
            return math.inf
        return float(super().get_epsilon(delta))

    def get_tradeoff(self, *, allow_unprotected: bool = False) -> Any:
        """The trade-off curve of the steps and releases so far (accountant ``"fdp"``).

        Args:
            allow_unprotected: Answer for the gradients alone where running statistics leak.

        Raises:
            ValueError: The accountant knows no trade-off curve.
            UnprotectedStatisticsError: Running statistics leak.
        """
        self._check_protected(allow_unprotected)
        if not hasattr(self.accountant, "get_tradeoff"):
            raise ValueError(
                f"accountant={self.accountant.mechanism()!r} has no trade-off curve: use "
                "PrivacyEngine(accountant='fdp')"
            )
        return self.accountant.get_tradeoff()

    def statement(self, delta: float, *, format: str = "text", allow_unprotected: bool = False) -> str:
        """What a reviewer has to know about the privacy of this run.

        Args:
            delta: The delta at which epsilon is stated.
            format: ``"text"``, ``"markdown"`` or ``"json"``.
            allow_unprotected: Speak for the gradients alone where running statistics leak.

        Raises:
            UnprotectedStatisticsError: Running statistics leak.
        """
        self._check_protected(allow_unprotected)
        return st.render(st.facts(self, self._runs, delta), format=format)

    def save_model_card(
        self,
        path: Any,
        delta: float,
        *,
        title: str = "Model card",
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write a model card for Hugging Face's hub: front matter, and the statement as a section.

        Args:
            path: The file, or a folder, which gets a README.md.
            delta: The delta at which epsilon is stated.
            title: The card's heading.
            metadata: More entries of the front matter, for instance ``{"license": "mit"}``.
            overwrite: Whether an existing file is replaced.

        Returns:
            The path of the card.

        Raises:
            FileExistsError: The file exists already.
            UnprotectedStatisticsError: Running statistics leak.
        """
        section = self.statement(delta, format="markdown")
        return write_card(path, model_card(section, title=title, metadata=metadata), overwrite=overwrite)

    def loggable(self, delta: float) -> dict[str, float]:
        """Numbers of the latest run that may be logged, published or plotted while it trains.

        **Formal guarantee**: nothing in it was computed from private data, but for what epsilon covers; see
        :func:`opacus_bc.engine.logs.loggable`. Losses, accuracies on training data, gradient norms and
        actual batch sizes are not in it, because they are private.

        Args:
            delta: The delta at which epsilon and mu are stated.

        Raises:
            ValueError: Nothing was made private yet.
            UnprotectedStatisticsError: Running statistics leak.
        """
        self._check_protected(False)
        return loggable(self, self._latest("loggable()"), delta)

    def _check_protected(self, allow_unprotected: bool) -> None:
        for run in self._runs:
            run.policy.check_buffers()
        self._check_booked()
        if not allow_unprotected and any(not run.policy.protected for run in self._runs):
            raise UnprotectedStatisticsError(
                "batch_norm='unprotected': running statistics leak, so no epsilon describes this run. "
                "allow_unprotected=True gives the value of the gradients' release alone"
            )

    def _check_booked(self) -> None:
        check_booked(self.accountant, [run.optimizer for run in self._runs])

    def layer_report(
        self,
        public_loader: DataLoader[Any] | None = None,
        *,
        criterion: Any = None,
        gradient: Any = None,
        compare_public: bool = True,
    ) -> LayerReport:
        """Norms and noise of each layer, from public data only; warns where noise drowns the signal.

        With ``alc=`` it needs no arguments, and also says how the layers' norms moved. A public loader is
        measured now, at the present weights, over what this run clips: single samples, users or mini-sets.

        **Formal guarantee**: weights, buffers, gradients, hooks, modes and random states stay as they are.
        (Checks that look at the first training forwards and then take themselves off count these too.)

        Args:
            public_loader: Public data, disjoint from the private data: pairs ``(x, y)`` unless ``gradient``
                says otherwise.
            criterion: The loss; None is cross entropy.
            gradient: As :class:`opacus_bc.ALC` takes it.
            compare_public: As in :meth:`make_private`.

        Raises:
            ValueError: Nothing was made private with ``alc=``, and there is no public loader.
            PublicDataError: The public data are private ones, or their gradients say nothing.
        """
        if public_loader is not None:
            run = self._latest("layer_report()")
            return public_report(
                run, public_loader, criterion=criterion, gradient=gradient, compare_public=compare_public
            )
        for run in reversed(self._runs):
            if run.optimizer.adaptive is not None:
                return run.optimizer.layer_report()
        raise ValueError(
            "layer_report() needs layer norms from public data: pass a public loader to it, or pass alc= to "
            "make_private"
        )

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
        """
        if noise_multiplier is not None:
            check_positive("noise_multiplier", noise_multiplier)
        if bound is not None:
            check_positive("bound", bound)
        runs = [run for run in self._runs if run.policy.name == "private"]
        if not runs:
            raise ValueError("recalibrate_batch_norm() needs a model made private with batch_norm='private'")
        for run in runs:
            recalibrate(run, self.accountant, noise_multiplier=noise_multiplier, bound=bound)

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

    def _run_of(self, module: nn.Module, optimizer: DPOptimizer | None) -> Run | None:
        for run in reversed(self._runs):
            if run.optimizer is optimizer or unwrap(run.policy.root) is unwrap(module):
                return run
        return None


def _warn_of_idle_policy(request: Request, run: Run) -> None:
    if request.batch_norm is None or run.policy.layers or keeps_statistics(bare(request.module)):
        return
    warnings.warn(
        "batch_norm= changes nothing: this model has no BatchNorm layer. If it had some, look who replaced "
        "them (ModuleValidator.fix puts fresh GroupNorms there)",
        stacklevel=users_level(),
    )


def _restore(parameters: list[tuple[nn.Parameter, torch.Tensor | None, set[str]]]) -> None:
    """Give parameters their gradients back, and take off what was hung on them since."""
    for p, grad, names in parameters:
        p.grad = grad
        for name in set(vars(p)) - names:
            delattr(p, name)
