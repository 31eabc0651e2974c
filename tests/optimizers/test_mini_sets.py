"""The optimizer: one draw, one step; clip, noise and scale against plain oracles; nothing half-done."""

from __future__ import annotations

import math

import pytest
import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager as StockBatchMemoryManager
from support import Inner, blobs, cross_entropy, inner_loss, mlp, private_parts, weights
from torch import nn, optim
from torch.utils.data import TensorDataset

from opacus_bc import BatchMemoryManager
from opacus_bc.draws.loader import DrawLedger
from opacus_bc.mechanism.noise import TorchNoise
from opacus_bc.mechanism.rules import FlatClipping
from opacus_bc.optimizers.mini_sets import BatchClippingOptimizer

DATA = blobs(40)
DRAWS = [
    [list(range(8)), list(range(8, 13)), [], list(range(20, 22))],
    [list(range(3, 9)), list(range(14, 20)), list(range(30, 40)), [1]],
]


def oracle_sum(model: nn.Module, draw: list[list[int]], clip_bound: float) -> torch.Tensor:
    """Ten plain lines: the sum of clipped mini-set mean gradients."""
    total = torch.zeros_like(weights(model))
    for part in draw:
        if len(part) < 2:
            continue
        x, y = DATA[part]
        grads = torch.autograd.grad(cross_entropy(model, x, y), list(model.parameters()))
        g = torch.cat([v.flatten() for v in grads]).double()
        total += g / max(1.0, float(g.norm()) / clip_bound)
    return total


def train(model, optimizer, loader, loss=cross_entropy):
    for x, y in loader:
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("clip_bound", [0.05, 10.0])
def test_update_is_the_mean_of_clipped_mini_set_gradients(norm, clip_bound):
    model, reference = mlp(norm), mlp(norm)
    optimizer, loader = private_parts(model, DATA, DRAWS, clip_bound=clip_bound, mini_sets=4, lr=0.5)
    train(model, optimizer, loader)
    for draw in DRAWS:
        update = oracle_sum(reference, draw, clip_bound) / 4
        moved = weights(reference) - 0.5 * update
        nn.utils.vector_to_parameters(moved.float(), reference.parameters())
    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-4, atol=1e-6)


def test_sum_reduction_is_not_divided_by_the_number_of_mini_sets():
    results = {}
    for reduction in ("mean", "sum"):
        model = mlp()
        optimizer, loader = private_parts(model, DATA, DRAWS[:1], mini_sets=4, loss_reduction=reduction)
        before = weights(model)
        train(model, optimizer, loader)
        results[reduction] = before - weights(model)
    torch.testing.assert_close(results["sum"], 4 * results["mean"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("manager", [StockBatchMemoryManager, BatchMemoryManager])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("mini_sets", [1, 4])
def test_physical_batches_of_any_size_give_the_same_clipped_gradient(manager, size, mini_sets):
    draws = DRAWS if mini_sets == 4 else [[draw[0] + draw[1]] for draw in DRAWS]
    whole, split = mlp(), mlp()
    optimizer, loader = private_parts(whole, DATA, draws, clip_bound=0.05, mini_sets=mini_sets)
    train(whole, optimizer, loader)
    optimizer, loader = private_parts(split, DATA, draws, clip_bound=0.05, mini_sets=mini_sets)
    deliveries = []
    with manager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as physical:
        for x, y in physical:
            deliveries.append(len(x))
            optimizer.zero_grad()
            cross_entropy(split, x, y).backward()
            optimizer.step()
    assert max(deliveries) <= size or size == 100
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-5, atol=1e-7)


def test_physical_batches_of_a_summed_loss_give_the_same_clipped_gradient():
    results = []
    for size in (100, 3):
        model = mlp()
        optimizer, loader = private_parts(model, DATA, DRAWS, mini_sets=4, loss_reduction="sum")
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=size, optimizer=optimizer
        ) as physical:
            train(model, optimizer, physical, lambda m, x, y: cross_entropy(m, x, y) * len(x))
        results.append(weights(model))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)


def test_memory_manager_with_workers_splits_and_opacus_own_one_is_refused():
    model = mlp()
    optimizer, loader = private_parts(model, DATA, DRAWS, mini_sets=4, num_workers=1)
    with (
        StockBatchMemoryManager(
            data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
        ) as physical,
        pytest.raises(RuntimeError, match=r"opacus_bc\.BatchMemoryManager"),
    ):
        next(iter(physical))
    reference = mlp()
    plain_optimizer, plain_loader = private_parts(reference, DATA, DRAWS, mini_sets=4)
    train(reference, plain_optimizer, plain_loader)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as physical:
        train(model, optimizer, physical)
    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-5, atol=1e-7)


# --- noise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_noise_has_the_claimed_std_on_every_entry_and_is_independent(dtype):
    """Two steps on zero gradients; 200,000 entries: each bound is 6 standard errors (false alarm 2e-9)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 500), nn.Linear(500, 200)).to(dtype)
    data = TensorDataset(torch.zeros(8, 200, dtype=dtype), torch.zeros(8))
    optimizer, loader = private_parts(
        model, data, [[[0, 1]], [[2, 3]]], clip_bound=0.5, noise_multiplier=3.0, lr=1.0
    )
    releases = []
    optimizer.original_optimizer.register_step_pre_hook(
        lambda *_: releases.append([p.grad.double().flatten() for p in model.parameters()])
    )
    for x, _ in loader:
        optimizer.zero_grad()
        (model(x).sum() * 0).backward()
        optimizer.step()
    tau = 2 * 0.5 * 3.0
    rounding = 2.0**-8 if dtype is torch.bfloat16 else 1e-6
    first, second = (torch.cat(parts) for parts in releases)
    for parts in releases:
        for part in parts:
            n = len(part)
            assert abs(part.mean()) < 6 * tau / math.sqrt(n)
            assert abs(part.std() / tau - 1) < 6 / math.sqrt(2 * n) + rounding
    n = len(first)
    assert abs((first * second).mean()) / tau**2 < 6 / math.sqrt(n)
    assert abs((first[1:] * first[:-1]).mean()) / tau**2 < 6 / math.sqrt(n)


def test_noise_of_general_batch_clipping_is_added_once_and_divided_by_k():
    model = nn.Linear(300, 300)
    data = TensorDataset(torch.zeros(40, 300), torch.zeros(40))
    optimizer, loader = private_parts(model, data, DRAWS[:1], noise_multiplier=2.0, mini_sets=4)
    before = weights(model)
    for x, _ in loader:
        optimizer.zero_grad()
        (model(x).sum() * 0).backward()
        optimizer.step()
    moved = before - weights(model)
    assert moved.std() == pytest.approx(2 * 1.0 * 2.0 / 4, rel=6 / math.sqrt(2 * len(moved)))


def test_unused_and_frozen_parameters_and_param_groups_are_noised_or_left_alone():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.used(x) + self.frozen(x)

    model = Model()
    optimizer, loader = private_parts(model, DATA, DRAWS[:1], noise_multiplier=1.0, mini_sets=4)
    optimizer.original_optimizer.param_groups[0]["params"] = list(model.used.parameters())
    optimizer.original_optimizer.add_param_group({"params": list(model.unused.parameters()), "lr": 0.1})
    optimizer.original_optimizer.add_param_group({"params": list(model.frozen.parameters()), "lr": 0.1})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, loader)
    for name, p in model.named_parameters():
        changed = (p != before[name]).all() if "frozen" not in name else not torch.equal(p, before[name])
        assert bool(changed) == ("frozen" not in name), name


def test_shared_parameters_are_clipped_and_noised_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))[:, :2]

    torch.manual_seed(0)
    model = Tied()
    optimizer, loader = private_parts(model, DATA, DRAWS[:1], mini_sets=4, clip_bound=0.01)
    (block,) = optimizer.blocks()
    assert block.names == ("a.weight",)
    before = weights(model)
    expected = oracle_sum(model, DRAWS[0], 0.01) / 4
    train(model, optimizer, loader)
    torch.testing.assert_close(before - weights(model), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_are_clipped_in_float32(dtype):
    model = nn.Linear(4, 2).to(dtype)
    data = TensorDataset(DATA.tensors[0].to(dtype), DATA.tensors[1])
    optimizer, loader = private_parts(model, data, DRAWS[:1], mini_sets=4, clip_bound=0.01)
    seen = []
    release = optimizer._release
    optimizer._release = lambda draw: seen.append([t.dtype for t in draw.clipped_sum]) or release(draw)
    train(model, optimizer, loader)
    assert set(seen[0]) == {torch.float32}
    assert all(p.dtype == dtype and p.grad.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_mini_set_with_a_gradient_that_is_not_finite_counts_as_zero(bad):
    x, y = DATA.tensors
    poisoned = x.clone()
    poisoned[9] = bad  # in the second mini-set of the first draw
    model, clean = mlp(), mlp()
    optimizer, loader = private_parts(model, TensorDataset(poisoned, y), DRAWS[:1], mini_sets=4)
    train(model, optimizer, loader)
    without = [DRAWS[0][0], [], [], DRAWS[0][3]]
    optimizer, loader = private_parts(clean, DATA, [without], mini_sets=4)
    train(clean, optimizer, loader)
    assert torch.isfinite(weights(model)).all()
    torch.testing.assert_close(weights(model), weights(clean))


# --- one draw, one step -----------------------------------------------------------------------------------


class Counter:
    """A step hook that counts what was accounted."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, optimizer) -> None:
        self.steps += 1


def parts(draws=DRAWS, mini_sets=4, **kwargs):
    model = mlp()
    optimizer, loader = private_parts(model, DATA, draws, mini_sets=mini_sets, noise_multiplier=1.0, **kwargs)
    counter = Counter()
    optimizer.attach_step_hook(counter)
    return model, optimizer, loader, counter


def assert_refused(model, optimizer, counter, match):
    before, steps = weights(model), counter.steps
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert counter.steps == steps


def test_every_draw_is_accounted_and_stepped_exactly_once():
    model, optimizer, loader, counter = parts()
    stepped = []
    optimizer.original_optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    train(model, optimizer, loader)
    train(model, optimizer, loader)
    assert counter.steps == len(stepped) == 2 * len(DRAWS)


def test_a_second_step_on_one_batch_is_refused():
    model, optimizer, loader, counter = parts(mini_sets=1, draws=[[list(range(9))]])
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        assert_refused(model, optimizer, counter, "needs a new batch")
    assert counter.steps == 1


def test_a_step_before_any_batch_is_refused():
    model, optimizer, _, counter = parts()
    cross_entropy(model, *DATA[:8]).backward()
    assert_refused(model, optimizer, counter, "needs a new batch")


def test_gradients_of_two_batches_are_never_mixed():
    model, optimizer, loader, counter = parts()
    iterator = iter(loader)
    for _ in range(2):
        x, y = next(iterator)
        cross_entropy(model, x, y).backward()
    assert_refused(model, optimizer, counter, "several batches were delivered")
    train(model, optimizer, loader)  # a new pass starts afresh
    assert counter.steps == len(DRAWS)


def test_two_backwards_on_one_batch_are_one_function_of_it():
    halves, whole = mlp(), mlp()
    for model, times in ((halves, 2), (whole, 1)):
        optimizer, loader = private_parts(model, DATA, DRAWS[:1], mini_sets=4)
        for x, y in loader:
            optimizer.zero_grad()
            for _ in range(times):
                (cross_entropy(model, x, y) / times).backward()
            optimizer.step()
    torch.testing.assert_close(weights(halves), weights(whole), rtol=1e-5, atol=1e-7)


def test_a_step_without_backward_is_refused():
    model, optimizer, loader, counter = parts()
    next(iter(loader))
    optimizer.zero_grad()
    assert_refused(model, optimizer, counter, "found no gradient.*zero_grad.* not between")


@pytest.mark.parametrize("clear", ["to none", "to zero", "never"])
def test_zero_grad_of_either_kind_or_none_at_all_gives_the_same_update(clear):
    """Gradients are dropped before a batch is delivered, so the last update is never added to the next."""
    model, reference = mlp(), mlp()
    for m, how in ((model, clear), (reference, "to none")):
        optimizer, loader = private_parts(m, DATA, [[list(range(8))], [list(range(8, 16))]])
        for x, y in loader:
            if how != "never":
                optimizer.zero_grad(set_to_none=how == "to none")
            cross_entropy(m, x, y).backward()
            optimizer.step()
    assert torch.equal(weights(model), weights(reference))


def test_forgotten_zero_grad_between_mini_sets_does_not_carry_one_into_the_next():
    careful, careless = mlp(), mlp()
    for model, clears in ((careful, True), (careless, False)):
        optimizer, loader = private_parts(model, DATA, DRAWS[:1], mini_sets=4)
        for x, y in loader:
            if clears:
                optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
    assert torch.equal(weights(careful), weights(careless))


def test_a_broken_off_draw_leaves_nothing_behind():
    torch.manual_seed(0)
    model, optimizer, loader, counter = parts(seed=7)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        break  # the first of several mini-sets
    assert counter.steps == 0
    train(model, optimizer, loader)
    fresh, fresh_optimizer, fresh_loader, _ = parts(seed=7)
    train(fresh, fresh_optimizer, fresh_loader)
    assert torch.equal(weights(model), weights(fresh))


@pytest.mark.parametrize("thaw", [True, False])
def test_a_parameter_frozen_or_thawed_within_a_draw_never_moves_by_its_raw_gradient(thaw):
    """The bias gets a huge gradient while it is not part of the release."""
    model = nn.Linear(4, 2)
    model.bias.requires_grad_(not thaw)
    data = TensorDataset(DATA.tensors[0], DATA.tensors[1])
    optimizer, loader = private_parts(model, data, DRAWS[:1], mini_sets=4, clip_bound=1e-6)
    optimizer.original_optimizer.param_groups[0]["params"] = list(model.parameters())
    before = model.bias.detach().clone()
    for x, y in loader:
        optimizer.zero_grad()
        if thaw:
            (1e6 * cross_entropy(model, x, y)).backward()
        else:
            model.bias.requires_grad_(True)
            (1e6 * cross_entropy(model, x, y)).backward()
            model.bias.requires_grad_(False)
        optimizer.step()
        model.bias.requires_grad_(thaw)
    assert float((model.bias.detach() - before).abs().max()) <= 1e-6


def test_an_exception_in_the_loop_is_never_half_accounted():
    model, optimizer, loader, counter = parts()
    iterator = iter(loader)
    x, y = next(iterator)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        cross_entropy(model, x[:, :2], y).backward()  # the user's own bug, caught by the user
    x, y = next(iterator)
    optimizer.zero_grad()
    cross_entropy(model, x, y).backward()
    assert_refused(model, optimizer, counter, "several batches")


def test_an_exception_in_the_accountant_leaves_the_weights_and_gradients_alone():
    model, optimizer, loader, _ = parts(mini_sets=1, draws=[[list(range(9))]])

    def refuse(optimizer):
        raise ValueError("no more budget")

    optimizer.attach_step_hook(refuse)
    before = weights(model)
    x, y = next(iter(loader))
    cross_entropy(model, x, y).backward()
    with pytest.raises(ValueError, match="no more budget"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_a_batch_that_was_never_stepped_do_not_reach_the_next_pass():
    model, reference = mlp(), mlp()
    optimizer, loader = private_parts(model, DATA, DRAWS, mini_sets=4)
    for x, y in loader:
        cross_entropy(model, x, y).backward()
        break  # before step()
    for x, y in loader:
        cross_entropy(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer, loader = private_parts(reference, DATA, DRAWS, mini_sets=4)
    train(reference, optimizer, loader)
    assert torch.equal(weights(model), weights(reference))


def test_a_failure_inside_a_step_leaves_no_gradient_behind(monkeypatch):
    model, optimizer, loader, counter = parts()
    iterator = iter(loader)
    x, y = next(iterator)
    cross_entropy(model, x, y).backward()
    with monkeypatch.context() as patch:
        patch.setattr("opacus_bc.optimizers.mini_sets.clip_coefficients", lambda *_: [][0])
        with pytest.raises(IndexError):
            optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    assert optimizer._draw is None
    assert counter.steps == 0


@pytest.mark.parametrize("through", ["wrapper", "original"])
def test_a_parameter_added_late_brings_no_gradients_of_earlier_draws(through):
    model = mlp()
    late = list(model[2].parameters())
    optimizer, loader = private_parts(model, DATA, [[list(range(8 * i, 8 * i + 8))] for i in range(4)])
    optimizer.original_optimizer.param_groups[0]["params"] = list(model[0].parameters())
    before = [p.detach().clone() for p in late]
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()  # the late layer's gradients pile up, nobody clears them
        if i == 3:
            target = optimizer if through == "wrapper" else optimizer.original_optimizer
            target.add_param_group({"params": late})
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(late, before, strict=True))


@pytest.mark.parametrize("physical", [None, 3])
def test_gradients_written_into_the_same_memory_every_time_are_still_clipped(physical):
    """A loop with gradient buffers of its own must not overwrite what has been clipped before."""
    results = []
    for reuse in (True, False):
        model = mlp()
        optimizer, loader = private_parts(model, DATA, DRAWS[:1], mini_sets=4, clip_bound=0.01)
        buffers = [torch.zeros_like(p) for p in model.parameters()]
        if physical:
            loader = loader.with_max_physical_batch_size(physical)
        for x, y in loader:
            grads = torch.autograd.grad(cross_entropy(model, x, y), list(model.parameters()))
            for p, buffer, g in zip(model.parameters(), buffers, grads, strict=True):
                p.grad = buffer.copy_(g) if reuse else g.clone()
            optimizer.step()
        results.append(weights(model))
    assert torch.equal(*results)


def test_a_users_step_hook_does_not_replace_the_accounting():
    model, optimizer, loader, counter = parts()
    booked = Counter()
    optimizer.booking = booked
    train(model, optimizer, loader)
    assert booked.steps == counter.steps == len(DRAWS)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # on one core
@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2}, {"num_workers": 2, "prefetch_factor": 8}],
    ids=["none", "some ahead", "whole pass ahead"],
)
def test_prefetched_batches_of_an_older_iterator_are_not_delivered(workers):
    _, _, loader, _ = parts(**workers)
    old = iter(loader)
    next(old)
    new = iter(loader)
    with pytest.raises(RuntimeError, match="superseded"):
        next(old)
    next(new)


def test_two_living_iterators_over_a_stock_memory_manager_are_refused():
    model, optimizer, loader, _ = parts()
    with StockBatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as physical:
        old = iter(physical)
        next(old)
        with pytest.raises(RuntimeError, match="two iterators"):
            next(iter(physical))
        del old
        train(model, optimizer, physical)


def test_an_older_iterator_cannot_deliver_after_a_newer_one_started():
    _, _, loader, _ = parts()
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="superseded"):
        next(old)


def test_looking_at_a_batch_first_costs_nothing():
    model, optimizer, loader, counter = parts()
    next(iter(loader))
    train(model, optimizer, loader)
    assert counter.steps == len(DRAWS)


@pytest.mark.parametrize("draw", [[[]], [[3]], [[], [5], [], []]])
def test_a_draw_with_nothing_to_deliver_is_noised_stepped_and_accounted(draw):
    model = Inner(3)
    data = TensorDataset(torch.full((8, 3), 1e6, dtype=torch.float64), torch.zeros(8))
    optimizer, loader = private_parts(
        model, data, [draw], mini_sets=len(draw), noise_multiplier=1.0, clip_bound=1e-3
    )
    counter = Counter()
    optimizer.attach_step_hook(counter)
    train(model, optimizer, loader, inner_loss)
    noise = TorchNoise(torch.Generator().manual_seed(0)).normal(model.w, 2e-3) / len(draw)
    torch.testing.assert_close(model.w.detach(), -noise)
    assert counter.steps == 1


# --- optimizers, schedulers, refusals ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: optim.Adam(p, lr=0.01),
        lambda p: optim.AdamW(p, lr=0.01),
        lambda p: optim.RMSprop(p, lr=0.01),
    ],
)
def test_any_first_order_optimizer_gets_the_released_gradient(make):
    model, reference = mlp(), mlp()
    optimizer, loader = private_parts(model, DATA, DRAWS, mini_sets=4, clip_bound=0.1)
    optimizer.original_optimizer = make(model.parameters())
    plain = make(reference.parameters())
    train(model, optimizer, loader)
    for draw in DRAWS:
        update = oracle_sum(reference, draw, 0.1) / 4
        start = 0
        for p in reference.parameters():
            p.grad = update[start : start + p.numel()].view_as(p).float()
            start += p.numel()
        plain.step()
    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-3, atol=2e-5)


def test_schedulers_move_clipping_and_noise_together():
    model = mlp()
    optimizer, loader = private_parts(model, DATA, DRAWS, mini_sets=4, noise_multiplier=2.0)
    clip = ExponentialGradClip(optimizer, gamma=0.5)
    noise = ExponentialNoise(optimizer, gamma=0.5)
    lr = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    train(model, optimizer, loader)
    for scheduler in (clip, noise, lr):
        scheduler.step()
    (block,) = optimizer.blocks()
    assert (block.clip_bound, block.sensitivity, block.noise_std) == (0.5, 1.0, 1.0)
    assert optimizer.effective_noise_multiplier == pytest.approx(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_bound_changed_in_the_middle_of_a_draw_waits_for_the_next_one():
    model = mlp()
    optimizer, loader = private_parts(
        model, DATA, DRAWS[:1], mini_sets=4, clip_bound=1e-2, noise_multiplier=1.0
    )
    seen = []
    optimizer.attach_step_hook(
        lambda o: seen.append((o.blocks()[0].clip_bound, o.effective_noise_multiplier))
    )
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
        optimizer.max_grad_norm, optimizer.noise_multiplier = 5.0, 1e-6
    assert seen == [(1e-2, pytest.approx(1.0))]


def test_a_closure_is_evaluated_once_and_its_loss_returned():
    model, optimizer, loader, counter = parts(mini_sets=1, draws=[[list(range(9))]])
    calls = []
    for x, y in loader:

        def closure(x=x, y=y):
            calls.append(1)
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
    assert (len(calls), counter.steps) == (1, 1)


def build(optimizer):
    return BatchClippingOptimizer(
        optimizer,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clip_rule=FlatClipping(unit="mini-set", adjacency="add/remove one"),
        ledger=DrawLedger(),
        mini_sets=1,
        noise=TorchNoise(),
    )


def test_optimizers_and_parameters_that_cannot_be_served_are_refused():
    with pytest.raises(ValueError, match="LBFGS"):
        build(optim.LBFGS(mlp().parameters()))
    with pytest.raises(ValueError, match="complex"):
        build(optim.SGD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=1.0))
    with pytest.raises(ValueError, match="no trainable parameters"):
        build(optim.SGD([nn.Parameter(torch.zeros(2), requires_grad=False)], lr=1.0))


def test_sparse_gradients_are_refused_before_anything_changes():
    model = nn.EmbeddingBag(10, 2, sparse=True, mode="sum")
    data = TensorDataset(torch.arange(8).view(8, 1), torch.zeros(8, dtype=torch.long))
    optimizer, loader = private_parts(model, data, [[[0, 1, 2]]])
    counter = Counter()
    optimizer.attach_step_hook(counter)
    x, y = next(iter(loader))
    cross_entropy(model, x, y).backward()
    assert_refused(model, optimizer, counter, "sparse=False")


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "a"])
def test_bad_values_from_schedulers_are_refused(value):
    _, optimizer, _, _ = parts()
    with pytest.raises(ValueError, match="noise_multiplier"):
        optimizer.noise_multiplier = value
    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.max_grad_norm = value
