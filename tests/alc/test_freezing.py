"""Freezing converged entries: its error rate, what it reads, and what frozen entries are left out of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from support import engine
from support.alc import adaptive, data, one_step, three_layers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import ALC, FreezeConverged
from opacus_bc.alc.freezing import HoverWatch, hover_threshold

WALKS = 20_000


def random_walks(window: int, seed: int, steps: np.ndarray | float = 1.0, path: np.ndarray | float = 0.0):
    noise = np.random.default_rng(seed).standard_normal((WALKS, window)) * steps
    return np.concatenate([np.zeros((WALKS, 1)), np.cumsum(noise, axis=1)], axis=1) + path


def most_false_alarms(rate: float) -> int:
    """A count that WALKS tests at this rate exceed with probability 1e-9."""
    return int(binom.isf(1e-9, WALKS, rate))


@pytest.mark.parametrize("window", [10, 60, 300])
@pytest.mark.parametrize("rate", [0.2, 0.01])
def test_pure_noise_is_frozen_at_most_at_the_stated_rate(window, rate):
    frozen = int((random_walks(window, seed=window).var(axis=1) <= hover_threshold(window, rate)).sum())
    assert frozen <= most_false_alarms(rate)
    assert frozen >= WALKS * rate / 20  # the bound is a bound, and not an empty one


@pytest.mark.parametrize("kind", ["drift", "oscillation", "growing noise"])
def test_whatever_does_not_react_to_the_noise_is_frozen_no_more_often(kind):
    window, rate = 60, 0.2
    t = np.arange(window + 1)
    walks = {
        "drift": lambda: random_walks(window, 1, path=0.3 * t),
        "oscillation": lambda: random_walks(window, 1, path=3 * np.sin(t)),
        "growing noise": lambda: random_walks(window, 1, steps=1 + t[1:] / 30),
    }[kind]()
    alone = int((random_walks(window, 1).var(axis=1) <= hover_threshold(window, rate)).sum())
    assert int((walks.var(axis=1) <= hover_threshold(window, rate)).sum()) < alone <= most_false_alarms(rate)


def test_the_walks_spectrum_is_that_of_the_path_graph():
    n = 12
    walk = np.tril(np.ones((n + 1, n)), -1)  # w_t as a sum of steps
    centred = walk - walk.mean(axis=0)
    found = np.sort(np.linalg.eigvalsh(centred.T @ centred))[::-1]
    expected = 1 / (4 * np.sin(np.arange(1, n + 1) * np.pi / (2 * (n + 1))) ** 2)
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_an_entry_that_is_pulled_back_is_recognised():
    window, pull = 500, 0.1
    w = np.zeros((2000, window + 1))
    noise = np.random.default_rng(0).standard_normal((2000, window + 1))
    w[:, 0] = noise[:, 0] / math.sqrt(2 * pull - pull**2)
    for t in range(window):
        w[:, t + 1] = (1 - pull) * w[:, t] + noise[:, t + 1]
    assert (w.var(axis=1) <= hover_threshold(window, 1e-3)).mean() > 0.93


def test_a_window_is_judged_by_its_variance_and_its_smallest_noise_step():
    watch = HoverWatch(FreezeConverged(window=20, false_freeze_rate=0.3))
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(21, 50, generator=generator) * torch.logspace(-2, 1, 50) + 1e3
    watch.start({"w": points[0]})
    steps = [1.0 + 0.1 * t for t in range(20)]
    for t in range(20):
        found = watch.observe({"w": points[t + 1]}, {"w": steps[t]})
        assert (found is None) == (t < 19)
    assert found is not None
    mask, mean = found["w"]
    expected = points.double().var(dim=0, correction=0) <= hover_threshold(20, 0.3) * min(steps) ** 2
    assert torch.equal(mask, expected)
    assert 0 < int(mask.sum()) < 50
    torch.testing.assert_close(mean, points.mean(dim=0))


def test_without_noise_nothing_is_frozen():
    watch = HoverWatch(FreezeConverged(window=10))
    w = {"w": torch.zeros(3)}
    watch.start(w)
    for _ in range(10):
        found = watch.observe(w, {"w": 0.0})
    assert found is not None
    assert not found["w"][0].any()
    with pytest.raises(RuntimeError, match="before start"):
        HoverWatch(FreezeConverged()).observe(w, {"w": 0.0})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 9}, "window must be a whole number >= 10"),
        ({"window": 20.0}, "got 20.0"),
        ({"false_freeze_rate": 0.0}, "between 1e-12 and 0.5"),
        ({"false_freeze_rate": 0.6}, "between 1e-12 and 0.5"),
    ],
)
def test_wrong_configurations_say_what_would_be_right(wrong, message):
    with pytest.raises(ValueError, match=message):
        FreezeConverged(**wrong)


# ---------------------------------------------------------------- in training


class Pulled(nn.Module):
    """``held`` is pulled to 1, ``free`` drifts and does not react to the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.held = nn.Linear(30, 1, bias=False).double()
        self.free = nn.Linear(30, 1, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        pulls = 2.5 * ((self.held.weight - 1.0) ** 2).sum() + 1e-3 * self.free.weight.sum()
        return pulls + 0.0 * x.sum(dim=1)


def pull(module: nn.Module, batch: Any) -> None:
    module(batch[0]).mean().backward()


def frozen_run(steps: int, window: int = 200, **sgd: Any):
    """(engine, model, optimizer, released weights after every step, blocks of every step)."""
    torch.manual_seed(0)
    model = Pulled()
    with torch.no_grad():
        model.held.weight.fill_(1.01)
    public = TensorDataset(torch.zeros(8, 30, dtype=torch.float64), torch.zeros(8))
    private = TensorDataset(torch.zeros(80, 30, dtype=torch.float64), torch.zeros(80))
    made = engine(accountant="prv")
    config = ALC(
        DataLoader(public, batch_size=8),
        layers=1,
        gradient=pull,
        max_batches=1,
        freeze=FreezeConverged(window=window, false_freeze_rate=1e-3),
    )
    _, optimizer, loader = made.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), **({"lr": 0.1} | sgd)),
        data_loader=DataLoader(private, batch_size=8),
        noise_multiplier=0.05,
        max_grad_norm=1.0,
        clipping="batch",
        alc=config,
    )
    weights, blocks = [], []
    while len(weights) < steps:
        for batch in loader:
            optimizer.zero_grad()
            pull(model, batch)
            optimizer.step()
            weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
            blocks.append(optimizer._released_blocks)
            if len(weights) == steps:
                break
    return made, model, optimizer, weights, blocks


@pytest.fixture(scope="module")
def run():
    return frozen_run(steps=260)


def test_held_entries_are_fixed_to_their_mean_and_free_ones_go_on(run):
    _, _, optimizer, weights, _ = run
    frozen = optimizer.adaptive.frozen
    assert int(frozen["held.weight"].sum()) >= 28
    assert "free.weight" not in frozen
    window = torch.stack([w["held.weight"] for w in weights[:200]])  # the last point is replaced by the mean
    mask = frozen["held.weight"]
    torch.testing.assert_close(weights[-1]["held.weight"][mask], window.mean(dim=0)[mask], rtol=0, atol=2e-3)


def test_the_decision_is_a_function_of_released_weights_and_public_noise_scales(run):
    """Recomputed by numpy from what an observer of the weights has."""
    _, _, optimizer, weights, blocks = run
    s = 0.1 * min(b[0].noise_std for b in blocks[:201])
    for name in ("held.weight", "free.weight"):
        points = torch.stack([w[name] for w in weights[:201]]).numpy().copy()
        mask = optimizer.adaptive.frozen.get(name, torch.zeros_like(weights[0][name], dtype=torch.bool))
        # The window's last point was replaced by the mean where the entry froze; the mean of 201 points that
        # include x is known, so x is: x = 201 * mean - sum of the others.
        others = points[:200].sum(axis=0)
        last = np.where(mask.numpy(), 201 * points[200] - others, points[200])
        points[200] = last
        expected = points.var(axis=0) <= hover_threshold(200, 1e-3) * s**2
        assert np.array_equal(expected, mask.numpy())


def test_frozen_entries_get_no_noise_and_no_update_and_leave_the_dimension(run):
    made, _, optimizer, weights, blocks = run
    mask = optimizer.adaptive.frozen["held.weight"]
    held = torch.stack([w["held.weight"][mask] for w in weights[200:]])
    assert (held == held[0]).all()
    free = torch.stack([w["free.weight"] for w in weights[200:]])
    assert (free[1:] != free[:-1]).all()
    assert blocks[199][0].dimension == 60
    assert blocks[-1][0].dimension == 60 - int(mask.sum())
    assert made.layer_report().rows[0].entries == 30 - int(mask.sum())


def test_sigma_eff_stays_at_its_schedule_through_freezing(run):
    made, _, _, weights, _ = run
    assert made.accountant.history == [(0.05, 0.1, len(weights))]


def test_freezing_takes_the_entries_out_of_the_layer_norms(run):
    _, model, optimizer, _, _ = run
    steps = [step for step, _ in optimizer.adaptive.history]
    assert 201 in steps  # at once, and not at the next epoch
    mask = optimizer.adaptive.frozen["held.weight"]
    live = (5 * (model.held.weight - 1.0))[~mask].norm().item()
    optimizer.adaptive._estimated_at = None
    optimizer.adaptive.begin_draw()
    assert optimizer.adaptive.norms["held"] == pytest.approx(live, abs=1e-12)


def test_weight_decay_does_not_move_frozen_entries():
    _, _, optimizer, weights, _ = frozen_run(steps=220, weight_decay=0.01)
    mask = optimizer.adaptive.frozen["held.weight"]
    held = torch.stack([w["held.weight"][mask] for w in weights[201:]])
    assert mask.any()
    assert (held == held[0]).all()


@pytest.mark.parametrize("unit", ["mini-set", "sample"])
def test_frozen_entries_leave_norms_bounds_clipping_and_noise(unit):
    """Against plain autograd with the frozen entries' gradients set to zero."""
    model, private, public = three_layers(), data(16), data(6, seed=5)
    draw = [list(range(8)), list(range(8, 16))]
    mask = torch.zeros(8, 4, dtype=torch.bool)
    mask[:6] = True

    def norms_and_sums(dataset: TensorDataset, parts: list[list[int]], bounds: list[float] | None):
        groups, e, sums = (
            [(0, 1), (2, 3), (4, 5)],
            [0.0] * 3,
            [torch.zeros_like(p) for p in model.parameters()],
        )
        for part in parts:
            x, y = dataset[part]
            g = list(torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model.parameters()))
            g[0] = g[0].masked_fill(mask, 0.0)
            for h, group in enumerate(groups):
                norm = math.hypot(*(g[i].norm().item() for i in group))
                e[h] += norm / len(parts)
                for i in group:
                    sums[i] += g[i] / max(1.0, norm / (bounds[h] if bounds else 1.0))
        return e, sums

    single = unit == "sample"
    e, _ = norms_and_sums(public, [[i] for i in range(6)] if single else [list(range(6))], None)
    bounds = [0.1 * value / max(e) for value in e]
    _, expected = norms_and_sums(private, [[i] for i in range(16)] if single else draw, bounds)

    again = three_layers()
    rule = adaptive(again, public, unit=unit, adjacency="add/remove one")
    rule.frozen, rule._estimated_at = {"0.weight": mask}, None
    released, optimizer = one_step(
        again, private, draw, rule, unit=unit, sigma=1.0, clip_bound=0.1, noise=1.0
    )
    assert list(optimizer.clip_bounds.values()) == pytest.approx(bounds)
    for i, (value, plain) in enumerate(zip(released.values(), expected, strict=True)):
        noise = torch.full_like(plain, (1 if single else 2) * bounds[i // 2])
        if i == 0:
            noise.masked_fill_(mask, 0.0)
        torch.testing.assert_close(value, plain + noise, rtol=3e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adam(p, lr=0.1), "torch.optim.SGD only, got torch.optim.Adam"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "without momentum, got momentum=0.9"),
    ],
)
def test_optimizers_whose_noise_is_not_known_are_refused(make, message):
    model = Pulled()
    public = TensorDataset(torch.zeros(8, 30, dtype=torch.float64), torch.zeros(8))
    private = TensorDataset(torch.zeros(8, 30, dtype=torch.float64), torch.zeros(8))
    with pytest.raises(ValueError, match=message):
        engine(accountant="prv").make_private(
            module=model,
            optimizer=make(model.parameters()),
            data_loader=DataLoader(private, batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping="batch",
            alc=ALC(DataLoader(public, batch_size=8), gradient=pull, freeze=FreezeConverged()),
        )


def test_a_resumed_run_takes_the_same_decisions(tmp_path):
    """Estimates, frozen entries and the window under way survive a file."""
    optimizer = frozen_run(steps=230)[2]
    torch.save(optimizer.adaptive.state_dict(), tmp_path / "alc.pt")
    other = frozen_run(steps=1)[2].adaptive
    other.load_state_dict(torch.load(tmp_path / "alc.pt", weights_only=True))
    assert other.rule == optimizer.adaptive.rule
    assert other.history == optimizer.adaptive.history
    assert (other.steps, other._estimated_at) == (optimizer.adaptive.steps, optimizer.adaptive._estimated_at)
    for name, p in optimizer.named_parameters():
        for a, b in ((other, optimizer.adaptive), (other._watch, optimizer.adaptive._watch)):
            for key in ("frozen", "fixed_values", "origin", "total", "squares"):
                if name in getattr(a, key, {}):
                    assert torch.equal(getattr(a, key)[name], getattr(b, key)[name])
        assert other._watch.origin[name].shape == p.shape
    with pytest.raises(ValueError, match="other layers"):
        other.load_state_dict({**optimizer.adaptive.state_dict(), "groups": {"group 1": ("w",)}})
    with pytest.raises(ValueError, match="another freeze="):
        other.load_state_dict({**optimizer.adaptive.state_dict(), "watch": None})
