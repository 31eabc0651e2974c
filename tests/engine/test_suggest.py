"""``suggest_max_grad_norm``: C and the batch size from public gradients, before anything is made private."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support import blobs, engine
from torch import nn, optim
from torch.utils.data import DataLoader

from opacus_bc import PublicDataError, suggest_max_grad_norm
from opacus_bc.engine.suggest import SuggestedClipping

PUBLIC = blobs(48, seed=1)
LOADER = DataLoader(PUBLIC, batch_size=24)
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "samples": ({}, 1),
    "mini-sets": ({"clipping": "batch", "mini_batch_size": 4}, 4),
    "whole batches": ({"clipping": "batch"}, 16),
}


def network(norm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 2))


def suggest(model: nn.Module, **kwargs: Any) -> SuggestedClipping:
    return suggest_max_grad_norm(model, LOADER, **{"batch_size": 16, **kwargs})


@pytest.mark.parametrize("mode", MODES)
def test_the_norms_are_those_of_plain_autograd(mode: str) -> None:
    kwargs, size = MODES[mode]
    model, expected = network(norm=False), []
    order = np.random.default_rng(0).permutation(len(PUBLIC)).tolist()
    for j in range(len(PUBLIC) // size):
        x, y = PUBLIC[order[j * size : (j + 1) * size]]
        grads = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
        expected.append(math.hypot(*(float(g.norm()) for g in grads)))
    found = suggest(model, **kwargs)
    assert list(found.norms) == pytest.approx(sorted(expected[:32] if size > 1 else expected), rel=1e-5)
    assert found.max_grad_norm == pytest.approx(np.median(found.norms))
    assert (found.unit, found.mini_set_size) == ("sample" if size == 1 else "mini-set", size)


@pytest.mark.parametrize("mode", MODES)
def test_models_with_batch_norm_are_measured_as_their_training_clips(mode: str) -> None:
    kwargs, _ = MODES[mode]
    found = suggest(network(), **kwargs)
    model = network()
    made = engine()
    made.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(blobs(64), batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=found.max_grad_norm,
        batch_norm=LOADER,
        **kwargs,
    )
    report = made.layer_report(LOADER)
    whole = math.hypot(*(row.signal for row in report.rows))  # of layers one by one: no more than of vectors
    again = found.noise_to_signal(noise_multiplier=1.0)
    assert again <= report.noise_to_signal <= 1.2 * again
    assert whole > 0


def test_the_model_and_all_randomness_are_left_alone() -> None:
    model = network()
    model[1].momentum = 0.5
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, types = torch.get_rng_state(), [type(m) for m in model.modules()]
    suggest(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(m) for m in model.modules()] == types
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_copy_is_measured_so_that_attributes_of_the_model_stay() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counting(4, 2)
    suggest(model)
    assert model.calls == 0


def made(norms: list[float], **kwargs: Any) -> SuggestedClipping:
    given: dict[str, Any] = {"unit": "sample", "mini_set_size": 1, "entries": 100, "batch_size": 20}
    return SuggestedClipping(norms=norms, **{**given, **kwargs})


def test_noise_to_signal_is_that_of_the_mechanism() -> None:
    found = made([1.0, 2.0, 4.0], noise_multiplier=3.0)
    assert found.max_grad_norm == 2.0
    assert found.noise_to_signal() == pytest.approx(3 * 2 * 10 / (20 * (1 + 2 + 2) / 3))
    mini_sets = made([1.0, 2.0, 4.0], unit="mini-set", mini_set_size=5)
    assert mini_sets.noise_to_signal(noise_multiplier=3.0) == pytest.approx(10 * found.noise_to_signal())
    assert found.noise_to_signal(batch_size=40) == pytest.approx(found.noise_to_signal() / 2)
    with pytest.raises(ValueError, match="noise_multiplier was not given"):
        made([1.0]).noise_to_signal()


def test_no_bound_has_less_than_half_of_the_noise_to_signal_of_the_median() -> None:
    rng = np.random.default_rng(0)
    for norms in (rng.lognormal(sigma=3.0, size=99), rng.pareto(0.5, size=99) + 0.01, np.ones(9)):
        found = made(sorted(norms.tolist()), noise_multiplier=1.0)
        least = min(found.noise_to_signal(max_grad_norm=float(c)) for c in np.geomspace(1e-9, 1e6, 60))
        assert found.noise_to_signal() <= 2.0 * least * 1.02  # of 99 norms 50 are at least the median


def test_it_says_what_it_found_and_what_larger_batches_bring() -> None:
    text = str(made([1.0, 2.0, 4.0], noise_multiplier=3.0))
    assert "50%: 2" in text
    assert "max_grad_norm=2 is suggested, the median" in text
    assert "20: 1.8, 40: 0.9, 80: 0.45, 160: 0.225" in text
    assert "noise over signal" not in str(made([1.0]))
    assert "mini-sets of 5 samples" in str(made([1.0], unit="mini-set", mini_set_size=5))


def test_it_warns_where_noise_would_drown_the_signal() -> None:
    with pytest.warns(UserWarning, match="times the norm of its signal.*clip samples instead"):
        suggest(network(), clipping="batch", noise_multiplier=30.0)


def test_arguments_that_contradict_each_other_are_refused() -> None:
    model = network()
    for kwargs, words in (
        ({"clipping": "per_layer"}, "clipping must be 'flat' or 'batch'"),
        ({"mini_batch_size": 4}, "goes with clipping='batch'"),
        ({"clipping": "batch", "mini_batch_size": 5}, "does not divide batch_size=16"),
        ({"clipping": "batch", "mini_batch_size": 1}, "mini_batch_size must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
    ):
        with pytest.raises(ValueError, match=words):
            suggest(model, **kwargs)  # type: ignore[arg-type]
    with pytest.raises(PublicDataError, match="all zero or not finite"):
        suggest(model, criterion=lambda output, _: 0 * output.sum())
    with pytest.raises(ValueError, match="no trainable parameters"):
        suggest(network().requires_grad_(False))
    with pytest.raises(PublicDataError, match="torch DataLoader"):
        suggest_max_grad_norm(model, PUBLIC, batch_size=4)  # type: ignore[arg-type]
