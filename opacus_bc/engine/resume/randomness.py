"""Every random stream of a run: taken for an exact resume, put back, or replaced by a fresh one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from opacus_bc.engine.run import Run
from opacus_bc.mechanism.noise import TorchNoise
from opacus_bc.mechanism.randomness import (
    as_arrays,
    as_tensors,
    entropy,
    generators_of,
    put_streams,
    take_streams,
)


def random_state(run: Run | None) -> dict[str, Any]:
    """The states of all generators that steer a run. They reveal its past and future noise."""
    if run is None:
        return take_streams()
    noise, draws = run.optimizer.noise, run.loader.draws
    bits = _bit_generator(draws)
    return {
        **take_streams(_given(run)),
        "noise": noise.state_dict() if isinstance(noise, TorchNoise) else None,
        "draws": None if bits is None else as_tensors(bits.state),
        "mini_sets": getattr(draws, "mini_sets", None),
    }


def load_random_state(run: Run | None, state: dict[str, Any]) -> None:
    """Put back what :func:`random_state` took."""
    if run is None:
        put_streams({**state, "given": []})
        return
    put_streams(state, _given(run))
    noise, draws = run.optimizer.noise, run.loader.draws
    if isinstance(noise, TorchNoise) and state["noise"] is not None:
        noise.load_state_dict(state["noise"])
    if state["draws"] is not None:
        _bit_generator(draws).state = as_arrays(state["draws"])
    if state["mini_sets"] is not None:
        draws.mini_sets = state["mini_sets"]  # type: ignore[attr-defined]  # a FixedPartition's


def draw_fresh_randomness(run: Run | None) -> None:
    """Seed every generator of a run from the operating system.

    Without it a script that passes seeded generators would add the noise of its first steps once more when
    it is resumed, and the same noise on two releases can be subtracted.
    """
    torch.seed()
    random.seed()
    np.random.seed()  # noqa: NPY002 (the legacy stream is what users seed)
    if run is None:
        return
    for generator in _given(run):
        generator.manual_seed(entropy())
    if isinstance(run.optimizer.noise, TorchNoise):
        run.optimizer.noise.reseed(_agreed_entropy(run))
    bits = _bit_generator(run.loader.draws)
    if isinstance(bits, np.random.Philox):
        bits.state = np.random.Philox(_agreed_entropy(run)).state


def _agreed_entropy(run: Run) -> int:
    return entropy() if run.ranks is None else run.ranks.agree(entropy())


def _given(run: Run) -> list[torch.Generator]:
    """The generators that the user passed, or that Opacus's optimizer draws noise from."""
    noise = run.optimizer.noise
    ours = [run.optimizer.generator, noise.given if isinstance(noise, TorchNoise) else None]
    found = [*generators_of(run.data_loader), *(g for g in ours if isinstance(g, torch.Generator))]
    return list(dict.fromkeys(found))


def _bit_generator(draws: Any) -> Any:
    generator = getattr(draws, "generator", None)
    return None if generator is None else generator.bit_generator
