"""Weights move by clipped and noised releases and by nothing else, whatever a loop does around them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant
from support import blobs, cross_entropy, engine, mlp
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

from opacus_bc import BatchMemoryManager
from opacus_bc._opacus import StockBatchMemoryManager
from opacus_bc.gradients import samples

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on one core
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]
DATA, C = blobs(48), 1e-6
PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [C] * 4}
MODES: dict[str, dict[str, Any]] = {
    "batch": {"clipping": "batch"},
    "flat": {},
    "per_layer": PER_LAYER,
    "Opacus's flat": {"noise_generator": torch.Generator().manual_seed(1)},
    "Opacus's per_layer": {"noise_generator": torch.Generator().manual_seed(1), **PER_LAYER},
    "ghost": {"grad_sample_mode": "ghost"},
    "bk": {"grad_sample_mode": "bk"},
    "bk, per_layer": {"grad_sample_mode": "bk", **PER_LAYER},
}
INDIVIDUAL = [mode for mode in MODES if mode != "batch"]
# Noise and clipped gradients move weights by less than this at C = 1e-6, raw ones by far more.
TINY = 1e-4


def everything(model: nn.Module) -> Tensor:
    """All entries, frozen or not."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Run:
    """A model made private with a bound so small that whatever escapes it shows."""

    def __init__(self, mode: str, model: nn.Module | None = None, **loader: Any) -> None:
        self.model = mlp() if model is None else model
        self.engine = engine()
        self.plain = optim.SGD(self.model.parameters(), lr=1.0)
        wrapper, self.optimizer, *criterion, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=self.plain,
            data_loader=DataLoader(loader.pop("data", DATA), batch_size=24, **loader),
            **{"noise_multiplier": 1.0, "max_grad_norm": C, **MODES[mode]},
        )
        self.wrapper = wrapper
        self.criterion = criterion[0] if criterion else nn.functional.cross_entropy
        self.start = everything(self.model)

    def backward(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.wrapper(x), y).backward()

    def moved(self) -> float:
        return float((everything(self.model) - self.start).abs().max())


def again(run: Run, x: Tensor, y: Tensor) -> Tensor:
    run.plain.zero_grad()
    loss = nn.functional.cross_entropy(run.model(x), y)
    loss.backward()
    return loss


MISUSES: dict[str, Callable[[Run, Tensor, Tensor], Any]] = {
    "a closure": lambda run, x, y: run.plain.step(lambda: again(run, x, y)),
    "a later backward": lambda run, x, y: (again(run, x, y), run.plain.step()),
    "a written gradient": lambda run, x, y: (run.model[0].weight.grad.add_(1.0), run.plain.step()),
    "a new batch": lambda run, x, y: (next(iter(run.loader)), again(run, x, y), run.plain.step()),
}


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.parametrize("mode", ["batch", "flat", "bk", "Opacus's flat"])
def test_the_torch_optimizer_moves_weights_by_the_release_alone(mode: str, misuse: str) -> None:
    run = Run(mode)
    x, y = next(iter(run.loader))
    run.backward(x, y)
    assert run.optimizer.pre_step()
    if mode not in ("batch", "bk"):
        run.wrapper.disable_hooks()  # the misuse's own passes are not about per-sample gradients
    with pytest.raises(RuntimeError, match=r"Nothing was moved|rows for a batch of"):
        MISUSES[misuse](run, x, y)
    assert run.moved() == 0


@pytest.mark.parametrize("mode", ["batch", "flat", "bk"])
def test_an_interrupted_step_leaves_no_licence_behind(mode: str) -> None:
    run = Run(mode)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = run.plain.register_step_pre_hook(interrupted)
    x, y = next(iter(run.loader))
    run.backward(x, y)
    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step()
    handle.remove()
    with pytest.raises(RuntimeError, match="Nothing was moved"):
        run.plain.step()
    assert run.moved() == 0


@pytest.mark.parametrize("thawed", [True, False], ids=["thawed", "frozen"])
@pytest.mark.parametrize("mode", ["flat", "bk", "Opacus's flat", "ghost"])
def test_a_layer_thawed_or_frozen_within_a_draw_is_refused_before_anything_changes(
    mode: str, thawed: bool
) -> None:
    model = mlp()
    model[0].requires_grad_(not thawed)
    run = Run(mode, model)

    def two_chunks(batches: Any) -> None:
        for number in range(2):
            model[0].requires_grad_(thawed == bool(number))
            run.backward(*next(batches))
            run.optimizer.step()

    with (
        BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
        ) as chunks,
        pytest.raises(RuntimeError, match=r"within a draw|frozen when|norms of this batch are missing"),
    ):
        two_chunks(iter(chunks))
    assert run.moved() == 0
    assert len(run.engine.accountant) == 0


def test_ghost_clipping_refuses_a_layer_that_was_frozen_at_make_private() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    run = Run("ghost", model)
    model[0].requires_grad_(True)
    run.backward(*next(iter(run.loader)))
    with pytest.raises(RuntimeError, match="frozen when make_private was called"):
        run.optimizer.step()
    assert run.moved() == 0


@pytest.mark.parametrize("mode", ["ghost", "Opacus's per_layer"])
def test_bounds_that_opacus_stores_cannot_be_changed_under_the_noise(mode: str) -> None:
    run = Run(mode)
    if mode == "ghost":
        run.wrapper.max_grad_norm = 10.0
    else:
        run.optimizer.max_grad_norms = [10.0] * 4
    run.backward(*next(iter(run.loader)))
    with pytest.raises(RuntimeError, match="the clip bounds were changed"):
        run.optimizer.step()
    assert run.moved() == 0


@pytest.mark.parametrize("mode", ["batch", "flat", "bk", "Opacus's flat"])
def test_a_superseded_iterator_takes_no_batch_of_the_newer_pass(mode: str) -> None:
    """Persistent workers serve the newest pass, whoever asks."""
    data = [(torch.full((4,), float(i)), i % 2) for i in range(48)]
    run = Run(mode, data=data, num_workers=1, persistent_workers=True)
    older = iter(run.loader)
    next(older)
    newer = iter(run.loader)
    with pytest.raises(RuntimeError, match="superseded"):
        next(older)
    ledger = run.loader.ledger
    for x, _ in newer:
        assert len(x) == ledger.outstanding().size or mode == "batch"
        run.backward(x, torch.zeros(len(x), dtype=torch.long))
        run.optimizer.step()
    assert len(run.engine.accountant) == 2


class Failing(Dataset[Any]):
    """Raises once, at a chosen call."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise OSError("the disk is away")
        return DATA[index]


@pytest.mark.parametrize("mode", ["batch", "flat", "bk", "Opacus's flat"])
def test_chunks_after_one_that_was_never_delivered_serve_no_step(mode: str) -> None:
    run = Run(mode, data=Failing(at=10))
    manager = StockBatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
    )
    with manager as chunks:
        batches, failures = iter(chunks), 0
        while not failures:
            try:
                x, y = next(batches)
            except OSError:
                failures += 1
            else:
                run.backward(x, y)
                run.optimizer.step()
        run.backward(*next(batches))
        with pytest.raises(RuntimeError, match="announced and never delivered"):
            run.optimizer.step()
    assert len(run.engine.accountant) == 0


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize("mode", ["flat", "Opacus's flat"])
def test_two_optimizers_of_one_model_do_not_share_an_unfinished_draw(mode: str) -> None:
    first = Run(mode)
    head = optim.SGD(first.model.parameters(), lr=1.0)
    _, second, loader = first.engine.make_private(
        module=first.wrapper,
        optimizer=head,
        data_loader=DataLoader(DATA, batch_size=24),
        noise_multiplier=0.0,
        max_grad_norm=C,
        noise_generator=torch.Generator().manual_seed(1),
    )
    with BatchMemoryManager(
        data_loader=first.loader, max_physical_batch_size=4, optimizer=first.optimizer
    ) as chunks:
        first.backward(*next(iter(chunks)))
        first.optimizer.step()
        held = {id(p): s.clone() for p, s in first.optimizer._draw.sums.items()}
        assert held
        assert all(getattr(p, "summed_grad", None) is None for p in first.model.parameters())
        x, y = next(iter(loader))
        second.zero_grad()
        cross_entropy(first.wrapper, x, y).backward()
        second.step()
        for p, s in first.optimizer._draw.sums.items():
            assert torch.equal(held[id(p)], s)


def test_per_sample_norms_do_not_stay_on_the_ghost_wrapper() -> None:
    run = Run("ghost")
    run.backward(*next(iter(run.loader)))
    run.optimizer.step()
    assert run.wrapper._per_sample_gradient_norms is None


def test_parameters_outside_the_optimizer_keep_no_per_sample_gradients() -> None:
    model = mlp()
    maker = engine()
    wrapper, optimizer, loader = maker.make_private(
        module=model,
        optimizer=optim.SGD(model[2].parameters(), lr=1.0),
        data_loader=DataLoader(DATA, batch_size=24),
        noise_multiplier=1.0,
        max_grad_norm=C,
    )
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(wrapper, x, y).backward()
        optimizer.step()
    assert all(getattr(p, "grad_sample", None) is None for p in model.parameters())
    assert len(maker.accountant) == 2


def test_a_checkpoint_does_not_take_what_hangs_on_parameters() -> None:
    run = Run("flat")
    with pytest.raises(ValueError, match="keep_vars"):
        run.engine.save_checkpoint(
            path=io.BytesIO(), module=run.model, module_state_dict_kwargs={"keep_vars": True}
        )


class Lookahead(optim.Optimizer):
    """A wrapper around another optimizer that forgets its parent's constructor."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state


def test_an_optimizer_without_step_hooks_is_refused_and_gradients_stay() -> None:
    model = mlp()
    cross_entropy(model, *DATA[:4]).backward()
    held = [p.grad for p in model.parameters()]
    with pytest.raises(ValueError, match=r"super\(\).__init__"):
        engine().make_private(
            module=model,
            optimizer=Lookahead(optim.SGD(model.parameters(), lr=0.1)),
            data_loader=DataLoader(DATA, batch_size=24),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))


def test_a_set_up_that_is_broken_off_leaves_nothing_on_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(wrapper: Any) -> None:
        assert any(vars(p) for p in wrapper.parameters())  # Opacus has been there
        raise RuntimeError("broken off")

    monkeypatch.setattr(samples, "run_live", broken)
    model = mlp()
    cross_entropy(model, *DATA[:4]).backward()
    held = [p.grad for p in model.parameters()]
    with pytest.raises(RuntimeError, match="broken off"):
        engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=24),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
    assert not any(vars(p) for p in model.parameters())


@pytest.mark.parametrize("mode", INDIVIDUAL)
def test_a_users_own_accountant_may_listen_too(mode: str) -> None:
    run, other = Run(mode), RDPAccountant()
    run.optimizer.attach_step_hook(other.get_optimizer_hook_fn(sample_rate=0.5))
    run.backward(*next(iter(run.loader)))
    run.optimizer.step()
    assert len(other) == len(run.engine.accountant) == 1
    assert run.moved() < TINY


@pytest.mark.parametrize("mode", MODES)
def test_the_loader_that_make_private_returned_cannot_be_made_private_again(mode: str) -> None:
    """Two optimizers on one loader would share its draws."""
    run, other = Run(mode), mlp()
    with pytest.raises(ValueError, match="pass the DataLoader that you made"):
        engine().make_private(
            module=other,
            optimizer=optim.SGD(other.parameters(), lr=1.0),
            data_loader=run.loader,
            **{"noise_multiplier": 1.0, "max_grad_norm": C, **MODES[mode]},
        )
    assert not any(vars(p) for p in other.parameters())
