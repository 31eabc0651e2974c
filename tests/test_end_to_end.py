"""What the README promises, run as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
def test_the_readme_example_runs_and_keeps_its_promises():
    torch.manual_seed(0)
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    engine, released = names["engine"], names["released"]
    assert 0.999 * 8.0 <= engine.get_epsilon(1e-5) <= 8.0
    assert type(released) is nn.Sequential
    assert [type(m) for m in released] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    plain = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    plain.load_state_dict(released.state_dict())
