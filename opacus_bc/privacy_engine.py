"""``PrivacyEngine``: Opacus's engine with batch clipping. Wiring only; the parts live elsewhere."""

from __future__ import annotations

import math
import secrets
import warnings
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from opacus_bc.alc import ALC, as_alc
from opacus_bc.batch_engine import BatchEngine
from opacus_bc.block_optimizer import BlockOptimizer
from opacus_bc.budget import effective_multiplier, multiplier_per_effective, warn_of_large_delta
from opacus_bc.checkpoint_engine import CheckpointEngine
from opacus_bc.clip_rules import check_alc
from opacus_bc.clipping import check_positive
from opacus_bc.individual_engine import IndividualEngine
from opacus_bc.layer_guards import check_layers
from opacus_bc.layer_report import LayerReport, layer_report
from opacus_bc.noise import SecureNoise
from opacus_bc.optimizer import check_optimizer
from opacus_bc.release_engine import bare, is_distributed
from opacus_bc.run import Run
from opacus_bc.sampling import check_data_loader, resolve_sampling
from opacus_bc.shards import fully_sharded, reshard
from opacus_bc.stock import unexpected_keywords


class PrivacyEngine(BatchEngine, IndividualEngine, CheckpointEngine):
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
        """See the class."""
        with warnings.catch_warnings():
            if secure_mode:
                warnings.filterwarnings("ignore", message="Secure RNG turned off")
            # Opacus's own secure mode imports torchcsprng, which no current torch can load.
            super().__init__(accountant=accountant, secure_mode=False)
        self._secure_noise: SecureNoise | None = SecureNoise() if secure_mode else None
        self.secure_mode = secure_mode
        self.dataset: Any = None
        self._runs: list[Run] = []
        self._identity = secrets.token_hex(16)
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
        check_data_loader(data_loader)
        reshard(module)
        if clipping != "batch" and fully_sharded(module):
            raise ValueError(
                f"clipping={clipping!r} needs per-sample gradients, not supported with fully_shard: "
                "use clipping='batch', or Opacus's DifferentiallyPrivateDistributedDataParallel"
            )
        check_layers(module, grad_sample_mode=None if clipping == "batch" else grad_sample_mode)
        check_optimizer(optimizer)
        config = as_alc(alc)
        if config is not None:
            distributed = is_distributed(module)
            inner = bare(module) if clipping == "batch" else module
            check_alc(config, inner, optimizer, data_loader, kind, clipping, grad_sample_mode, distributed)
            batch_norm = config.public_loader if batch_norm is None else batch_norm
        if clipping == "batch":
            if batch_norm_refresh != 1:
                raise ValueError(
                    f"batch_norm_refresh={batch_norm_refresh!r} says how often individual clipping takes new "
                    "public statistics; clipping='batch' takes them when they are read: leave it out"
                )
            if kwargs:
                raise unexpected_keywords(kwargs)
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
        return self._make_individual_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            sampling=kind,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            rand_on_empty=rand_on_empty,
            batch_norm=batch_norm,
            batch_norm_refresh=batch_norm_refresh,
            alc=config,
            criterion=criterion,
            extra=kwargs,
        )

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
        check_positive("target_epsilon", target_epsilon)
        check_data_loader(data_loader)
        reshard(module)
        kind = resolve_sampling(kwargs.get("sampling"), poisson_sampling=kwargs.get("poisson_sampling", True))
        self._check_accountant(kind)
        warn_of_large_delta(target_delta, [data_loader], "target_delta")
        releases = self._reserved_releases(module, kwargs)
        clipping = kwargs.get("clipping", "flat")
        config = as_alc(kwargs.get("alc"))
        effective = effective_multiplier(
            self.accountant.mechanism(),
            epsilon=target_epsilon,
            delta=target_delta,
            steps_per_epoch=len(data_loader),
            epochs=epochs,
            sampling=kind,
            releases=releases,
            stock=clipping != "batch" and config is None,
        )
        per_effective = multiplier_per_effective(
            config, bare(module), optimizer, sampling=kind, batch=clipping == "batch"
        )
        result = self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=effective * per_effective,
            max_grad_norm=max_grad_norm,
            **kwargs,
        )
        self._runs[-1].planned_steps = epochs * len(data_loader)
        return result

    def get_epsilon(self, delta: float, *, allow_unprotected: bool = False) -> float:
        """Epsilon spent so far at ``delta``; infinite if any step was taken without noise.

        Args:
            delta: The delta of (epsilon, delta)-DP.
            allow_unprotected: Answer for the gradients alone where running statistics leak.
        """
        self._check_protected(allow_unprotected)
        warn_of_large_delta(delta, [run.data_loader for run in self._runs])
        if any(entry[0] == 0 for entry in self.accountant.history):
            return math.inf
        return float(super().get_epsilon(delta))

    def layer_report(self) -> LayerReport:
        """What ALC does to each layer now and how the layers' norms moved, from public data only.

        Raises:
            ValueError: Nothing was made private with ``alc=``.
        """
        for run in reversed(self._runs):
            if isinstance(run.optimizer, BlockOptimizer) and run.optimizer.adaptive is not None:
                return layer_report(run.optimizer)
        raise ValueError("layer_report() needs layer norms from public data: pass alc= to make_private")
