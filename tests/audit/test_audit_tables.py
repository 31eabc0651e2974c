"""Every mode, unit and BatchNorm policy that the engine accepts has a row among the audits, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

import pytest
import torch
from opacus.optimizers import AdaClipDPOptimizer
from support import engine
from torch import optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc.audit.models import NORMALISED_LAYERS, InnerProduct, Mean, Normalised, Wide
from opacus_bc.audit.modes import MODES, OF_CONSTANTS, OF_MINI_SETS, USERS, Policy, policy_argument
from opacus_bc.audit.table import adaptive, all_audits
from opacus_bc.audit.toys import make_toy, single_round
from opacus_bc.audit.units import _releases, single_user_round
from opacus_bc.batch_norm.choices import POLICIES
from opacus_bc.engine.request import CLIPPINGS, PER_SAMPLE_MODES
from opacus_bc.mechanism.names import Unit
from opacus_bc.optimizers.book_keeping import BookKeepingOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:batch_norm="),
    pytest.mark.filterwarnings("ignore:the public data has"),
]
ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 2.0,
    "poisson_sampling": False,
}
UNITS: dict[str, dict[str, Any]] = {
    "sample": {},
    "sample with four views": {"views": 4},
    "user": {"unit": [i // 3 for i in range(12)], "mini_batch_size": 2},
}
# "unprotected" has no claim that could be audited; a public loader has two policies and no word in POLICIES.
AUDITED = [None, "public", "differentiated", *(policy for policy in POLICIES if policy != "unprotected")]
GRADIENTS = (*PER_SAMPLE_MODES, "ghost")


@dataclass(frozen=True)
class Kind:
    """What distinguishes one audited mechanism from another."""

    clipping: str
    gradients: str | None
    stock: bool
    several_mini_sets: bool
    unit: str
    policy: str | None


def accepted(
    clipping: str, gradients: str | None, generator: bool, several: bool, unit: str, policy: Any
) -> Any:
    """The optimizer of a run that the engine has set up, or None if it refuses."""
    inner: Wide = InnerProduct(NORMALISED_LAYERS, 2) if policy is None else Normalised(2)
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=next(inner.parameters()).dtype)
    how: dict[str, Any] = {"clipping": clipping, **UNITS[unit]}
    if gradients is not None:
        how["grad_sample_mode"] = gradients
    if gradients == "ghost":
        how["criterion"] = Mean()
    if clipping == "adaptive":
        how |= ADAPTIVE
    if generator:
        how["noise_generator"] = torch.Generator().manual_seed(1)
    if several:
        how["mini_batch_size"] = 3
    if policy is not None:
        how["batch_norm"] = policy_argument(policy)
    try:
        _, optimizer, *_ = engine().make_private(
            module=inner,
            optimizer=optim.SGD(inner.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x), batch_size=2 if unit == "user" else 6),
            noise_multiplier=1.0,
            max_grad_norm=[1.0] * NORMALISED_LAYERS if clipping == "per_layer" else 1.0,
            **how,
        )
    except (ValueError, TypeError):
        return None
    return optimizer


def existing() -> Iterator[Kind]:
    """Every kind of run that the engine sets up, of the words that it knows."""
    for clipping, unit, policy in product(CLIPPINGS, UNITS, AUDITED):
        ways = (
            [(None, False, several) for several in ((False,) if unit == "user" else (False, True))]
            if clipping == "batch"
            else [(gradients, generator, False) for gradients in GRADIENTS for generator in (False, True)]
        )
        for gradients, generator, several in ways:
            optimizer = accepted(clipping, gradients, generator, several, unit, policy)
            if optimizer is None:
                continue
            # Where Opacus clips, our noise source is None; adaptive and ghost clipping are Opacus's anyway.
            stock = optimizer.noise is None and gradients != "ghost" and clipping != "adaptive"
            assert isinstance(optimizer, AdaClipDPOptimizer) == (clipping == "adaptive")
            yield Kind(clipping, gradients, stock, several, unit, policy)


def audited() -> Iterator[Kind]:
    """What the tables say."""
    for mode in (*MODES.values(), *USERS.values()):
        if mode.alc is None and not mode.local_steps:
            gradients = mode.gradients if mode.individual else None
            several = mode.mini_sets > 1
            yield Kind(mode.clipping, gradients, mode.stock, several, mode.unit, mode.batch_norm)
    for audit in adaptive(4).values():
        toy = audit.args[0]
        yield Kind("adaptive", toy.gradients, False, False, "sample", toy.batch_norm)


def test_every_mode_unit_and_policy_that_exists_has_a_row_and_every_row_exists() -> None:
    rows, found = list(audited()), set(existing())
    assert len(rows) == len(set(rows))  # no row is another one's copy
    assert found - set(rows) == set()  # without a row
    assert set(rows) - found == set()  # rows that the engine refuses
    assert {"sample", "user", "mini-set"} == set(get_args(Unit))  # a new unit needs a word in UNITS


def test_every_policy_has_a_word_in_the_tables() -> None:
    assert {policy for policy in AUDITED if policy is not None} == set(get_args(Policy))


def test_every_row_of_the_tables_is_among_the_audits_of_the_command() -> None:
    names = all_audits(quick=True)
    for method, mode in MODES.items():
        assert f"{method}, {'one round' if mode.batch_norm is None else 'four rounds'}" in names
    assert set(USERS) <= set(names)


@pytest.mark.parametrize("method", USERS)
def test_every_row_of_users_is_set_up_as_it_says(method: str) -> None:
    """A row that forgot its mode would audit another one twice."""
    mode = USERS[method]
    releases, private, _ = _releases(single_user_round(method), canary=True, width=3, seed=0)
    (run,) = private._runs
    assert (run.clipping, run.users is not None) == (mode.clipping, True)
    assert isinstance(run.optimizer, BookKeepingOptimizer) == (mode.gradients == "bk")
    assert (run.optimizer.adaptive is not None) == (mode.alc is not None)
    words = {None: "none", "differentiated": "public"}
    assert run.policy.name == words.get(mode.batch_norm, mode.batch_norm)
    if run.policy.layers:
        assert run.policy.follow == (mode.batch_norm == "differentiated")
    assert len(releases) == (1 if mode.batch_norm is None else 4)


@pytest.mark.parametrize("method", ["BC", "BK of views"])
def test_the_rows_of_samples_obey_the_policy_that_they_name(method: str) -> None:
    for policy in OF_MINI_SETS if method == "BC" else OF_CONSTANTS:
        (run,) = make_toy(single_round(f"{method} + BatchNorm, {policy}"), canaries=1).engine._runs
        assert run.policy.name == policy.replace("differentiated", "public")
        assert run.policy.follow == (policy == "differentiated")
