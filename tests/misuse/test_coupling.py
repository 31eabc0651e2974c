"""Forwards in which samples meet are refused by individual clipping before anything is released."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from opacus.layers import DPLSTM
from support import engine, weights
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, default_collate

from opacus_bc import ALC
from opacus_bc.gradients.probe import FORWARDS, CoupledSamplesError, CouplingProbe

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
N, T = 24, 6
X = torch.randn(N, T, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, torch.arange(N) % 2)
HOOKS = {"grad_sample_mode": "hooks"}
MODES: dict[str, dict[str, Any]] = {
    "hooks": HOOKS,
    "no wrapper": {"wrap_model": False},
    "functorch": {"grad_sample_mode": "functorch"},
    "ew": {"grad_sample_mode": "ew"},
    "ghost": {"grad_sample_mode": "ghost"},
    "bk": {"grad_sample_mode": "bk"},
}
PUBLIC = TensorDataset(torch.randn(8, T, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2)
CLIPPINGS: dict[str, dict[str, Any]] = {
    f"{how}{name}": {**mode, **arguments}
    for how, mode in (("", HOOKS), ("bk, ", {"grad_sample_mode": "bk"}))
    for name, arguments in (
        ("alc", {"alc": ALC(DataLoader(PUBLIC, batch_size=4))}),
        ("per_layer", {"clipping": "per_layer", "max_grad_norm": [1.0] * 4}),
    )
}


class Plain(nn.Module):
    """Every sample by itself; what is derived from it overrides ``meet``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(T, 8), nn.Linear(8, 2)

    def meet(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.meet(torch.tanh(self.inner(x))))
        return out


class Centred(Plain):
    def meet(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0)


class DetachedMean(Plain):
    def meet(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.detach().mean(0)


class StraightThrough(Plain):
    """Adds nothing to the values, and the mean of all samples to the gradient."""

    def meet(self, hidden: Tensor) -> Tensor:
        mean = hidden.mean(0)
        return hidden + (mean - mean.detach())


class CentredLogits(Plain):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - out.mean(0)


class CentredInput(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Distances(Plain):
    def meet(self, hidden: Tensor) -> Tensor:
        return hidden + torch.cdist(hidden, hidden).sum(1, keepdim=True)


class MixUp(Plain):
    def meet(self, hidden: Tensor) -> Tensor:
        return 0.7 * hidden + 0.3 * hidden[torch.randperm(len(hidden))]


class Flipped(Plain):
    def meet(self, hidden: Tensor) -> Tensor:
        return hidden.flip(0)


class Attention(Plain):
    def meet(self, hidden: Tensor) -> Tensor:
        return torch.softmax(hidden @ hidden.T, dim=1) @ hidden


class Largest(Plain):
    """Only the samples with the largest first entry pass: no gradient shows it."""

    def meet(self, hidden: Tensor) -> Tensor:
        kept = hidden[:, :1] >= hidden[:, :1].topk(max(1, len(hidden) // 2), dim=0).values[-1]
        return hidden * kept


class Positions(Plain):
    """A position embedding that runs once for the whole batch, with as many positions as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(T, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions(torch.arange(T)).T)


class SequenceFirst(Plain):
    """Turns the batch into the second dimension, with as many steps as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.inner(x.T[..., None]))).mean(0)
        return out


COUPLED = [
    Centred,
    DetachedMean,
    StraightThrough,
    CentredLogits,
    CentredInput,
    Distances,
    MixUp,
    Flipped,
    Attention,
    Largest,
]
BY_LAYOUT = [Positions, SequenceFirst]


class Run:
    """A model made private in one of the modes, with batches of T samples."""

    def __init__(self, model: nn.Module, mode: str = "hooks", data: Any = DATA, **kwargs: Any) -> None:
        self.model, self.engine = model, engine()
        arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False, **kwargs}
        wrapper, self.optimizer, *criterion, self.loader = self.engine.make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=T),
            **arguments | {**MODES, **CLIPPINGS}[mode],
        )
        self.wrapper = model if mode == "no wrapper" else wrapper
        self.criterion = criterion[0] if criterion else F.cross_entropy

    def train(self) -> None:
        for *x, y in self.loader:
            self.optimizer.zero_grad()
            self.criterion(self.wrapper(*x), y).backward()
            self.optimizer.step()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", COUPLED)
def test_forwards_that_couple_samples_are_refused_before_anything_is_released(kind: Any, mode: str) -> None:
    run = Run(kind(), mode)
    before = weights(run.model)
    with pytest.raises(CoupledSamplesError, match=r"of other samples|for other samples"):
        run.train()
    if kind not in (MixUp, Largest):  # by chance the row that is looked at may stay where it is once
        assert torch.equal(weights(run.model), before)
        assert len(run.engine.accountant) == 0


@pytest.mark.parametrize("mode", CLIPPINGS)
@pytest.mark.parametrize("kind", [StraightThrough, DetachedMean])  # gradients alone meet, values alone meet
def test_every_kind_of_individual_clipping_refuses_forwards_that_couple_samples(kind: Any, mode: str) -> None:
    run = Run(kind(), mode)
    before = weights(run.model)
    with pytest.raises(CoupledSamplesError, match=r"of other samples|for other samples"):
        run.train()
    assert torch.equal(weights(run.model), before)
    assert len(run.engine.accountant) == 0
    apart = Run(Plain(), mode)
    apart.train()
    assert len(apart.engine.accountant) == N // T


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "ew"])  # which refuses them itself
@pytest.mark.parametrize("kind", BY_LAYOUT)
def test_another_dimension_of_the_size_of_the_batch_is_not_taken_for_it(kind: Any, mode: str) -> None:
    run = Run(kind(), mode)
    with pytest.raises(CoupledSamplesError, match="rows are not the samples"):
        run.train()
    assert len(run.engine.accountant) == 0


class Dropped(Plain):
    def meet(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, 0.5) * (1 + 0.1 * random.random()) + torch.randn_like(hidden)


class InPlace(Plain):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x).relu_())
        return out


class Checkpointed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(checkpoint(lambda v: v.sin(), self.inner(x), use_reentrant=False))
        return out


class WritesIntoItsInput(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))


class ByKeyword(Plain):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        return super().forward(x if scale is None else x * scale)


class Normalised(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)

    def meet(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.norm(hidden)
        return out


class OwnGenerator(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(3)

    def meet(self, hidden: Tensor) -> Tensor:
        return hidden + torch.randn(hidden.shape, generator=self.noise)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = DPLSTM(1, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(T, 0, -1)[: len(x)]
        packed = rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True)
        out: Tensor = self.out(rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0].sum(1))
        return out


APART = [Plain, Dropped, InPlace, Checkpointed, WritesIntoItsInput, ByKeyword, Normalised, OwnGenerator]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", APART)
def test_forwards_that_keep_samples_apart_are_accepted(kind: Any, mode: str) -> None:
    if mode == "ew" and kind in (InPlace, Checkpointed, Normalised):
        pytest.skip("ExpandedWeights has no such layer")
    run = Run(kind(), mode)
    run.train()
    assert len(run.engine.accountant) == N // T


def test_recurrent_layers_on_packed_sequences_are_accepted() -> None:
    run = Run(Recurrent())
    run.train()
    assert len(run.engine.accountant) == N // T


def test_a_second_input_and_the_batch_in_the_second_dimension_are_understood() -> None:
    class TwoInputs(Plain):
        def forward(self, x: Tensor, scale: Tensor) -> Any:
            return super().forward(x * scale[:, None])

    Run(TwoInputs(), data=TensorDataset(X, torch.rand(N), torch.arange(N) % 2)).train()

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:  # (steps, batch, 1)
            out: Tensor = self.layer(x).mean(0)
            return out

    run = Run(Sequences(), batch_first=False)
    for x, y in run.loader:
        run.optimizer.zero_grad()
        F.cross_entropy(run.wrapper(x.T[..., None]), y).backward()
        run.optimizer.step()
    assert len(run.engine.accountant) == N // T


def streams() -> list[Any]:
    legacy: Any = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), legacy[1].tolist(), random.getstate()]


@pytest.mark.parametrize("mode", MODES)
def test_the_probe_leaves_no_trace(mode: str) -> None:
    """The same forward and backward with and without it: streams, gradients, rows and buffers are equal."""
    traces = []
    for probed in (True, False):
        torch.manual_seed(1)
        model = Dropped()
        model.register_buffer("constant", torch.ones(1))
        model.own = torch.Generator().manual_seed(3)
        run = Run(model, mode)
        if not probed:
            next(g for g in run.engine._runs[0].guests if isinstance(g, CouplingProbe)).remove()
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        torch.manual_seed(5)
        x, y = next(iter(run.loader))
        run.criterion(run.wrapper(x), y).backward()
        held: list[Any] = list(model.parameters())
        if mode == "bk":
            rows = [entry.rows() for entry in run.optimizer._book.read(held).values()]
        else:
            rows = [p.grad if mode == "ghost" else p.grad_sample for p in held]
        traces.append((streams(), rows, weights(model), model.own.get_state(), x))
        run.optimizer.step()
    (first, rows, moved, own, x), (second, others, unmoved, other, z) = traces
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(rows, others, strict=True))
    assert torch.equal(moved, unmoved)
    assert torch.equal(own, other)
    assert torch.equal(x, z)


def test_the_probe_takes_itself_off_after_the_first_forwards() -> None:
    class Counting(Plain):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    run = Run(Counting())
    probe = next(g for g in run.engine._runs[0].guests if isinstance(g, CouplingProbe))
    for _ in range(3):
        run.train()
    assert not probe._handles
    steps = 3 * N // T
    assert run.model.calls == steps + 4 * FORWARDS


def test_evaluation_and_forwards_without_gradient_are_not_probed() -> None:
    run = Run(Centred())
    with torch.no_grad():
        run.wrapper(X)
    run.wrapper.eval()
    run.wrapper(X)
    run.wrapper.train()
    with pytest.raises(CoupledSamplesError):
        run.wrapper(X)


def test_batch_clipping_takes_forwards_that_couple_samples() -> None:
    model = Attention()
    eng = engine()
    module, optimizer, loader = eng.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=T),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="batch",
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert len(eng.accountant) == N // T


def test_a_forward_that_fails_on_a_few_rows_is_not_disturbed() -> None:
    class Fixed(Plain):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) != T:
                raise ValueError("this model takes batches of six")
            return super().forward(x)

    run = Run(Fixed())
    run.train()
    assert len(run.engine.accountant) == N // T


class BeforeNorm(nn.Module):
    """Samples meet before BatchNorm, in evaluation too."""

    def __init__(self, meet: Any) -> None:
        super().__init__()
        self.inner, self.norm, self.outer, self.meet = (
            nn.Linear(T, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 2),
            meet,
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.norm(self.meet(self.inner(x))))
        return out


MEETINGS: dict[str, Any] = {
    "centring": lambda h: h - h.mean(0),
    "detached centring": lambda h: h - h.detach().mean(0),
    "batch attention": lambda h: torch.softmax(h @ h.T, dim=1) @ h,
    "distances": lambda h: h + torch.cdist(h, h).sum(1, keepdim=True),
}


def with_private_statistics(model: nn.Module, collate: Any = None) -> tuple[Any, ...]:
    eng = engine()
    made = eng.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=T, collate_fn=collate),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="batch",
        batch_norm="private",
    )
    return eng, *made


quiet = pytest.mark.filterwarnings("ignore:batch_norm='private'")


@quiet
@pytest.mark.parametrize("name", MEETINGS)
def test_private_statistics_of_samples_that_meet_are_refused_before_anything_changes(name: str) -> None:
    model = BeforeNorm(MEETINGS[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="changes what other samples bring to norm"):
        with_private_statistics(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert type(model.norm) is nn.BatchNorm1d


@quiet
def test_private_statistics_of_samples_that_begin_to_meet_are_refused_before_they_are_booked() -> None:
    model = BeforeNorm(lambda h: h)
    eng, *_ = with_private_statistics(model)
    model.meet = MEETINGS["centring"]
    with pytest.raises(ValueError, match="changes what other samples bring to norm"):
        eng.recalibrate_batch_norm()
    assert not eng.accountant.history
    model.meet = lambda h: h
    eng.recalibrate_batch_norm()
    assert len(eng.accountant.history) == 1


@quiet
def test_private_statistics_refuse_a_collate_function_with_several_rows_a_sample() -> None:
    def six(samples: list[Any]) -> Any:
        return default_collate([sample for sample in samples for _ in range(6)])

    with pytest.raises(ValueError, match="several rows of one sample"):
        with_private_statistics(BeforeNorm(lambda h: h), six)


@pytest.mark.parametrize("mode", ["hooks", "bk"])
def test_a_criterion_that_divides_by_the_batchs_labels_is_named(mode: str) -> None:
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
    with pytest.warns(
        UserWarning, match=r"\(weight=\.\.\.\).*one label changes the gradients of all samples"
    ):
        Run(Plain(), mode, criterion=weighted)
    with pytest.warns(UserWarning, match=r"\(ignore_index=1\).*one label changes the gradients of all"):
        Run(Plain(), mode, criterion=nn.NLLLoss(ignore_index=1))


@pytest.mark.parametrize("mode", ["hooks", "bk"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_criterion_that_reduces_otherwise_than_loss_reduction_says_is_refused(
    mode: str, reduction: str
) -> None:
    """Of 20 samples under a mean that was declared a sum, one more moved the release by 1.95 C."""
    model, declared = Plain(), {"mean": "sum", "sum": "mean"}[reduction]
    with pytest.raises(ValueError, match=f"loss_reduction='{declared}', and CrossEntropyLoss has reduction"):
        Run(model, mode, criterion=nn.CrossEntropyLoss(reduction=reduction), loss_reduction=declared)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    Run(model, mode, criterion=nn.CrossEntropyLoss(reduction="none"), loss_reduction=declared)


def test_criteria_that_keep_samples_apart_are_not_named() -> None:
    Run(Plain(), criterion=nn.CrossEntropyLoss())
    Run(Plain(), criterion=nn.CrossEntropyLoss(weight=torch.ones(2), reduction="sum"), loss_reduction="sum")
    Run(Plain(), "ghost", criterion=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0])))


def test_the_statement_names_what_individual_clipping_assumes_of_samples() -> None:
    run = Run(Plain())
    run.train()
    assert "one row of a batch is one sample" in run.engine.statement(1e-3)
