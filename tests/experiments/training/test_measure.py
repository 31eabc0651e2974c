"""What a method costs: the bytes of its tensors, counted exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import load
from opacus_bc.experiments.training.measure import TensorMemory, peak_bytes
from opacus_bc.experiments.training.methods import METHODS


def test_the_peak_counts_what_lives_together_and_not_what_is_gone() -> None:
    with TensorMemory() as memory:
        for _ in range(5):
            torch.zeros(1000)  # one after the other
        kept = [torch.zeros(1000) for _ in range(3)]
        assert memory.peak == 3 * 4000
        view = kept[0].view(10, 100)[2:]  # no memory of its own
        assert memory.peak == 3 * 4000
        del kept
        second = torch.zeros(500)
    assert memory.peak == 3 * 4000
    assert len(view) == 8
    assert len(second) == 500


def test_what_autograd_keeps_for_the_backward_pass_counts() -> None:
    layers = nn.Sequential(*[nn.Tanh() for _ in range(6)])
    x = torch.zeros(1000, requires_grad=True)
    with TensorMemory() as memory, torch.no_grad():
        layers(x)
    without = memory.peak
    with TensorMemory() as memory:
        layers(x)
    assert without <= 2 * 4000
    assert memory.peak == 6 * 4000


def test_memory_of_training_is_the_same_every_time_and_mini_sets_need_less() -> None:
    data = load("digits")
    cell = Cell(
        method=METHODS["bc"], dataset="digits", model="smallnet", epsilon=None, delta=1e-4, epochs=1,
        batch_size=64, lr=0.1, clip=1.0, seed=0, noise_multiplier=1.0,
    )  # fmt: skip
    found = {name: peak_bytes(replace(cell, method=METHODS[name]), data) for name in ("bc", "gbc-8", "ic")}
    assert peak_bytes(cell, data) == pytest.approx(found["bc"], rel=0.2)  # draws differ in size
    assert found["gbc-8"] < found["bc"] < found["ic"]


def test_the_data_set_does_not_count_and_neither_do_its_rows() -> None:
    images = torch.zeros(1000, 100)
    with TensorMemory(outside=[images]) as memory:
        rows = [images[i] for i in range(5)]
        batch = torch.stack(rows)
    assert memory.peak == batch.nbytes == 5 * 400
    data = load("digits")
    cell = Cell(
        method=METHODS["no-dp"], dataset="digits", model="smallnet", delta=1e-4, epochs=1, batch_size=4,
        lr=0.1, clip=1.0, seed=0,
    )  # fmt: skip
    assert peak_bytes(cell, data) < data.private.tensors[0].nbytes / 4
