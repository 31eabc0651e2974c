"""The blocks of a release, and what they cost: the only place that computes sigma_eff of a step.

A step releases, for every block h, the sum over units of clipped vectors plus Gaussian noise:

    U_h = sum_j [g_h(w; S_j)]_{C_h} + N(0, tau_h^2 I),     [x]_C = x / max(1, |x| / C).

All blocks come from the same draw, so the release is one Gaussian mechanism whose whitened shift is at most
``sqrt(sum_h (Delta_h / tau_h)^2)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from opacus_bc.mechanism.names import Adjacency, Unit


def sensitivity(clip_bound: float, *, unit: Unit, adjacency: Adjacency) -> float:
    """L2-sensitivity of a sum of clipped vectors, one vector for every ``unit``.

    **Formal guarantee**: neighbouring data sets, drawn with the same randomness, give sums that differ by at
    most the returned value. Where the clipped vector *is* what is protected (a sample with its views, a user
    with all their samples), neighbours differ by one whole vector of norm <= C, whatever it is made of (or by
    one instead of another: 2C). A sample inside a mini-set can turn that mini-set's clipped vector from one
    side of the ball to the other: 2C under every adjacency, Poisson sampling included.

    >>> sensitivity(0.5, unit="sample", adjacency="add/remove one")
    0.5
    >>> sensitivity(0.5, unit="user", adjacency="add/remove one")
    0.5
    >>> sensitivity(0.5, unit="mini-set", adjacency="add/remove one")
    1.0
    """
    if unit != "mini-set" and adjacency == "add/remove one":
        return clip_bound
    return 2.0 * clip_bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One clipped and noised part of a release, in the coordinates in which the noise is added.

    Attributes:
        names: Parameter names in this block.
        factors: What each parameter's gradient is multiplied by before clipping and divided by after the
            noise (all 1 unless ``apply="scale"``).
        clip_bound: C_h, the L2 bound of the block's (multiplied) vector.
        sensitivity: Delta_h.
        noise_multiplier: tau_h / Delta_h, the noise standard deviation over the sensitivity.
        dimension: Number of entries.
    """

    names: tuple[str, ...]
    factors: tuple[float, ...]
    clip_bound: float
    sensitivity: float
    noise_multiplier: float
    dimension: int

    @property
    def noise_std(self) -> float:
        """tau_h, the noise standard deviation."""
        return self.noise_multiplier * self.sensitivity


def make_block(
    *,
    names: Sequence[str],
    dimension: int,
    clip_bound: float,
    noise_multiplier: float,
    unit: Unit,
    adjacency: Adjacency,
    factors: Sequence[float] | None = None,
    weight: float = 1.0,
) -> Block:
    """Build a block whose noise is ``tau_h = sigma * Delta_h / p_h`` with ``p_h = weight``.

    >>> block = make_block(names=["w"], dimension=3, clip_bound=0.5, noise_multiplier=2.0,
    ...                    unit="mini-set", adjacency="add/remove one")
    >>> block.sensitivity, block.noise_std
    (1.0, 2.0)
    """
    delta = sensitivity(clip_bound, unit=unit, adjacency=adjacency)
    return Block(
        names=tuple(names),
        factors=tuple(factors) if factors is not None else (1.0,) * len(names),
        clip_bound=clip_bound,
        sensitivity=delta,
        noise_multiplier=noise_multiplier / weight,
        dimension=dimension,
    )


def step_mu(blocks: Sequence[Block]) -> float:
    """Gaussian-DP parameter of one release without subsampling: ``sqrt(sum_h (Delta_h / tau_h)^2)``.

    **Formal guarantee**: given the draw, the release of these blocks is ``G_mu``-DP. Proof: dividing block h
    by tau_h leaves standard Gaussian noise and a shift of norm at most Delta_h / tau_h; orthogonal shifts add
    in squares, and two Gaussians at distance mu have the trade-off function ``G_mu``.

    **Edge cases**: a block without noise gives ``inf``.
    """
    if any(block.noise_multiplier == 0 for block in blocks):
        return math.inf
    return math.hypot(*(1.0 / block.noise_multiplier for block in blocks))


def effective_noise_multiplier(blocks: Sequence[Block]) -> float:
    """``sigma_eff = 1 / mu_step``: what an accountant has to be told. 0 when a block has no noise.

    One block has its own multiplier. That of several is rounded to 12 digits, so that a refresh of the
    bounds, which moves every Delta_h and tau_h but not their ratios, tells the accountant the same number
    again; the margin that clipping takes off every bound is ten million times larger.

    >>> blocks = [make_block(names=[n], dimension=1, clip_bound=c, noise_multiplier=2.0, unit="mini-set",
    ...                      adjacency="add/remove one") for n, c in (("a", 0.1), ("b", 0.2))]
    >>> round(effective_noise_multiplier(blocks) * 2 ** 0.5, 9)  # the sqrt(L) correction, L = 2
    2.0
    """
    if len(blocks) == 1:
        return blocks[0].noise_multiplier
    mu = step_mu(blocks)
    return 0.0 if math.isinf(mu) else float(f"{1.0 / mu:.12g}")


def over_layers(noise_multiplier: float, layers: int) -> float:
    """The sqrt(L) correction: sigma_eff of ``layers`` blocks that all have this multiplier.

    >>> round(over_layers(2.5, 8), 3)
    0.884
    """
    return noise_multiplier / math.sqrt(layers)


def noise_against_individual_clipping(mini_set_size: int, *, adjacency: Adjacency) -> float:
    """How much more noise an update carries than individual clipping's at equal C, sigma and batch size.

    Clipping k = m/s vectors instead of m divides the noise of the sum by m/s instead of m, and the
    sensitivity of a mini-set is that of the worst case.

    >>> noise_against_individual_clipping(64, adjacency="add/remove one")
    128.0
    """
    worst = sensitivity(1.0, unit="mini-set", adjacency=adjacency)
    return mini_set_size * worst / sensitivity(1.0, unit="sample", adjacency=adjacency)
