"""A pickle of a model after a step holds its weights, and nothing of the batch that the step has used."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from support import blobs, engine, mlp
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from opacus_bc import ALC

ROWS = 13  # of a batch, and of nothing else
DATA = blobs(2 * ROWS)
PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [0.5] * 4}
ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 2.0,
}
PUBLIC = DataLoader(blobs(16, seed=1), batch_size=8)
MODES: dict[str, dict[str, Any]] = {  # a model with Opacus's functorch hooks cannot be pickled at all
    "flat": {},
    "flat, alc": {"alc": ALC(PUBLIC)},
    "ew": {"grad_sample_mode": "ew"},
    "ghost": {"grad_sample_mode": "ghost"},
    "per_layer": PER_LAYER,
    "bk": {"grad_sample_mode": "bk"},
    "Opacus's flat": {"noise_generator": torch.Generator().manual_seed(1)},
    "Opacus's per_layer": {"noise_generator": torch.Generator().manual_seed(1), **PER_LAYER},
    "Opacus's adaptive": ADAPTIVE,
    "batch": {"clipping": "batch"},
}


class Listing(pickle.Pickler):
    """Notes every tensor that goes into a pickle."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.tensors: list[Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            self.tensors.append(obj)
        return NotImplemented


def pickled(module: nn.Module) -> list[Tensor]:
    listing = Listing()
    listing.dump(module)
    return listing.tensors


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("mode", MODES)
def test_a_pickle_after_a_step_holds_nothing_of_its_batch(mode: str) -> None:
    """Per-sample gradients of the last batch were in it, and private inputs could be rebuilt from them."""
    model = mlp()
    wrapper, optimizer, *criterion, loader = engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=ROWS),
        poisson_sampling=False,
        **{"noise_multiplier": 1.0, "max_grad_norm": 0.5, **MODES[mode]},
    )
    loss = criterion[0] if criterion else nn.functional.cross_entropy
    known = {id(p) for p in model.parameters()}
    for x, y in loader:
        assert len(x) == ROWS
        optimizer.zero_grad()
        loss(wrapper(x), y).backward()
        optimizer.step()
        for p in model.parameters():
            assert not any(isinstance(value, Tensor) for value in vars(p).values()), vars(p).keys()
        found = pickled(model)
        assert known <= {id(tensor) for tensor in found}
        assert all(id(tensor) in known for tensor in found if isinstance(tensor, nn.Parameter))
        assert sum(tensor.numel() for tensor in found) <= 2 * sum(p.numel() for p in model.parameters())
        assert not any(ROWS in tensor.shape for tensor in found)


def test_the_listing_sees_what_hangs_on_a_parameter() -> None:
    model = mlp()
    model[0].weight.grad_sample = torch.zeros(ROWS, 2)  # type: ignore[union-attr,assignment]
    assert any(tensor.shape == (ROWS, 2) for tensor in pickled(model))
