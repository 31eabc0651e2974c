"""Gaussian noise: torch generators, or a cryptographic bit generator.

Noise, sampling and augmentation use separate streams. The noise has generators of its own, seeded by the
operating system, and never touches torch's default generator; a run is repeated by passing
``noise_generator=`` and a DataLoader with a ``generator=``.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from opacus_bc.mechanism.clipping import accumulation_dtype
from opacus_bc.mechanism.randomness import entropy, secure_generator

_LARGE = 2**18  # entries from which a second core pays
_PIECE = 2**16  # entries that stay in the cache between being drawn and being added


class NoiseSource(Protocol):
    """Where a release's Gaussian noise comes from."""

    secure: bool

    def normal(self, like: Tensor, std: float) -> Tensor:
        """Independent N(0, std^2) entries with the shape and device of ``like``, in float32 or float64."""
        ...

    def add_(self, tensor: Tensor, std: float) -> None:
        """Add independent N(0, std^2) noise to every entry of a float32 or float64 tensor, in place."""
        ...


class TorchNoise:
    """Noise from torch generators, one for each device, or from the one generator the user passed.

    ``offset`` keeps processes apart that share a seed and must not share noise.

    **Edge cases**: a user's generator on another device than the parameters draws there and moves the noise.
    After a fork the child starts streams of its own: noise that two processes share could be subtracted.
    """

    secure = False

    def __init__(self, generator: torch.Generator | None = None, *, offset: int = 0) -> None:
        self._given = generator
        self._offset = offset
        self._pid = os.getpid()
        self._streams: dict[tuple[torch.device, int], torch.Generator] = {}
        self._seed = entropy() if generator is None else 0

    def stream(self, device: torch.device, number: int = 0) -> torch.Generator:
        """One of the generators that serve ``device``."""
        if self._given is not None:
            return self._given
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self.reseed(entropy())
        key = (device, number)
        if key not in self._streams:
            generator = torch.Generator(device=device)
            # Streams get different seeds: the same noise on two tensors could be subtracted.
            generator.manual_seed((self._seed + self._offset + len(self._streams)) % 2**63)
            self._streams[key] = generator
        return self._streams[key]

    @property
    def given(self) -> torch.Generator | None:
        """The user's generator, if there is one."""
        return self._given

    def reseed(self, seed: int) -> None:
        """Start new streams; a user's generator is left alone."""
        self._streams.clear()
        self._seed = seed

    def state_dict(self) -> dict[str, Any]:
        """All streams but a user's own. It reveals past and future noise: keep it secret."""
        streams = [(str(device), n, g.get_state()) for (device, n), g in self._streams.items()]
        return {"seed": self._seed, "streams": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.reseed(state["seed"])
        for device, number, held in state["streams"]:
            self.stream(torch.device(device), number)
            if self._given is None:
                self._streams[torch.device(device), number].set_state(held)

    def normal(self, like: Tensor, std: float) -> Tensor:
        """See :meth:`NoiseSource.normal`."""
        generator = self.stream(like.device)
        noise = torch.empty(like.shape, dtype=accumulation_dtype(like.dtype), device=generator.device)
        return noise.normal_(0.0, std, generator=generator).to(like.device)

    def add_(self, tensor: Tensor, std: float) -> None:
        """See :meth:`NoiseSource.add_`.

        On the CPU noise is drawn in pieces that stay in the cache. A torch generator uses one core, so the
        halves of a large tensor get a generator each, and a core each if torch may use two; which half comes
        from which generator does not depend on that.
        """
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            tensor.add_(self.normal(tensor, std))
            return
        if tensor.numel() <= _PIECE:
            generator = self.stream(tensor.device)
            tensor.add_(torch.empty_like(tensor).normal_(0.0, std, generator=generator))
            return
        flat = tensor.view(-1)
        if self._given is not None or flat.numel() < _LARGE:
            _add_in_pieces(flat, std, self.stream(tensor.device))
            return
        halves = flat.tensor_split(2)
        streams = [self.stream(tensor.device, number) for number in range(2)]
        with ThreadPoolExecutor(2 if torch.get_num_threads() > 1 else 1) as pool:
            # A list asks every half for its result: a failure in a thread must not pass for noise.
            list(pool.map(_add_in_pieces, halves, (std, std), streams))


@torch.no_grad()
def _add_in_pieces(flat: Tensor, std: float, generator: torch.Generator) -> None:
    piece = torch.empty(min(len(flat), _PIECE), dtype=flat.dtype)
    for start in range(0, len(flat), _PIECE):
        part = flat[start : start + _PIECE]
        part.add_(piece[: len(part)].normal_(0.0, std, generator=generator))


class SecureNoise:
    """Cryptographic noise, hardened against attacks on floating-point Gaussians.

    Every entry is half the sum of four float64 normals, after one discarded normal, as in Opacus's secure
    mode (Holohan & Braghin 2021, section 5.1, n = 2): an attacker who wants to rebuild the noise from the
    set of reachable floating-point values has to search 2^159 states.

    **Edge cases**: after a fork the child draws a new key, so that two processes never share a stream.
    """

    secure = True

    def __init__(self, key: int | None = None) -> None:
        self._generator = secure_generator(key)
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a stored key would reveal past and future noise

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # a copy starts a stream of its own

    def normal(self, like: Tensor, std: float) -> Tensor:
        """See :meth:`NoiseSource.normal`."""
        if os.getpid() != self._pid:
            self.__setstate__({})
        self._generator.standard_normal()
        total = self._generator.standard_normal(tuple(like.shape))
        for _ in range(3):
            total = total + self._generator.standard_normal(tuple(like.shape))
        noise = torch.as_tensor(np.asarray(total) * (std / 2.0))
        return noise.to(device=like.device, dtype=accumulation_dtype(like.dtype))

    def add_(self, tensor: Tensor, std: float) -> None:
        """See :meth:`NoiseSource.add_`."""
        tensor.add_(self.normal(tensor, std))
