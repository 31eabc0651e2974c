"""What happens to running statistics: BatchNorm that does not leak.

Gradients through batch statistics are inside the clipped vector. The running mean and variance are not: an
ordinary forward in training mode writes raw private statistics into buffers that ship with the model. A
policy says what happens instead; there is no silent default.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from opacus_bc._opacus import UnsupportedModuleError

RUNNING_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
POLICIES = ("batch", "frozen")


class BatchNormPolicyError(UnsupportedModuleError):  # type: ignore[misc]  # Opacus is untyped
    """The model keeps running statistics and nothing was said about them (also a ValueError)."""


def statistics_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Modules that would write running statistics in a training forward, by name."""
    return {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, RUNNING_STATISTICS) and child.track_running_stats
    }


def check_policy(module: nn.Module, policy: Any) -> None:
    """Refuse a model with running statistics unless a policy is named; changes nothing.

    Raises:
        BatchNormPolicyError: The model has running statistics and ``policy`` is None.
        ValueError: The policy is unknown.
    """
    if policy is not None and policy not in POLICIES:
        raise ValueError(f"batch_norm must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}")
    found = statistics_modules(module)
    if found and policy is None:
        name, child = next(iter(found.items()))
        raise BatchNormPolicyError(
            f"{len(found)} modules keep running statistics (first: {name or 'the module'}, "
            f"{type(child).__name__}), which a private forward would write into the model unprotected. Say "
            "what shall happen with batch_norm=: 'batch' (normalise with the batch at hand, keep no "
            "statistics) or 'frozen' (use the given statistics, never write them)"
        )


def apply_policy(module: nn.Module, policy: str | None) -> None:
    """Make private forwards obey the policy.

    **Formal guarantee**: afterwards no forward of a module in :data:`RUNNING_STATISTICS` writes a buffer.

    ``"batch"`` turns a module into what ``track_running_stats=False`` constructs; ``"frozen"`` keeps it in
    evaluation mode whatever mode the model is put into.
    """
    for child in statistics_modules(module).values():
        if policy == "batch":
            child.track_running_stats = False
            child.running_mean = child.running_var = child.num_batches_tracked = None
        elif policy == "frozen":
            child.__class__ = _frozen_type(type(child))
            child.eval()


_FROZEN_TYPES: dict[type[nn.Module], type[nn.Module]] = {}


def _frozen_type(kind: type[nn.Module]) -> type[nn.Module]:
    if kind in _FROZEN_TYPES.values():
        return kind
    if kind not in _FROZEN_TYPES:
        raise ValueError(f"batch_norm='frozen' does not know how to freeze {kind.__name__}")
    return _FROZEN_TYPES[kind]


class _StaysInEvaluationMode(nn.Module):
    def train(self, mode: bool = True) -> _StaysInEvaluationMode:
        super().train(False)
        return self


class FrozenBatchNorm1d(_StaysInEvaluationMode, nn.BatchNorm1d):
    """BatchNorm1d with given statistics, never written."""


class FrozenBatchNorm2d(_StaysInEvaluationMode, nn.BatchNorm2d):
    """BatchNorm2d with given statistics, never written."""


class FrozenBatchNorm3d(_StaysInEvaluationMode, nn.BatchNorm3d):
    """BatchNorm3d with given statistics, never written."""


_FROZEN_TYPES.update(
    {
        nn.BatchNorm1d: FrozenBatchNorm1d,
        nn.BatchNorm2d: FrozenBatchNorm2d,
        nn.BatchNorm3d: FrozenBatchNorm3d,
    }
)
