"""One draw serves one step, in every mode, with and without loader workers and memory managers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import blobs, engine, mlp, weights
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from opacus_bc import ALC, BatchMemoryManager
from opacus_bc._opacus import StockBatchMemoryManager
from opacus_bc.draws.ledger import NoFreshBatchError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on one core
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

DATA, PUBLIC = blobs(48), blobs(16, seed=5)
LAYERS = 4
ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 2.0,
}
GIVEN = {"noise_generator": torch.Generator().manual_seed(1)}
PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [0.5] * LAYERS}
MODES: dict[str, dict[str, Any]] = {
    "batch": {"clipping": "batch"},
    "mini-sets": {"clipping": "batch", "mini_batch_size": 6},
    "partition": {"clipping": "batch", "mini_batch_size": 6, "sampling": "partition"},
    "batch, shuffled": {"clipping": "batch", "sampling": "shuffle"},
    "flat": {},
    "flat, shuffled": {"poisson_sampling": False},
    "flat, alc": {"alc": ALC(DataLoader(PUBLIC, batch_size=8))},
    "flat, functorch": {"grad_sample_mode": "functorch"},
    "flat, ew": {"grad_sample_mode": "ew"},
    "flat, no wrapper": {"wrap_model": False},
    "flat, secure": {},
    "per_layer": PER_LAYER,
    "ghost": {"grad_sample_mode": "ghost"},
    "ghost, secure": {"grad_sample_mode": "ghost"},
    "bk": {"grad_sample_mode": "bk"},
    "bk, shuffled": {"grad_sample_mode": "bk", "poisson_sampling": False},
    "bk, alc": {"grad_sample_mode": "bk", "alc": ALC(DataLoader(PUBLIC, batch_size=8))},
    "bk, per_layer": {"grad_sample_mode": "bk", **PER_LAYER},
    "bk, secure": {"grad_sample_mode": "bk"},
    "Opacus's flat": GIVEN,
    "Opacus's flat, shuffled": {**GIVEN, "poisson_sampling": False},
    "Opacus's per_layer": {**GIVEN, **PER_LAYER},
    "Opacus's adaptive": {"clipping": "adaptive", "poisson_sampling": False, **ADAPTIVE},
    "Opacus's ghost": {**GIVEN, "grad_sample_mode": "ghost"},
}


class Run:
    """A model made private in one of the modes."""

    def __init__(self, mode: str, workers: int = 0) -> None:
        self.model = mlp()
        self.engine = engine(secure_mode=mode.endswith("secure"))
        arguments = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, **MODES[mode]}
        wrapper, self.optimizer, *criterion, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=optim.SGD(self.model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=24, num_workers=workers),
            **arguments,
        )
        self.forward = wrapper if arguments.get("wrap_model", True) else self.model
        self.criterion = criterion[0] if criterion else nn.functional.cross_entropy

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.forward(x), y).backward()
        self.optimizer.step()

    @contextmanager
    def refuses(self) -> Iterator[None]:
        """The body raises for want of a fresh batch; weights, accountant and ledger stay what they are."""
        before, booked = weights(self.model), list(self.engine.accountant.history)
        used, sums = self.loader.ledger.draws_used, self.sums()
        with pytest.raises(NoFreshBatchError, match="needs a new batch"):
            yield
        assert torch.equal(weights(self.model), before)
        assert list(self.engine.accountant.history) == booked
        assert self.loader.ledger.draws_used == used
        assert all(a is b for a, b in zip(sums, self.sums(), strict=True))

    def sums(self) -> list[Any]:
        """What was clipped of the draw under way."""
        draw = self.optimizer._draw
        return [] if draw is None else [draw.clipped_sum, *draw.sums.values()]


MANAGERS = {"no manager": None, "ours": BatchMemoryManager, "Opacus's": StockBatchMemoryManager}


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_one_draw_serves_one_step_and_a_second_is_refused_before_anything_changes(
    mode: str, workers: int, manager: str
) -> None:
    run = Run(mode, workers)
    made = MANAGERS[manager]
    batches = run.loader
    if made is not None:
        arguments = {"data_loader": run.loader, "max_physical_batch_size": 5, "optimizer": run.optimizer}
        batches = made(**arguments).__enter__()
    if workers and made is StockBatchMemoryManager:
        with pytest.raises(RuntimeError, match=r"use opacus_bc.BatchMemoryManager \(same arguments\)"):
            next(iter(batches))
        return
    steps = deliveries = 0
    for x, y in batches:
        run.step(x, y)
        deliveries += 1
        with run.refuses():
            run.step(x, y)
        moved = run.optimizer.weights_moved
        steps += moved
        assert len(run.engine.accountant) == run.optimizer.steps_taken == steps
    assert steps == 2  # a pass of 48 samples in batches of 24
    assert deliveries >= steps
    with run.refuses():
        run.optimizer.step()
    run.engine.get_epsilon(1e-3)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_two_draws_are_not_mixed(mode: str, workers: int) -> None:
    run = Run(mode, workers)
    before = weights(run.model)
    batches = iter(run.loader)
    for _ in range(2):
        x, y = next(batches)
        run.optimizer.zero_grad()
        run.criterion(run.forward(x), y).backward()
    with pytest.raises(RuntimeError, match="several batches were delivered"):
        run.optimizer.step()
    assert torch.equal(weights(run.model), before)
    assert len(run.engine.accountant) == 0


@pytest.mark.parametrize("mode", [name for name in MODES if "mini-sets" not in name and name != "partition"])
def test_a_draw_left_unfinished_does_not_reach_the_next_release(mode: str) -> None:
    run = Run(mode)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as chunks:
        run.step(*next(iter(chunks)))
        assert len(run.engine.accountant) == 0
    next(iter(run.loader))
    assert not run.sums()


@pytest.mark.parametrize(
    "mode", ["Opacus's flat", "Opacus's ghost", "flat", "per_layer", "ghost", "bk", "batch"]
)
def test_signals_of_a_users_own_cannot_join_draws(mode: str) -> None:
    """Opacus adds the next batch to the draw when its user calls ``signal_skip_step``."""
    run = Run(mode)
    batches = iter(run.loader)
    run.step(*next(batches))
    before = weights(run.model)
    run.optimizer.signal_skip_step(do_skip=True)
    with pytest.raises(RuntimeError, match="several batches were delivered"):
        run.step(*next(batches))
    assert torch.equal(weights(run.model), before)
    assert len(run.engine.accountant) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_on_a_used_batch_does_not_serve_the_next_delivery(mode: str) -> None:
    """The next batch gets no backward: a step would release the used draw once more."""
    run = Run(mode)
    batches = iter(run.loader)
    x, y = next(batches)
    run.step(x, y)
    run.criterion(run.forward(x), y).backward()
    next(batches)
    before, booked = weights(run.model), list(run.engine.accountant.history)
    with pytest.raises((RuntimeError, ValueError, AttributeError)):  # the last is Opacus's ghost optimizer's
        run.optimizer.step()
    assert torch.equal(weights(run.model), before)
    assert list(run.engine.accountant.history) == booked


@pytest.mark.parametrize("mode", ["batch", "mini-sets", "flat", "flat, shuffled"])
@pytest.mark.parametrize("manager", [BatchMemoryManager, StockBatchMemoryManager])
def test_a_memory_managers_loader_has_the_length_of_its_chunks(manager: Any, mode: str) -> None:
    """24 samples a draw in chunks of 6 or 3, two draws a pass; in expectation where draws vary in size."""
    run = Run(mode)
    arguments = {"data_loader": run.loader, "max_physical_batch_size": 3, "optimizer": run.optimizer}
    with manager(**arguments) as chunks:
        assert len(chunks) == 2 * 24 // 3
