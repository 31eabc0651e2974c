"""Parameters that models use by themselves, twice, in place or through functions of their own: exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from support import blobs, engine
from support.book_keeping import Kept, Loss, assert_exact, entries_of, oracle, squares
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.data import DataLoader

from opacus_bc.gradients.book_keeping.book import BookKeepingError

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # vmap of rare functions
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
ROWS, LENGTH, WIDTH = 5, 4, 6
Body = Callable[[Any, Tensor], Any]


class Uses(nn.Module):
    """A model of one function, with the parameters and layers that it is given."""

    def __init__(self, body: Body, **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def linear(outputs: int = WIDTH, **kwargs: Any) -> nn.Linear:
    return nn.Linear(WIDTH, outputs, **kwargs)


def repeated_token(m: Any, x: Tensor) -> Tensor:
    token = m.token.repeat(len(x), 1, 1)
    return m.layer(torch.cat([token, x * token.tanh()], 1)) + token


def in_place(m: Any, x: Tensor) -> Tensor:
    out = m.first(x)
    out = F.relu(out, inplace=True)
    out = m.second(out)
    out += x
    return F.hardtanh(out, inplace=True)


def in_place_add(m: Any, x: Tensor) -> Tensor:
    x = torch.cat([m.token.expand(len(x), -1, -1), m.first(x)], 1)
    x += m.places
    return m.second(x)


def standardised(m: Any, x: Tensor) -> Tensor:
    w = m.layer.weight
    w = (w - w.mean(1, keepdim=True)) / (w.var(1, keepdim=True) + 1e-3).sqrt() * m.gain
    return F.linear(x, w, m.layer.bias)


def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(m.norm(x)).chunk(3, dim=-1)
    return x + m.scale * m.out(F.scaled_dot_product_attention(q, k, v))


def masked(m: Any, x: Tensor) -> Tensor:
    return m.layer(torch.where(x[..., :1] > 0, m.token, x))


def normalised(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(WIDTH, 3), nn.Linear(3, WIDTH, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table((x[..., 0].abs() * 2).long() % WIDTH)))


class Standardised(nn.Conv1d):
    """A subclass that computes with another weight, as timm's ScaledStdConv2d does."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2), keepdim=True)
        return self._conv_forward(x, w, self.bias)


def models() -> dict[str, nn.Module]:
    torch.manual_seed(4)
    shared = linear()
    return {
        "layer scale": Uses(lambda m, x: x + m.scale * m.layer(x), scale=torch.randn(WIDTH), layer=linear()),
        "one number": Uses(lambda m, x: m.layer(x) * m.scale, scale=torch.randn(()), layer=linear()),
        "a temperature": Uses(lambda m, x: m.layer(x) / m.t.exp(), t=torch.randn(()), layer=linear()),
        "positions": Uses(lambda m, x: m.layer(x + m.at), at=torch.randn(1, LENGTH, WIDTH), layer=linear()),
        "positions without a row": Uses(lambda m, x: x - m.at, at=torch.randn(LENGTH, WIDTH)),
        "positions by index": Uses(
            lambda m, x: m.layer(x) + m.at(torch.arange(x.shape[1])),
            at=nn.Embedding(9, WIDTH),
            layer=linear(),
        ),
        "a repeated token, used twice": Uses(
            lambda m, x: (lambda t: m.layer(torch.cat([t, x * t.tanh()], 1)) + t)(
                m.token.repeat(len(x), 1, 1)
            ),
            token=torch.randn(1, 1, WIDTH),
            layer=linear(),
        ),
        "a class token by expand": Uses(
            lambda m, x: m.layer(torch.cat([m.token.expand(len(x), -1, -1), x], 1)),
            token=torch.randn(1, 1, WIDTH),
            layer=linear(),
        ),
        "a class token by expand_as": Uses(
            lambda m, x: m.layer(torch.cat([m.token.expand_as(x[:, :1]), x], dim=1)),
            token=torch.randn(1, 1, WIDTH),
            layer=linear(),
        ),
        "a class token by repeat": Uses(
            lambda m, x: m.layer(torch.cat((x, m.token.repeat(x.size(0), 1, 1)), -2)),
            token=torch.randn(1, 2, WIDTH),
            layer=linear(),
        ),
        "a token stacked": Uses(
            lambda m, x: m.layer(torch.stack([x, m.token.expand(len(x), LENGTH, -1)], 2)),
            token=torch.randn(WIDTH),
            layer=linear(),
        ),
        "positions added in place": Uses(
            in_place_add,
            token=torch.randn(1, 1, WIDTH),
            places=torch.randn(1, LENGTH + 1, WIDTH),
            first=linear(),
            second=linear(),
        ),
        "a token in masked places": Uses(masked, token=torch.randn(WIDTH), layer=linear()),
        "matrices": Uses(
            lambda m, x: torch.einsum("ntd,de->nte", x @ m.a, m.b),
            a=torch.randn(WIDTH, 3),
            b=torch.randn(3, 2),
        ),
        "rows by index": Uses(lambda m, x: m.w[(x[..., 0] > 0).long()] * x[..., :2], w=torch.randn(2, 2)),
        "prototypes": Uses(
            lambda m, x: F.linear(normalised(x), normalised(m.w)) + torch.cdist(x, m.w),
            w=torch.randn(3, WIDTH),
        ),
        "a bilinear form": Uses(lambda m, x: m.layer(x, x.flip(1)), layer=nn.Bilinear(WIDTH, WIDTH, 2)),
        "a standardised weight": Uses(standardised, layer=linear(), gain=torch.randn(WIDTH, 1)),
        "a subclass": nn.Sequential(Standardised(LENGTH, 3, 2), nn.ReLU(inplace=True), Standardised(3, 2, 2)),
        "a cast weight": Uses(lambda m, x: F.linear(x, m.layer.weight.to(x.dtype)), layer=linear()),
        "parts of a weight": Uses(
            lambda m, x: torch.cat([F.linear(x, w) for w in m.layer.weight.chunk(2)], -1), layer=linear()
        ),
        "attention": Uses(
            attention, qkv=linear(3 * WIDTH), out=linear(), norm=nn.LayerNorm(WIDTH), scale=torch.randn(WIDTH)
        ),
        "in place": Uses(in_place, first=linear(), second=linear()),
        "used twice": nn.Sequential(shared, nn.Tanh(), shared),
        "tied, transposed": Uses(lambda m, x: F.linear(m.layer(x), m.layer.weight.T), layer=linear(3)),
        "tied embedding": TiedEmbedding(),
        "used and reshaped": Uses(
            lambda m, x: m.layer(x) + x * m.layer.weight.view(-1)[:WIDTH], layer=linear()
        ),
        "weight norm": nn.utils.parametrizations.weight_norm(linear(3)),
        "spectral norm": nn.utils.parametrizations.spectral_norm(linear(3)).eval(),
        "Opacus's LSTM": Uses(lambda m, x: m.layer(x)[0], layer=DPLSTM(WIDTH, 3, batch_first=True)),
        "Opacus's GRU": Uses(lambda m, x: m.layer(x)[0], layer=DPGRU(WIDTH, 3, 2, batch_first=True)),
        "Opacus's attention": Uses(
            lambda m, x: m.layer(x, x, x)[0],
            layer=DPMultiheadAttention(WIDTH, 2, batch_first=True),
        ),
        "not reached by all": Uses(lambda m, x: m.a(x), a=linear(), b=linear()),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", list(models()))
def test_uses_of_parameters_are_exact(name: str, dtype: torch.dtype) -> None:
    model = models()[name].to(dtype)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_exact(entries_of(model, x), oracle(model, x), TOLERANCE[dtype])


@given(
    times=st.integers(1, 3),
    kernel=st.sampled_from([1, 3]),
    groups=st.sampled_from([1, 2]),
    length=st.integers(1, 9),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**20),
)
def test_a_convolution_that_is_used_several_times_is_exact(
    times: int, kernel: int, groups: int, length: int, dtype: torch.dtype, seed: int
) -> None:
    """Large and small outputs: some uses of a weight are kept, others are products."""

    def body(m: Any, x: Tensor) -> Tensor:
        for _ in range(times):
            x = torch.tanh(m.conv(x))
        return x

    torch.manual_seed(seed)
    model = Uses(body, conv=nn.Conv1d(4, 4, kernel, padding=kernel // 2, groups=groups)).to(dtype)
    x = torch.randn(ROWS, 4, length).to(dtype)
    assert_exact(entries_of(model, x), oracle(model, x), TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["positions by index", "a class token by expand", "attention"])
def test_as_many_positions_as_samples_are_not_taken_for_samples(name: str) -> None:
    model = models()[name].double()
    x = torch.randn(LENGTH, LENGTH, WIDTH, dtype=torch.float64)
    assert_exact(entries_of(model, x), oracle(model, x), 1e-10)


def test_a_batch_of_one_is_exact() -> None:
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    for model in models().values():
        assert_exact(entries_of(model.double(), x), oracle(model, x), 1e-10)


def test_many_rows_of_their_own_are_pulled_back_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opacus_bc.gradients.book_keeping.products._PIECE", 2 * ROWS * WIDTH)
    model = models()["a class token by expand"].double()
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    assert_exact(entries_of(model, x), oracle(model, x), 1e-10)


def two_losses(output: Tensor) -> Tensor:
    return squares(output) + output.exp().mean((1, 2)).sum()


def test_two_backwards_of_two_losses_add_up() -> None:
    model = Uses(in_place, first=linear(), second=linear()).double()
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    kept = Kept(model)
    kept.deliver(ROWS)
    output = model(x)
    squares(output).backward(retain_graph=True)
    output.exp().mean((1, 2)).sum().backward()
    found = kept.read()
    kept.recording.remove()
    assert_exact(found, oracle(model, x, two_losses), 1e-10)


def test_several_forwards_of_one_batch_add_up() -> None:
    """Views of every sample in a loop: each forward has a row for each sample."""
    model = models()["attention"].double()
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    views: list[Loss] = [lambda v: v, lambda v: v.flip(1), lambda v: 2 * v]
    kept = Kept(model)
    kept.deliver(ROWS)
    for view in views:
        squares(model(view(x))).backward()
    found = kept.read()
    kept.recording.remove()
    total: dict[str, Tensor] = {}
    for view in views:
        for name, rows in oracle(model, view(x)).items():
            total[name] = total.get(name, 0) + rows
    assert_exact(found, total, 1e-10)


# --- exact or refused ---------------------------------------------------------------------------------------


def tapped_in_place(m: Any, x: Tensor) -> Tensor:
    out = m.layer(x)
    out.mul_(m.scale)
    return out


def assigned(m: Any, x: Tensor) -> Tensor:
    out = m.layer(x)
    out[:, 0] = m.scale
    return out


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "torch's attention": (
        lambda: Uses(
            lambda m, x: m.layer(x, x, x)[0], layer=nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        ),
        "in_proj_weight meets the batch in multi_head_attention_forward",
    ),
    "torch's encoder layer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True),
        "meets the batch in multi_head_attention_forward",
    ),
    "torch's LSTM": (
        lambda: Uses(lambda m, x: m.layer(x)[0], layer=nn.LSTM(WIDTH, 3, batch_first=True)),
        "meets the batch in lstm",
    ),
    "torch's GRU": (
        lambda: Uses(lambda m, x: m.layer(x)[0], layer=nn.GRU(WIDTH, 3, batch_first=True)),
        "meets the batch in gru",
    ),
    "torch's LSTM cell": (
        lambda: Uses(lambda m, x: m.layer(x[:, 0])[0], layer=nn.LSTMCell(WIDTH, 3)),
        "meets the batch in lstm_cell",
    ),
    "a scale in place": (
        lambda: Uses(tapped_in_place, layer=linear(), scale=torch.ones(WIDTH)),
        "scale meets the batch in mul_",
    ),
    "an assignment": (
        lambda: Uses(assigned, layer=linear(), scale=torch.ones(WIDTH)),
        "scale meets the batch in __setitem__",
    ),
    "a row more in the batch": (
        lambda: Uses(
            lambda m, x: m.layer(torch.cat([m.token, x[1:]], 0)),
            layer=linear(),
            token=torch.ones(1, LENGTH, WIDTH),
        ),
        "token meets the batch in cat",
    ),
    "statistics of the batch": (
        lambda: nn.Sequential(nn.Conv1d(LENGTH, 3, 1), nn.BatchNorm1d(3)),
        "statistics of the private batch",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_backward_cannot_tell_is_refused_in_the_forward_and_says_the_way_out(name: str) -> None:
    make, words = REFUSED[name]
    kept = Kept(make())
    kept.deliver(ROWS)
    with pytest.raises(BookKeepingError, match=words) as caught:
        kept.model(torch.randn(ROWS, LENGTH, WIDTH))
    assert any(way in str(caught.value) for way in ("grad_sample_mode='hooks'", "batch_norm="))
    assert torch.overrides._get_current_function_mode() is None  # the recording is over


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("check", ["default", "none"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_are_refused_and_never_wrong(
    reentrant: bool, check: str, square: bool
) -> None:
    """The forward that is repeated in backward is not recorded. Square weights have an input's shape."""
    size = ROWS if square else WIDTH
    model = Uses(
        lambda m, x: m.last(checkpoint(m.middle, m.first(x), use_reentrant=reentrant, **options)),
        first=nn.Linear(size, size),
        middle=nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size)),
        last=nn.Linear(size, 2),
    )
    options = {} if reentrant else {"determinism_check": check}
    kept = Kept(model)
    kept.deliver(ROWS)

    def step() -> None:
        squares(model(torch.randn(ROWS, size))).backward()
        kept.read()

    words = (
        "not made sample by sample" if reentrant else r"torch\.utils\.checkpoint|shape"
    )  # before torch 2.8
    with pytest.raises((BookKeepingError, CheckpointError, RuntimeError), match=words):
        step()


class ByPlace(nn.Module):
    """Adds to each sample the row of a table at its place in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(64, 4))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.table[: len(x)])


def test_a_row_for_each_place_in_the_batch_is_refused_though_all_rows_are_equal_now() -> None:
    """A sample that joins the batch would move the places of others: it could move the sum by 3 C."""
    model = ByPlace()
    wrapper, optimizer, loader = engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(blobs(32), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="bk",
    )
    x, _ = next(iter(loader))
    with pytest.raises(BookKeepingError, match="depends on where it stands"):
        wrapper(x)  # the check of the first forward reads the book
    with pytest.raises(BookKeepingError, match="no gradient"):
        optimizer.step()
