"""``PrivacyEngine``: Opacus's engine with batch clipping. Wiring only; the parts live elsewhere."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from opacus_bc import accounting
from opacus_bc import batch_norm as bn
from opacus_bc._opacus import AbstractGradSampleModule, DPOptimizer, get_noise_multiplier
from opacus_bc.alc import ALC, as_alc
from opacus_bc.block_optimizer import BlockOptimizer
from opacus_bc.clip_rules import (
    check_alc,
    effective_per_multiplier,
    individual_adjacency,
    mini_set_rule,
    sample_rule,
    trainable,
)
from opacus_bc.clipping import (
    check_positive,
    effective_noise_multiplier,
    noise_against_individual_clipping,
)
from opacus_bc.individual import IndividualClippingOptimizer
from opacus_bc.layer_report import LayerReport, layer_report
from opacus_bc.loader import PrivateDataLoader
from opacus_bc.noise import NoiseSource, SecureNoise, TorchNoise, sampling_generator
from opacus_bc.optimizer import BatchClippingOptimizer, check_optimizer
from opacus_bc.release_engine import ReleaseEngine
from opacus_bc.run import Run
from opacus_bc.sampling import Sampling, SamplingPlan, make_draws, make_plan, resolve_sampling
from opacus_bc.stock import (
    PassBook,
    ShuffledLoader,
    check_adaptive,
    check_keywords,
    count_draws,
    guard_frozen_parameters,
    guard_per_layer_bounds,
    individual_hook,
    one_step_per_draw,
)

logger = logging.getLogger("opacus_bc")


class PrivacyEngine(ReleaseEngine):
    """Opacus's ``PrivacyEngine`` with ``clipping="batch"``, which leaves BatchNorm in place.

    Args:
        accountant: ``"fdp"`` (certified upper bounds, every sampling), or Opacus's ``"prv"``, ``"rdp"`` and
            ``"gdp"`` (Poisson sampling only; ``"gdp"`` is an approximation and no bound).
        secure_mode: Draw noise and batches from a cryptographic generator (extra ``secure``).

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        >>> with warnings.catch_warnings(action="ignore"):
        ...     engine = PrivacyEngine()
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
        with warnings.catch_warnings():
            if secure_mode:
                warnings.filterwarnings("ignore", message="Secure RNG turned off")
            # Opacus's own secure mode imports torchcsprng, which no current torch can load.
            super().__init__(accountant=accountant, secure_mode=False)
        self._secure_noise: SecureNoise | None = SecureNoise() if secure_mode else None
        self.secure_mode = secure_mode
        self.dataset: Any = None
        self._runs: list[Run] = []
        if accountant == "gdp":
            warnings.warn(
                "accountant='gdp' is a central-limit approximation, not an upper bound: it can claim less "
                "than is attained. Use accountant='fdp' for a certified value.",
                stacklevel=2,
            )

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
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        mini_batch_size: int | None = None,
        sampling: str | None = None,
        batch_norm: Any = None,
        batch_norm_refresh: int = 1,
        alc: ALC | DataLoader[Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Make a training set-up private; arguments as in Opacus, and six more.

        Args:
            module: The model. With ``clipping="batch"`` the very same object is returned.
            optimizer: Any first-order torch optimizer.
            criterion: Used by Opacus's ghost clipping, and by ALC on public data (default: cross entropy).
            data_loader: The private data.
            noise_multiplier: Noise standard deviation over L2-sensitivity.
            max_grad_norm: C.
            batch_first: See Opacus.
            loss_reduction: ``"mean"`` or ``"sum"``, what the loss does over a batch.
            poisson_sampling: ``False`` keeps the loader's own order, accounted as shuffling.
            clipping: ``"batch"``, or Opacus's ``"flat"``, ``"per_layer"``, ``"adaptive"``.
            noise_generator: torch generator of the noise, for repeatable runs.
            grad_sample_mode: See Opacus; batch clipping needs no per-sample gradients.
            wrap_model: See Opacus.
            rand_on_empty: See Opacus.
            mini_batch_size: s, the samples that are clipped together; None clips the whole batch (BC), a
                divisor of the batch size gives GBC.
            sampling: ``"poisson"``, ``"partition"``, ``"shuffle"``; None derives it from
                ``poisson_sampling``.
            batch_norm: What happens to BatchNorm's running statistics: a public DataLoader, ``"private"``,
                ``"batch"``, ``"frozen"`` or ``"unprotected"``; see ``opacus_bc.batch_norm``.
            alc: Adaptive layerwise clipping, with ``clipping="batch"`` or ``"flat"``: a public loader, or an
                :class:`opacus_bc.ALC`. Its loader also serves BatchNorm if ``batch_norm`` is None.
            batch_norm_refresh: With individual clipping and public statistics: steps between new ones.
            **kwargs: What Opacus's adaptive clipping takes; anything else is a TypeError.

        Returns:
            What Opacus returns: ``(module, optimizer, data_loader)``, for ghost clipping with the criterion
            in third place.
        """
        if clipping not in ("batch", "flat", "per_layer", "adaptive"):
            raise ValueError(f"clipping must be 'batch', 'flat', 'per_layer' or 'adaptive', got {clipping!r}")
        kind = resolve_sampling(sampling, poisson_sampling=poisson_sampling)
        if noise_generator is not None and self.secure_mode:
            raise ValueError("noise_generator cannot be given with secure_mode=True: a known seed voids it")
        if check_positive("noise_multiplier", noise_multiplier, zero_allowed=True) == 0:
            warnings.warn("noise_multiplier=0 adds no noise: epsilon is infinite", stacklevel=2)
        config = as_alc(alc)
        if config is not None:
            distributed = _is_distributed(module)
            check_alc(config, module, optimizer, data_loader, kind, clipping, grad_sample_mode, distributed)
            batch_norm = config.public_loader if batch_norm is None else batch_norm
        if clipping == "batch":
            if kwargs:
                raise TypeError(
                    f"make_private() got unexpected keyword arguments: {', '.join(sorted(kwargs))}"
                )
            if grad_sample_mode != "hooks" or not wrap_model:
                raise ValueError(
                    f"grad_sample_mode={grad_sample_mode!r} and wrap_model={wrap_model} say how per-sample "
                    "gradients are made; clipping='batch' makes none: leave them out"
                )
            return self._make_batch_private(
                module=module,
                optimizer=optimizer,
                data_loader=data_loader,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                loss_reduction=loss_reduction,
                sampling=kind,
                noise_generator=noise_generator,
                mini_batch_size=mini_batch_size,
                batch_norm=batch_norm,
                alc=config,
                criterion=criterion,
            )
        if mini_batch_size is not None:
            raise ValueError(
                f"mini_batch_size={mini_batch_size} goes with clipping='batch', got {clipping!r}"
            )
        check_keywords(
            kwargs, clipping=clipping, distributed=_is_distributed(module), grad_sample_mode=grad_sample_mode
        )
        if self.secure_mode:
            raise ValueError(
                f"secure_mode=True works with clipping='batch'; Opacus's clipping={clipping!r} draws its "
                "noise from torch generators, none of which is cryptographic"
            )
        self._check_accountant(kind)
        if clipping == "adaptive":
            check_adaptive(self.accountant.mechanism(), kind)
        policy = bn.make_policy(
            module,
            batch_norm,
            individual=True,
            private_loader=data_loader,
            refresh_every=batch_norm_refresh,
        )
        if policy.layers and (grad_sample_mode not in ("hooks", "ghost") or not batch_first):
            raise ValueError(
                f"BatchNorm under individual clipping needs grad_sample_mode 'hooks' or 'ghost' and "
                f"batch_first=True, got {grad_sample_mode!r} and {batch_first}"
            )
        if policy.public is not None and policy.public.differentiate and grad_sample_mode != "hooks":
            raise ValueError(
                f"PublicStatistics(differentiate=True) needs grad_sample_mode='hooks', got "
                f"{grad_sample_mode!r}: Opacus's ghost norms know of no gradient from one layer into another"
            )
        if kind == "partition":
            raise ValueError(f"sampling='partition' goes with clipping='batch', got clipping={clipping!r}")
        loader = data_loader if kind == "poisson" else ShuffledLoader(data_loader)
        policy.install()
        with policy.withdrawn_on_error():
            if config is not None:
                kwargs["clip_rule"] = sample_rule(config, module, optimizer, data_loader, kind, criterion)
            result = super().make_private(
                module=module,
                optimizer=optimizer,
                criterion=nn.CrossEntropyLoss() if criterion is None else criterion,
                data_loader=loader,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                poisson_sampling=kind == "poisson",
                clipping=clipping,
                noise_generator=noise_generator,
                grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model,
                rand_on_empty=rand_on_empty,
                **kwargs,
            )
        private_optimizer: DPOptimizer = result[1]
        self._start(
            Run(
                policy=policy,
                wrapper=result[0],
                optimizer=private_optimizer,
                data_loader=data_loader,
                sampling=kind,
                clipping=clipping,
                alc_loader=None if config is None else config.public_loader,
            )
        )
        guard_per_layer_bounds(private_optimizer)
        guard_frozen_parameters(private_optimizer)
        counter = count_draws(result[-1], private_optimizer)
        if isinstance(private_optimizer, IndividualClippingOptimizer):
            private_optimizer.attach_to(module, hooks=result[0])
        if isinstance(private_optimizer, IndividualClippingOptimizer) or kind == "shuffle":
            private_optimizer.attach_step_hook(
                individual_hook(self.accountant, counter, sample_rate=1 / len(loader), sampling=kind)
            )
        if counter is not None:
            private_optimizer.attach_step_hook(one_step_per_draw(private_optimizer.step_hook, counter))
        return tuple(result)

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
        sample rate ``1 / len(data_loader)``, through the same blocks.

        Args:
            module: See :meth:`make_private`.
            optimizer: See :meth:`make_private`.
            data_loader: See :meth:`make_private`.
            target_epsilon: The budget's epsilon.
            target_delta: The budget's delta.
            epochs: Passes over the data that will be made.
            max_grad_norm: See :meth:`make_private`.
            **kwargs: Further arguments of :meth:`make_private`.
        """
        if "noise_multiplier" in kwargs:
            raise TypeError("make_private_with_epsilon() finds noise_multiplier itself: leave it out")
        if len(self.accountant) > 0:
            warnings.warn(
                "some privacy budget is already spent: the calibrated noise_multiplier assumes a fresh "
                "accountant, so the total will be higher than target_epsilon",
                stacklevel=2,
            )
        kind = resolve_sampling(kwargs.get("sampling"), poisson_sampling=kwargs.get("poisson_sampling", True))
        self._check_accountant(kind)
        releases = self._reserved_releases(module, kwargs)
        sigma_eff = self._calibrate(data_loader, target_epsilon, target_delta, epochs, kind, kwargs, releases)
        return self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=sigma_eff * self._multiplier_per_effective(module, optimizer, kind, kwargs),
            max_grad_norm=max_grad_norm,
            **kwargs,
        )

    def get_epsilon(self, delta: float, *, allow_unprotected: bool = False) -> float:
        """Epsilon spent so far at ``delta``; infinite if any step was taken without noise.

        Args:
            delta: The delta of (epsilon, delta)-DP.
            allow_unprotected: Answer for the gradients alone where running statistics leak.
        """
        self._check_protected(allow_unprotected)
        if any(entry[0] == 0 for entry in self.accountant.history):
            return math.inf
        return float(super().get_epsilon(delta))

    def _check_accountant(self, sampling: Sampling) -> None:
        mechanism = self.accountant.mechanism()
        if sampling != "poisson" and mechanism != "fdp":
            raise ValueError(
                f"accountant={mechanism!r} models Poisson sampling only, got sampling={sampling!r}: use "
                "PrivacyEngine(accountant='fdp')"
            )

    def _calibrate(
        self,
        data_loader: DataLoader[Any],
        epsilon: float,
        delta: float,
        epochs: int,
        sampling: Sampling,
        kwargs: dict[str, Any],
        releases: tuple[float, ...] = (),
    ) -> float:
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise ValueError(f"epochs must be a whole number >= 1, got {epochs!r}")
        mechanism = self.accountant.mechanism()
        steps = len(data_loader)
        if mechanism == "fdp":
            return accounting.noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=1 / steps,
                steps=epochs * steps,
                sampling=sampling,
                releases=releases,
            )
        budget = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": 1 / steps}
        if kwargs.get("clipping", "flat") == "batch" or kwargs.get("alc") is not None:
            return float(get_noise_multiplier(**budget, steps=epochs * steps, accountant=mechanism))
        return float(get_noise_multiplier(**budget, epochs=epochs, accountant=mechanism))

    def _multiplier_per_effective(
        self, module: nn.Module, optimizer: optim.Optimizer, sampling: Sampling, kwargs: dict[str, Any]
    ) -> float:
        """Sigma over sigma_eff, from the blocks that training will release."""
        batch, config = kwargs.get("clipping", "flat") == "batch", as_alc(kwargs.get("alc"))
        if not batch and config is None:
            # Opacus's own noise is sigma * C, while a replaced sample moves the sum by up to 2C.
            return 2.0 if sampling == "shuffle" else 1.0
        return 1.0 / effective_per_multiplier(
            config,
            trainable(module, optimizer),
            unit="mini-set" if batch else "sample",
            adjacency=individual_adjacency(sampling),
        )

    def _prepare_optimizer(self, *, clip_rule: Any = None, **kwargs: Any) -> DPOptimizer:
        if clip_rule is None:
            return super()._prepare_optimizer(**kwargs)
        return IndividualClippingOptimizer(
            getattr(kwargs["optimizer"], "original_optimizer", kwargs["optimizer"]),
            noise_multiplier=kwargs["noise_multiplier"],
            max_grad_norm=kwargs["max_grad_norm"],
            expected_batch_size=kwargs["expected_batch_size"],
            clip_rule=clip_rule,
            noise=TorchNoise(kwargs["noise_generator"]),
            loss_reduction=kwargs["loss_reduction"],
        )

    def layer_report(self) -> LayerReport:
        """What ALC does to each layer now and how the layers' norms moved, from public data only.

        Raises:
            ValueError: Nothing was made private with ``alc=``.
        """
        for run in reversed(self._runs):
            if isinstance(run.optimizer, BlockOptimizer) and run.optimizer.adaptive is not None:
                return layer_report(run.optimizer)
        raise ValueError("layer_report() needs layer norms from public data: pass alc= to make_private")

    def _make_batch_private(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        loss_reduction: str,
        sampling: Sampling,
        noise_generator: torch.Generator | None,
        mini_batch_size: int | None,
        batch_norm: Any,
        alc: ALC | None,
        criterion: Any,
    ) -> tuple[nn.Module, BatchClippingOptimizer, PrivateDataLoader]:
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        _check_batch_module(module, optimizer)
        clip_bound = check_positive("max_grad_norm", max_grad_norm)
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
        if isinstance(data_loader, PrivateDataLoader):
            raise ValueError("data_loader is private already: several optimizers cannot share its draws")
        self._check_accountant(sampling)
        plan = make_plan(data_loader, sampling=sampling, mini_batch_size=mini_batch_size)
        policy = bn.make_policy(module, batch_norm, private_loader=data_loader)
        if policy.private and self.accountant.mechanism() == "gdp":
            raise ValueError("accountant='gdp' cannot compose the release of batch_norm='private': use 'fdp'")
        draws = make_draws(
            plan, data_loader, sampling_generator(secure=self.secure_mode, generator=data_loader.generator)
        )
        self._remember(data_loader)

        policy.install(normaliser=plan.dataset_size, adjacency=plan.adjacency)
        with policy.withdrawn_on_error():
            rule = mini_set_rule(alc, module, optimizer, plan=plan, criterion=criterion)
        loader = PrivateDataLoader(data_loader, draws=draws)
        noise: NoiseSource = self._secure_noise or TorchNoise(noise_generator)
        private = BatchClippingOptimizer(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip_bound,
            clip_rule=rule,
            ledger=loader.ledger,
            mini_sets=plan.mini_sets,
            noise=noise,
            parameter_names={p: name for name, p in module.named_parameters()},
            loss_reduction=loss_reduction,
        )
        private.accounting_hook = self._accounting_hook(plan)
        self._start(
            Run(
                policy=policy,
                wrapper=module,
                optimizer=private,
                data_loader=data_loader,
                sampling=plan.kind,
                clipping="batch",
                mini_set_size=plan.mini_set_size,
                alc_loader=None if alc is None else alc.public_loader,
            )
        )
        logger.info(
            "clipping='batch': at equal C and noise_multiplier an update carries %g times the noise of "
            "individual clipping's",
            noise_against_individual_clipping(plan.mini_set_size, adjacency=plan.adjacency),
        )
        return module, private, loader

    def _remember(self, data_loader: DataLoader[Any]) -> None:
        if self.dataset is not None and self.dataset is not data_loader.dataset:
            warnings.warn(
                "this engine has accounted another data set object before: its epsilon is meant for one data "
                "set, so use a new PrivacyEngine unless both are the same data",
                stacklevel=4,
            )
        self.dataset = data_loader.dataset

    def _accounting_hook(self, plan: SamplingPlan) -> Callable[[BatchClippingOptimizer], None]:
        book = PassBook(self.accountant)

        def hook(optimizer: BatchClippingOptimizer) -> None:
            book.step(
                noise_multiplier=effective_noise_multiplier(optimizer.blocks()),
                sample_rate=plan.sample_rate,
                sampling=plan.kind,
                pass_index=optimizer.ledger.pass_index,
            )

        return hook


def _is_distributed(module: nn.Module) -> bool:
    return isinstance(module, (DistributedDataParallel, FSDPModule)) or type(module).__name__ == (
        "DifferentiallyPrivateDistributedDataParallel"
    )


def _check_batch_module(module: nn.Module, optimizer: optim.Optimizer) -> None:
    if isinstance(module, AbstractGradSampleModule):
        raise ValueError("module is wrapped for per-sample gradients: pass the plain nn.Module")
    if _is_distributed(module):
        raise ValueError(
            f"clipping='batch' does not support {type(module).__name__} yet: pass the plain module"
        )
    check_optimizer(optimizer)
    own = set(module.parameters())
    if any(p not in own for p in chain.from_iterable(g["params"] for g in optimizer.param_groups)):
        raise ValueError("optimizer holds parameters that are not module's: build it on module.parameters()")
