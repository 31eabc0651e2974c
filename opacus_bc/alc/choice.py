"""Which clip rule a call of ``make_private`` asks for, and what it makes of a noise multiplier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer

from opacus_bc.alc.adaptive import AdaptiveClipping
from opacus_bc.alc.config import ALC, nominal_rule
from opacus_bc.alc.freezing import check_freezable
from opacus_bc.alc.measuring import Hooks, Measure, PublicNorms
from opacus_bc.draws.plan import SamplingPlan
from opacus_bc.mechanism.blocks import effective_noise_multiplier
from opacus_bc.mechanism.names import Adjacency, Unit
from opacus_bc.mechanism.rules import ClipRule, FlatClipping, OpacusClipping
from opacus_bc.mechanism.types import Loader, Loss
from opacus_bc.parallel.ranks import Ranks
from opacus_bc.public.data import check_disjoint
from opacus_bc.public.norms import parameter_norms

Named = Sequence[tuple[str, nn.Parameter]]


def trainable(module: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the optimizer trains, by name."""
    own = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    return [(name, p) for name, p in module.named_parameters() if p in own]


def without_alc(unit: Unit, adjacency: Adjacency, bounds: tuple[float, ...] | None = None) -> ClipRule:
    """Mini-sets and users get noise of sigma times their sensitivity, single samples Opacus's."""
    if unit != "sample":
        return FlatClipping(unit=unit, adjacency=adjacency)
    return OpacusClipping(adjacency=adjacency, bounds=bounds)


def effective_per_multiplier(
    config: ALC | None, parameters: Named, *, unit: Unit, adjacency: Adjacency
) -> float:
    """``sigma_eff / sigma``, read off the very blocks that training will release (at sigma = 1)."""
    rule = without_alc(unit, adjacency)
    if config is not None:
        rule = nominal_rule(config, [name for name, _ in parameters], unit=unit, adjacency=adjacency)
    return effective_noise_multiplier(rule.blocks(parameters, noise_multiplier=1.0, max_grad_norm=1.0))


def check_alc(
    config: ALC,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: Loader,
    *,
    unit: Unit,
    adjacency: Adjacency,
) -> None:
    """Refuse what ALC cannot do, before anything is changed."""
    check_disjoint(config.public_loader, data_loader)
    if config.freeze is not None:
        check_freezable(optimizer)
    parameters = trainable(module, optimizer)
    if not parameters:
        raise ValueError("optimizer has no trainable parameters of module: there is nothing to clip")
    effective_per_multiplier(config, parameters, unit=unit, adjacency=adjacency)


def make_meter(
    module: nn.Module,
    plan: SamplingPlan,
    *,
    ranks: Ranks | None = None,
    measure: Measure | None = None,
    hooks: Hooks | None = None,
) -> PublicNorms:
    """What measures public gradients as this training clips them; see :class:`PublicNorms`."""
    if plan.views > 1:
        measure = partial(parameter_norms, views=plan.views)
    return PublicNorms(module, measure=measure or parameter_norms, hooks=hooks, ranks=ranks)


def make_rule(
    config: ALC | None,
    optimizer: Optimizer,
    *,
    plan: SamplingPlan,
    meter: PublicNorms,
    bounds: tuple[float, ...] | None = None,
    criterion: Loss | None = None,
) -> ClipRule:
    """The clip rule of every mode; without a ``config`` a fixed one (``bounds`` are those of "per_layer")."""
    if config is None:
        return without_alc(plan.unit, plan.adjacency, bounds)
    return AdaptiveClipping(
        config,
        meter,
        [name for name, _ in trainable(meter.module, optimizer)],
        unit=plan.unit,
        adjacency=plan.adjacency,
        mini_set_size=plan.clipped_together,
        steps_per_epoch=plan.steps_per_epoch,
        gradients_per_step=plan.vectors,
        criterion=criterion,
    )
