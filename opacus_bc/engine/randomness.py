"""Who draws batches and noise in a run: the user's generators, the operating system, or a secure key."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from opacus_bc.engine.request import Request
from opacus_bc.mechanism.noise import NoiseSource, SecureNoise, TorchNoise
from opacus_bc.mechanism.randomness import fresh_seed, sampling_generator, secure_generator, secure_key
from opacus_bc.parallel.ranks import Ranks
from opacus_bc.parallel.shards import Sharding


def streams(
    request: Request, ranks: Ranks | None, sharding: Sharding | None, noise: SecureNoise | None
) -> tuple[Generator, NoiseSource]:
    """Who draws batches and noise: the same on all ranks, but for the noise of different shards."""
    given = request.data_loader.generator
    if ranks is None:
        generator = sampling_generator(secure=noise is not None, generator=given)
        return generator, noise or TorchNoise(request.noise_generator)
    if noise is not None:
        same_noise = ranks if sharding is None else sharding.replicas
        key = secure_key() if same_noise is None else same_noise.agree(secure_key())
        return secure_generator(ranks.agree(secure_key())), SecureNoise(key)
    generator = np.random.Generator(np.random.Philox(ranks.agree(fresh_seed(given))))
    shared = TorchNoise(offset=0 if sharding is None else sharding.noise_offset)
    shared.reseed(ranks.agree(fresh_seed(request.noise_generator)))
    return generator, shared
