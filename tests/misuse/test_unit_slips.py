"""Users' ids and views that make no sense: a clear error before anything changes."""

from __future__ import annotations

import copy
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import FDPAccountant, PrivacyEngine, Units

N = 12
IDS = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def make(engine: PrivacyEngine | None = None, module: nn.Module | None = None, **options: Any) -> Any:
    module = module or model()
    data = TensorDataset(torch.zeros(N, 4), torch.zeros(N, dtype=torch.long))
    given: dict[str, Any] = {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "data_loader": DataLoader(data, batch_size=options.pop("batch_size", 2)),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "clipping": "flat",
    }
    return (engine or PrivacyEngine()).make_private(**{**given, **options})


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("too short", {"unit": IDS[:-1]}, ValueError, r"shape \(11,\) and the data set 12 samples"),
    ("a table", {"unit": np.zeros((N, 2))}, ValueError, r"shape \(12, 2\)"),
    ("NaN", {"unit": [*map(float, IDS[:-1]), float("nan")]}, ValueError, "no id for 1 samples .*sample 11"),
    ("NaN as a decimal", {"unit": [*IDS[:-1], Decimal("NaN")]}, ValueError, "no id for 1 samples"),
    (
        "NaT in a list",
        {"unit": [*map(str, IDS[:-1]), np.datetime64("NaT", "D")]},
        ValueError,
        "no id for 1 samples",
    ),
    ("NaN array", {"unit": np.array([np.nan] * 2 + [1.0] * 10)}, ValueError, "no id for 2 samples"),
    ("NaN tensor", {"unit": torch.tensor([float("nan")] + [1.0] * 11)}, ValueError, "no id for 1 samples"),
    ("None", {"unit": [None, *IDS[1:]]}, ValueError, "no id for 1 samples"),
    ("one user", {"unit": [7] * N}, ValueError, "one user only"),
    ("no samples", {"unit": Units(IDS, users=6)}, ValueError, "2 users have no samples"),
    ("too many", {"unit": Units(IDS, users=3)}, ValueError, "1 users are unknown"),
    ("a string", {"unit": "user_id"}, TypeError, "one user id for each sample"),
    ("a number", {"unit": 3}, TypeError, "one user id for each sample"),
    ("lists", {"unit": [[i] for i in IDS]}, TypeError, "not hashable"),
    ("no cap", {"unit": IDS, "mini_batch_size": None}, ValueError, "unit= needs mini_batch_size="),
    ("cap 0", {"unit": IDS, "mini_batch_size": 0}, ValueError, "mini_batch_size must be"),
    (
        "a cap of one",
        {"unit": IDS, "mini_batch_size": 1, "clipping": "batch"},
        ValueError,
        "mini_batch_size=1 with unit= .*clipping='flat'",
    ),
    ("too large", {"unit": IDS, "batch_size": 5}, ValueError, "batch_size=5, which with unit= counts users"),
    ("ghost", {"unit": IDS, "grad_sample_mode": "ghost"}, ValueError, "unit= needs per-sample gradients"),
    ("per layer", {"unit": IDS, "clipping": "per_layer"}, ValueError, "unit= goes with clipping='batch'"),
    ("no views", {"views": 0}, ValueError, "views must be a whole number >= 1, got 0"),
    ("half a view", {"views": 2.5}, ValueError, "views must be a whole number"),
    ("true views", {"views": True}, ValueError, "views must be a whole number"),
    ("views of a mini-set", {"views": 2, "clipping": "batch"}, ValueError, "views=2 goes with individual"),
    ("views, ghost", {"views": 2, "grad_sample_mode": "ghost"}, ValueError, "views=2 needs per-sample"),
    ("views, adaptive", {"views": 2, "clipping": "adaptive"}, ValueError, "views=2 goes with"),
]


@pytest.mark.parametrize(("options", "kind", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_units_are_refused_before_anything_changes(options, kind, message):
    if "unit" in options:
        options = {"mini_batch_size": 2, **options}
    module, engine = model(), PrivacyEngine()
    before = copy.deepcopy(module.state_dict())
    hooks = [len(child._forward_hooks) + len(child._forward_pre_hooks) for child in module.modules()]
    with pytest.raises(kind, match=message):
        make(engine, module, **options)
    assert engine.accountant.history == []
    assert engine._runs == []
    assert [len(c._forward_hooks) + len(c._forward_pre_hooks) for c in module.modules()] == hooks
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    "ids",
    [
        IDS,
        tuple(IDS),
        np.array(IDS),
        torch.tensor(IDS),
        [str(i) for i in IDS],
        np.array([f"user {i}" for i in IDS]),
        [("ward", i) for i in IDS],
        [float(i) for i in IDS],
        ["a", 1, 1, "a", 2, 2, None.__class__, 2, 1, 1, 1, 1],
        Units(lambda i: IDS[i]),
        Units(IDS, users=4),
    ],
    ids=[
        "list",
        "tuple",
        "array",
        "tensor",
        "str",
        "strings",
        "tuples",
        "float",
        "mixed",
        "function",
        "Units",
    ],
)
def test_ids_of_many_kinds_are_taken(ids):
    *_, loader = make(unit=ids, mini_batch_size=2)
    assert loader.plan.dataset_size == 4
    assert loader.plan.cap == 2


class NAType:
    """What pandas puts where a value is missing: comparing it gives neither true nor false."""

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")

    __hash__ = None  # type: ignore[assignment]


class Column:
    """What a column of a table shows of itself: a length, and an array of objects."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        array = np.empty(len(self.values), dtype=object)
        array[:] = self.values
        return array


def test_a_column_of_a_table_is_taken():
    *_, loader = make(unit=Column([f"u{i}" for i in IDS]), mini_batch_size=2)
    assert loader.plan.dataset_size == 4
    for nothing in (None, NAType(), float("nan")):
        with pytest.raises(ValueError, match="no id for 1 samples"):
            make(unit=Column([nothing, *IDS[1:]]), mini_batch_size=2)


def step(module: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        if optimizer.steps_taken:
            return


@pytest.mark.parametrize("accountant", ["fdp", "prv"])
@pytest.mark.parametrize("first", [{}, {"unit": IDS, "mini_batch_size": 2}], ids=["samples", "users"])
def test_one_engine_does_not_account_samples_and_users_together(first, accountant):
    engine = PrivacyEngine(accountant=accountant)
    make(engine, **first)
    second = {} if first else {"unit": IDS, "mini_batch_size": 2}
    with pytest.raises(ValueError, match="no epsilon holds for both"):
        make(engine, **second)


def test_accountants_of_samples_and_users_do_not_mix():
    users, samples = FDPAccountant(), FDPAccountant()
    users.step(noise_multiplier=1.0, sample_rate=0.1, sampling="poisson over users")
    assert users.adjacency == "add/remove one user"
    for mixed in (
        lambda: users.step(noise_multiplier=1.0, sample_rate=0.1),
        lambda: users.step(noise_multiplier=1.0, sample_rate=0.1, sampling="shuffle over users"),
        lambda: users.release(noise_multiplier=9.0, adjacency="add/remove one"),
    ):
        with pytest.raises(ValueError, match="protects against"):
            mixed()
    samples.step(noise_multiplier=1.0, sample_rate=0.1)
    state = samples.state_dict()
    state["history"] = [*state["history"], *users.history]
    with pytest.raises(ValueError, match="mixes the adjacencies"):
        FDPAccountant().load_state_dict(state)
    assert users.get_epsilon(1e-5) == samples.get_epsilon(1e-5)
    users.release(noise_multiplier=9.0)
    assert users.history[-1] == (9.0, 1.0, 0, "release over users")


def test_an_engine_refuses_a_run_on_another_unit_than_its_loaded_history():
    engine = PrivacyEngine()
    engine.accountant.history = [(1.0, 0.1, 3, "poisson over users")]
    with pytest.raises(ValueError, match="this run protects samples"):
        make(engine)


def test_the_delta_warning_is_about_users():
    module, optimizer, loader = make(engine := PrivacyEngine(), unit=IDS, mini_batch_size=2)
    step(module, optimizer, loader)
    with pytest.warns(UserWarning, match="no less than 1/4: publishing all samples of a random user of 4"):
        engine.get_epsilon(0.25)


def checkpoint(tmp_path: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    engine = PrivacyEngine()
    module, optimizer, loader = make(engine, unit=IDS, mini_batch_size=2, **options)
    step(module, optimizer, loader)
    path = tmp_path / "run.pt"
    engine.save_checkpoint(path=path, module=module, optimizer=optimizer)
    return path, module, optimizer, engine


@pytest.mark.parametrize("clipping", ["batch", "flat"])
def test_a_run_of_users_is_resumed_with_the_same_ids_only(tmp_path, clipping):
    path, *_ = checkpoint(tmp_path, clipping=clipping)
    other = [0, 0, 1, 1, 1, 0, 2, 2, 2, 3, 3, 3]  # one sample changed hands
    engine = PrivacyEngine()
    module, optimizer, _ = make(engine, unit=other, mini_batch_size=2, clipping=clipping)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match="does not give the samples to the same users"):
        engine.load_checkpoint(path=path, module=module, optimizer=optimizer)
    assert engine.accountant.history == []
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    engine = PrivacyEngine()
    names = [f"u{i}" for i in IDS]  # other names for the same people
    module, optimizer, loader = make(engine, unit=names, mini_batch_size=2, clipping=clipping)
    engine.load_checkpoint(path=path, module=module, optimizer=optimizer)
    assert engine.accountant.history == [(1.0, 0.5, 1, "poisson over users")]
    for x, y in loader:
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert engine.accountant.history == [(1.0, 0.5, 2, "poisson over users")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "protects='user', this run has 'sample'"),
        ({"unit": IDS, "mini_batch_size": 3}, "mini_set_size=2, this run has 3"),
        ({"unit": IDS, "mini_batch_size": 2, "views": 2}, "views=1, this run has 2"),
    ],
)
def test_a_run_of_users_is_not_resumed_as_another(tmp_path, options, message):
    path, *_ = checkpoint(tmp_path)
    engine = PrivacyEngine()
    module, optimizer, _ = make(engine, batch_size=2 if options else 6, **options)
    with pytest.raises(ValueError, match=message):
        engine.load_checkpoint(path=path, module=module, optimizer=optimizer)


def test_the_ids_fingerprint_is_in_no_file_that_others_can_read(tmp_path):
    """With it, who knows all users but one could find out whether that one is there."""
    path, *_ = checkpoint(tmp_path)
    fingerprint = Units(IDS).index(N).fingerprint().encode()
    owners = tmp_path / "run.pt.owners"
    assert fingerprint in owners.read_bytes()
    assert fingerprint not in path.read_bytes()
    assert owners.stat().st_mode & 0o077 == 0
    owners.unlink()
    engine = PrivacyEngine()
    module, optimizer, _ = make(engine, unit=IDS, mini_batch_size=2)
    with pytest.raises(ValueError, match=r"run\.pt\.owners is missing"):
        engine.load_checkpoint(path=path, module=module, optimizer=optimizer)
