"""Random streams: seeds, the generators that draw batches, and torch's, numpy's and Python's global ones."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn
from torch.utils.data import DataLoader


def entropy() -> int:
    """63 bits of the operating system's entropy."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def fresh_seed(generator: torch.Generator | None = None) -> int:
    """A 63-bit seed: from ``generator``, or from the operating system.

    Never from torch's default generator: a script that seeds it in every epoch, or that is started twice,
    would draw the same noise again, and the same noise on two releases can be subtracted.
    """
    if generator is None:
        return entropy()
    return int(torch.randint(0, 2**63 - 1, (), generator=generator).item())


def secure_key() -> int:
    """128 bits of the operating system's entropy."""
    return int.from_bytes(os.urandom(16), "little")


def secure_generator(key: int | None = None) -> Generator:
    """A numpy generator over AES in counter mode.

    Args:
        key: What ranks have agreed on; None draws one.

    Raises:
        ImportError: ``randomgen`` is not installed (extra ``secure``).
    """
    try:
        from randomgen import AESCounter
    except ImportError as error:
        raise ImportError(
            "secure_mode=True needs the package randomgen: pip install 'opacus-bc[secure]'"
        ) from error
    return np.random.Generator(AESCounter(key=secure_key() if key is None else key))


def sampling_generator(*, secure: bool, generator: torch.Generator | None = None) -> Generator:
    """The numpy generator that draws batches: cryptographic, or seeded as :func:`fresh_seed` says."""
    if secure:
        return secure_generator()
    return np.random.Generator(np.random.Philox(fresh_seed(generator)))


def generators_of(*loaders: DataLoader[Any]) -> list[torch.Generator]:
    """The generators that loaders and their samplers were given, each once."""
    found = [g for loader in loaders for g in (loader.generator, getattr(loader.sampler, "generator", None))]
    return list(dict.fromkeys(g for g in found if isinstance(g, torch.Generator)))


def generators_within(module: nn.Module) -> list[torch.Generator]:
    """The generators that a model's layers hold as attributes."""
    return [g for child in module.modules() for g in vars(child).values() if isinstance(g, torch.Generator)]


def take_streams(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """The states of torch's, numpy's and Python's global streams and of ``generators``: plain and tensors."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's stub has no types
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if in_use else [],
        "python": random.getstate(),
        "numpy": as_tensors(np.random.get_state(legacy=False)),  # noqa: NPY002 (the stream that users seed)
        "given": [generator.get_state() for generator in generators],
    }


def put_streams(state: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Put back what :func:`take_streams` took."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state(as_arrays(state["numpy"]))  # noqa: NPY002 (the stream that users seed)
    for generator, held in zip(generators, state["given"], strict=True):
        generator.set_state(held)


def seed_streams(seed: int, generators: Sequence[torch.Generator] = ()) -> None:
    """Seed the global streams and ``generators`` with one number."""
    # torch.manual_seed would format a stack trace for every backend that is not in use (2 ms).
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's stub has no types
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the stream that users seed)
    for generator in generators:
        generator.manual_seed(seed)


@contextmanager
def isolated_randomness(seed: int, *loaders: DataLoader[Any]) -> Iterator[None]:
    """Run the body with every random stream seeded, and put the streams back afterwards.

    >>> before = torch.get_rng_state()
    >>> with isolated_randomness(7):
    ...     first = torch.rand(3)
    >>> with isolated_randomness(7):
    ...     assert torch.equal(first, torch.rand(3))
    >>> torch.equal(before, torch.get_rng_state())
    True
    """
    generators = generators_of(*loaders)
    state = take_streams(generators)
    try:
        seed_streams(seed, generators)
        yield
    finally:
        put_streams(state, generators)


def as_tensors(state: Any) -> Any:
    """Arrays in nested dicts as tensors, which ``torch.load(weights_only=True)`` can read."""
    if isinstance(state, dict):
        return {key: as_tensors(value) for key, value in state.items()}
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


def as_arrays(state: Any) -> Any:
    """The inverse of :func:`as_tensors`."""
    if isinstance(state, dict):
        return {key: as_arrays(value) for key, value in state.items()}
    return state.numpy().copy() if isinstance(state, Tensor) else state
