"""Which policy goes with which layers and which clipping: checks that change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from opacus_bc._opacus import UnsupportedModuleError
from opacus_bc.norm_types import NORM_LAYERS, PolicyLayer, is_known
from opacus_bc.private_statistics import PrivateStatistics
from opacus_bc.public_data import WRAP_IT, check_disjoint, check_public_loader
from opacus_bc.public_statistics import PublicStatistics

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

Config = PublicStatistics | PrivateStatistics | str | None


class BatchNormPolicyError(UnsupportedModuleError):  # type: ignore[misc]  # Opacus is untyped
    """The model's normalisation layers do not go with what was asked (also a ValueError)."""


class UnprotectedStatisticsError(RuntimeError):
    """A guarantee was asked for a run that leaks running statistics."""


def statistics_modules(module: nn.Module, *, individual: bool = False) -> dict[str, nn.Module]:
    """Layers that need a policy, by name: those that would write running statistics in a training forward.

    With individual clipping also those that only mix samples (BatchNorm without running statistics), since
    per-sample gradients do not exist through them.
    """
    batch_norm = NORM_LAYERS[0]
    return {
        name: child
        for name, child in module.named_modules()
        if isinstance(child, NORM_LAYERS)
        and (child.track_running_stats or (individual and isinstance(child, batch_norm)))
    }


def resolve(policy: Any) -> Config:
    """Turn what the user passed as ``batch_norm=`` into a configuration.

    Raises:
        ValueError: It is none.
    """
    if isinstance(policy, DataLoader):
        return PublicStatistics(loader=policy)
    if policy is None or isinstance(policy, (PublicStatistics, PrivateStatistics)):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        names = ", ".join(map(repr, POLICIES))
        what = repr(policy) if isinstance(policy, str) else type(policy).__name__  # never the data
        hint = (
            WRAP_IT if isinstance(policy, (Dataset, Tensor, Sequence)) and not isinstance(policy, str) else ""
        )
        raise ValueError(f"batch_norm must be a public DataLoader or one of {names}, got {what}{hint}")
    return PrivateStatistics() if policy == "private" else policy


def check_policy(
    module: nn.Module,
    policy: Any,
    *,
    individual: bool = False,
    private_loader: DataLoader[Any] | None = None,
) -> dict[str, nn.Module]:
    """Refuse a model whose running statistics nobody answers for; changes nothing.

    Args:
        module: The model.
        policy: What was passed as ``batch_norm=``; may be a DataLoader.
        individual: Whether samples are clipped one by one.
        private_loader: If given, public data must be disjoint from it.

    Returns:
        The layers that the policy is about, by name.

    Raises:
        BatchNormPolicyError: No policy, or one that does not go with the layers or the clipping.
        ValueError: The policy is unknown, or the public data is private.
    """
    config = resolve(policy)
    if isinstance(config, PublicStatistics):
        check_public_loader(config.loader)
        if private_loader is not None:
            check_disjoint(config.loader, private_loader)
    for name, child in module.named_modules():
        if isinstance(child, PolicyLayer):
            raise BatchNormPolicyError(
                f"{name or 'the module'} ({type(child).__name__}) already obeys a policy: call "
                "engine.finalize(module) before make_private"
            )
    found = statistics_modules(module, individual=individual)
    if not found:
        return found
    first, layer = next(iter(found.items()))
    which = f"{first or 'the module'} ({type(layer).__name__})"
    if len(found) > 1:
        which += f" and {len(found) - 1} more"
    for name, child in found.items():
        if isinstance(child, nn.modules.lazy.LazyModuleMixin) and child.has_uninitialized_params():
            raise BatchNormPolicyError(
                f"{name or 'the module'} ({type(child).__name__}) has no shape yet: run one forward on dummy "
                "or public data before make_private, so that no private forward decides it"
            )
    if config is None:
        choices = _INDIVIDUAL_CHOICES if individual else _CHOICES
        raise BatchNormPolicyError(
            f"in {which} a private forward would mix samples or write running statistics into the model "
            f"unprotected. Say what shall happen with batch_norm=: {choices}"
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
        if not is_known(child):
            raise BatchNormPolicyError(
                f"{name or 'the module'} ({type(child).__name__}) is a norm layer with a forward of its own, "
                "whose per-sample gradients are not known: use torch's type, or clipping='batch'"
            )
        if config == "frozen" and not child.track_running_stats:
            raise BatchNormPolicyError(
                f"batch_norm='frozen': {name or 'the module'} ({type(child).__name__}) has no running "
                "statistics to use; pass a public DataLoader"
            )


def _check_private(module: nn.Module, found: dict[str, nn.Module]) -> None:
    for name, child in statistics_modules(module, individual=True).items():
        if name not in found:
            raise BatchNormPolicyError(
                f"batch_norm='private': {name or 'the module'} ({type(child).__name__}) normalises with the "
                "batch at hand in evaluation too, so a sample's statistics would depend on other samples: "
                "use track_running_stats=True there"
            )
