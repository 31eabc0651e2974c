"""Attention of linear layers: torch's outputs for torch's arguments, and every sample's own gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.layers import DPMultiheadAttention
from support import engine
from support.batch_norm import BACKWARD_HOOK_REMARK
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import fix
from opacus_bc.gradients.attention import PrivateMultiheadAttention

pytestmark = pytest.mark.filterwarnings(BACKWARD_HOOK_REMARK)
SAMPLES, QUERIES, KEYS, WIDTH, HEADS = 3, 4, 5, 6, 2
both = pytest.mark.parametrize("batch_first", [False, True])


def pair(batch_first: bool, **kwargs: Any) -> tuple[nn.MultiheadAttention, Any]:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, dtype=torch.float64, **kwargs).eval()
    for p in layer.parameters():
        nn.init.normal_(p)  # biases begin as zeros
    return layer, fix(layer)


def inputs(batch_first: bool, widths: tuple[int, int, int] = (WIDTH, WIDTH, WIDTH)) -> list[Tensor]:
    lengths = (QUERIES, KEYS, KEYS)
    shapes = (
        (SAMPLES, n, w) if batch_first else (n, SAMPLES, w) for n, w in zip(lengths, widths, strict=True)
    )
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def assert_same(layer: Any, fixed: Any, given: list[Tensor], **kwargs: Any) -> None:
    for expected, found in zip(layer(*given, **kwargs), fixed(*given, **kwargs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


hidden = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1)
padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "of pairs": {"attn_mask": hidden},
    "added to pairs": {"attn_mask": torch.randn(QUERIES, KEYS, dtype=torch.float64)},
    "of every head": {"attn_mask": torch.randn(SAMPLES * HEADS, QUERIES, KEYS, dtype=torch.float64)},
    "of padding": {"key_padding_mask": padded},
    "both": {"attn_mask": hidden, "key_padding_mask": padded},
    "no weights": {"need_weights": False},
    "weights of every head": {"average_attn_weights": False},
}


@both
@pytest.mark.parametrize(
    "more", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["plain", "appended"]
)
@pytest.mark.parametrize("name", MASKS)
def test_outputs_and_weights_are_torchs(name: str, more: dict[str, Any], batch_first: bool) -> None:
    layer, fixed = pair(batch_first, **more)
    assert type(fixed) is PrivateMultiheadAttention
    assert_same(layer, fixed, inputs(batch_first), **MASKS[name])


@both
def test_keys_and_values_of_other_widths(batch_first: bool) -> None:
    layer, fixed = pair(batch_first, kdim=3, vdim=7)
    assert_same(layer, fixed, inputs(batch_first, (WIDTH, 3, 7)))


@pytest.mark.parametrize("how", ["padding", "causal"])
def test_masks_of_torchs_encoder_are_taken(how: str) -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()
    x = torch.randn(SAMPLES, KEYS, WIDTH, dtype=torch.float64)
    given = {"src_key_padding_mask": padded}
    if how == "causal":
        given = {"mask": nn.Transformer.generate_square_subsequent_mask(KEYS, dtype=torch.float64)}
    kept = ~padded if how == "padding" else torch.ones(SAMPLES, KEYS, dtype=torch.bool)
    expected, found = model(x, **given), fix(model)(x, **given)
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-10, atol=1e-12)


def test_what_torch_refuses_is_refused() -> None:
    _, fixed = pair(True)
    x, *others = inputs(True)
    with pytest.raises(ValueError, match=r"shape \(4, 6\): it needs a batch dimension"):
        fixed(x[0], *(other[0] for other in others))
    with pytest.raises(ValueError, match="pass attn_mask too"):
        fixed(x, *others, is_causal=True)


@both
def test_the_state_dict_loads_into_torchs_attention(batch_first: bool) -> None:
    layer, fixed = pair(batch_first, add_bias_kv=True)
    with torch.no_grad():
        for p in fixed.parameters():
            p.mul_(1.5)
    layer.load_state_dict(fixed.state_dict())
    assert_same(layer, fixed, inputs(batch_first))


def test_opacus_own_attention_computes_something_else_with_the_batch_first() -> None:
    """Why there is a subclass; once this fails, the remark in its docstring can go."""
    layer, fixed = pair(True)
    stock = DPMultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    stock.load_state_dict(layer.state_dict())
    given = inputs(True)
    assert (stock(*given)[0] - layer(*given)[0]).abs().max() > 0.1
    assert_same(layer, fixed, given)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("mode", ["hooks", "bk"])
def test_every_sample_has_the_gradient_that_it_has_alone(mode: str) -> None:
    torch.manual_seed(0)
    model = fix(Classifier()).double()
    x, y = torch.randn(SAMPLES, KEYS, WIDTH, dtype=torch.float64), torch.tensor([0, 1, 1])
    alone = [
        torch.autograd.grad(
            nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), [*model.parameters()]
        )
        for i in range(SAMPLES)
    ]
    norms = [torch.cat([g.flatten() for g in grads]).norm() for grads in alone]
    bound = float(min(norms)) / 2  # every sample is clipped
    expected = [
        -sum(bound / n * grads[i] for n, grads in zip(norms, alone, strict=True))
        for i in range(len(alone[0]))
    ]
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="noise_multiplier=0"):
        module, optimizer, loader = engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=float(SAMPLES)),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=SAMPLES),
            noise_multiplier=0.0,
            max_grad_norm=bound,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
    for rows, labels in loader:
        nn.functional.cross_entropy(module(rows), labels).backward()
        optimizer.step()
    for p, old, move in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(p.detach() - old, move, rtol=1e-5, atol=1e-7)
