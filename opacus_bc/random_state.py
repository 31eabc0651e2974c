"""Every random stream of a run: taken for an exact resume, put back, or replaced by a fresh one."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opacus_bc.noise import TorchNoise
from opacus_bc.run import Run


def random_state(run: Run | None) -> dict[str, Any]:
    """The states of all generators that steer a run. They reveal its past and future noise."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": _tensors(np.random.get_state(legacy=False)),  # noqa: NPY002 (the legacy stream is what users seed)
    }
    if run is None:
        return state
    noise, bits = getattr(run.optimizer, "noise", None), _bit_generator(run.draws)
    return {
        **state,
        "given": [generator.get_state() for generator in _given(run)],
        "noise": noise.state_dict() if isinstance(noise, TorchNoise) else None,
        "draws": None if bits is None else _tensors(bits.state),
        "mini_sets": getattr(run.draws, "mini_sets", None),
    }


def load_random_state(run: Run | None, state: dict[str, Any]) -> None:
    """Put back what :func:`random_state` took."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state(_arrays(state["numpy"]))  # noqa: NPY002 (the legacy stream is what users seed)
    if run is None or "given" not in state:
        return
    for generator, held in zip(_given(run), state["given"], strict=True):
        generator.set_state(held)
    if state["noise"] is not None:
        run.optimizer.noise.load_state_dict(state["noise"])
    if state["draws"] is not None:
        _bit_generator(run.draws).state = _arrays(state["draws"])
    if state["mini_sets"] is not None:
        run.draws.mini_sets = state["mini_sets"]  # type: ignore[union-attr]  # only a FixedPartition has them


def draw_fresh_randomness(run: Run | None) -> None:
    """Seed every generator of a run from the operating system.

    Without it a script that starts with ``torch.manual_seed(0)`` would add the noise of its first steps once
    more when it is resumed, and the same noise on two releases can be subtracted.
    """
    torch.seed()
    random.seed()
    np.random.seed()  # noqa: NPY002 (the legacy stream is what users seed)
    if run is None:
        return
    for generator in _given(run):
        generator.manual_seed(_entropy())
    noise = getattr(run.optimizer, "noise", None)
    if isinstance(noise, TorchNoise):
        noise.reseed(_agreed_entropy(run))
    if isinstance(_bit_generator(run.draws), np.random.Philox):
        _bit_generator(run.draws).state = np.random.Philox(_agreed_entropy(run)).state


def _entropy() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1


def _agreed_entropy(run: Run) -> int:
    return _entropy() if run.ranks is None else run.ranks.agree(_entropy())


def _given(run: Run) -> list[torch.Generator]:
    """The generators that the user passed: for the noise, and with the data loader."""
    candidates = [
        run.data_loader.generator,
        getattr(run.data_loader.sampler, "generator", None),
        getattr(run.optimizer, "generator", None),
        getattr(getattr(run.optimizer, "noise", None), "given", None),
    ]
    found = {id(g): g for g in candidates if isinstance(g, torch.Generator)}
    return list(found.values())


def _bit_generator(draws: Any) -> Any:
    generator = getattr(draws, "generator", None)
    return None if generator is None else generator.bit_generator


def _tensors(state: Any) -> Any:
    """Arrays as tensors, which ``weights_only=True`` can load."""
    if isinstance(state, dict):
        return {key: _tensors(value) for key, value in state.items()}
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _arrays(value) for key, value in state.items()}
    return state.numpy().copy() if isinstance(state, Tensor) else state
