"""The part of the engine that gives things out: the finished module, its statistics, and the statement."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate

from opacus_bc import batch_norm as bn
from opacus_bc import statement as st
from opacus_bc._opacus import (
    AbstractGradSampleModule,
    GradSampleHooks,
    StockPrivacyEngine,
)
from opacus_bc.clipping import check_positive
from opacus_bc.guards import COPIES, drop_non_finite_samples, refuse_copies
from opacus_bc.norm_types import PolicyLayer
from opacus_bc.private_statistics import (
    PrivateKeeper,
    PrivateStatistics,
    execution_order,
    release_multiplier,
)
from opacus_bc.run import Run
from opacus_bc.sampling import Sampling


class ReleaseEngine(StockPrivacyEngine):  # type: ignore[misc]  # Opacus is untyped
    """What ``PrivacyEngine`` inherits: finalize, recalibrate_batch_norm, get_tradeoff and statement."""

    _runs: list[Run]
    _identity: str  # of this engine's budget: checkpoints carry it
    _adopted: list[Any] | None = None  # the history with which a checkpoint's identity was taken over

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(COPIES)

    def _start(self, run: Run) -> None:
        refuse_copies(run.optimizer)
        drop_non_finite_samples(run.optimizer, run.wrapper)
        former = run.take_over()
        if former is not None and former.steps and not any(former is own for own in self._runs):
            warnings.warn(
                f"another PrivacyEngine has made {former.steps} steps with this optimizer, and this one does "
                "not count them: go on with that engine, or start with a new model and optimizer",
                stacklevel=5,
            )
        self._runs.append(run)

    def _check_protected(self, allow_unprotected: bool) -> None:
        for run in self._runs:
            run.policy.check_buffers()
        self._check_booked()
        if not allow_unprotected and any(not run.policy.protected for run in self._runs):
            raise bn.UnprotectedStatisticsError(
                "batch_norm='unprotected': running statistics leak, so no epsilon describes this run. "
                "allow_unprotected=True gives the value of the gradients' release alone"
            )

    def _check_booked(self) -> None:
        """Refuse to speak for, save or hand out weights that moved without the accountant.

        Raises:
            RuntimeError: There were more steps than the accountant knows.
        """
        booked = sum(int(entry[2]) for entry in self.accountant.history)
        taken = sum(run.steps for run in self._runs)
        if taken > booked:
            raise RuntimeError(
                f"{taken} steps were taken and {booked} are booked: something replaced the accountant or its "
                "step hook, so no epsilon describes this run"
            )

    def _check_accountant(self, sampling: Sampling) -> None:
        mechanism = self.accountant.mechanism()
        if sampling != "poisson" and mechanism != "fdp":
            raise ValueError(
                f"accountant={mechanism!r} models Poisson sampling only, got sampling={sampling!r}: use "
                "PrivacyEngine(accountant='fdp')"
            )

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
        runs = [run for run in self._runs if isinstance(run.policy.keeper, PrivateKeeper)]
        if not runs:
            raise ValueError("recalibrate_batch_norm() needs a model made private with batch_norm='private'")
        for run in runs:
            self._recalibrate(run, noise_multiplier, bound)

    def _recalibrate(self, run: Run, noise_multiplier: float | None, bound: float | None) -> None:
        keeper, policy = run.policy.keeper, run.policy
        assert isinstance(keeper, PrivateKeeper)
        if policy.finished:
            raise RuntimeError("this model was finalized: its statistics are released already")
        sigma = keeper.config.noise_multiplier if noise_multiplier is None else noise_multiplier
        loader = in_order(run.data_loader)
        layers = [child for child in policy.layers.values() if isinstance(child, PolicyLayer)]
        ordered = execution_order(policy.root, layers, next(iter(loader)))
        self._account_release(release_multiplier(sigma, max(1, len(ordered))), keeper.adjacency)
        keeper.release(
            ordered,
            loader,
            noise=run.optimizer.noise,
            noise_multiplier=sigma,
            bound=keeper.config.bound if bound is None else bound,
        )

    def _account_release(self, noise_multiplier: float, adjacency: str) -> None:
        if self.accountant.mechanism() == "fdp":
            self.accountant.release(noise_multiplier=noise_multiplier, adjacency=adjacency)
        else:  # a Gaussian mechanism on all data is a step with sample rate 1
            self.accountant.step(noise_multiplier=noise_multiplier, sample_rate=1.0)

    def _reserved_releases(self, module: nn.Module, kwargs: dict[str, Any]) -> tuple[float, ...]:
        """Noise multipliers of what will be released besides the steps: the final running statistics."""
        config = bn.resolve(kwargs.get("batch_norm"))
        layers = bn.statistics_modules(module)
        if not isinstance(config, PrivateStatistics) or not layers:
            return ()
        if self.accountant.mechanism() != "fdp":
            raise ValueError(
                f"accountant={self.accountant.mechanism()!r} cannot reserve the release of "
                "batch_norm='private' in a calibration: use PrivacyEngine(accountant='fdp')"
            )
        return (release_multiplier(config.noise_multiplier, len(layers)),)

    def finalize(self, module: nn.Module) -> nn.Module:
        """The plain, releasable module: the object that was made private, without anything added to it.

        Running statistics are brought up to date (public data) or released (``"private"``, unless that was
        done at these weights), every buffer is checked, layers get their plain types back, Opacus's hooks and
        whatever private activations and gradients still hang on the module are removed.

        Args:
            module: What ``make_private`` returned, or the module inside.

        Returns:
            The plain module. Its optimizer refuses further steps.

        Raises:
            ValueError: This engine did not make the module private.
            RuntimeError: Weights moved without the accountant.
            MovingBufferError: A buffer holds what nobody released.
        """
        plain = unwrap(module)
        runs = [run for run in self._runs if unwrap(run.policy.root) is plain]
        if not runs:
            raise ValueError(f"this engine has not made this {type(plain).__name__} private")
        self._check_booked()
        run = runs[-1]
        keeper = run.policy.keeper
        if isinstance(keeper, PrivateKeeper) and not keeper.current and not run.policy.finished:
            self._recalibrate(run, None, None)
        run.policy.finish()
        for guest in run.attached:
            guest.detach()
        wrapped = isinstance(run.wrapper, (AbstractGradSampleModule, GradSampleHooks))
        if wrapped and hasattr(run.wrapper, "autograd_grad_sample_hooks"):
            run.wrapper.cleanup()
        scrub(plain)
        run.optimizer.pre_step = _refuse_step
        return plain

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


def _refuse_step(*_: Any) -> NoReturn:
    raise RuntimeError(bn.FINALIZED)


def bare(module: Any) -> nn.Module:
    """The module inside torch.compile's and DistributedDataParallel's wrappers: what policies work on."""
    while hasattr(module, "_orig_mod") or isinstance(module, DistributedDataParallel):
        module = module._orig_mod if hasattr(module, "_orig_mod") else module.module
    inside: nn.Module = module
    return inside


def unwrap(module: Any) -> nn.Module:
    """The module inside Opacus's, torch.compile's and DistributedDataParallel's wrappers."""
    plain = bare(module)
    while isinstance(plain, (AbstractGradSampleModule, GradSampleHooks)):
        plain = bare(plain._module)
    return plain


def is_distributed(module: nn.Module) -> bool:
    """Whether the module is one of torch's or Opacus's wrappers for several processes."""
    return isinstance(module, (DistributedDataParallel, FSDPModule)) or type(module).__name__ == (
        "DifferentiallyPrivateDistributedDataParallel"
    )


# What Opacus hangs on parameters; pickling a module would write it out.
_PRIVATE_ATTRIBUTES = (
    "grad_sample",
    "summed_grad",
    "_current_grad_sample",
    "_forward_counter",
    "_norm_sample",
)


def scrub(module: nn.Module) -> None:
    """Remove raw gradients, per-sample gradients and captured activations: they are private data."""
    for p in module.parameters():
        p.grad = None
        for name in _PRIVATE_ATTRIBUTES:
            p.__dict__.pop(name, None)
    for child in module.modules():
        for name in ("activations", "max_batch_len"):
            child.__dict__.pop(name, None)


class OneByOne:
    """The user's collate function on every sample by itself, so that it cannot mix samples (mixup)."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return _joined([self.collate([sample]) for sample in samples])


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        return [_joined([part[i] for part in parts]) for i in range(len(first))]
    raise TypeError(
        f"batch_norm='private' cannot join batches of {type(first).__name__}: collate into tensors"
    )


def in_order(data_loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader's data, every sample exactly once and by itself."""
    collate = data_loader.collate_fn
    return DataLoader(
        data_loader.dataset,
        batch_size=data_loader.batch_size,
        collate_fn=collate if collate is default_collate else OneByOne(collate),
        num_workers=data_loader.num_workers,
    )
