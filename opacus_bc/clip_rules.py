"""Which clip rule a call of ``make_private`` asks for, and what it makes of a noise multiplier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from opacus_bc._opacus import AbstractGradSampleModule
from opacus_bc.adaptive import AdaptiveClipping, Measure
from opacus_bc.alc import ALC, nominal_rule
from opacus_bc.clipping import Adjacency, ClipRule, FlatClipping, Unit, effective_noise_multiplier
from opacus_bc.public_data import check_disjoint
from opacus_bc.ranks import Ranks
from opacus_bc.sampling import Sampling, SamplingPlan
from opacus_bc.sparsification import check_freezable

PER_SAMPLE_MODES = ("hooks", "ew", "functorch")
Named = Sequence[tuple[str, nn.Parameter]]


def trainable(module: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the optimizer trains, by name."""
    own = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    return [(name, p) for name, p in module.named_parameters() if p in own]


def effective_per_multiplier(
    config: ALC | None, parameters: Named, *, unit: Unit, adjacency: Adjacency
) -> float:
    """``sigma_eff / sigma``, read off the very blocks that training will release (at sigma = 1).

    Raises:
        ValueError: ALC's layers or noise weights do not fit the parameters.
    """
    rule: ClipRule = FlatClipping(unit=unit, adjacency=adjacency)
    if config is not None:
        rule = nominal_rule(config, [name for name, _ in parameters], unit=unit, adjacency=adjacency)
    return effective_noise_multiplier(rule.blocks(parameters, noise_multiplier=1.0, max_grad_norm=1.0))


def check_alc(
    config: ALC,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    sampling: Sampling,
    clipping: str,
    grad_sample_mode: str,
    distributed: bool,
) -> None:
    """Refuse what ALC cannot do before anything is changed.

    Raises:
        ValueError: The mode does not go with ALC, the public data are private, or the layers, the noise
            weights or the optimizer do not fit.
    """
    if clipping not in ("batch", "flat"):
        raise ValueError(f"alc= goes with clipping='batch' or 'flat', got clipping={clipping!r}")
    if clipping == "flat" and (distributed or grad_sample_mode not in PER_SAMPLE_MODES):
        raise ValueError(
            "alc= with clipping='flat' needs per-sample gradients in one process (ghost clipping never forms "
            f"them): grad_sample_mode must be one of {', '.join(map(repr, PER_SAMPLE_MODES))}, got "
            f"{grad_sample_mode!r} for a {type(module).__name__}"
        )
    if isinstance(module, AbstractGradSampleModule):
        raise ValueError("alc= needs the plain nn.Module; this one is wrapped for per-sample gradients")
    check_disjoint(config.public_loader, data_loader)
    if config.freeze is not None:
        check_freezable(optimizer)
    parameters = trainable(module, optimizer)
    if not parameters:
        raise ValueError("optimizer has no trainable parameters of module: there is nothing to clip")
    effective_per_multiplier(
        config,
        parameters,
        unit="mini-set" if clipping == "batch" else "sample",
        adjacency=individual_adjacency(sampling),
    )


def mini_set_rule(
    config: ALC | None,
    module: nn.Module,
    optimizer: Optimizer,
    *,
    plan: SamplingPlan,
    criterion: Callable[..., Tensor] | None,
    ranks: Ranks | None = None,
    measure: Measure | None = None,
) -> ClipRule:
    """The rule of batch clipping."""
    if config is None:
        return FlatClipping(unit="mini-set", adjacency=plan.adjacency)
    return AdaptiveClipping(
        config,
        module,
        [name for name, _ in trainable(module, optimizer)],
        unit="mini-set",
        adjacency=plan.adjacency,
        mini_set_size=plan.mini_set_size,
        steps_per_epoch=plan.steps_per_epoch,
        gradients_per_step=plan.mini_sets,
        criterion=criterion,
        ranks=ranks,
        measure=measure,
    )


def sample_rule(
    config: ALC,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    sampling: Sampling,
    criterion: Callable[..., Tensor] | None,
) -> AdaptiveClipping:
    """The rule of individual clipping with ALC."""
    return AdaptiveClipping(
        config,
        module,
        [name for name, _ in trainable(module, optimizer)],
        unit="sample",
        adjacency=individual_adjacency(sampling),
        mini_set_size=1,
        steps_per_epoch=len(data_loader),
        gradients_per_step=data_loader.batch_size or 1,
        criterion=criterion,
    )


def individual_adjacency(sampling: Sampling) -> Adjacency:
    """What neighbouring data sets are under individual clipping."""
    return "add/remove one" if sampling == "poisson" else "replace one"
