"""What the README promises, run as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import timm
import torch
from torch.utils.data import TensorDataset

README = Path(__file__).parents[1] / "README.md"
PRETRAINED = '"tf_efficientnet_lite0", pretrained=True'  # weights that a test cannot download
BATCH = "batch_size=1000"  # more than a test has
SMALL = '"test_efficientnet", pretrained=False'


@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
@pytest.mark.filterwarnings("ignore:batch_norm='frozen'")  # its statistics are those of a new network
def test_the_readme_example_runs_and_keeps_its_promises():
    torch.manual_seed(0)
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    assert PRETRAINED in code
    assert len(code.splitlines()) <= 20
    images = TensorDataset(torch.randn(60, 3, 32, 32), torch.randint(0, 10, (60,)))
    assert BATCH in code
    names: dict[str, object] = {"private": images}
    exec(compile(code.replace(PRETRAINED, SMALL).replace(BATCH, "batch_size=20"), "README.md", "exec"), names)
    engine, released = names["engine"], names["released"]
    assert not released.training
    assert 0.999 * 8.0 <= engine.get_epsilon(1e-5) <= 8.0
    plain = timm.create_model("test_efficientnet", num_classes=10)
    assert [type(layer) for layer in released.modules()] == [type(layer) for layer in plain.modules()]
    plain.load_state_dict(released.state_dict())
    assert float(released.classifier.weight.detach().norm()) > 0  # it started at zero
    assert all(int(n) == 0 for name, n in released.named_buffers() if name.endswith("num_batches_tracked"))


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 600
