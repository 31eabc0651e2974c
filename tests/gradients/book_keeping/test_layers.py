"""Every sample's gradient of every layer is plain autograd's: rows, norms and weighted sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.book_keeping import assert_exact, entries_of, oracle
from torch import Tensor, nn

from opacus_bc.gradients.book_keeping import rules
from opacus_bc.gradients.book_keeping.products import ConvolutionProduct, LinearProduct, Rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # vmap of rare functions
]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
quick = settings(max_examples=25, deadline=None, derandomize=True)
dtypes = st.sampled_from([torch.float64, torch.float64, torch.float32])
seeds = st.integers(0, 2**16)


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(model: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
    model = model.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    assert_exact(entries_of(model, x), oracle(model, x), TOLERANCE[dtype])


@dataclass(frozen=True)
class Shape:
    """A convolution and the image it meets."""

    dimensions: int
    groups: int
    inputs: int  # channels of a group
    outputs: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    mode: str
    bias: bool
    size: tuple[int, ...]

    def layer(self) -> nn.Module:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[self.dimensions - 1]
        return kind(
            self.groups * self.inputs,
            self.groups * self.outputs,
            self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            bias=self.bias,
            padding_mode=self.mode,
        )


@st.composite
def convolutions(draw: st.DrawFn) -> Shape:
    n = draw(st.sampled_from([1, 1, 2, 2, 2, 3]))

    def each(values: list[int]) -> tuple[int, ...]:
        return tuple(draw(st.sampled_from(values)) for _ in range(n))

    named = draw(st.booleans())
    stride = (1,) * n if named else each([1, 1, 2, 3])
    padding = draw(st.sampled_from(["same", "valid"])) if named else each([0, 1, 2])
    return Shape(
        dimensions=n,
        groups=draw(st.sampled_from([1, 1, 2, 3])),
        inputs=draw(st.sampled_from([1, 2, 3])),
        outputs=draw(st.sampled_from([1, 2, 4])),
        kernel=each([1, 2, 3] if n < 3 else [1, 2]),
        stride=stride,
        padding=padding,
        dilation=each([1, 1, 2]),
        mode=draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"])),
        bias=draw(st.booleans()),
        size=each([4, 5, 7] if n < 3 else [4, 5]),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=convolutions(), dtype=dtypes, seed=seeds, rows=st.integers(1, 4), keep=st.sampled_from([0, 4]))
def test_convolutions_are_exact_whether_kept_or_not(
    shape: Shape, dtype: torch.dtype, seed: int, rows: int, keep: int
) -> None:
    """``keep = 0`` leaves every layer to the Gram matrices, which small ones are too small for."""
    spread = [d * (k - 1) + 1 for d, k in zip(shape.dilation, shape.kernel, strict=True)]
    assume(all(s >= reach for s, reach in zip(shape.size, spread, strict=True)))
    torch.manual_seed(seed)
    model = nn.Sequential(shape.layer(), nn.Tanh())
    x = randn(rows, shape.groups * shape.inputs, *shape.size, seed=seed, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_KEEP", keep)
        check(model, x, dtype)


CHOICES: dict[str, tuple[nn.Module, tuple[int, ...], type]] = {
    "few entries are kept": (nn.Conv2d(2, 3, 3), (2, 9, 9), Rows),
    "many are not": (nn.Conv2d(16, 16, 3), (16, 4, 4), ConvolutionProduct),
    "groups count one by one": (nn.Conv2d(8, 8, 3, groups=8), (8, 5, 5), Rows),
    "one window is a linear layer": (nn.Conv2d(4, 8, 3), (4, 3, 3), LinearProduct),
    "one window with groups is not": (nn.Conv2d(4, 8, 3, groups=2), (4, 3, 3), ConvolutionProduct),
    "one position": (nn.Linear(3, 4), (3,), LinearProduct),
    "many positions, few entries": (nn.Linear(3, 4), (9, 3), Rows),
    "many entries": (nn.Linear(30, 40), (3, 30), LinearProduct),
    "wide channels": (nn.Conv2d(64, 2, 3), (64, 20, 20), Rows),  # torch's own gradient, by groups
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CHOICES)
def test_every_way_to_compute_norms_is_taken_and_exact(name: str, dtype: torch.dtype) -> None:
    layer, shape, kind = CHOICES[name]
    x = randn(3, *shape, seed=1, dtype=dtype)
    model = layer.to(dtype)
    assert isinstance(entries_of(model, x)["weight"], kind)
    check(model, x, dtype)


@quick
@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=2),
    features=st.tuples(st.sampled_from([1, 3, 17]), st.sampled_from([1, 2, 19])),
    bias=st.booleans(),
    dtype=dtypes,
    seed=seeds,
)
def test_linear_layers_over_any_positions_are_exact(
    shape: list[int], features: tuple[int, int], bias: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(*features, bias=bias), nn.Tanh(), nn.Linear(features[1], 3, bias=bias))
    check(model, randn(4, *shape, features[0], seed=seed, dtype=dtype), dtype)


class Shaken(nn.Module):
    """A layer between two linear ones along the channels, with parameters that are not the identity."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = nn.Conv1d(4, 4, 1), layer
        for p in layer.parameters():
            nn.init.uniform_(p, -1.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.before(x)))


def batch_norm() -> nn.Module:
    layer = nn.BatchNorm1d(4).eval()
    nn.init.uniform_(layer.running_mean)
    nn.init.uniform_(layer.running_var, 0.5, 2)
    return layer


NORMS = {
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "InstanceNorm": lambda: nn.InstanceNorm1d(4, affine=True),
    "LayerNorm, last": lambda: nn.LayerNorm(6),
    "LayerNorm, all": lambda: nn.LayerNorm((4, 6)),
    "LayerNorm without bias": lambda: nn.LayerNorm(6, bias=False),
    "RMSNorm, last": lambda: nn.RMSNorm(6),
    "RMSNorm, all": lambda: nn.RMSNorm((4, 6)),
    "BatchNorm with constants": batch_norm,
    "PReLU": lambda: nn.PReLU(4),
    "one PReLU for all": lambda: nn.PReLU(),
    "ConvTranspose": lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1),
    "ConvTranspose in groups": lambda: nn.ConvTranspose1d(4, 6, 3, groups=2, dilation=2, bias=False),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 3, 3)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NORMS)
def test_normalisations_and_rare_layers_are_exact(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    check(Shaken(NORMS[name]()), randn(5, 4, 6, seed=3, dtype=dtype), dtype)


@quick
@given(
    index=st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=4),
    padding=st.sampled_from([None, 0, 3, -1, -6]),
    dtype=dtypes,
)
def test_embeddings_are_exact_with_repeated_and_padding_indices(
    index: list[list[int]], padding: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    check(nn.Sequential(nn.Embedding(6, 3, padding_idx=padding), nn.Tanh()), torch.tensor(index), dtype)


def test_an_index_for_each_sample_and_images_of_indices_are_embedded_exactly() -> None:
    for shape in ((5,), (5, 2, 3)):
        index = torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(0))
        check(nn.Embedding(7, 4), index, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_embedding_bag_is_exact(dtype: torch.dtype) -> None:
    """Opacus's hooks miss indices that occur twice; one row at a time autograd does not."""
    check(nn.EmbeddingBag(5, 3), torch.tensor([[1, 1, 2], [0, 4, 4], [3, 3, 3]]), dtype)
