"""What individual clipping refuses: whatever would let a sample out of its ball, or move weights unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import engine, weights
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import BatchMemoryManager
from opacus_bc._opacus import StockBatchMemoryManager

pytestmark = [
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:Full backward hook"),
]
C = 0.05
Batch = tuple[Tensor, Tensor]


def samples(n: int = 6, seed: int = 7) -> Batch:
    """One sample with a gradient a hundred thousand times as long as the others'."""
    x = 0.01 * torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    x[0] *= 1e5
    return x, torch.arange(n) % 3


class Run:
    """A model made private without noise, so that what it releases can be measured in units of C."""

    def __init__(self, model: nn.Module, data: Batch, mode: str = "ghost", **kwargs: Any) -> None:
        self.model, self.size = model, len(data[0])
        arguments = {"poisson_sampling": False, "criterion": nn.CrossEntropyLoss(), **kwargs}
        self.wrapper, self.optimizer, *criterion, self.loader = engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(*data), batch_size=self.size),
            noise_multiplier=0.0,
            max_grad_norm=C,
            grad_sample_mode=mode,
            **arguments,
        )
        self.criterion = criterion[0] if criterion else arguments["criterion"]

    def release(self, loss: Callable[[Run, Tensor, Tensor], Any] | None = None) -> Tensor:
        """The clipped sum over C: at most one for each sample."""
        before = weights(self.model)
        x, y = next(iter(self.loader))
        self.optimizer.zero_grad()
        (self.criterion(self.wrapper(x), y) if loss is None else loss(self, x, y)).backward()
        self.optimizer.step()
        return (before - weights(self.model)) * self.size / C


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("criterion", [nn.MSELoss, nn.BCEWithLogitsLoss])
def test_ghost_losses_with_one_output_are_clipped_sample_by_sample(criterion: Any, reduction: str) -> None:
    x, y = samples()
    torch.manual_seed(0)
    model, target = nn.Linear(6, 1), (y > 0).float()[:, None]
    expected = torch.zeros(7, dtype=torch.float64)
    for i in range(len(x)):  # the oracle: every sample alone
        loss = criterion()(model(x[i : i + 1]), target[i : i + 1])
        grad = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        expected += grad * min(1.0, C / float(grad.norm() + 1e-6)) / C
    run = Run(model, (x, target), criterion=criterion(reduction=reduction), loss_reduction=reduction)
    found = run.release() / (len(x) if reduction == "sum" else 1)  # Opacus divides means alone
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


class Whole(nn.Module):
    reduction = "mean"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.1)


def test_a_ghost_criterion_that_mixes_the_batch_is_refused() -> None:
    run = Run(nn.Linear(6, 3), samples(), criterion=Whole())
    with pytest.raises(ValueError, match="one number for the whole batch"):
        run.release()


@pytest.mark.parametrize(
    "combine",
    [
        lambda loss, extra: loss + extra,
        lambda loss, extra: extra + loss,
        lambda loss, extra: loss - extra,
        lambda loss, extra: extra - loss,
        lambda loss, extra: loss * extra,
        lambda loss, extra: (0.5 * loss / 2 + 1) * extra,
        lambda loss, extra: -loss / extra,
    ],
)
def test_what_ghost_clipping_would_not_clip_cannot_join_its_loss(combine: Any) -> None:
    run = Run(nn.Linear(6, 3), samples())
    before = weights(run.model)

    def loss(run: Run, x: Tensor, y: Tensor) -> Any:
        output = run.wrapper(x)
        return combine(run.criterion(output, y), output.pow(2).mean())

    with pytest.raises((ValueError, TypeError), match=r"would not be clipped|unsupported operand"):
        run.release(loss)
    assert torch.equal(weights(run.model), before)


def test_a_factor_that_would_spread_over_all_ghost_losses_is_refused() -> None:
    run = Run(nn.Linear(6, 3), samples())
    with pytest.raises(RuntimeError, match="one number a sample"):
        run.release(lambda run, x, y: run.criterion(run.wrapper(x), y) * torch.ones(6, 1))


def test_ghost_losses_take_numbers_and_other_ghost_losses() -> None:
    run = Run(nn.Linear(6, 3), samples())

    def loss(run: Run, x: Tensor, y: Tensor) -> Any:
        output = run.wrapper(x)
        return 2.0 * run.criterion(output, y) + run.criterion(output, y) / 3 - 1.0

    assert float(run.release(loss).norm()) <= 6 + 1e-3


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return x * self.weight * factor


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], str]] = {
    "max_norm of Embedding": (
        lambda: nn.Embedding(5, 3, max_norm=0.1),
        ("batch", "hooks", "ghost", "functorch"),
        "without noise: use max_norm=None",
    ),
    "max_norm of EmbeddingBag": (
        lambda: nn.EmbeddingBag(5, 3, max_norm=0.1),
        ("batch", "hooks"),
        "without noise",
    ),
    "circular": (
        lambda: nn.Conv2d(1, 3, 3, padding=1, padding_mode="circular"),
        ("hooks", "ghost"),
        "take for zeros",
    ),
    "bag": (lambda: nn.EmbeddingBag(5, 3, mode="sum"), ("hooks", "ghost"), "occur twice"),
    "frequency": (
        lambda: nn.Embedding(5, 3, scale_grad_by_freq=True),
        ("hooks", "ghost", "bk"),
        "how often others use the row",
    ),
    "own layer": (Own, ("ghost",), "grad_sample_mode='hooks'"),
    "two inputs": (lambda: nn.Bilinear(3, 3, 2), ("ghost",), "grad_sample_mode='hooks'"),
}


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, row in LAYERS.items() for mode in row[1]])
def test_layers_that_escape_clipping_are_refused_before_anything_changes(name: str, mode: str) -> None:
    build, _, message = LAYERS[name]
    model = nn.Sequential(build())
    batch = {"clipping": "batch", "criterion": None}
    with pytest.raises(ValueError, match=f"^0 .*{message}"):
        Run(model, samples(), **(batch | {"mode": "hooks"} if mode == "batch" else {"mode": mode}))
    assert not model[0]._forward_hooks
    assert not model[0]._backward_hooks


def test_frozen_layers_and_modes_that_know_better_are_not_refused() -> None:
    conv = nn.Conv2d(1, 3, 3, padding=1, padding_mode="circular")
    Run(nn.Sequential(conv), samples(), mode="functorch")
    bag = nn.EmbeddingBag(5, 3).requires_grad_(False)
    Run(nn.Sequential(bag, nn.Linear(3, 3)), samples(), mode="hooks")


def scaled_by_hook(model: nn.Module, where: str) -> Any:
    if where == "prepended":
        return model.register_forward_hook(lambda m, i, o: 20 * o, prepend=True)
    if where == "global":
        hook = torch.nn.modules.module.register_module_forward_hook
        return hook(lambda m, i, o: 20 * o if isinstance(m, nn.Linear) else None)
    if where == "gradient":
        return model.weight.register_hook(lambda g: 20 * g)

    def grow(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(20)

    return model.weight.register_post_accumulate_grad_hook(grow)


@pytest.mark.parametrize("where", ["prepended", "global", "gradient", "accumulated gradient"])
def test_hooks_that_ghost_norms_do_not_know_of_are_refused(where: str) -> None:
    run = Run(nn.Linear(6, 3), samples())
    before = weights(run.model)
    handle = scaled_by_hook(run.model, where)
    try:
        with pytest.raises(RuntimeError, match=r"forward hook comes before|has a gradient hook"):
            run.release()
    finally:
        handle.remove()
    assert torch.equal(weights(run.model), before)
    assert float(run.release().norm()) <= 6 + 1e-3


class Overwrites(nn.Module):
    """``h += layer(h)`` under autocast: autograd keeps a half-precision copy of h and does not object."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.in_place = nn.Linear(6, 6), nn.Linear(6, 3), in_place

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = x * 1.0
            if self.in_place:
                h += self.inner(h)
            else:
                h = h + self.inner(h)
            return self.outer(h).float()


def test_an_input_that_was_overwritten_after_the_forward_pass_is_refused() -> None:
    with pytest.raises(RuntimeError, match="overwritten in place"):
        Run(Overwrites(True), samples(), mode="hooks").release()
    summed: dict[str, Any] = {"criterion": nn.CrossEntropyLoss(reduction="sum"), "loss_reduction": "sum"}
    assert float(Run(Overwrites(False), samples(), mode="hooks", **summed).release().norm()) <= 6 * (6 + 1e-2)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_forward_in_evaluation_mode_cannot_take_another_ones_record(mode: str) -> None:
    run = Run(nn.Linear(6, 3), samples(), mode=mode)

    def loss(run: Run, x: Tensor, y: Tensor) -> Any:
        run.wrapper(1e-3 * x).detach()
        run.wrapper.eval()
        output = run.wrapper(x)
        run.wrapper.train()
        return run.criterion(output, y)

    before = weights(run.model)
    with pytest.raises(RuntimeError, match="evaluation mode in the forward pass"):
        run.release(loss)
    assert torch.equal(weights(run.model), before)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from opacus.layers import DPLSTM

        self.lstm, self.out = DPLSTM(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(1, len(x) + 1)
        packed = rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
        return self.out(rnn.pad_packed_sequence(self.lstm(input=packed)[0], batch_first=True)[0].sum(1))


def test_unsorted_sequences_are_refused_as_keyword_arguments_too() -> None:
    with pytest.raises(ValueError, match="enforce_sorted=False"):
        Run(Packed(), samples(), mode="hooks").release()


@pytest.mark.parametrize("manager", [BatchMemoryManager, StockBatchMemoryManager])
@pytest.mark.parametrize("misuse", ["backward", "step"])
def test_a_chunk_of_a_batch_counts_once(manager: Any, misuse: str) -> None:
    run = Run(nn.Linear(6, 3), samples(), mode="hooks", poisson_sampling=misuse == "step")
    before = weights(run.model)
    with manager(data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer) as chunks:
        for x, y in chunks:
            for _ in range(3):
                F.cross_entropy(run.wrapper(x), y).backward()
                if misuse == "step":
                    step_once_then_refuse(run)
                    break
            else:
                with pytest.raises(RuntimeError, match="3 batches were accumulated"):
                    run.optimizer.step()
            break
    assert torch.equal(weights(run.model), before)


def step_once_then_refuse(run: Run) -> None:
    """The first chunk's own step is skipped; a second one must not end the draw."""
    run.optimizer.step()
    run.optimizer.zero_grad()
    F.cross_entropy(run.wrapper(samples()[0][:2]), samples()[1][:2]).backward()
    with pytest.raises(RuntimeError, match="second step"):
        run.optimizer.step()


def test_passes_with_and_without_chunks_may_alternate() -> None:
    run = Run(nn.Linear(6, 3), samples(), mode="hooks")
    for chunked in (True, False, True, False):
        steps = 0
        if chunked:
            with BatchMemoryManager(
                data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer
            ) as chunks:
                for x, y in chunks:
                    run.optimizer.zero_grad()
                    F.cross_entropy(run.wrapper(x), y).backward()
                    run.optimizer.step()
                    steps += 1
            assert steps == 3
        else:
            assert float(run.release().norm()) <= 6 + 1e-3
