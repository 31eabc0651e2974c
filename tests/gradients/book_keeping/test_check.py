"""The first batches are compared with autograd on the user's own model, without a trace."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from support import blobs, cross_entropy, engine, mlp, weights
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import PublicStatistics
from opacus_bc.gradients.book_keeping import rules
from opacus_bc.gradients.book_keeping.book import Book, BookKeepingError


def private(model: nn.Module, **kwargs: Any) -> Any:
    return engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(kwargs.pop("data", blobs(32)), batch_size=8),
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "grad_sample_mode": "bk", **kwargs},
    )


def twice_the_weight(book: Book, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A rule that is wrong by a factor."""
    output = F.linear(input, book.plain(weight), book.plain(bias))

    def note(grad: Tensor, x: Tensor) -> None:
        book.add(weight, rules.Rows(2.0 * grad[:, :, None] * x[:, None]))
        book.add(bias, rules.Rows(grad))  # type: ignore[arg-type]  # there is one here

    return book.tap(output, note, input)


def without_the_bias(book: Book, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A rule that forgets a parameter."""
    output = F.linear(input, book.plain(weight), book.plain(bias))
    return book.tap(output, lambda g, x: book.add(weight, rules.Rows(g[:, :, None] * x[:, None])), input)


@pytest.mark.parametrize("wrong", [twice_the_weight, without_the_bias])
def test_a_rule_that_is_wrong_for_this_model_is_found_before_anything_is_released(
    wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    wrapper, optimizer, loader = private(model)
    before = weights(model)
    monkeypatch.setitem(rules.RULES, F.linear, wrong)
    x, _ = next(iter(loader))
    with pytest.raises(BookKeepingError, match="do not add up to autograd's"):
        wrapper(x)
    with pytest.raises(RuntimeError, match="no gradient"):
        optimizer.step()
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("seed", range(3))
def test_a_bias_whose_gradient_is_nothing_but_rounding_is_no_mistake(seed: int) -> None:
    """GroupNorm with a group for each channel takes the convolution's bias back: its gradient is zero."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(8, 8), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(392, 2)
    )
    data = TensorDataset(3 * torch.randn(16, 3, 32, 32), torch.arange(16) % 2)
    wrapper, optimizer, loader = private(model, data=data)
    for x, y in loader:
        cross_entropy(wrapper, x, y).backward()
        optimizer.step()


class Gradual(nn.Module):
    """A model with dropout, a buffer that would move, and public BatchNorm behind an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x)


@pytest.mark.parametrize("differentiate", [False, True])
def test_the_check_leaves_streams_buffers_and_gradients_as_they_were(differentiate: bool) -> None:
    torch.manual_seed(0)
    model = Gradual()
    public = DataLoader(TensorDataset(blobs(16, seed=4).tensors[0]), batch_size=16)
    statistics = PublicStatistics(loader=public, differentiate=differentiate)
    wrapper, optimizer, loader = private(model, batch_norm=statistics)
    seen = 0
    for x, y in loader:
        state = torch.get_rng_state()
        calls = int(model.calls)
        output = wrapper(x)
        assert int(model.calls) == calls + 1
        assert all(p.grad is None for p in model.parameters())
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        F.dropout(torch.ones(len(x), 8))  # what one forward draws
        assert torch.equal(torch.get_rng_state(), after)
        F.cross_entropy(output, y).backward()
        optimizer.step()
        seen += 1
    assert seen == 4


def test_only_the_first_forwards_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus_bc.gradients.book_keeping import attached

    found = []

    def counted(*args: Any, **kwargs: Any) -> bool:
        found.append(kwargs["rows"])
        return True

    monkeypatch.setattr(attached, "check_exactness", counted)
    wrapper, optimizer, loader = private(mlp())
    for _ in range(2):
        for x, y in loader:
            cross_entropy(wrapper, x, y).backward()
            optimizer.step()
    assert len(found) == 3


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_a_batch_with_a_sample_that_is_not_finite_is_not_judged_and_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = (t.clone() for t in blobs(32).tensors)
    x[0] = float("nan")
    model, data = mlp(), TensorDataset(x, y)
    wrapper, optimizer, loader = private(model, data=data, poisson_sampling=False, noise_multiplier=0.0)
    for _ in range(4):  # four times the first batch
        batch = next(iter(loader))
        cross_entropy(wrapper, *batch).backward()
        optimizer.step()
    assert bool(torch.isfinite(weights(model)).all())
    batches = iter(loader)
    cross_entropy(wrapper, *next(batches)).backward()
    optimizer.step()
    monkeypatch.setitem(rules.RULES, F.linear, twice_the_weight)
    with pytest.raises(BookKeepingError, match="do not add up to autograd's"):
        cross_entropy(wrapper, *next(batches))


def test_the_check_writes_into_no_input_and_no_gradient_of_one() -> None:
    class Writing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(1.0) if not x.requires_grad else x * 2.0)

    wrapper, _, loader = private(Writing(4, 2))
    x, _ = next(iter(loader))
    before = x.clone()
    wrapper(x)
    assert torch.equal(x, before + 1.0)
    leaf = before.clone().requires_grad_()
    wrapper(leaf)
    assert leaf.grad is None
    assert leaf.requires_grad


def test_a_part_of_the_batch_is_refused_with_both_numbers() -> None:
    model = mlp()
    wrapper, optimizer, loader = private(model, poisson_sampling=False)
    before = weights(model)
    x, _ = next(iter(loader))
    with pytest.raises(BookKeepingError, match="called with 5 rows for a batch of 8 samples"):
        wrapper(x[:5])
    with pytest.raises(RuntimeError, match="no gradient"):
        optimizer.step()
    assert torch.equal(weights(model), before)


def test_what_batch_norm_has_normalised_is_free_to_go_with_the_backward_pass() -> None:
    """The loss holds the graph, which must not hold inputs as well."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    public = DataLoader(TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.long)), batch_size=16)
    wrapper, _, loader = private(model, batch_norm=PublicStatistics(loader=public), poisson_sampling=False)
    seen: list[weakref.ref[Tensor]] = []
    model[0].register_forward_hook(lambda *call: seen.append(weakref.ref(call[2])))
    x, y = next(iter(loader))
    loss = F.cross_entropy(wrapper(x), y)
    loss.backward()
    assert loss.grad_fn is not None
    assert seen[-1]() is None


def test_a_batch_norm_weight_that_changes_before_the_backward_pass_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    public = DataLoader(TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.long)), batch_size=16)
    wrapper, _, loader = private(model, batch_norm=PublicStatistics(loader=public), poisson_sampling=False)
    x, y = next(iter(loader))
    loss = F.cross_entropy(wrapper(x), y)
    with torch.no_grad():
        model[1].weight.mul_(3.0)
    with pytest.raises(BookKeepingError, match="changed between forward and backward"):
        loss.backward()
