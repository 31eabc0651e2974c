"""Whether a BatchNorm type with a forward of its own can normalise with constants: tried out on random rows.

A copy is patched and compared with another copy that stays plain. Nothing of the layer itself is touched.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from opacus_bc.batch_norm.gradients import constant_statistics_grad_sample
from opacus_bc.batch_norm.layers import ConstantStatistics, patch
from opacus_bc.mechanism.randomness import isolated_randomness

_ROWS = 3
_POSITIONS: dict[type[nn.Module], tuple[tuple[int, ...], ...]] = {
    nn.BatchNorm1d: ((), (4,)),
    nn.BatchNorm2d: ((3, 3),),
    nn.BatchNorm3d: ((2, 2, 2),),
}
_ANY = ((3, 3), (), (4,), (2, 2, 2))
_OTHERS = "use torch's type, or clipping='batch'"


def why_not_constant(layer: nn.Module) -> str | None:
    """Why the layer's forward does not go with constant statistics; None if it does.

    **Formal guarantee**: None says that on random rows the patched layer's outputs and its per-sample
    gradients were those of the plain layer in evaluation mode, given one row at a time.
    """
    own = {name: p.requires_grad for name, p in layer.named_parameters(recurse=False)}
    extra = [name for name, trained in own.items() if trained and name not in ("weight", "bias")]
    if extra:
        return f"its parameter {extra[0]!r} has unknown per-sample gradients: {_OTHERS}"
    with isolated_randomness(0), torch.enable_grad():
        try:
            return _compare(layer, torch.float64)
        except Exception:  # it may insist on single precision
            try:
                return _compare(layer, torch.float32)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                return f"its forward fails with constant statistics ({what}): {_OTHERS}"


def _compare(layer: Any, dtype: torch.dtype) -> str | None:
    plain = _randomised(layer, dtype)
    x = _input(plain, dtype)
    ours = copy.deepcopy(plain)
    patch(ours, ConstantStatistics)
    assert isinstance(ours, ConstantStatistics)
    ours.training = True  # and the modules inside are in evaluation mode, where nothing is random
    given = x.clone().requires_grad_()
    output = ours(given)
    tapped = ours.take_tap()
    if tapped is None:
        return (
            "its forward does not call F.batch_norm (or its parent's forward) with its own statistics, "
            f"weight and bias: {_OTHERS}"
        )
    weights = torch.randn_like(output)
    seen: list[Tensor] = []
    tapped.node.register_hook(lambda _, grads: seen.append(grads[tapped.place]))
    (input_grad,) = torch.autograd.grad(output, given, weights)
    rows = constant_statistics_grad_sample(ours, [tapped.given], seen[0])
    affine = [(p, getattr(plain, name)) for name, p in ours.named_parameters(recurse=False) if p in rows]
    for i in range(_ROWS):
        row = x[i : i + 1].clone().requires_grad_()
        alone = plain(row)
        if not _close(output[i : i + 1], alone):
            return f"row by row it does not give what it gives for a batch in evaluation mode: {_OTHERS}"
        expected = torch.autograd.grad(alone, [row, *(p for _, p in affine)], weights[i : i + 1])
        found = [input_grad[i : i + 1], *(rows[p][i] for p, _ in affine)]
        if not all(_close(a, b) for a, b in zip(found, expected, strict=True)):
            return f"its per-sample gradients are not those of its weight and bias: {_OTHERS}"
    return None


def _randomised(layer: Any, dtype: torch.dtype) -> Any:
    """A copy on the CPU in evaluation mode, with statistics and parameters that hide nothing."""
    plain = copy.deepcopy(layer).to("cpu", dtype).eval()
    plain.track_running_stats = True
    plain.running_mean = torch.randn(plain.num_features, dtype=dtype)
    plain.running_var = torch.rand(plain.num_features, dtype=dtype) + 0.5
    with torch.no_grad():
        for p in plain.parameters():
            p.requires_grad_(True).normal_()
    return plain


def _input(plain: Any, dtype: torch.dtype) -> Tensor:
    """Rows in the first shape that the layer takes."""
    shapes = next((s for kind, s in _POSITIONS.items() if isinstance(plain, kind)), _ANY)
    for positions in shapes:
        x = torch.randn(_ROWS, plain.num_features, *positions, dtype=dtype)
        try:
            with torch.no_grad():
                plain(x)
        except Exception:
            if positions == shapes[-1]:
                raise
        else:
            return x
    raise AssertionError("the last shape returns or raises")


def _close(left: Tensor, right: Tensor) -> bool:
    tight, loose = (1e-6, 1e-9) if left.dtype == torch.float64 else (1e-3, 1e-4)
    return left.shape == right.shape and torch.allclose(left, right.to(left.dtype), rtol=tight, atol=loose)
