"""Layerwise clip rules: from layer norms to clip bounds, noise weights and blocks. Pure functions.

*What scaling gains and when it does not.* ``apply="clip"`` with bound C and multiplier sigma costs
``mu = sqrt(L) / sigma``. ``apply="scale"`` with bound ``C * sqrt(L)`` and multiplier ``sigma / sqrt(L)``
costs the same and puts the same noise on every layer, and a gradient that clipping leaves alone
(``|g_h| <= C_h`` for all h) is left alone too: ``sum_h (|g_h| C / C_h)^2 <= L C^2``. It also leaves alone
gradients of which one layer is beyond its bound while others have room. The reverse fails once one layer
explodes: clipping cuts that layer only, scaling shrinks all of them with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from torch import Tensor

from opacus_bc.mechanism.blocks import Block, make_block, sensitivity
from opacus_bc.mechanism.names import Adjacency, Unit
from opacus_bc.mechanism.numbers import check_positive

Groups = dict[str, tuple[str, ...]]  # parameter names by clip group
Rule = Literal["ratio", "norm"]
Apply = Literal["clip", "scale"]
NoiseName = Literal["proportional", "isotropic", "optimal"]
NoiseAllocation = NoiseName | Mapping[str, float]

# A layer whose public gradient vanishes (dead units, a bias in front of BatchNorm) would get a bound of 0.
# No layer's norm counts as less than this share of the largest one's.
NORM_FLOOR = 1e-4


def floored(norms: Mapping[str, float]) -> dict[str, float]:
    """Layer norms with the floor: at least :data:`NORM_FLOOR` times the largest.

    Raises:
        ValueError: All norms are zero, or one is not finite.

    >>> floored({"a": 2.0, "dead": 0.0})
    {'a': 2.0, 'dead': 0.0002}
    """
    largest = max(norms.values())
    if not all(math.isfinite(value) for value in norms.values()) or largest <= 0:
        raise ValueError(f"layer norms must be finite and not all zero, got {dict(norms)}")
    return {name: max(value, NORM_FLOOR * largest) for name, value in norms.items()}


def layer_bounds(norms: Mapping[str, float], *, rule: Rule, max_grad_norm: float) -> dict[str, float]:
    """Clip bound of every group: ``C e_h / M`` (``"ratio"``) or ``C e_h`` (``"norm"``).

    >>> layer_bounds({"a": 2.0, "b": 0.5}, rule="ratio", max_grad_norm=0.1)
    {'a': 0.1, 'b': 0.025}
    """
    values = floored(norms)
    reference = max(values.values()) if rule == "ratio" else 1.0
    return {name: max_grad_norm * (value / reference) for name, value in values.items()}


def noise_weights(
    noise: NoiseAllocation,
    sensitivities: Mapping[str, float],
    dimensions: Mapping[str, int],
    *,
    groups: int,
) -> dict[str, float]:
    """Weights p_h of the noise ``tau_h = sigma Delta_h / p_h``, one for each group in ``sensitivities``.

    **Formal guarantee**: ``sum_h p_h^2`` depends on ``noise`` and ``groups`` alone (the number of groups
    ("proportional", "optimal"), 1 ("isotropic"), or the sum of the mapping's squares), whatever the bounds
    are and however many groups are still live; so the effective noise multiplier does not move. Proof:
    ``sigma_eff = sigma / sqrt(sum p_h^2)``, and every branch ends in a normalisation to that sum.

    * ``"proportional"``: p_h = 1, the paper's ``tau_h = sigma Delta_h``.
    * ``"isotropic"``: the same tau everywhere, Opacus's ``per_layer``.
    * ``"optimal"``: ``p_h^2`` proportional to ``Delta_h sqrt(d_h)``, the least total noise power
      ``sum d_h tau_h^2`` at this mu (Lagrange: ``tau_h^4`` proportional to ``Delta_h^2 / d_h``).
    """
    if isinstance(noise, Mapping):
        total = sum(value**2 for value in noise.values())
        squares = {name: noise[name] ** 2 for name in sensitivities}
    elif noise == "isotropic":
        total = 1.0
        squares = {name: delta**2 for name, delta in sensitivities.items()}
    else:
        total = float(groups)
        squares = {
            name: 1.0 if noise == "proportional" else delta * math.sqrt(dimensions[name])
            for name, delta in sensitivities.items()
        }
    scale = total / sum(squares.values())
    return {name: math.sqrt(scale * square) for name, square in squares.items()}


@dataclass(frozen=True, kw_only=True)
class LayerwiseClipping:
    """Clip every group of parameters to a bound of its own, or scale the groups and clip the whole.

    **Formal guarantee**: given the draw, a release of these blocks is ``G_mu``-DP with
    ``mu = sqrt(sum_h p_h^2) / sigma`` for ``apply="clip"`` and ``1 / sigma`` for ``"scale"``, whatever the
    norms are. Proof: clipping bounds each block's shift by Delta_h and ``step_mu`` adds the squares of
    ``Delta_h / tau_h = p_h / sigma``; scaling clips one vector and divides the noised sum by public factors,
    which is post-processing.

    **Edge cases**: a group without live entries (all frozen) leaves the release; its share of the budget goes
    to the others, and its tensors ride along in the first live block with zero gradients and without noise.

    Attributes:
        groups: Parameter names of every group.
        norms: e_h of every group, from public data.
        rule: ``"ratio"`` or ``"norm"``.
        apply: ``"clip"`` or ``"scale"``.
        noise: How noise is spread over the groups; only ``"proportional"`` goes with ``"scale"``.
        unit: What is clipped.
        adjacency: What neighbouring data sets are.
        frozen: Number of frozen entries by parameter name.
    """

    groups: Groups
    norms: Mapping[str, float]
    rule: Rule
    apply: Apply
    noise: NoiseAllocation
    unit: Unit
    adjacency: Adjacency
    frozen: Mapping[str, int] = field(default_factory=dict)

    def blocks(
        self, parameters: Sequence[tuple[str, Tensor]], *, noise_multiplier: float, max_grad_norm: float
    ) -> list[Block]:
        """See :meth:`opacus_bc.mechanism.rules.ClipRule.blocks`."""
        sizes = {name: p.numel() - self.frozen.get(name, 0) for name, p in parameters}
        grouped = [name for names in self.groups.values() for name in names]
        if sorted(sizes) != sorted(grouped):
            changed = sorted(set(sizes) ^ set(grouped))
            raise RuntimeError(
                f"the trainable parameters changed since make_private (first: {changed[0]!r}), which would "
                "change the number of clip groups and the noise: call make_private again"
            )
        dimensions = {group: sum(sizes[name] for name in names) for group, names in self.groups.items()}
        live = [group for group in self.groups if dimensions[group]] or list(self.groups)
        bounds = layer_bounds(
            {group: self.norms[group] for group in live}, rule=self.rule, max_grad_norm=max_grad_norm
        )
        names = {group: list(self.groups[group]) for group in live}
        names[live[0]] += [name for group in self.groups if group not in names for name in self.groups[group]]
        make = partial(
            make_block, noise_multiplier=noise_multiplier, unit=self.unit, adjacency=self.adjacency
        )
        if self.apply == "scale":
            members = [(group, name) for group in live for name in names[group]]
            return [
                make(
                    names=[name for _, name in members],
                    dimension=sum(dimensions.values()),
                    clip_bound=max_grad_norm,
                    factors=[max_grad_norm / bounds[group] for group, _ in members],
                )
            ]
        deltas = {
            group: sensitivity(bounds[group], unit=self.unit, adjacency=self.adjacency) for group in live
        }
        weights = noise_weights(self.noise, deltas, dimensions, groups=len(self.groups))
        return [
            make(
                names=names[group],
                dimension=dimensions[group],
                clip_bound=bounds[group],
                weight=weights[group],
            )
            for group in live
        ]


def check_noise(noise: object, *, apply: str) -> None:
    """Refuse a ``noise`` argument that is unknown or does not go with ``apply``.

    Raises:
        ValueError: Says what would be right.
    """
    if isinstance(noise, Mapping):
        if not noise:
            raise ValueError("noise={}: give a weight p_h > 0 for every group")
        for name, value in noise.items():
            check_positive(f"noise[{name!r}]", value)
    elif noise not in get_args(NoiseName):
        raise ValueError(
            f"noise must be one of {', '.join(map(repr, get_args(NoiseName)))} or a mapping from group name "
            f"to weight, got {noise!r}"
        )
    if apply == "scale" and noise != "proportional":
        raise ValueError(
            f"noise={noise!r} spreads noise over several blocks; apply='scale' makes one: leave noise out"
        )
