"""Every example runs at its smallest setting and says what it spent."""

from __future__ import annotations

import os
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
def test_finetuning_a_resnet_with_compile_and_autocast() -> None:
    small = ["--samples", "64", "--batch-size", "16", "--epochs", "1", "--backend", "aot_eager"]
    printed = run(sys.executable, "examples/finetune_resnet.py", *small)
    assert "after 4 steps" in printed
    assert "test accuracy" in printed
