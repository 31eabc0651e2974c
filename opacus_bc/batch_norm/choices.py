"""Which policy goes with which layers and which clipping: checks that change nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from opacus_bc._opacus import UnsupportedModuleError
from opacus_bc.batch_norm.layers import NORM_LAYERS, PolicyLayer
from opacus_bc.batch_norm.private import PrivateStatistics
from opacus_bc.batch_norm.public import PublicStatistics
from opacus_bc.batch_norm.subclass_check import why_not_constant
from opacus_bc.batch_norm.subclasses import has_own_forward
from opacus_bc.mechanism.names import type_name
from opacus_bc.mechanism.types import Loader
from opacus_bc.public.data import WRAP_IT, check_disjoint, check_public_loader

POLICIES = ("private", "batch", "frozen", "unprotected")
_CHOICES = (
    "a public DataLoader (statistics re-estimated on public data), 'private' (released with noise), 'batch' "
    "(keep none, normalise with the batch at hand), 'frozen' (use the given ones, never write them), "
    "'unprotected' (leak them)"
)
_INDIVIDUAL_CHOICES = (
    "a public DataLoader (normalise with statistics of public batches) or 'frozen' (use the given ones); "
    "'private' and 'batch' go with clipping='batch'. Or replace the layers by GroupNorm before the optimizer "
    "is made: opacus.validators.ModuleValidator.fix(model)"
)

_FROZEN_BACKBONE = (
    "Their weights and biases are not trained: batch_norm='frozen' leaves the statistics as they are, too, "
    "which is what fine-tuning on a frozen backbone wants. "
)

Config = PublicStatistics | PrivateStatistics | str | None


class BatchNormPolicyError(UnsupportedModuleError):  # type: ignore[misc]  # Opacus is untyped
    """The model's normalisation layers do not go with what was asked (also a ValueError)."""


class UnprotectedStatisticsError(RuntimeError):
    """A guarantee was asked for a run that leaks running statistics."""


def statistics_modules(module: nn.Module, *, individual: bool = False) -> dict[str, nn.Module]:
    """Layers that need a policy, by name: those whose training forward would write running statistics.

    With ``individual`` clipping also those that only mix samples: per-sample gradients do not exist then.
    """
    batch_norm = NORM_LAYERS[0]
    return {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, NORM_LAYERS)
        and (child.track_running_stats or (individual and isinstance(child, batch_norm)))
    }


def resolve(policy: object) -> Config:
    """Turn what the user passed as ``batch_norm=`` into a configuration, or raise a ValueError."""
    if isinstance(policy, DataLoader):
        return PublicStatistics(loader=policy)
    if policy is None or isinstance(policy, (PublicStatistics, PrivateStatistics)):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        names = ", ".join(map(repr, POLICIES))
        what = repr(policy) if isinstance(policy, str) else type(policy).__name__  # never the data
        data = isinstance(policy, (Dataset, Tensor, Sequence)) and not isinstance(policy, str)
        hint = WRAP_IT if data else ""
        raise ValueError(f"batch_norm must be a public DataLoader or one of {names}, got {what}{hint}")
    return PrivateStatistics() if policy == "private" else policy


def _called(name: str, child: nn.Module) -> str:
    return f"{name or 'the module'} ({type_name(child)})"


def has_initial_statistics(layer: Any) -> bool:
    """Whether no forward and no state dict has ever written the layer's running statistics.

    >>> layer = nn.BatchNorm1d(2)
    >>> has_initial_statistics(layer), layer.running_mean.add_(1).numel(), has_initial_statistics(layer)
    (True, 2, False)
    """
    mean, var, count = layer.running_mean, layer.running_var, layer.num_batches_tracked
    if mean is None or var is None or (count is not None and int(count) > 0):
        return False
    return not bool(mean.any()) and bool((var == 1).all())


def keeps_statistics(module: nn.Module) -> bool:
    """Whether any layer, of whatever type (FrozenBatchNorm2d), holds running statistics."""
    return any(name.endswith("running_mean") for name, _ in module.named_buffers())


def needs_several_samples(module: nn.Module, policy: str) -> bool:
    """Whether a training forward normalises with the statistics of its mini-set, which one sample lacks.

    ``policy`` is the name of what was chosen for the layers that keep statistics.
    """
    kept = statistics_modules(module)
    return any(
        isinstance(child, NORM_LAYERS[0]) and not (policy == "frozen" and name in kept)
        for name, child in statistics_modules(module, individual=True).items()
    )


def check_policy(
    module: nn.Module,
    policy: object,
    *,
    individual: bool = False,
    private_loader: Loader | None = None,
    trained: Collection[nn.Parameter] | None = None,
) -> dict[str, nn.Module]:
    """Refuse a model whose running statistics nobody answers for; return the layers in question, by name.

    ``policy`` is what was passed as ``batch_norm=``; public data must be disjoint from ``private_loader``;
    ``trained`` is what the optimizer holds (None: everything).
    """
    config = resolve(policy)
    if isinstance(config, PublicStatistics):
        check_public_loader(config.loader)
        if private_loader is not None:
            check_disjoint(config.loader, private_loader)
    for name, child in module.named_modules():
        if isinstance(child, PolicyLayer):
            raise BatchNormPolicyError(
                f"{_called(name, child)} already obeys a policy: call "
                "engine.finalize(module) before make_private"
            )
    found = statistics_modules(module, individual=individual)
    if not found:
        return found
    first, layer = next(iter(found.items()))
    which = _called(first, layer) + (f" and {len(found) - 1} more" if len(found) > 1 else "")
    for name, child in found.items():
        if isinstance(child, nn.modules.lazy.LazyModuleMixin) and child.has_uninitialized_params():
            raise BatchNormPolicyError(
                f"{_called(name, child)} has no shape yet: run one forward on dummy "
                "or public data before make_private, so that no private forward decides it"
            )
    if config is None:
        choices = _INDIVIDUAL_CHOICES if individual else _CHOICES
        own = [p for child in found.values() for p in child.parameters(recurse=False)]
        moved = any(p.requires_grad and (trained is None or p in trained) for p in own)
        advice = "" if moved or not own else _FROZEN_BACKBONE
        raise BatchNormPolicyError(
            f"in {which} a private forward would mix samples or write running statistics into the model "
            f"unprotected. {advice}Say what shall happen with batch_norm=: {choices}"
        )
    if isinstance(config, PublicStatistics) and config.differentiate and not individual:
        raise BatchNormPolicyError(
            "PublicStatistics(differentiate=True) goes with individual clipping: with clipping='batch' "
            "gradients follow the mini-set's own statistics anyway"
        )
    if individual:
        _check_individual(config, found)
    elif isinstance(config, PrivateStatistics):
        _check_private(module, found)
    return found


def _check_individual(config: Config, found: dict[str, nn.Module]) -> None:
    if isinstance(config, PrivateStatistics) or config in ("batch", "unprotected"):
        name = config if isinstance(config, str) else "private"
        raise BatchNormPolicyError(
            f"batch_norm={name!r} uses statistics of the private batch, through which no sample has a "
            f"gradient of its own: with individual clipping use {_INDIVIDUAL_CHOICES}"
        )
    for name, child in found.items():
        if has_own_forward(type(child)):
            known = isinstance(child, NORM_LAYERS[0])
            reason = why_not_constant(child) if known else "its per-sample gradients are not known"
            if reason is not None:
                raise BatchNormPolicyError(f"{_called(name, child)} has a forward of its own: {reason}")
        if config == "frozen" and not child.track_running_stats:
            raise BatchNormPolicyError(
                f"batch_norm='frozen': {_called(name, child)} has no running "
                "statistics to use; pass a public DataLoader"
            )


def _check_private(module: nn.Module, found: dict[str, nn.Module]) -> None:
    for name, child in statistics_modules(module, individual=True).items():
        if name not in found:
            raise BatchNormPolicyError(
                f"batch_norm='private': {_called(name, child)} normalises with the "
                "batch at hand in evaluation too, so a sample's statistics would depend on other samples: "
                "use track_running_stats=True there"
            )
