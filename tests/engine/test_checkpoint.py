"""Exact resume: bit by bit with the generator states, with fresh randomness without them, or not at all."""

from __future__ import annotations

import copy
import os
import random
import signal
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import opacus
import pytest
import torch
from support import blobs, cross_entropy, engine, mlp, weights
from support import checkpoint as checkpoint_support
from support.checkpoint import CASES, Case, Training
from support.process import IMPORTS
from torch import nn, optim
from torch.utils.data import DataLoader

from opacus_bc.batch_norm.buffers import MovingBufferError
from opacus_bc.engine.resume.files import KEY, CheckpointError, read, read_secret, secret_path
from opacus_bc.mechanism.fingerprint import fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, saved after 20 steps."""
    path = tmp_path_factory.mktemp("runs")
    for name, case in CASES.items():
        Training(case, seed=1).advance(20).save(path / f"{name}.pt")
    return path


@pytest.fixture(scope="module")
def resumed(folder: Path) -> dict[str, str]:
    """What another process makes of them in 20 more steps."""
    done = subprocess.run(
        [sys.executable, checkpoint_support.__file__, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": IMPORTS, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split("\t") for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", CASES)
def test_forty_steps_are_twenty_saved_and_twenty_in_another_process(name: str, resumed: Any) -> None:
    assert Training(CASES[name], seed=1).advance(40).result() == resumed[name]


def test_the_seed_of_the_second_process_would_have_given_other_weights(folder: Path) -> None:
    # What the test above rests on: the resumed process starts elsewhere.
    assert Training(CASES["sgd"], seed=1).result() != Training(CASES["sgd"], seed=99).result()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Training, Path]:
    training, path = Training(CASES["sgd"], seed=1).advance(20), tmp_path / "run.pt"
    training.save(path)
    return training, path


def test_generator_states_are_in_the_secret_file_alone_and_only_its_owner_reads_it(saved: Any) -> None:
    training, path = saved
    assert stat.S_IMODE(secret_path(path).stat().st_mode) == 0o600
    state = training.optimizer.noise.stream(torch.device("cpu")).get_state()
    philox = training.loader.draws.generator.bit_generator.state["state"]["key"].tobytes()
    for secret in (state.numpy().tobytes(), torch.get_rng_state().numpy().tobytes(), philox):
        assert secret not in path.read_bytes()
        assert secret in secret_path(path).read_bytes()


def test_generator_states_of_overwritten_checkpoints_are_dropped(saved: Any) -> None:
    training, path = saved
    names = [torch.load(path, weights_only=True)[KEY]["id"]]
    for _ in range(2):
        training.advance(1).save(path)
        names.append(torch.load(path, weights_only=True)[KEY]["id"])
    # The one before the last is kept for a process that is killed between writing the two files.
    assert set(torch.load(secret_path(path), weights_only=True)["states"]) == set(names[1:])
    training.engine.save_checkpoint(
        path=path, module=training.model, optimizer=training.optimizer, exact=False
    )
    assert not secret_path(path).exists()


def test_without_generator_states_no_noise_and_no_draw_is_used_twice(saved: Any) -> None:
    # A script that seeds itself would otherwise add its first noise again after the resume.
    _, path = saved
    secret_path(path).unlink()
    first = Training(CASES["sgd"], seed=1)
    again = Training(CASES["sgd"], seed=1)
    torch.manual_seed(1)
    again.load(path)
    assert not torch.equal(torch.rand(3), _after_seed(1))
    like = torch.zeros(50)
    assert not torch.equal(first.optimizer.noise.normal(like, 1.0), again.optimizer.noise.normal(like, 1.0))
    assert first.loader.draws.draw() != again.loader.draws.draw()
    assert again.engine.get_epsilon(1e-5) == saved[0].engine.get_epsilon(1e-5)


def _after_seed(seed: int) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.rand(3)


def test_a_users_generator_is_seeded_anew_without_generator_states(tmp_path: Path) -> None:
    case, path = Case(kwargs={"clipping": "batch", "batch_norm": "batch"}), tmp_path / "run.pt"
    given = torch.Generator().manual_seed(5)
    case.kwargs["noise_generator"] = given
    Training(case, seed=1).advance(2).save(path, exact=False)
    assert not secret_path(path).exists()
    given.manual_seed(5)
    Training(case, seed=1).load(path)
    assert not torch.equal(
        torch.rand(3, generator=given), torch.rand(3, generator=torch.Generator().manual_seed(5))
    )


def test_secure_mode_never_writes_generator_states(tmp_path: Path) -> None:
    pytest.importorskip("randomgen")
    path = tmp_path / "run.pt"
    training = Training(CASES["sgd"], seed=1, secure_mode=True).advance(3)
    training.save(path)
    assert os.listdir(tmp_path) == ["run.pt"]
    again = Training(CASES["sgd"], seed=1, secure_mode=True).load(path)
    assert again.result() == training.result()


def test_steps_before_a_resume_must_stay_booked_after_it(saved: Any) -> None:
    again = Training(CASES["sgd"], seed=2).load(saved[1]).advance(2)
    again.engine.accountant.history = again.engine.accountant.history[1:]
    again.advance(3)
    with pytest.raises(RuntimeError, match="25 steps were taken"):
        again.engine.get_epsilon(1e-5)


def test_a_batch_drawn_before_a_load_serves_no_step_after_it(saved: Any) -> None:
    training, path = saved
    again = Training(CASES["sgd"], seed=2)
    x, y = next(iter(again.loader))
    torch.nn.functional.cross_entropy(again.model(x), y).backward()
    again.load(path)
    with pytest.raises(RuntimeError, match="needs a new batch"):
        again.optimizer.step()
    assert again.result() == training.result()


def test_the_next_pass_makes_up_the_rest_of_the_saved_one(saved: Any) -> None:
    _, path = saved
    again = Training(CASES["sgd"], seed=2).load(path)
    lengths = [again.advance_pass() for _ in range(2)]
    assert lengths == [12, 16]  # 20 steps of 16 a pass: 4 of the second are done


def test_a_shuffled_pass_that_was_cut_is_booked_as_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    case = CASES["shuffle"]
    Training(case, seed=1).advance(3).save(path)
    again = Training(case, seed=2).load(path).advance(10)
    assert [entry[2] for entry in again.engine.accountant.history] == [3, 10]


def test_a_batch_that_no_step_has_used_makes_the_checkpoint_inexact(tmp_path: Path) -> None:
    training = Training(CASES["gbc, public batch norm"], seed=1)
    next(iter(training.loader))
    with pytest.warns(UserWarning, match="no step has used"):
        training.save(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == ["run.pt"]


def test_half_a_draw_makes_the_checkpoint_inexact(tmp_path: Path) -> None:
    training = Training(CASES["gbc, public batch norm"], seed=1)
    for x, y in training.loader:
        nn.functional.cross_entropy(training.model(x), y).backward()
        training.optimizer.step()
        if len(training.engine.accountant) == 0:
            break
    with pytest.warns(UserWarning, match="no step has used"):
        training.save(tmp_path / "run.pt")


def everything(training: Training) -> str:
    """All that a load may change, the random streams included."""
    from opacus_bc.engine.resume.randomness import random_state
    from opacus_bc.engine.resume.state import run_state

    run = training.engine._runs[0]
    return fingerprint(
        {
            "weights": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "history": training.engine.accountant.history,
            "run": run_state(run),
            "random": random_state(run),
            "schedulers": {k: v.state_dict() for k, v in training.parts.items() if "scheduler" in k},
        }
    )


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "no zip", "other"])
def test_a_damaged_file_gives_one_error_and_changes_nothing(damage: str, saved: Any) -> None:
    _, path = saved
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "no zip":
        path.write_bytes(b"weights" * 100)
    elif damage == "flipped":
        values = weights(saved[0].model)[:4].float().numpy().tobytes()
        place = content.index(values)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    else:
        torch.save({"weights": torch.zeros(3)}, path)
    fresh = Training(CASES["sgd"], seed=2)
    before = everything(fresh)
    with pytest.raises(CheckpointError):
        fresh.load(path)
    assert everything(fresh) == before


@pytest.mark.parametrize("damage", ["flipped", "cut", "other"])
def test_damaged_generator_states_give_one_error_and_change_nothing(damage: str, saved: Any) -> None:
    training, path = saved
    secret = secret_path(path)
    content = secret.read_bytes()
    if damage == "cut":
        secret.write_bytes(content[: len(content) // 2])
    elif damage == "other":
        torch.save({"noise": 1}, secret)
    else:
        state = training.optimizer.noise.stream(torch.device("cpu")).get_state().numpy().tobytes()
        place = content.index(state) + 100
        secret.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    fresh = Training(CASES["sgd"], seed=2)
    before = everything(fresh)
    with pytest.raises(CheckpointError, match="Delete it to resume with fresh randomness"):
        fresh.load(path)
    assert everything(fresh) == before


def test_a_changed_history_is_noticed(saved: Any) -> None:
    _, path = saved
    content = torch.load(path, weights_only=True)
    content["privacy_accountant_state_dict"]["history"] = [(100.0, 0.1, 20, "poisson")]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="fingerprint"):
        Training(CASES["sgd"], seed=2).load(path)


@pytest.mark.parametrize("part", ["module_state_dict", "optimizer_state_dict", "lr_scheduler_state_dict"])
def test_a_load_that_fails_halfway_changes_nothing(part: str, tmp_path: Path) -> None:
    from opacus_bc.engine.resume.files import sealed

    path = tmp_path / "run.pt"
    Training(CASES["schedulers"], seed=1).advance(7).save(path)
    content = torch.load(path, weights_only=True)
    own = content.pop(KEY)
    if part == "module_state_dict":
        content[part]["0.weight"] = torch.zeros(1)
    else:
        content[part] = ["nonsense"]
    torch.save(sealed(content, {"run": own["run"]}), path)
    fresh = Training(CASES["schedulers"], seed=2)
    before = everything(fresh)
    with pytest.raises((ValueError, RuntimeError, TypeError, AttributeError)):
        fresh.load(path)
    assert everything(fresh) == before


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    content = {"module_state_dict": Trap(), "privacy_accountant_state_dict": {}}
    torch.save(content, tmp_path / "run.pt")
    training = Training(CASES["sgd"], seed=1)
    with pytest.raises(CheckpointError):
        training.load(tmp_path / "run.pt")
    with pytest.raises(ValueError, match="would run code"):
        training.load(tmp_path / "run.pt", torch_load_kwargs={"weights_only": False})
    assert not (tmp_path / "ran").exists()


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    training = Training(CASES["sgd"], seed=1)
    with pytest.raises(CheckpointError, match="must not run code"):
        training.save(tmp_path / "run.pt", checkpoint_dict={"model": nn.Linear(1, 1)})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(sgd=False), "optimizer='SGD', this run has 'AdamW'"),
        (Case(batch=16), "mini_set_size"),
        (Case(kwargs={"clipping": "batch", "batch_norm": "batch", "mini_batch_size": 5}), "mini_set_size"),
        (Case(kwargs={"clipping": "batch", "batch_norm": "batch"}, alc={}), "alc="),
        (Case(kwargs={"clipping": "batch"}, public_norm={}), "batch_norm="),
    ],
)
def test_another_set_up_is_refused(case: Case, message: str, saved: Any) -> None:
    with pytest.raises(ValueError, match=message):
        Training(case, seed=1).load(saved[1])


@pytest.mark.parametrize("saved_with_it", [True, False])
def test_a_scheduler_on_one_side_alone_is_said(saved_with_it: bool, tmp_path: Path) -> None:
    first, second = Training(CASES["schedulers"], seed=1), Training(CASES["schedulers"], seed=2)
    scheduler = (first if not saved_with_it else second).parts.pop("lr_scheduler")
    first.save(tmp_path / "run.pt")
    with pytest.warns(UserWarning, match="has a lr_scheduler" if saved_with_it else "has no lr_scheduler"):
        second.load(tmp_path / "run.pt")
    assert scheduler.last_epoch == 0


def planned(**changes: Any) -> tuple[Any, ...]:
    """An engine, and what it made private for a budget."""
    eng, model = engine(), mlp()
    arguments = {"epochs": 2, "target_epsilon": 8.0, "max_grad_norm": 1.0, "clipping": "batch", **changes}
    return eng, *eng.make_private_with_epsilon(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(blobs(40), batch_size=10),
        target_delta=1e-5,
        **arguments,
    )


@pytest.mark.parametrize("clipping", ["batch", "flat"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 4}, "planned_steps=8, this run has 16: pass the same epochs"),
        ({"target_epsilon": 2.0}, "start=.*pass the same budget"),
        ({"max_grad_norm": 2.0}, "start=.*pass the same budget and bounds"),
    ],
)
def test_a_resume_under_another_budget_is_refused_and_changes_nothing(
    clipping: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    eng, model, optimizer, loader = planned(clipping=clipping)
    x, y = next(iter(loader))
    cross_entropy(model, x, y).backward()
    optimizer.step()
    eng.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    other, module, resumed, _ = planned(clipping=clipping, **changes)
    before = (resumed.noise_multiplier, resumed.max_grad_norm, copy.deepcopy(module.state_dict()))
    with pytest.raises(ValueError, match=message):
        other.load_checkpoint(path=tmp_path / "run.pt", module=module, optimizer=resumed)
    assert (resumed.noise_multiplier, resumed.max_grad_norm) == before[:2]
    assert other.accountant.history == []
    assert all(torch.equal(value, before[2][name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("use", ["public_norm", "alc"])
def test_data_that_were_not_public_before_cannot_become_public(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A script that splits anew when it is resumed would normalise with samples it has trained on.
    case, path = Case(kwargs={"clipping": "batch"}, **{use: {}}), tmp_path / "run.pt"
    Training(case, seed=1).advance(2).save(path)
    Training(case, seed=1).load(path)
    monkeypatch.setattr(checkpoint_support, "public", lambda: DataLoader(blobs(64, seed=8), batch_size=16))
    again = Training(case, seed=1)
    before = everything(again)
    with pytest.raises(ValueError, match="public_data"):
        again.load(path)
    assert everything(again) == before


@pytest.mark.filterwarnings("ignore:.*hold the statistics")
def test_frozen_statistics_of_individual_clipping_come_back_and_stay_watched(tmp_path: Path) -> None:
    case, path = Case(kwargs={"clipping": "flat", "batch_norm": "frozen"}), tmp_path / "run.pt"

    def pretrained(mean: float) -> Training:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.BatchNorm1d, "reset_running_stats", lambda norm: norm.running_mean.fill_(mean))
            return Training(case, seed=1)

    first, second = pretrained(1.0), pretrained(0.0)
    first.save(path)
    second.load(path)
    layer = second.engine._runs[0].policy.layers["1"]
    assert torch.equal(layer.constant_mean, torch.ones(8))
    assert second.engine.get_epsilon(1e-5) == 0
    layer.running_mean.add_(1.0)
    with pytest.raises(MovingBufferError):
        second.engine.get_epsilon(1e-5)


def test_of_two_continuations_neither_takes_the_other_for_itself(tmp_path: Path) -> None:
    path, other_path = tmp_path / "run.pt", tmp_path / "other.pt"
    first = Training(CASES["sgd"], seed=1).advance(5)
    first.save(path)
    second = Training(CASES["sgd"], seed=2).load(path).advance(5)
    second.save(other_path)
    first.advance(5)
    with pytest.raises(ValueError, match="10 steps"):
        first.load(other_path)
    first.save(path)
    with pytest.raises(ValueError, match="10 steps"):
        second.load(path)


def test_generator_states_are_written_only_if_asked_for(tmp_path: Path) -> None:
    # Two different continuations with one .secret file would share their noise.
    training, path = Training(CASES["sgd"], seed=1).advance(2), tmp_path / "run.pt"
    training.engine.save_checkpoint(path=path, **training.parts)
    assert os.listdir(tmp_path) == ["run.pt"]
    like = torch.zeros(50)
    twice = [Training(CASES["sgd"], seed=1).load(path).optimizer.noise.normal(like, 1.0) for _ in range(2)]
    assert not torch.equal(*twice)


def test_another_runs_checkpoint_cannot_hide_this_ones_steps(saved: Any) -> None:
    # The histories are equal, the spendings are two.
    _, path = saved
    other = Training(CASES["sgd"], seed=1).advance(20)
    before = everything(other)
    with pytest.raises(ValueError, match="20 steps"):
        other.load(path)
    assert everything(other) == before


def test_two_models_of_one_budget_are_loaded_one_after_the_other(tmp_path: Path) -> None:
    def two() -> tuple[Any, list[dict[str, Any]]]:
        ours, parts, data = engine(), [], blobs(64)
        for seed in (1, 2):
            model = mlp(seed=seed)
            model, optimizer, _ = ours.make_private(
                module=model,
                optimizer=optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(data, batch_size=16),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                clipping="batch",
            )
            parts.append({"module": model, "optimizer": optimizer})
        return ours, parts

    ours, parts = two()
    ours.accountant.step(noise_multiplier=1.0, sample_rate=0.25)
    for place, part in enumerate(parts):
        ours.save_checkpoint(path=tmp_path / f"{place}.pt", **part)
    again, parts = two()
    for place, part in enumerate(parts):
        again.load_checkpoint(path=tmp_path / f"{place}.pt", **part)
    assert again.accountant.history == ours.accountant.history


@pytest.mark.filterwarnings("ignore:.*hold the statistics")
@pytest.mark.parametrize("inner_saves", [True, False])
def test_wrapper_and_module_inside_read_each_others_checkpoints(inner_saves: bool, tmp_path: Path) -> None:
    kwargs = {"clipping": "flat", "batch_norm": "frozen", "grad_sample_mode": "hooks"}
    case, path = Case(kwargs=kwargs), tmp_path / "run.pt"
    first, second = Training(case, seed=1), Training(case, seed=2)
    wrappers = [t.engine._runs[0].wrapper for t in (first, second)]
    modules = [wrappers[0]._module, wrappers[1]] if inner_saves else [wrappers[0], wrappers[1]._module]
    first.engine.save_checkpoint(path=path, module=modules[0], optimizer=first.optimizer)
    assert not torch.equal(weights(wrappers[0]), weights(wrappers[1]))
    second.engine.load_checkpoint(path=path, module=modules[1], optimizer=second.optimizer)
    assert torch.equal(weights(wrappers[0]), weights(wrappers[1]))


def test_steps_that_the_checkpoint_lacks_cannot_be_forgotten(saved: Any) -> None:
    training, path = saved
    training.load(path)  # nothing was booked since
    training.advance(1)
    with pytest.raises(ValueError, match="21 steps"):
        training.load(path)


def test_more_can_be_saved_and_comes_back(tmp_path: Path) -> None:
    training, path = Training(CASES["sgd"], seed=1), tmp_path / "run.pt"
    training.save(path, checkpoint_dict={"epoch": 3})
    found = training.engine.load_checkpoint(path=path, module=training.model, optimizer=training.optimizer)
    assert found["epoch"] == 3
    assert "optimizer_state_dict" not in found
    with open(tmp_path / "open.pt", "wb") as file:
        training.engine.save_checkpoint(path=file, module=training.model)
    with pytest.warns(UserWarning, match="optimizer"):
        training.load(tmp_path / "open.pt")


def test_a_checkpoint_of_opacus_loads_with_a_note_of_what_it_lacks(tmp_path: Path) -> None:
    path, data = tmp_path / "stock.pt", DataLoader(blobs(64), batch_size=16)
    with warnings.catch_warnings(action="ignore"):
        stock = opacus.PrivacyEngine()
    model = mlp(seed=1)
    kwargs: dict[str, Any] = {"data_loader": data, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    model, optimizer, loader = stock.make_private(
        module=model, optimizer=optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **kwargs
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    stock.save_checkpoint(path=path, module=model, optimizer=optimizer)

    ours, other = engine(), mlp(seed=2)
    other, optimizer, _ = ours.make_private(
        module=other, optimizer=optim.SGD(other.parameters(), lr=0.1, momentum=0.9), **kwargs
    )
    with pytest.warns(UserWarning, match="It lacks"):
        ours.load_checkpoint(path=path, module=other, optimizer=optimizer)
    assert torch.equal(weights(model), weights(other))
    assert len(ours.accountant) == 4
    assert ours.get_epsilon(1e-5) > 0


def test_a_process_killed_while_saving_leaves_a_checkpoint_that_resumes(tmp_path: Path) -> None:
    # SIGKILL at 100 random moments: what lies there is always whole, and its generator states match it.
    training, path = Training(CASES["sgd"], seed=1).advance(1), tmp_path / "run.pt"
    training.save(path)
    started = time.perf_counter()
    training.save(path)
    duration = time.perf_counter() - started
    chance = random.Random(0)
    for _ in range(100):
        child = os.fork()
        if child == 0:
            while True:
                training.save(path)
        time.sleep(chance.uniform(0, 3 * duration))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert read_secret(path, read(path)[KEY]["id"]) is not None
    expected = Training(CASES["sgd"], seed=1).advance(3).result()
    assert Training(CASES["sgd"], seed=9).load(path).advance(2).result() == expected


def test_a_failed_write_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(CASES["sgd"], seed=1)

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        training.save(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("arguments", [{}, {"grad_sample_mode": "hooks"}, {"clipping": "batch"}])
def test_a_torch_state_that_comes_without_its_epsilon_warns(arguments: dict[str, Any]) -> None:
    def training() -> tuple[Any, Any, Any]:
        model = mlp()
        return engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            data_loader=DataLoader(blobs(16), batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **arguments,
        )

    model, optimizer, loader = training()
    fresh = training()[1]
    fresh.load_state_dict(optimizer.state_dict())  # of no steps: nothing is lost
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    with pytest.warns(UserWarning, match=r"earlier steps, which this engine's epsilon does not count"):
        fresh.load_state_dict(optimizer.state_dict())


def test_a_learning_rate_of_numpys_type_is_saved_so_that_it_can_be_read(tmp_path: Path) -> None:
    def training() -> tuple[Any, ...]:
        model, maker = mlp(), engine()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        return maker, *maker.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(blobs(16), batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )

    maker, model, optimizer, _ = training()
    optimizer.param_groups[0]["lr"] = np.float64(0.025)
    maker.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    maker, model, optimizer, _ = training()
    maker.load_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.025
