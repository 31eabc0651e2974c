"""Pure functions that put gradients into their balls, float rounding included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from opacus_bc.mechanism.blocks import Block

HALF = (torch.float16, torch.bfloat16)  # too coarse for norms and sums


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms, clipped sums and noise live in at least float32: a rounded sum could leave the ball."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_NORM_ROW = 2048
# Rows of 2048 float32 squares are summed to within 2e-6 relative (measured and tested); the margin, taken off
# every clip bound, covers that and the rounding of the products.
_NORM_MARGIN = 1e-5
# Clip bounds beyond which a sample is not scaled down but left out: its coefficient would be a float32 with
# few digits, or none.
_LONGEST = 1e30


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
        by_stride = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
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
        As :func:`coefficients_of_norms`.
    """
    return coefficients_of_norms([row_norms(g) for g in grad_samples], blocks)


def coefficients_of_norms(
    norms: Sequence[Tensor], blocks: Sequence[Block], *, scale: float | Tensor = 1.0
) -> tuple[list[Tensor], Tensor]:
    """:func:`clip_coefficients` for each of many samples, from the norms of their gradients.

    Args:
        norms: For every parameter, in the order of the blocks' names, a norm for each sample, within 2e-6 or
            above.
        blocks: What is clipped together, and to which bounds.
        scale: What all gradients are multiplied with before they are clipped (a number, or one for each
            sample); the coefficients contain it.

    Returns:
        One vector of coefficients for every tensor (the same within a block), and which samples are finite in
        all blocks, and no longer than a float32 can shorten; the others have coefficients 0 and must be left
        out.
    """
    device = norms[0].device
    finite = torch.ones(len(norms[0]), dtype=torch.bool, device=device)
    coefficients: list[Tensor] = []
    start = 0
    for block in blocks:
        part = norms[start : start + len(block.names)]
        start += len(block.names)
        stacked = torch.stack([each.to(device) for each in part])
        if any(factor != 1.0 for factor in block.factors):
            stacked *= torch.tensor(block.factors, dtype=torch.float64, device=device)[:, None]
        norm = torch.linalg.vector_norm(stacked, dim=0) * scale
        limit = block.clip_bound * (1.0 - _NORM_MARGIN)
        finite &= norm <= limit * _LONGEST  # which NaN is not
        coefficients.append(torch.where(norm > limit, limit / norm, 1.0) * scale)
    if start != len(norms):
        raise ValueError(f"blocks name {start} parameters, got {len(norms)} gradients")
    coefficients = [torch.where(finite, c, 0.0) for c in coefficients]
    return [c for c, block in zip(coefficients, blocks, strict=True) for _ in block.names], finite


def row_norms(samples: Tensor) -> Tensor:
    """L2 norm of every sample in float64, with float32 sums no longer than in :func:`tensor_norms`."""
    rows, entries = samples.shape[0], samples.shape[1:].numel()
    flat = samples.detach().permute(memory_order(samples)).reshape(rows, entries)
    if entries <= _NORM_ROW or flat.dtype == torch.float64:
        short: Tensor = torch.linalg.vector_norm(flat, dim=1)
        return short.double()
    pieces = -(-entries // _NORM_ROW)
    whole = entries - entries % pieces
    parts = torch.linalg.vector_norm(flat[:, :whole].view(rows, pieces, whole // pieces), dim=2)
    norm: Tensor = torch.linalg.vector_norm(parts, dim=1, dtype=torch.float64)
    if whole == entries:
        return norm
    return torch.hypot(norm, torch.linalg.vector_norm(flat[:, whole:], dim=1, dtype=torch.float64))


def memory_order(samples: Tensor) -> list[int]:
    """The samples' dimension and then their entries' as they lie in memory: flattening copies nothing.

    >>> memory_order(torch.zeros(2, 3, 4)), memory_order(torch.zeros(2, 4, 3).transpose(1, 2))
    ([0, 1, 2], [0, 2, 1])
    """
    strides = samples.stride()
    return [0, *sorted(range(1, samples.dim()), key=strides.__getitem__, reverse=True)]


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
