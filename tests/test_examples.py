"""Every example runs at its smallest setting and says what it spent."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str, timeout: float = 240) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        ["--train", "norm+head"],
        ["--clipping", "batch", "--backend", "aot_eager", "--bfloat16", "--lr", "0.01"],
    ],
    ids=["one backward", "compiled batch clipping"],
)
def test_finetuning_a_network_of_timm(mode: list[str]) -> None:
    small = ["--model", "test_efficientnet", "--image-size", "32", "--samples", "80", "--batch-size", "18"]
    printed = run(sys.executable, "examples/finetune_timm.py", *small, "--epochs", "1", *mode)
    assert "after 4 steps" in printed
    assert "test accuracy" in printed


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
@pytest.mark.parametrize("mode", [[], ["--mini-batch-size", "16"]])
def test_two_ranks_train_and_say_the_same_epsilon(script: str, mode: list[str]) -> None:
    small = ["--samples", "512", "--batch-size", "64", "--epochs", "1", *mode]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = run(*launcher, f"examples/{script}", *small)
    found = re.findall(r"rank (\d): .*?(epsilon [\d.]+ after \d+ steps)", printed)  # ranks may share a line
    assert sorted(rank for rank, _ in found) == ["0", "1"]
    assert found[0][1] == found[1][1]
    assert "after 8 steps" in found[0][1]
    assert "test accuracy" in printed
