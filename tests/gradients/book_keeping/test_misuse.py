"""Loops and models that one backward cannot serve are refused before anything changes; others are exact."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.layers import DPLSTM
from support import engine, weights
from support.book_keeping import norms_of
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.overrides import _get_current_function_mode
from torch.utils.data import DataLoader, TensorDataset, default_collate

from opacus_bc.gradients.book_keeping import attached
from opacus_bc.gradients.book_keeping.book import BookKeepingError
from opacus_bc.gradients.probe import CouplingProbe

pytestmark = [
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
]
N, WIDTH, CLASSES, C = 6, 5, 3, 0.05


def data(*shape: int, rows: int = 3 * N) -> TensorDataset:
    x = torch.randn(rows, *(shape or (WIDTH,)), generator=torch.Generator().manual_seed(1))
    return TensorDataset(4 * x.double(), torch.arange(rows) % CLASSES)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


class Run:
    """A model made private without noise; its first forwards are not tried out: every guard stands alone."""

    def __init__(
        self, model: nn.Module | None = None, dataset: TensorDataset | None = None, **kwargs: Any
    ) -> None:
        self.model, self.engine = mlp() if model is None else model.double(), engine()
        self.plain = optim.SGD(self.model.parameters(), lr=1.0)
        self.wrapper, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=self.plain,
            data_loader=DataLoader(
                dataset or data(), batch_size=N, collate_fn=kwargs.pop("collate", default_collate)
            ),
            poisson_sampling=False,
            **{"noise_multiplier": 0.0, "max_grad_norm": C, "grad_sample_mode": "bk", **kwargs},
        )
        for guest in self.engine._runs[0].guests:
            if isinstance(guest, CouplingProbe):
                guest.remove()
            if isinstance(guest, attached.BookKeeping):
                guest._checks_left, self.guest = 0, guest

    @property
    def book(self) -> Any:
        return self.optimizer._book

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.wrapper(x), y)

    def release(self, loop: Callable[[Run, Tensor, Tensor], Any] | None = None) -> Tensor:
        """The clipped sum of the first batch over C."""
        before = weights(self.model)
        x, y = next(iter(self.loader))
        self.optimizer.zero_grad()
        self.loss(x, y).backward() if loop is None else loop(self, x, y)
        self.optimizer.step()
        return (before - weights(self.model)) * N / C

    def refuses(
        self, loop: Callable[[Run, Tensor, Tensor], Any] | None, words: str | None, kind: Any = None
    ) -> None:
        """The loop raises; weights, accountant and ledger stay, nothing is recorded any more."""
        before = weights(self.model)
        with pytest.raises(kind, match=words):
            self.release(loop)
        assert torch.equal(weights(self.model), before)
        assert len(self.engine.accountant) == 0
        assert self.loader.ledger.sole() is not None
        assert _get_current_function_mode() is None


def expected(rows: int = N, times: float = 1.0, loss: Any = F.cross_entropy) -> Tensor:
    """The oracle: every sample alone, times a factor, clipped to C and added up, over C."""
    model, (x, y) = mlp(), data()[:rows]
    total = torch.zeros_like(weights(model))
    for i in range(rows):
        alone = loss(model(x[i : i + 1]), y[i : i + 1])
        grads = torch.autograd.grad(alone, list(model.parameters()))
        grad = times * torch.cat([g.flatten() for g in grads])
        total += grad * min(1.0, (1 - 1e-5) * C / float(grad.norm())) / C
    return total


def exact(found: Tensor, oracle: Tensor | None = None) -> None:
    torch.testing.assert_close(found, expected() if oracle is None else oracle, rtol=1e-6, atol=1e-9)


def test_the_release_is_the_oracles() -> None:
    exact(Run().release())


# --- rows that are not samples ------------------------------------------------------------------------------


class Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (N, frames, WIDTH)
        return self.head(self.layer(x.flatten(0, 1)).view(len(x), -1, 8).mean(1))


class OneRow(Folded):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x) + self.layer(x.mean(0, keepdim=True)))


class Typed(Folded):
    """Positions that have seen the batch's type are taken for the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(9, 8)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1]).type_as(x).long()
        return self.head((self.layer(x) + self.places(at)).mean(1))


class Transposed(Folded):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.transpose(0, 1)).mean(0))


class Unbatched(Folded):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv1d(N, N, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.line(x)))


class Rowwise(Folded):
    """A parameter with a row for each place in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.ones(N, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x * self.at))


ROWS: dict[str, tuple[type[nn.Module], tuple[int, ...], str]] = {
    "frames in the batch": (Folded, (4, WIDTH), "24 rows for a batch of 6"),
    "one row for all": (OneRow, (WIDTH,), "1 rows for a batch of 6"),
    "positions of the batch's type": (Typed, (4, WIDTH), "4 rows for a batch of 6"),
    "tokens first": (Transposed, (4, WIDTH), "4 rows for a batch of 6"),
    "no dimension for samples": (Unbatched, (WIDTH,), "no dimension for the samples"),
    "a row for each place": (Rowwise, (WIDTH,), "at has 6 rows and meets the batch's"),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_not_samples_are_refused(name: str) -> None:
    model, shape, words = ROWS[name]
    Run(model(), data(*shape)).refuses(None, words)


@pytest.mark.parametrize("model", [Typed, Transposed])
def test_as_many_tokens_as_samples_are_refused_by_the_first_forwards(model: Any) -> None:
    """In this one batch they look like samples; on a few rows of it they do not."""
    run = Run(model(), data(N, WIDTH))
    run.guest._checks_left = 1
    run.refuses(None, "rows for a batch of 4")


def several(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples for _ in range(3)])


def test_rows_that_a_collate_function_makes_or_leaves_out_are_refused() -> None:
    Run(collate=several).refuses(None, "18 rows for a batch of 6")
    Run(collate=lambda samples: default_collate(samples[1:])).refuses(None, "5 rows for a batch of 6")


class Packed(nn.Module):
    """Equal lengths: every step has all sequences, in an order of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lstm, self.out = (
            nn.Linear(1, 3),
            DPLSTM(3, 4, batch_first=True),
            nn.Linear(4, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        inner = self.inner(x[..., None])
        packed = rnn.pack_padded_sequence(inner, lengths, batch_first=True, enforce_sorted=False)
        return self.out(rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0].sum(1))


def test_sequences_packed_in_another_order_are_refused() -> None:
    """Torch's sort keeps the order of up to 16 equal lengths."""
    run = Run(Packed(), data(rows=40))
    with pytest.raises(ValueError, match="enforce_sorted=False"):
        run.wrapper(data(rows=40)[:][0])


# --- parameters that are used elsewhere ---------------------------------------------------------------------


def penalty(run: Run, x: Tensor, y: Tensor) -> None:
    (run.loss(x, y) + sum(p.square().sum() for p in run.model.parameters())).backward()


def own_backward(run: Run, x: Tensor, y: Tensor) -> None:
    run.loss(x, y).backward()
    run.model[0].weight.abs().sum().backward()


def submodule(run: Run, x: Tensor, y: Tensor) -> None:
    (run.loss(x, y) + run.model[0](x).square().mean()).backward()


def around_the_hooks(run: Run, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(run.wrapper.forward(x), y).backward()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, grad.T @ x


def own_function(run: Run, x: Tensor, y: Tensor) -> None:
    hidden = Doubled.apply(x, run.model[0].weight)
    (run.loss(x, y) + hidden.square().mean()).backward()


@pytest.mark.parametrize("loop", [penalty, own_backward, submodule, around_the_hooks, own_function])
def test_parameters_used_outside_of_the_models_forward_are_refused(loop: Any) -> None:
    Run().refuses(loop, "has a gradient that was not made sample by sample")


class Inside(nn.Module):
    """What the forward pass does with the parameters alone."""

    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(WIDTH, CLASSES), use

    def forward(self, x: Tensor) -> Any:
        return self.use(self.layer, x)


INSIDE: dict[str, Callable[[Any, Tensor], Any]] = {
    "a penalty that is returned": lambda m, x: (m(x), m.weight.square().sum()),
    "a penalty of a view": lambda m, x: (m(x), m.weight[0].abs().mean()),
    "an operation of one's own": lambda m, x: (m(x), Doubled.apply(x, m.weight).sum()),
    "an operation on a function of it": lambda m, x: (m(x), Doubled.apply(x, 2 * m.weight).sum()),
    "a batch that is not passed": lambda m, x: (m(data()[:N][0]), x.sum()),
}


@pytest.mark.parametrize("name", INSIDE)
def test_parameters_that_give_the_loss_more_than_the_samples_do_are_refused(name: str) -> None:
    def loop(run: Run, x: Tensor, y: Tensor) -> None:
        output, extra = run.wrapper(x)
        (F.cross_entropy(output, y) + extra).backward()

    Run(Inside(INSIDE[name])).refuses(loop, "has a gradient that was not made sample by sample")


def test_a_penalty_in_the_models_own_loss_is_refused() -> None:
    def own(m: Any, x: Tensor) -> Tensor:
        return m(x).square().mean() + m.weight.square().sum()

    Run(Inside(own)).refuses(lambda run, x, y: run.wrapper(x).backward(), "no rows for a batch of 6")


# --- backward passes ----------------------------------------------------------------------------------------


def test_a_second_backward_on_the_same_graph_doubles_norm_and_sum() -> None:
    def loop(run: Run, x: Tensor, y: Tensor) -> None:
        loss = run.loss(x, y)
        loss.backward(retain_graph=True)
        once = {p: e.norms() for p, e in run.book.read(run.model.parameters()).items()}
        loss.backward()
        for p, entry in run.book.read(run.model.parameters()).items():
            torch.testing.assert_close(entry.norms(), 2 * once[p], rtol=1e-9, atol=0)
            torch.testing.assert_close(norms_of(entry.rows()), 2 * once[p], rtol=1e-9, atol=0)

    exact(Run().release(loop), expected(times=2.0))


def test_gradients_of_inputs_and_attacks_on_them_write_nothing() -> None:
    def loop(run: Run, x: Tensor, y: Tensor) -> None:
        x = x.requires_grad_()
        for _ in range(2):  # adversarial training asks for them first
            (grad,) = torch.autograd.grad(run.loss(x, y), x)
            assert float(grad.norm()) > 0
        run.loss(x, y).backward(inputs=[x])
        assert not run.book._entries
        run.loss(x, y).backward()

    exact(Run().release(loop))


def test_a_gradient_penalty_is_refused() -> None:
    def loop(run: Run, x: Tensor, y: Tensor) -> None:
        x = x.requires_grad_()
        loss = run.loss(x, y)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()

    Run().refuses(loop, "differentiate twice", RuntimeError)


def test_gradients_of_parameters_by_hand_do_not_exist() -> None:
    def loop(run: Run, x: Tensor, y: Tensor) -> None:
        torch.autograd.grad(run.loss(x, y), list(run.model.parameters()))

    Run().refuses(loop, "not have been used in the graph", RuntimeError)


def test_a_step_without_a_backward_is_refused() -> None:
    Run().refuses(lambda run, x, y: run.loss(x, y), "no gradient")

    def only_inputs(run: Run, x: Tensor, y: Tensor) -> None:
        run.loss(x, y).backward(inputs=list(run.model.parameters()))

    Run().refuses(only_inputs, r"no gradient|not have been used", RuntimeError)


def test_a_graph_of_an_earlier_batch_is_refused() -> None:
    run = Run()
    batches = iter(run.loader)
    first = next(batches)
    old, older = run.loss(*first), run.loss(*first)
    run.loss(*first).backward()
    run.optimizer.step()
    before = weights(run.model)
    x, y = next(batches)
    with pytest.raises(BookKeepingError, match="earlier batch"):
        older.backward()
    with pytest.raises(BookKeepingError, match="earlier batch"):
        (run.loss(x, y) + old).backward()
    with pytest.raises(BookKeepingError, match="raised"):
        run.optimizer.step()
    assert torch.equal(weights(run.model), before)


def failing(run: Run, x: Tensor, y: Tensor) -> None:
    """Backward raises when the last layer has written its gradients and the first has not."""

    def fail(grad: Tensor) -> None:
        raise ValueError("out of memory")

    handle = run.model[1].register_forward_hook(lambda m, i, out: out.register_hook(fail) and None)
    try:
        loss = run.loss(x, y)
        with pytest.raises(ValueError, match="out of memory"):
            loss.backward()
    finally:
        handle.remove()


def test_half_a_backward_is_not_released() -> None:
    Run().refuses(failing, "a backward pass of this batch raised")

    def again(run: Run, x: Tensor, y: Tensor) -> None:
        failing(run, x, y)
        run.loss(x, y).backward()  # what was written before would count twice

    Run().refuses(again, "a backward pass of this batch raised")


def test_a_backward_that_raised_leaves_nothing_after_zero_grad() -> None:
    def loop(run: Run, x: Tensor, y: Tensor) -> None:
        failing(run, x, y)
        run.optimizer.zero_grad()
        run.loss(x, y).backward()

    exact(Run().release(loop))


@pytest.mark.parametrize("when", ["before the forward", "between forward and backward"])
def test_zero_grad_drops_what_backward_has_written(when: str) -> None:
    def loop(run: Run, x: Tensor, y: Tensor) -> None:
        (3 * run.loss(x, y)).backward()
        if when == "before the forward":
            run.optimizer.zero_grad()
        loss = run.loss(x, y)
        if when != "before the forward":
            run.optimizer.zero_grad()
        loss.backward()

    exact(Run().release(loop))


def test_an_input_that_was_overwritten_is_refused_before_backward_and_counts_once_after_it() -> None:
    def before(run: Run, x: Tensor, y: Tensor) -> None:
        loss = run.loss(x, y)
        x.mul_(1e-9)
        loss.backward()

    Run().refuses(before, "modified by an inplace operation", RuntimeError)

    def after(run: Run, x: Tensor, y: Tensor) -> None:
        run.loss(x, y).backward()
        x.mul_(1e9)  # norms and sums are computed of the same numbers, in step()

    assert float(Run().release(after).norm()) <= N


class Overwrites(nn.Module):
    """``h += layer(h)`` overwrites what the layer has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        h += self.inner(h)
        return self.outer(h)


def test_an_input_that_the_model_overwrites_is_refused() -> None:
    Run(Overwrites()).refuses(None, "modified by an inplace operation", RuntimeError)


def test_evaluation_mode_and_forwards_without_gradient_change_nothing() -> None:
    def loop(run: Run, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            run.wrapper(x[:2])
            run.wrapper(torch.cat([x, x]))
        run.wrapper.eval()
        run.loss(x, y)  # and no backward
        run.wrapper.train()
        run.loss(x, y).backward()

    exact(Run().release(loop))


def test_a_model_in_evaluation_mode_trains_exactly() -> None:
    run = Run()
    run.model.eval()
    exact(run.release())


def test_an_interrupt_in_the_forward_pass_leaves_no_recording_behind() -> None:
    """Torch calls no hook after a KeyboardInterrupt, which notebooks make of a stopped cell."""
    run = Run()
    batches = iter(run.loader)
    x, y = next(batches)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = run.model[1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        run.wrapper(x)
    handle.remove()
    before = weights(run.model)
    x, y = next(iter(run.loader))
    weight = run.model[0].weight
    assert (2 * weight).grad_fn.next_functions[0][0].variable is weight  # nobody watches
    run.loss(x, y).backward()
    run.optimizer.step()
    assert _get_current_function_mode() is None
    assert not run.guest._running
    exact((before - weights(run.model)) * N / C)


# --- copies, pickles, compilers -----------------------------------------------------------------------------


def own_hooks(model: Any) -> None:
    """A user's: one changes what a layer returns, the others look."""
    model[0].register_forward_hook(lambda module, given, output: 2 * output)
    model[2].register_full_backward_hook(lambda *seen: None)
    model.register_forward_pre_hook(lambda *seen: None)
    model.register_forward_hook(lambda *seen: None)


@pytest.mark.parametrize("late", [False, True])
def test_a_users_hooks_may_be_registered_before_and_after(late: bool) -> None:
    model, doubled = mlp(), mlp()
    if not late:
        own_hooks(model)
    run = Run(model)
    if late:
        own_hooks(model)
    own_hooks(doubled)
    total, (x, y) = torch.zeros_like(weights(doubled)), data()[:N]
    for i in range(N):
        loss = F.cross_entropy(doubled(x[i : i + 1]), y[i : i + 1])
        grad = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(doubled.parameters()))])
        total += grad * min(1.0, (1 - 1e-5) * C / float(grad.norm())) / C
    exact(run.release(), total)


def test_a_copy_of_the_model_is_a_plain_model() -> None:
    run = Run()
    x, y = next(iter(run.loader))
    run.loss(x, y).backward()
    twin = copy.deepcopy(run.model)
    F.cross_entropy(twin(x), y).backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in run.model.parameters())
    exact_before = {p: e.rows().clone() for p, e in run.book.read(run.model.parameters()).items()}
    assert len(exact_before) == 4
    run.optimizer.step()


@pytest.mark.parametrize("dump", [torch.save, pickle.dump])
def test_a_pickle_between_backward_and_step_holds_nothing_of_the_batch(dump: Any) -> None:
    run = Run()
    x, y = next(iter(run.loader))
    run.loss(x, y).backward()
    file = io.BytesIO()
    dump(run.model, file)
    for row in x:
        assert row.numpy().tobytes() not in file.getvalue()
    size = len(file.getvalue())
    plain = io.BytesIO()
    dump(mlp(), plain)
    assert size < len(plain.getvalue()) + 5000
    file.seek(0)
    loaded = torch.load(file, weights_only=False) if dump is torch.save else pickle.load(file)
    F.cross_entropy(loaded(x), y).backward()
    assert all(p.grad is not None for p in loaded.parameters())


def test_nothing_of_the_batch_survives_the_step() -> None:
    run = Run()
    run.release()
    assert not run.book._entries
    assert not run.book._twins
    assert not run.book._derived
    assert not run.optimizer._entries
    assert all(value is None for p in run.model.parameters() for value in vars(p).values())


def test_compiled_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.compile"):
        Run(torch.compile(mlp(), backend="eager"))


def scripted_part() -> nn.Module:
    model = mlp()
    model[0] = torch.jit.script(model[0])
    return model


SCRIPTED = {
    "whole": lambda: torch.jit.script(mlp()),
    "traced": lambda: torch.jit.trace(mlp(), data()[:N][0]),
    "a part": scripted_part,
}


@pytest.mark.parametrize("name", SCRIPTED)
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_scripted_models_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"TorchScript.*clipping='batch'"):
        Run(SCRIPTED[name]())


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_a_scripted_function_of_a_parameter_is_refused() -> None:
    function = torch.jit.trace(lambda x, w: x @ w, (torch.ones(N, CLASSES), torch.ones(CLASSES, CLASSES)))

    class Scripted(Inside):
        def forward(self, x: Tensor) -> Tensor:
            return function(self.layer(x), self.layer.weight[:, :CLASSES])

    Run(Scripted(lambda m, x: None)).refuses(None, "has a gradient that was not made sample by sample")


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_function_of_a_parameter_releases_nothing(whole: bool) -> None:
    """The message is torch's: its compiler cannot follow what is watched, whether it may give up or not."""
    function = torch.compile(lambda m, x: F.linear(x, m.weight, m.bias), backend="eager", fullgraph=whole)
    Run(Inside(function)).refuses(None, None, Exception)


def test_a_model_made_private_twice_has_one_recording() -> None:
    """The first run is finished before the second begins."""
    run = Run()
    run.release()
    run.engine.finalize(run.model)
    assert not run.model._forward_pre_hooks
    assert not run.model._forward_hooks
