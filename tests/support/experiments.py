"""A data set of a few images, cells for it, and epsilon by another library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from scipy.special import ndtr
from torch.utils.data import TensorDataset

from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import Data
from opacus_bc.experiments.training.methods import METHODS


def tiny_data(private: int = 48, public: int = 24, test: int = 20) -> Data:
    """Noise with a bright bar whose place is the label."""
    generator = torch.Generator().manual_seed(1)

    def part(count: int) -> TensorDataset:
        y = torch.arange(count) % 10
        x = torch.randn(count, 1, 32, 32, generator=generator)
        for image, label in zip(x, y, strict=True):
            image[0, 3 * int(label) : 3 * int(label) + 3] += 2.0
        return TensorDataset(x, y)

    return Data(
        name="tiny", private=part(private), public=part(public), test=part(test), num_classes=10,
        mean=(0.0,), std=(1.0,), crop_padding=2,
    )  # fmt: skip


def tiny_cell(name: str, **changes: Any) -> Cell:
    """A cell for `tiny_data`: three steps an epoch, whole mini-sets in each."""
    method = METHODS[name]
    values: dict[str, Any] = {
        "method": method, "dataset": "tiny", "model": "bn_lenet5", "delta": 1e-3, "epochs": 2,
        "batch_size": 16, "lr": 0.05, "clip": 0.5, "seed": 3, "epsilon": 8.0 if method.private else None,
    }  # fmt: skip
    return Cell(**(values | changes))


def other_epsilon(history: Sequence[Sequence[Any]], delta: float) -> float:
    """Epsilon of a Poisson history by Google's dp-accounting, or in closed form where every sample is in."""
    return _other_epsilon(tuple(map(tuple, history)), delta)


@lru_cache
def _other_epsilon(history: tuple[tuple[Any, ...], ...], delta: float) -> float:
    if all(entry[1] == 1 for entry in history):
        mu = math.sqrt(sum(steps / sigma**2 for sigma, _, steps, *_ in history))
        return _gaussian_epsilon(mu, delta)
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    for sigma, rate, steps, kind in history:
        assert kind == "poisson"
        step = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
        accountant.compose(step, int(steps))
    return float(accountant.get_epsilon(delta))


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """By bisection of delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)."""
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        second = math.exp(middle) * ndtr(-mu / 2 - middle / mu) if middle < 700 else 0.0
        if ndtr(mu / 2 - middle / mu) - second > delta:
            low = middle
        else:
            high = middle
    return high
