"""Individual clipping counts samples: rows that are not samples are refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import engine, weights
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from opacus_bc import ALC, BatchMemoryManager
from opacus_bc.gradients.probe import CouplingProbe

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
N, FEATURES, CLASSES = 24, 4, 2
DATA = TensorDataset(
    torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(0)), torch.arange(N) % CLASSES
)
PUBLIC = DataLoader(
    TensorDataset(torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2),
    batch_size=4,
)
HOOKS = {"grad_sample_mode": "hooks"}
MODES: dict[str, dict[str, Any]] = {
    "hooks": HOOKS,
    "functorch": {"grad_sample_mode": "functorch"},
    "ew": {"grad_sample_mode": "ew"},
    "ghost": {"grad_sample_mode": "ghost"},
    "alc": {**HOOKS, "alc": ALC(PUBLIC)},
    "per_layer": {**HOOKS, "clipping": "per_layer"},
    "bk": {"grad_sample_mode": "bk"},
    "bk, per_layer": {"grad_sample_mode": "bk", "clipping": "per_layer"},
    "bk, alc": {"grad_sample_mode": "bk", "alc": ALC(PUBLIC)},
    "Opacus's flat": {"noise_generator": torch.Generator().manual_seed(1)},
    "Opacus's per_layer": {"noise_generator": torch.Generator().manual_seed(1), "clipping": "per_layer"},
}
REFUSED = r"the loader delivered \d+ samples|rows for \d+ losses|with \d+ and \d+ rows|rows for a batch of"
BY_TORCH = "ExpandedWeights to have batch size matching input"  # torch's own refusal in mode "ew"
BY_OPACUS = "Parameter tying is not supported with Ghost Clipping"


class Plain(nn.Module):
    """One row a sample everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.inner(x)))
        return out


class Frames(Plain):
    """Four frames of a sample are folded into the batch, and averaged behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, 1)).reshape(len(x), FEATURES, -1).mean(1)


class Prompt(Plain):
    """A layer runs on one row, and its result is added to all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Linear(1, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.prompt(x.new_ones(1, 1)))


class Experts(Plain):
    """Samples are sent to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(FEATURES, 6)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.arange(len(x)) % 2 == 0
        hidden = x.new_zeros(len(x), 6)
        hidden[first], hidden[~first] = self.inner(x[first]), self.other(x[~first])
        out: Tensor = self.outer(hidden)
        return out


class Tied(Plain):
    """One layer is used for the samples and, with one row, for all of them at once."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.0 * x) + self.outer(torch.tanh(self.inner(x.new_ones(1, FEATURES))))


def several_views(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples for _ in range(3)])


def left_out(samples: list[Any]) -> Any:
    return default_collate(samples[: len(samples) // 2])


class Run:
    """A model made private in one of the modes, and one batch taken through it."""

    def __init__(self, model: nn.Module, mode: str, collate: Any = None, data: Any = DATA) -> None:
        self.model, self.engine = model, engine()
        count = len(list(model.parameters()))
        bound: Any = [0.5] * count if MODES[mode].get("clipping") == "per_layer" else 0.5
        self.wrapper, self.optimizer, *criterion, self.loader = self.engine.make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=12, collate_fn=collate),
            noise_multiplier=1.0,
            max_grad_norm=bound,
            **MODES[mode],
        )
        self.criterion = criterion[0] if criterion else F.cross_entropy
        for guest in self.engine._runs[0].guests:  # rows are counted in every step, probed in the first ones
            if isinstance(guest, CouplingProbe):
                guest.remove()

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.wrapper(x), y).backward()
        self.optimizer.step()

    def refuses(
        self,
        loop: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, y: (x, y),
        message: str = REFUSED,
    ) -> None:
        before = weights(self.model)
        x, y = next(iter(self.loader))
        delivered = self.loader.ledger.outstanding()
        with pytest.raises(RuntimeError, match=message):
            self.step(*loop(x, y))
        assert torch.equal(weights(self.model), before)
        assert len(self.engine.accountant) == 0
        assert self.loader.ledger.outstanding() is delivered


modes = pytest.mark.parametrize("mode", MODES)


@modes
@pytest.mark.parametrize("collate", [several_views, left_out])
def test_rows_that_a_collate_function_makes_or_leaves_out_are_refused(mode: str, collate: Any) -> None:
    Run(Plain(), mode, collate).refuses()


@modes
def test_views_that_the_loop_makes_are_refused(mode: str) -> None:
    Run(Plain(), mode).refuses(lambda x, y: (torch.cat([x, x + 0.1]), torch.cat([y, y])))


@modes
def test_views_that_a_data_set_item_holds_are_refused(mode: str) -> None:
    x, y = DATA.tensors
    views = TensorDataset(torch.stack([x, x + 0.1, x - 0.1], dim=1), y)
    run = Run(Plain(), mode, data=views)
    run.refuses(lambda x, y: (x.flatten(0, 1), y.repeat_interleave(3)))


@modes
def test_a_part_of_a_batch_is_refused(mode: str) -> None:
    Run(Plain(), mode).refuses(lambda x, y: (x[:1], y[:1]))


@modes
@pytest.mark.parametrize("model", [Frames, Prompt, Experts])
def test_layers_with_other_rows_than_samples_are_refused(mode: str, model: Any) -> None:
    Run(model(), mode).refuses(message=BY_TORCH if mode == "ew" else REFUSED)


@modes
def test_a_layer_used_once_for_the_samples_and_once_for_all_of_them_is_refused(mode: str) -> None:
    Run(Tied(), mode).refuses(message={"ew": BY_TORCH, "ghost": BY_OPACUS}.get(mode, REFUSED))


@modes
def test_one_row_a_sample_is_accepted_also_in_chunks(mode: str) -> None:
    run = Run(Plain(), mode)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as chunks:
        for x, y in chunks:
            run.step(x, y)
    assert len(run.engine.accountant) == 2
