"""Adaptive layerwise clipping: clip bounds that follow the layers' gradient norms on public data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from torch.utils.data import DataLoader

from opacus_bc.alc.freezing import FreezeConverged
from opacus_bc.alc.groups import Layers, by_module, by_norm, by_parameter, by_pattern, check_layers
from opacus_bc.mechanism.layerwise import Apply, Groups, LayerwiseClipping, NoiseAllocation, Rule, check_noise
from opacus_bc.mechanism.names import Adjacency, Unit
from opacus_bc.mechanism.numbers import check_count
from opacus_bc.mechanism.types import Loader
from opacus_bc.public.data import check_yields_samples
from opacus_bc.public.norms import Gradient, check_drawable


@dataclass(frozen=True)
class ALC:
    """How clip bounds follow the layers' norms.

    **Formal guarantee**: clip bounds and noise scales are functions of released weights and public data, so
    they reveal nothing; sigma_eff is fixed by ``layers``, ``apply`` and ``noise`` before training and no
    refresh moves it, so composition with fixed parameters covers the run.

    **Edge cases**: a layer whose public gradient vanishes counts with 1e-4 of the largest norm. If all public
    gradients vanish or are not finite, ``make_private`` raises; a later refresh warns and keeps the old
    bounds. Mini-sets are drawn from the public loader's data set, in the size that is clipped; a public set
    smaller than that is used as one mini-set, with a warning, and its norms come out too large.

    Args:
        public_loader: Public data, disjoint from the private data; pairs ``(x, y)`` unless ``gradient`` says
            otherwise.
        rule: ``"ratio"``: ``C_h = C e_h / max e``, the paper's. ``"norm"``: ``C_h = C e_h`` (C = 1 is Zhang
            et al. 2018).
        layers: ``"module"``, ``"parameter"``, a number G (always ``min(G, modules)`` groups of modules with
            similar norms), patterns for parameter names (``["conv*", "fc*"]``), or a mapping from group name
            to pattern or patterns.
        apply: ``"clip"`` clips every group to its C_h and pays sqrt(L). ``"scale"`` multiplies groups by
            ``C / C_h``, clips the whole vector to C and divides after the noise: no sqrt(L). When which is
            better: see ``opacus_bc.mechanism.layerwise``.
        noise: ``"proportional"``, ``"isotropic"``, ``"optimal"``, or weights p_h by group name; see
            :func:`opacus_bc.mechanism.layerwise.noise_weights`. ``layers=G`` names its groups "group 1"
            (smallest norms) to "group G".
        refresh: When the norms are estimated again: ``"epoch"``, a number of steps, or ``"once"`` (never).
        max_batches: Public mini-sets (single samples for individual clipping) looked at in an estimation;
            None stays below 5 % of an epoch's time, with at most 32 mini-sets or 128 samples.
        gradient: ``gradient(module, batch)`` leaves g in ``.grad`` as the training loop does (``backward()``,
            or ``local_update``), for batches that are no pairs, local updates or unusual losses. None is the
            mean gradient of ``criterion(module(x), y)`` with ``make_private``'s ``criterion``, by default
            cross entropy.
        freeze: Fix converged entries; see :class:`opacus_bc.FreezeConverged`.
    """

    public_loader: Loader
    _: KW_ONLY
    rule: Rule = "ratio"
    layers: Layers = "module"
    apply: Apply = "clip"
    noise: NoiseAllocation = "proportional"
    refresh: Literal["epoch", "once"] | int = "epoch"
    max_batches: int | None = None
    gradient: Gradient | None = None
    freeze: FreezeConverged | None = None

    def __post_init__(self) -> None:
        check_yields_samples(self.public_loader)
        check_drawable(self.public_loader)
        for name, value, allowed in (("rule", self.rule, Rule), ("apply", self.apply, Apply)):
            if value not in get_args(allowed):
                choices = ", ".join(map(repr, get_args(allowed)))
                raise ValueError(f"{name} must be one of {choices}, got {value!r}")
        check_layers(self.layers)
        check_noise(self.noise, apply=self.apply)
        if self.refresh not in ("epoch", "once"):
            check_count("refresh", self.refresh, wanted="'epoch', 'once' or a number of steps >= 1")
        if self.max_batches is not None:
            check_count("max_batches", self.max_batches, wanted="a whole number >= 1 or None")
        if self.gradient is not None and not callable(self.gradient):
            raise ValueError(f"gradient must be a function of (module, batch), got {self.gradient!r}")
        if self.freeze is not None and not isinstance(self.freeze, FreezeConverged):
            raise ValueError(f"freeze must be a FreezeConverged or None, got {self.freeze!r}")


def as_alc(alc: object) -> ALC | None:
    """The configuration that ``alc=`` stands for: a public loader means the defaults."""
    if alc is None or isinstance(alc, ALC):
        return alc
    if isinstance(alc, DataLoader):
        return ALC(alc)
    raise ValueError(f"alc must be a public DataLoader or an ALC, got {type(alc).__name__}")


def finest_layers(layers: Layers, names: Sequence[str]) -> Groups:
    """The layers whose norms are measured; an integer merges modules later."""
    if layers == "parameter":
        return by_parameter(names)
    if layers == "module" or isinstance(layers, int):
        return by_module(names)
    assert not isinstance(layers, str)  # check_layers has seen to it
    return by_pattern(names, layers)


def nominal_rule(config: ALC, names: Sequence[str], *, unit: Unit, adjacency: Adjacency) -> LayerwiseClipping:
    """The rule with equal norms: its sigma_eff is that of every later refresh, so calibration reads it."""
    groups = finest_layers(config.layers, names)
    if isinstance(config.layers, int):
        groups = by_norm(groups, dict.fromkeys(groups, 1.0), config.layers)
    if isinstance(config.noise, Mapping) and set(config.noise) != set(groups):
        raise ValueError(
            f"noise has weights for {', '.join(sorted(config.noise))}; the groups are "
            f"{', '.join(sorted(groups))}"
        )
    return LayerwiseClipping(
        groups=groups,
        norms=dict.fromkeys(groups, 1.0),
        rule=config.rule,
        apply=config.apply,
        noise=config.noise,
        unit=unit,
        adjacency=adjacency,
    )
