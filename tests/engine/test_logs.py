"""``engine.loggable``: numbers that may be shown, and nothing that was computed from private data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import blobs, engine, mlp
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import UnprotectedStatisticsError

DELTA = 1e-5
PUBLIC = DataLoader(blobs(40, seed=1), batch_size=20)
NAMES = {
    "epsilon",
    "delta",
    "steps",
    "noise_multiplier",
    "effective_noise_multiplier",
    "max_grad_norm",
    "sample_rate",
    "expected_batch_size",
    "mu",
}


def run(data: TensorDataset | None = None, passes: int = 1, eng: Any = None, **kwargs: Any) -> Any:
    made, model = engine() if eng is None else eng, mlp(norm="batch_norm" in kwargs)
    module, optimizer, loader = made.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(blobs(64) if data is None else data, batch_size=16),
        **{"noise_multiplier": 2.0, "max_grad_norm": 0.5, **kwargs},
    )
    for _ in range(passes):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    return made


MODES: dict[str, dict[str, Any]] = {"flat": {}, "gbc": {"clipping": "batch", "mini_batch_size": 4}}


@pytest.mark.parametrize("mode", MODES)
def test_the_numbers_are_those_of_the_run(mode: str) -> None:
    made = run(**MODES[mode])
    found = made.loggable(DELTA)
    assert set(found) == NAMES
    assert found["epsilon"] == made.get_epsilon(DELTA) > 0
    assert found["mu"] == made.accountant.get_mu(DELTA)
    assert (found["steps"], found["expected_batch_size"], found["sample_rate"]) == (4, 16, 0.25)
    assert (found["noise_multiplier"], found["effective_noise_multiplier"]) == (2.0, pytest.approx(2.0))


@pytest.mark.parametrize("mode", MODES)
def test_other_private_data_log_the_same(mode: str) -> None:
    other = TensorDataset(100 * torch.randn(64, 4), torch.ones(64, dtype=torch.long))
    assert run(**MODES[mode]).loggable(DELTA) == run(other, **MODES[mode]).loggable(DELTA)


def test_before_the_first_step_nothing_is_spent() -> None:
    found = run(passes=0).loggable(DELTA)
    assert (found["epsilon"], found["steps"]) == (0.0, 0)
    assert "mu" not in found


def test_public_norms_are_there_where_they_are_known() -> None:
    made = run(clipping="batch", alc=PUBLIC)
    found, report = made.loggable(DELTA), made.layer_report()
    assert set(found) - NAMES == {"noise_to_signal", *(f"public_norm/{row.layer}" for row in report.rows)}
    assert found["noise_to_signal"] == report.noise_to_signal
    assert all(found[f"public_norm/{row.layer}"] == row.norm for row in report.rows)


def test_accountants_without_mu_log_none() -> None:
    assert set(run(eng=engine(accountant="rdp")).loggable(DELTA)) == NAMES - {"mu"}


def test_nothing_is_logged_of_leaking_statistics_or_without_a_run() -> None:
    with pytest.raises(ValueError, match="call make_private first"):
        engine().loggable(DELTA)
    with pytest.warns(UserWarning, match="unprotected"):
        made = run(clipping="batch", batch_norm="unprotected")
    with pytest.raises(UnprotectedStatisticsError):
        made.loggable(DELTA)
