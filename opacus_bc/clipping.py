"""Pure functions on gradients and bounds: clip rules, the blocks of a release, and what they cost.

A step releases, for every block h, the sum over mini-sets of clipped vectors plus Gaussian noise:

    U_h = sum_j [g_h(w; S_j)]_{C_h} + N(0, tau_h^2 I),     [x]_C = x / max(1, |x| / C).

All blocks come from the same draw, so the release is one Gaussian mechanism whose whitened shift is at most
``sqrt(sum_h (Delta_h / tau_h)^2)``. Every noise scale and every effective noise multiplier of this package
is computed here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Unit = Literal["sample", "mini-set"]
Adjacency = Literal["add/remove one", "replace one"]


def check_positive(name: str, value: object, *, zero_allowed: bool = False) -> float:
    """Return ``value`` as a float, or raise a ValueError that says what would be right."""
    wanted = "a finite number >= 0" if zero_allowed else "a finite number > 0"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero_allowed):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return float(value)


def sensitivity(clip_bound: float, *, unit: Unit, adjacency: Adjacency) -> float:
    """L2-sensitivity of a sum of clipped vectors, one vector for every ``unit``.

    **Formal guarantee**: neighbouring data sets, drawn with the same randomness, give sums that differ by at
    most the returned value. A sample that is a unit of its own only adds or removes a vector of norm <= C
    (or replaces one by another: 2C). A sample inside a mini-set can turn that mini-set's clipped vector from
    one side of the ball to the other: 2C under every adjacency, Poisson sampling included.

    >>> sensitivity(0.5, unit="sample", adjacency="add/remove one")
    0.5
    >>> sensitivity(0.5, unit="mini-set", adjacency="add/remove one")
    1.0
    """
    if unit == "sample" and adjacency == "add/remove one":
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
        noise_std: tau_h.
        dimension: Number of entries.
    """

    names: tuple[str, ...]
    factors: tuple[float, ...]
    clip_bound: float
    sensitivity: float
    noise_std: float
    dimension: int


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
        noise_std=noise_multiplier * delta / weight,
        dimension=dimension,
    )


def step_mu(blocks: Sequence[Block]) -> float:
    """Gaussian-DP parameter of one release without subsampling: ``sqrt(sum_h (Delta_h / tau_h)^2)``.

    **Formal guarantee**: given the draw, the release of these blocks is ``G_mu``-DP. Proof: dividing block h
    by tau_h leaves standard Gaussian noise and a shift of norm at most Delta_h / tau_h; orthogonal shifts add
    in squares, and two Gaussians at distance mu have the trade-off function ``G_mu``.

    **Edge cases**: a block without noise gives ``inf``.
    """
    if any(block.noise_std == 0 for block in blocks):
        return math.inf
    return math.hypot(*(block.sensitivity / block.noise_std for block in blocks))


def effective_noise_multiplier(blocks: Sequence[Block]) -> float:
    """``sigma_eff = 1 / mu_step``: what an accountant has to be told. 0 when a block has no noise.

    Rounded to 12 digits, so that a refresh of the bounds, which moves every Delta_h and tau_h but not their
    ratios, tells the accountant the same number again; the margin that :func:`clip_coefficients` takes off
    every bound is ten million times larger.

    >>> blocks = [make_block(names=[n], dimension=1, clip_bound=c, noise_multiplier=2.0, unit="mini-set",
    ...                      adjacency="add/remove one") for n, c in (("a", 0.1), ("b", 0.2))]
    >>> round(effective_noise_multiplier(blocks) * 2 ** 0.5, 9)  # the sqrt(L) correction, L = 2
    2.0
    """
    mu = step_mu(blocks)
    return 0.0 if math.isinf(mu) else float(f"{1.0 / mu:.12g}")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms, clipped sums and noise live in at least float32: a rounded sum could leave the ball."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_NORM_ROW = 2048
# Rows of 2048 float32 squares are summed to within 2e-6 relative (measured and tested); the margin, taken off
# every clip bound, covers that and the rounding of the products.
_NORM_MARGIN = 1e-5


def tensor_norms(tensors: Sequence[Tensor]) -> list[float]:
    """L2 norm of every tensor, accurate to 2e-6 whatever its size, with one synchronisation in all.

    ``torch.linalg.vector_norm`` on the CPU adds float32 squares naively: at 30 million equal entries it
    returns 1.6 % too little, which would let a "clipped" vector out of its ball. Rows of 2048 entries are
    short enough for float32; the row norms are then added in float64.
    """
    results: list[Tensor] = []
    for tensor in tensors:
        dtype = accumulation_dtype(tensor.dtype)
        if tensor.numel() <= _NORM_ROW:
            results.append(torch.linalg.vector_norm(tensor.detach(), dtype=dtype).double())
            continue
        strides = tensor.stride()
        by_stride = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
        flat = tensor.detach().permute(by_stride).reshape(-1)  # a view of every dense memory format
        whole = flat.numel() // _NORM_ROW * _NORM_ROW
        norm = torch.linalg.vector_norm(flat[whole:], dtype=dtype).double()
        if whole:
            rows = torch.linalg.vector_norm(flat[:whole].view(-1, _NORM_ROW), dim=1, dtype=dtype)
            norm = torch.hypot(norm, torch.linalg.vector_norm(rows.double()))
        results.append(norm)
    if not results:
        return []
    flat_norms: list[float] = torch.stack([norm.to(results[0].device) for norm in results]).tolist()
    return flat_norms


def clip_coefficients(
    grads: Sequence[Tensor],
    blocks: Sequence[Block],
    norms: Callable[[Sequence[Tensor]], list[float]] = tensor_norms,
) -> list[float] | None:
    """Coefficient of every gradient tensor that puts each block's vector into its ball.

    ``grads`` follow the order of the blocks' names. With factors m the vector that is clipped is
    ``(m_i * g_i)_i``; since it is divided by m afterwards, the coefficient applies to ``g_i`` itself.

    **Formal guarantee**: for finite gradients, ``|(m_i * c * g_i)_i| <= clip_bound`` in every block, float
    rounding included.

    **Edge cases**: if any block's norm is not finite (NaN, infinity or overflow) the answer is ``None``: the
    mini-set counts as the zero vector, which is still a function of this mini-set alone. Where ``grads`` are
    shards of larger tensors, ``norms`` must say how long the whole ones are, within 2e-6.
    """
    margin = 1.0 - _NORM_MARGIN
    flat = norms(grads)

    coefficients: list[float] = []
    start = 0
    for block in blocks:
        part = flat[start : start + len(block.names)]
        start += len(block.names)
        norm = math.hypot(*(m * value for m, value in zip(block.factors, part, strict=True)))
        if not math.isfinite(norm):
            return None
        coefficient = 1.0 if norm <= block.clip_bound * margin else block.clip_bound * margin / norm
        coefficients.extend([coefficient] * len(part))
    if start != len(flat):
        raise ValueError(f"blocks name {start} parameters, got {len(flat)} gradients")
    return coefficients


def sample_clip_coefficients(
    grad_samples: Sequence[Tensor], blocks: Sequence[Block]
) -> tuple[list[Tensor], Tensor]:
    """:func:`clip_coefficients` for each of many samples, whose gradients are rows of ``grad_samples``.

    Returns:
        One vector of coefficients for every tensor (the same within a block), and which samples are finite in
        all blocks; the others have coefficients 0 and must be left out.
    """
    device = grad_samples[0].device
    finite = torch.ones(len(grad_samples[0]), dtype=torch.bool, device=device)
    coefficients: list[Tensor] = []
    start = 0
    for block in blocks:
        part = grad_samples[start : start + len(block.names)]
        start += len(block.names)
        norms = [m * _row_norms(g).to(device) for m, g in zip(block.factors, part, strict=True)]
        norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        finite &= norm.isfinite()
        limit = block.clip_bound * (1.0 - _NORM_MARGIN)
        coefficients.extend([torch.where(norm > limit, limit / norm, 1.0)] * len(part))
    if start != len(grad_samples):
        raise ValueError(f"blocks name {start} parameters, got {len(grad_samples)} gradients")
    return [torch.where(finite, c, 0.0) for c in coefficients], finite


def _row_norms(samples: Tensor) -> Tensor:
    """L2 norm of every sample in float64, with float32 sums no longer than in :func:`tensor_norms`."""
    flat = samples.detach().reshape(len(samples), samples[0].numel() if len(samples) else 0)
    whole = flat.shape[1] // _NORM_ROW * _NORM_ROW
    norm: Tensor = torch.linalg.vector_norm(flat[:, whole:], dim=1).double()
    if whole:
        rows = torch.linalg.vector_norm(flat[:, :whole].reshape(len(flat), -1, _NORM_ROW), dim=2)
        norm = torch.hypot(norm, torch.linalg.vector_norm(rows.double(), dim=1))
    return norm


def scale_(tensors: Sequence[Tensor], coefficients: Sequence[float]) -> None:
    """Multiply every tensor by its coefficient in place; coefficients of 1 cost nothing."""
    chosen = [(t, c) for t, c in zip(tensors, coefficients, strict=True) if c != 1.0]
    if chosen:
        torch._foreach_mul_([t for t, _ in chosen], [c for _, c in chosen])


def add_scaled_(sums: Sequence[Tensor], grads: Sequence[Tensor], coefficients: Sequence[float]) -> None:
    """``sums += coefficients * grads`` in place, one fused call for each distinct coefficient."""
    by_coefficient: dict[float, list[int]] = {}
    for i, c in enumerate(coefficients):
        by_coefficient.setdefault(c, []).append(i)
    for c, members in by_coefficient.items():
        torch._foreach_add_([sums[i] for i in members], [grads[i] for i in members], alpha=c)


def noise_against_individual_clipping(mini_set_size: int, *, adjacency: Adjacency) -> float:
    """How much more noise an update carries than individual clipping's at equal C, sigma and batch size.

    Clipping k = m/s vectors instead of m divides the noise of the sum by m/s instead of m, and the
    sensitivity of a mini-set is that of the worst case.

    >>> noise_against_individual_clipping(64, adjacency="add/remove one")
    128.0
    """
    worst = sensitivity(1.0, unit="mini-set", adjacency=adjacency)
    return mini_set_size * worst / sensitivity(1.0, unit="sample", adjacency=adjacency)


class ClipRule(Protocol):
    """Turns the trainable parameters of the moment into the blocks of a release."""

    def blocks(
        self, parameters: Sequence[tuple[str, Tensor]], *, noise_multiplier: float, max_grad_norm: float
    ) -> list[Block]:
        """Blocks that name every parameter exactly once."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatClipping:
    """One block: the whole vector is clipped to ``max_grad_norm``."""

    unit: Unit
    adjacency: Adjacency

    def blocks(
        self, parameters: Sequence[tuple[str, Tensor]], *, noise_multiplier: float, max_grad_norm: float
    ) -> list[Block]:
        """See :meth:`ClipRule.blocks`."""
        return [
            make_block(
                names=[name for name, _ in parameters],
                dimension=sum(p.numel() for _, p in parameters),
                clip_bound=max_grad_norm,
                noise_multiplier=noise_multiplier,
                unit=self.unit,
                adjacency=self.adjacency,
            )
        ]
