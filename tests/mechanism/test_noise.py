"""Noise sources: reproducible, separate from everything else, or cryptographic."""

from __future__ import annotations

import copy
import math
import pickle
import sys

import pytest
import torch

from opacus_bc.mechanism import noise
from opacus_bc.mechanism.noise import SecureNoise, TorchNoise
from opacus_bc.mechanism.randomness import secure_generator


def test_a_given_generator_makes_noise_repeatable():
    like = torch.zeros(50)
    one, two = (TorchNoise(torch.Generator().manual_seed(3)).normal(like, 2.0) for _ in range(2))
    assert torch.equal(one, two)


def test_noise_has_a_stream_of_its_own():
    """Noise consumes no default generator, repeats nothing of what augmentation draws, follows no seed."""
    torch.manual_seed(0)
    source = TorchNoise()
    state = torch.get_rng_state()
    noise = source.normal(torch.zeros(1000), 1.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert abs(float((noise * torch.randn(1000)).mean())) < 6 / math.sqrt(1000)
    torch.manual_seed(0)
    assert abs(float((TorchNoise().normal(torch.zeros(1000), 1.0) * noise).mean())) < 6 / math.sqrt(1000)


def added(source, n, dtype=torch.float32):
    values = torch.zeros(n, dtype=dtype)
    source.add_(values, 2.0)
    return values


def test_large_tensors_get_two_independent_halves_whatever_the_number_of_threads():
    """A million entries; each bound is six standard errors."""
    n = 2**20
    threads = torch.get_num_threads()
    values = []
    for count in (1, 2):
        torch.set_num_threads(count)
        source = TorchNoise()
        source.reseed(0)
        values.append((added(source, n), added(source, n)))
    torch.set_num_threads(threads)
    assert torch.equal(values[0][0], values[1][0])
    assert torch.equal(values[0][1], values[1][1])
    first, second = (v.double() / 2.0 for v in values[0])
    left, right = first.tensor_split(2)
    pieces = first.split(2**16)
    pairs = [(left, right), (first, second), (left, second[: n // 2]), (right, second[: n // 2])]
    for a, b in [*pairs, (pieces[0], pieces[1]), (pieces[0], pieces[8])]:
        assert abs(float((a * b).mean())) < 6 / math.sqrt(len(a))
    for part in (left, right, *pieces):
        assert abs(float(part.mean())) < 6 / math.sqrt(len(part))
        assert abs(float(part.var()) - 1) < 6 * math.sqrt(2 / len(part))


@pytest.mark.parametrize("make", [TorchNoise, SecureNoise, lambda: TorchNoise(torch.Generator())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_added_to_every_entry_of_any_memory_format(make, dtype):
    wide = torch.zeros(3, 40, 50, 60, dtype=dtype)
    for values in (wide, wide.clone().transpose(0, -1), wide[0, 0, 0, :0], wide[0, 0, 0, 0].clone()):
        values.zero_()
        make().add_(values, 1e-3)
        # A float32 normal is exactly zero once in about 2^24 draws.
        assert int((values == 0).sum()) <= 2
        assert values.numel() == 0 or float(values.abs().max()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_noise_is_drawn_in_at_least_single_precision(dtype):
    like = torch.zeros(4, dtype=dtype)
    wanted = torch.float64 if dtype is torch.float64 else torch.float32
    assert TorchNoise().normal(like, 1.0).dtype == wanted
    assert SecureNoise().normal(like, 1.0).dtype == wanted


def test_secure_noise_is_standard_normal_and_ignores_seeds():
    """Mean, variance, kurtosis and neighbours of 400,000 values, each within six standard errors."""
    torch.manual_seed(0)
    n = 400_000
    x = SecureNoise().normal(torch.zeros(n), 3.0).double() / 3.0
    assert abs(float(x.mean())) < 6 / math.sqrt(n)
    assert abs(float(x.var()) - 1) < 6 * math.sqrt(2 / n)
    assert abs(float((x**4).mean()) - 3) < 6 * math.sqrt(96 / n)
    assert abs(float((x[1:] * x[:-1]).mean())) < 6 / math.sqrt(n)
    torch.manual_seed(0)
    assert not torch.equal(SecureNoise().normal(torch.zeros(n), 3.0).double() / 3.0, x)


def test_every_secure_value_is_made_of_four_normals(monkeypatch):
    source = SecureNoise()
    drawn = []
    real = source._generator

    class Spy:
        def standard_normal(self, size=None):
            value = real.standard_normal(size)
            drawn.append(value)
            return value

    source._generator = Spy()
    noise = source.normal(torch.zeros(3, dtype=torch.float64), 2.0)
    assert len(drawn) == 5  # the first is thrown away
    assert drawn[0] is not None
    assert noise.tolist() == pytest.approx((sum(drawn[1:]) * 2.0 / 2.0).tolist())


def test_copies_of_a_secure_source_never_repeat_its_stream():
    source = SecureNoise()
    like = torch.zeros(20)
    copies = [source, copy.deepcopy(source), pickle.loads(pickle.dumps(source))]
    assert len(pickle.dumps(source)) < 100  # no room for a generator's state
    values = [s.normal(like, 1.0) for s in copies]
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert not torch.equal(values[1], values[2])


def test_a_forked_child_does_not_repeat_its_parents_noise():
    source = SecureNoise()
    state = source._generator.bit_generator.state
    parent = source.normal(torch.zeros(20), 1.0)
    source._generator.bit_generator.state = state  # what the child inherits
    source._pid -= 1
    assert not torch.equal(source.normal(torch.zeros(20), 1.0), parent)


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "randomgen", None)
    with pytest.raises(ImportError, match=r"opacus-bc\[secure\]"):
        secure_generator()


@pytest.mark.parametrize("threads", [1, 2])
def test_noise_that_fails_in_one_thread_fails_the_release(monkeypatch, threads):
    def failing(flat, std, generator):
        if flat.data_ptr() != tensor.data_ptr():
            raise MemoryError("second half")

    before = torch.get_num_threads()
    tensor = torch.zeros(2**19)
    monkeypatch.setattr(noise, "_add_in_pieces", failing)
    try:
        torch.set_num_threads(threads)
        with pytest.raises(MemoryError, match="second half"):
            TorchNoise().add_(tensor, 1.0)
    finally:
        torch.set_num_threads(before)
