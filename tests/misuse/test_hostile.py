"""Hostile input: the right result or a clear error; never an un-noised update, never an epsilon too low.

What is tested elsewhere: public data that is empty or overlaps (test_public_data.py), loaders that cannot be
accounted (test_sampling.py), steps without backward, twice or on mixed batches and exceptions inside a step
(test_optimizer.py), bad arguments of batch clipping and no noise at all (test_privacy_engine.py), secure
noise after copies and forks (test_noise.py), copies of patched models (test_batch_norm.py).
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import GivenDraws, blobs, engine, mlp, weights
from support.alc import KnownNoise
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from opacus_bc import BatchMemoryManager, PrivateDataLoader, accounting
from opacus_bc.draws.ledger import DrawLedger
from opacus_bc.mechanism.noise import TorchNoise
from opacus_bc.mechanism.randomness import fresh_seed, isolated_randomness
from opacus_bc.mechanism.rules import OpacusClipping
from opacus_bc.optimizers.stock import PerLayerOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

PUBLIC = DataLoader(blobs(16, seed=9), batch_size=8)
MODES: dict[str, dict[str, Any]] = {
    "BC": {"clipping": "batch"},
    "GBC": {"clipping": "batch", "mini_batch_size": 4},
    "BC + ALC": {"clipping": "batch", "alc": PUBLIC},
    "IC": {"clipping": "flat"},
    "IC per layer": {"clipping": "per_layer", "max_grad_norm": [1.0] * 4},
    "IC + ALC": {"clipping": "flat", "alc": PUBLIC},
    "IC shuffled": {"clipping": "flat", "poisson_sampling": False},
    "BC partition": {"clipping": "batch", "sampling": "partition"},
}
every_mode = pytest.mark.parametrize("mode", MODES)


def make(
    mode: str, data: Any = None, *, batch_size: int = 8, seed: int = 0, **change: Any
) -> tuple[Any, ...]:
    """Engine, model, optimizer, loader, all random streams seeded."""
    model = change.pop("model", None) or mlp(seed=seed)
    maker = change.pop("maker", None) or engine()
    optimizer = change.pop("optimizer", None) or optim.SGD(model.parameters(), lr=0.1)
    loading = change.pop("loading", {})
    torch.manual_seed(seed)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | MODES[mode] | change
    made = maker.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(
            blobs(40) if data is None else data,
            batch_size=batch_size,
            generator=torch.Generator().manual_seed(seed),
            **loading,
        ),
        noise_generator=torch.Generator().manual_seed(seed),
        **settings,
    )
    return maker, *made


def train(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


# --- values -----------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 3e38])
def test_samples_of_any_value_leave_finite_noised_weights_and_a_full_account(mode: str, value: float) -> None:
    x, y = blobs(40).tensors
    x = x.clone()
    x[:10] = value
    maker, model, optimizer, loader = make(mode, TensorDataset(x, y))
    before = weights(model)
    train(model, optimizer, loader)
    assert torch.isfinite(weights(model)).all()
    assert (weights(model) != before).all()  # noise reached every entry
    assert len(maker.accountant) == 5
    assert maker.get_epsilon(1e-5) == pytest.approx(clean_epsilon(mode))


def clean_epsilon(mode: str) -> float:
    maker, model, optimizer, loader = make(mode)
    train(model, optimizer, loader)
    return maker.get_epsilon(1e-5)


def update(mode: str, data: TensorDataset, members: list[int], chunk: int) -> Tensor:
    """What one draw of these members, delivered in chunks, moves the weights by without noise."""
    with pytest.warns(UserWarning, match="epsilon is infinite"):
        _, model, optimizer, loader = make(mode, data, noise_multiplier=0.0, loss_reduction="sum")
    source = GivenDraws(loader.plan, [[members]])
    given = PrivateDataLoader(loader, draws=source, ledger=loader.ledger, part=loader.part)
    before = weights(model)
    with BatchMemoryManager(data_loader=given, max_physical_batch_size=chunk, optimizer=optimizer) as chunks:
        for x, y in chunks:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
    return weights(model) - before


@pytest.mark.parametrize("mode", ["IC", "IC per layer", "IC + ALC"])
def test_a_sample_that_is_not_finite_counts_as_zero_in_individual_clipping_too(mode: str) -> None:
    """Without noise the update equals that of the batch in which the sample's gradient is zero."""
    x, y = blobs(8).tensors
    poisoned = x.clone()
    poisoned[3] = math.nan
    found = update(mode, TensorDataset(poisoned, y), list(range(8)), chunk=8)
    assert found.abs().sum() > 0
    torch.testing.assert_close(found, update(mode, TensorDataset(x, y), [0, 1, 2, 4, 5, 6, 7], chunk=8))


@pytest.mark.parametrize("mode", ["IC", "IC per layer"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_chunk_that_is_not_finite_takes_nothing_from_the_chunks_before(mode: str, value: float) -> None:
    x, y = blobs(8).tensors
    poisoned = x.clone()
    poisoned[5] = value
    found = update(mode, TensorDataset(poisoned, y), list(range(8)), chunk=4)
    assert found.abs().sum() > 0
    torch.testing.assert_close(found, update(mode, TensorDataset(x, y), [0, 1, 2, 3, 4, 6, 7], chunk=4))


def test_ghost_clipping_refuses_a_batch_that_is_not_finite_and_nothing_moves() -> None:
    x, y = blobs(40).tensors
    x = x.clone()
    x[:] = math.nan
    maker, model, optimizer, criterion, loader = make("IC", TensorDataset(x, y), grad_sample_mode="ghost")
    before = weights(model)
    inputs, labels = next(iter(loader))
    optimizer.zero_grad()
    criterion(model(inputs), labels).backward()
    with pytest.raises(RuntimeError, match="not finite, and ghost clipping"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert len(maker.accountant) == 0


# --- sizes ------------------------------------------------------------------------------------------------


@every_mode
def test_an_empty_data_set_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match="the data set has 0 samples"):
        make(mode, TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)))


FAR_TOO_LARGE = "ignore:batch_size=.* is more than twice the data set's"


@pytest.mark.filterwarnings(FAR_TOO_LARGE)
@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_fewer_samples_than_mini_sets_train_and_are_booked_without_amplification(sampling: str) -> None:
    maker, model, optimizer, loader = make("GBC", blobs(6), batch_size=80, sampling=sampling)
    before = weights(model)
    train(model, optimizer, loader)
    assert (weights(model) != before).all()
    assert maker.accountant.history == [(1.0, 1.0, 1, sampling)]


@pytest.mark.filterwarnings(FAR_TOO_LARGE)
def test_fewer_samples_than_mini_sets_cannot_be_partitioned() -> None:
    with pytest.raises(ValueError, match="larger mini_batch_size"):
        make("GBC", blobs(6), batch_size=80, sampling="partition")


@pytest.mark.filterwarnings("ignore:the public data has", FAR_TOO_LARGE)
@pytest.mark.parametrize("mode", ["BC", "IC", "BC + ALC", "IC + ALC"])
def test_a_batch_larger_than_the_data_is_a_sample_rate_of_one(mode: str) -> None:
    maker, model, optimizer, loader = make(mode, blobs(6), batch_size=100)
    train(model, optimizer, loader)
    ((sigma, rate, steps, *_),) = maker.accountant.history
    assert (rate, steps) == (1.0, 1)
    closed = accounting.TradeOffCurve.gaussian(1 / sigma).epsilon(1e-5)
    assert maker.get_epsilon(1e-5) == pytest.approx(closed)


# --- arguments --------------------------------------------------------------------------------------------

BAD: list[tuple[str, Any]] = [
    ("max_grad_norm", -1.0),
    ("max_grad_norm", 0.0),
    ("max_grad_norm", math.nan),
    ("max_grad_norm", math.inf),
    ("max_grad_norm", "one"),
    ("max_grad_norm", None),
    ("noise_multiplier", -1.0),
    ("noise_multiplier", math.nan),
    ("noise_multiplier", math.inf),
    ("noise_multiplier", None),
]


@pytest.mark.parametrize(("name", "value"), BAD)
@pytest.mark.parametrize("mode", ["BC", "IC", "IC per layer", "IC + ALC"])
def test_senseless_bounds_and_noise_are_refused_before_anything_changes(
    mode: str, name: str, value: Any
) -> None:
    model = mlp()
    before = weights(model)
    change = {name: [1.0, 1.0, value, 1.0] if (mode, name) == ("IC per layer", "max_grad_norm") else value}
    with pytest.raises(ValueError, match=name):
        make(mode, model=model, **change)
    assert torch.equal(weights(model), before)
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())


def test_one_bound_for_many_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="a bound for each trainable parameter"):
        make("IC per layer", max_grad_norm=1.0)


@every_mode
@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_a_senseless_delta_gets_no_epsilon(mode: str, delta: float) -> None:
    maker = make(mode)[0]
    with pytest.raises(ValueError, match="delta="):
        maker.get_epsilon(delta)


@every_mode
def test_no_noise_is_loud_and_worth_nothing_in_every_mode(mode: str) -> None:
    with pytest.warns(UserWarning, match="epsilon is infinite"):
        maker, model, optimizer, loader = make(mode, noise_multiplier=0.0)
    train(model, optimizer, loader)
    assert maker.get_epsilon(1e-5) == math.inf


@every_mode
def test_models_without_trainable_parameters_are_refused(mode: str) -> None:
    frozen = mlp().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        make(mode, model=frozen)


@every_mode
def test_models_without_any_parameters_are_refused(mode: str) -> None:
    other = nn.Parameter(torch.zeros(1))
    maker = engine()
    with pytest.raises(ValueError, match=r"not module's|no trainable parameters|different than optimizer"):
        make(mode, model=nn.Sequential(nn.Tanh()), optimizer=optim.SGD([other], lr=0.1), maker=maker)
    assert len(maker.accountant) == 0


@pytest.mark.parametrize("argument", ["alc", "batch_norm"])
@pytest.mark.parametrize("mode", ["BC", "GBC", "IC"])
def test_public_data_that_are_private_or_missing_are_refused_before_anything_changes(
    mode: str, argument: str
) -> None:
    private = blobs(40)
    half = Subset(private, range(20))
    nothing = TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))
    for public in (private, half, nothing):
        model = mlp(norm=True)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(
            ValueError, match=r"belong to the private data|equal to private ones|no batch|empty|0 samples"
        ):
            make(mode, private, model=model, **{argument: DataLoader(public, batch_size=8)})
        assert type(model[1]) is nn.BatchNorm1d
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- batches that are no pairs of tensors -----------------------------------------------------------------


class Records(Dataset[dict[str, Any]]):
    """Samples with a text, a number and a tensor."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = blobs(24).tensors[0][index]
        return {"text": f"sample {index}", "x": x, "nested": (index % 2, [float(index)])}


def texts_and_tensors(samples: list[dict[str, Any]]) -> tuple[list[str], Tensor]:
    return [sample["text"] for sample in samples], torch.stack([sample["x"] for sample in samples])


@pytest.mark.parametrize("mode", ["GBC", "IC shuffled"])
@pytest.mark.parametrize("collate", [None, texts_and_tensors])
def test_batches_of_any_form_are_delivered_as_they_are_and_booked(mode: str, collate: Any) -> None:
    maker, model, optimizer, loader = make(mode, Records(), loading={"collate_fn": collate})
    for batch in loader:
        optimizer.zero_grad()
        x = batch[1] if collate else batch["x"]
        assert len(batch[0] if collate else batch["text"]) == len(x)
        model(x).square().mean().backward()
        optimizer.step()
    assert len(maker.accountant) == 3


# --- the loop ---------------------------------------------------------------------------------------------


def first_movement(change: bool) -> Tensor:
    """What the first step moves; the learning rate may be tripled between two mini-sets of its draw."""
    _, model, optimizer, loader = make("GBC")
    before = weights(model)
    for place, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if change and place == 0:
            optimizer.param_groups[0]["lr"] *= 3
        optimizer.step()
        if not torch.equal(weights(model), before):
            break
    return weights(model) - before


def test_a_learning_rate_changed_within_a_draw_scales_the_release_and_nothing_else() -> None:
    torch.testing.assert_close(first_movement(True), 3 * first_movement(False), rtol=1e-5, atol=1e-7)


@every_mode
def test_a_step_without_backward_is_refused_and_costs_nothing(mode: str) -> None:
    maker, model, optimizer, loader = make(mode)
    before = weights(model)
    next(iter(loader))
    with pytest.raises((RuntimeError, ValueError), match=r"backward|[Pp]er sample gradient"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert len(maker.accountant) == 0


@every_mode
def test_an_exception_in_the_users_loop_leaves_no_gradient_for_the_next_step(mode: str) -> None:
    """After the exception, a step releases what it would have released without the broken-off batch."""

    def run(fail: bool) -> tuple[Tensor, int]:
        maker, model, optimizer, loader = make(mode)
        if fail:
            try:
                for x, y in loader:
                    nn.functional.cross_entropy(model(1e3 * x), y).backward()
                    raise KeyboardInterrupt
            except KeyboardInterrupt:
                pass
        else:
            next(iter(loader))
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        torch.manual_seed(1)
        optimizer.zero_grad()
        train(model, optimizer, loader)
        return weights(model), len(maker.accountant)

    (one, steps), (two, same) = run(True), run(False)
    assert steps == same == 5
    torch.testing.assert_close(one, two)


THREADS = [("GBC", "GBC"), ("IC", "IC + ALC"), ("BC + ALC", "IC per layer")]


@pytest.mark.parametrize("modes", THREADS, ids=" and ".join)
def test_two_engines_in_two_threads_do_what_each_does_alone(modes: tuple[str, str]) -> None:
    def run(seed: int, results: dict[int, Any]) -> None:
        maker, model, optimizer, loader = made[seed]
        train(model, optimizer, loader)
        results[seed] = weights(model), maker.get_epsilon(1e-5), maker.accountant.history

    def both() -> dict[int, Any]:
        return {s: make(m, seed=s, noise_multiplier=1.0 + s) for s, m in zip((1, 2), modes, strict=True)}

    made = both()
    together: dict[int, Any] = {}
    threads = [threading.Thread(target=run, args=(seed, together)) for seed in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = both()
    alone: dict[int, Any] = {}
    for seed in made:
        run(seed, alone)
    for seed in made:
        assert torch.equal(together[seed][0], alone[seed][0])
        assert together[seed][1:] == alone[seed][1:]


def private_randomness(what: str) -> Callable[[], Tensor]:
    """Something private that is drawn; all else is the same every time."""
    if what == "seeds of noise":
        return lambda: TorchNoise().normal(torch.zeros(4), 1.0)
    model = mlp()
    generator = None if what == "draws" else torch.Generator().manual_seed(1)
    _, optimizer, loader = engine().make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(blobs(40), batch_size=8, generator=generator),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    if what == "draws":
        return lambda: torch.tensor([index for draw in loader.draws for index in draw[0]])
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()

    def noise() -> Tensor:
        optimizer.step()
        return weights(model)

    return noise


@pytest.mark.parametrize("what", ["noise", "draws", "seeds of noise"])
def test_nothing_private_is_drawn_from_streams_that_have_a_public_seed(what: str) -> None:
    """Another thread may read public data meanwhile; noise of its seed could be computed and subtracted."""
    found = []
    for _ in range(2):
        draw = private_randomness(what)
        with isolated_randomness(0):
            found.append(draw())
    assert not torch.equal(*found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_child_forked_while_another_thread_reads_public_data_does_not_wait_for_it() -> None:
    holding, done = threading.Event(), threading.Event()

    def read() -> None:
        with isolated_randomness(0):
            holding.set()
            done.wait()

    thread = threading.Thread(target=read)
    thread.start()
    holding.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that waits for ever is killed
        fresh_seed()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert status == 0


# --- copies and processes ---------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, pickle.dumps])
def test_private_optimizers_and_engines_are_not_copied_and_go_on_working(mode: str, copying: Any) -> None:
    maker, model, optimizer, loader = make(mode)
    for thing in (optimizer, maker):
        with pytest.raises(TypeError, match="a copy would repeat its noise"):
            copying(thing)
    train(model, optimizer, loader)
    assert len(maker.accountant) == 5


@pytest.mark.parametrize("mode", ["BC", "GBC", "BC partition"])
@pytest.mark.parametrize("copying", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_batches_of_a_copied_loader_serve_no_step(mode: str, copying: Any) -> None:
    maker, model, optimizer, loader = make(mode)
    before = weights(model)
    with pytest.raises(RuntimeError, match="needs a new batch"):
        train(model, optimizer, copying(loader))
    assert torch.equal(weights(model), before)
    assert len(maker.accountant) == 0


def test_a_copied_model_is_a_plain_model() -> None:
    _, model, optimizer, loader = make("BC")
    train(model, optimizer, loader)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(p.grad is None or torch.equal(p.grad, q.grad) for p, q in pairs(twin, model))
        assert torch.equal(weights(twin), weights(model))


def pairs(one: nn.Module, two: nn.Module) -> Any:
    return zip(one.parameters(), two.parameters(), strict=True)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # on one core
@pytest.mark.parametrize("mode", ["GBC", "IC", "BC partition"])
def test_forked_workers_deliver_the_draws_of_the_main_process_once(mode: str) -> None:
    results = []
    for workers in (0, 2):
        maker, model, optimizer, loader = make(mode, loading={"num_workers": workers})
        train(model, optimizer, loader)
        results.append((weights(model), maker.accountant.history))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_has_noise_of_its_own() -> None:
    noise = TorchNoise()
    noise.normal(torch.zeros(3), 1.0)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, noise.normal(torch.zeros(4, dtype=torch.float64), 1.0).numpy().tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(reading, 32))
    ours = noise.normal(torch.zeros(4, dtype=torch.float64), 1.0).numpy()
    assert (theirs != ours).all()


def test_every_entry_is_noised_whatever_the_batch_was() -> None:
    """The released gradient differs from the one without noise on every entry, by exactly the noise."""
    releases = {}
    for size in (0.0, 1.0):
        _, model, optimizer, loader = make("GBC")
        optimizer.noise = KnownNoise(size)
        optimizer.original_optimizer.step = lambda *_: None
        for x, y in loader:
            x = torch.where(torch.arange(len(x))[:, None] == 0, math.inf, x)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if optimizer._draw is None:
                break
        releases[size] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (releases[0.0] == 0).all()  # no mini-set was finite
    assert (releases[1.0] > 0).all()


def test_default_collation_of_an_announced_batch_is_torchs() -> None:
    """Collating through the ledger changes nothing about a batch."""
    _, _, _, loader = make("BC", Records())
    samples = [Records()[i] for i in (3, 1)]
    ours, torchs = loader.collate_fn(samples), default_collate(samples)
    assert ours["text"] == torchs["text"]
    assert torch.equal(ours["x"], torchs["x"])


def _ghost(model: nn.Module) -> tuple[Any, ...]:
    x = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return make_ghost(model, TensorDataset(x, torch.arange(64) % 2))


def make_ghost(model: nn.Module, data: TensorDataset) -> tuple[Any, ...]:
    maker = engine()
    model, optimizer, criterion, loader = maker.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
        poisson_sampling=False,  # equal batches: old norms would fit
        criterion=nn.CrossEntropyLoss(),
    )
    return maker, model, optimizer, criterion, loader


def _without_linear() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 6), nn.Flatten())


def test_ghost_clipping_refuses_a_loss_that_it_has_not_clipped_and_nothing_moves() -> None:
    maker, model, optimizer, criterion, loader = _ghost(_without_linear())
    batches = iter(loader)
    x, y = next(batches)
    before = weights(model)
    optimizer.zero_grad()
    (nn.functional.cross_entropy(model(x), y, reduction="sum") * 1000).backward()
    with pytest.raises(RuntimeError, match="not clipped"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert len(maker.accountant) == 0
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    (nn.functional.cross_entropy(model(x), y) * 1000).backward()  # on top of a clipped one
    with pytest.raises(RuntimeError, match="not clipped"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
    assert len(maker.accountant) == 1


@pytest.mark.parametrize("earlier", ["stepped", "cleared"])
def test_a_clipped_ghost_gradient_counts_once_and_not_after_zero_grad(earlier: str) -> None:
    """Without Opacus's hooks a plain loss leaves no norms: only the count of clipped gradients tells."""
    maker, model, optimizer, criterion, loader = _ghost(_without_linear())
    batches = iter(loader)
    x, y = next(batches)
    criterion(model(x), y).backward()
    if earlier == "stepped":
        optimizer.step()
        x, y = next(batches)
    else:
        optimizer.zero_grad()
    before, booked = weights(model), len(maker.accountant)
    model.disable_hooks()
    (nn.functional.cross_entropy(model(x), y) * 1000).backward()
    with pytest.raises(RuntimeError, match="not clipped"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert len(maker.accountant) == booked


def test_ghost_clipping_never_uses_the_norms_of_another_batch() -> None:
    maker, model, optimizer, criterion, loader = _ghost(_without_linear())
    batches = iter(loader)
    x, y = next(batches)
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
    before = weights(model)
    x, y = next(batches)
    model(x)  # recorded, and never followed by a backward
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="norms of this batch are missing"):
        criterion(model(1000 * x), y).backward()
    with pytest.raises(RuntimeError, match="not clipped"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert len(maker.accountant) == 1


def test_ghost_clipping_after_an_interrupted_backward_clips_the_next_batch_by_its_own_norms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, model, optimizer, criterion, loader = _ghost(nn.Sequential(nn.Flatten(), nn.Linear(108, 2)))
    batches = iter(loader)
    x, y = next(batches)
    loss, real = criterion(model(x), y), torch.Tensor.backward
    calls = []

    def interrupted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        calls.append(tensor)
        if len(calls) == 2:
            raise MemoryError("no more")
        real(tensor, *args, **kwargs)

    optimizer.zero_grad()
    monkeypatch.setattr(torch.Tensor, "backward", interrupted)
    with pytest.raises(MemoryError):
        loss.backward()
    monkeypatch.undo()
    x, y = next(batches)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="norms of this batch are missing"):
        criterion(model(1000 * x), y).backward()  # hooks were still off
    optimizer.zero_grad()
    criterion(model(1000 * x), y).backward()
    released = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert released.norm() <= 16 * 1.0 * (1 + 1e-5)


def test_whether_a_sample_counts_does_not_depend_on_a_neighbour_that_is_not_finite() -> None:
    def summed(rows: torch.Tensor) -> torch.Tensor:
        params: list[Any] = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
        optimizer = PerLayerOptimizer(
            optim.SGD(params),
            ledger=DrawLedger(),
            clip_rule=OpacusClipping(adjacency="add/remove one", bounds=(1.0, 1.0)),
            noise=None,
            noise_multiplier=0.0,
            max_grad_norm=[1.0, 1.0],
            expected_batch_size=1,
        )
        for p, g in zip(params, (rows[:, :2], rows[:, 2:]), strict=True):
            p.grad_sample = g.clone()
        optimizer.clip_and_accumulate()
        return torch.cat([p.summed_grad for p in optimizer.params])

    huge = torch.tensor([[3e38, 3e38, 1.0]] * 20)  # finite, but their row's sum is not
    difference = summed(torch.cat([huge, torch.full((1, 3), float("nan"))])) - summed(huge)
    assert difference.norm() <= 2**0.5
