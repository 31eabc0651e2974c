"""Claim: with its defaults, ALC's estimation on public data costs at most 5 % of an epoch.

    python benchmarks/alc_estimation_cost.py [--model bn_lenet5] [--samples 54000]

CPU time on one thread of a few training steps (times their number in an epoch) and of one estimation, for
batch clipping and for individual clipping, on random images: cost does not depend on the pixels. Prints a
table, writes JSON, and exits with 1 if the claim fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import ALC, PrivacyEngine
from opacus_bc.experiments.training.models import build

LIMIT = 0.05
TIMED_STEPS = 6
REPEATS = 3
SETTINGS = (
    # (clipping, batch size, mini-set size)
    ("batch", 64, None),
    ("batch", 1024, None),
    ("batch", 1024, 64),
    ("flat", 64, None),
    ("flat", 1024, None),
)


def measure(
    model_name: str, samples: int, clipping: str, batch_size: int, mini: int | None
) -> dict[str, Any]:
    """Seconds for an epoch and for an estimation."""
    torch.manual_seed(0)
    channels = 1 if model_name == "bn_lenet5" else 3
    model = build(model_name)
    images = torch.randn(min(samples, 8192), channels, 32, 32)
    # The real number of samples, without their memory.
    private = TensorDataset(
        images.repeat(-(-samples // len(images)), 1, 1, 1)[:samples], torch.randint(0, 10, (samples,))
    )
    public = TensorDataset(torch.randn(6000, channels, 32, 32), torch.randint(0, 10, (6000,)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            data_loader=DataLoader(private, batch_size=batch_size),
            noise_multiplier=1.0,
            max_grad_norm=0.1,
            clipping=clipping,
            mini_batch_size=mini,
            alc=ALC(DataLoader(public, batch_size=64)),
            grad_sample_mode="hooks",  # as kept: per-sample gradients of Opacus under individual clipping
        )
        steps_per_epoch = len(DataLoader(private, batch_size=batch_size))
        done, start = 0, 0.0
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            if optimizer.adaptive.steps > done:
                done = optimizer.adaptive.steps
                if done == 1:
                    start = time.process_time()  # the first step warms up
            if done == TIMED_STEPS + 1:
                break
        epoch = (time.process_time() - start) / TIMED_STEPS * steps_per_epoch
        times = []
        for _ in range(REPEATS):
            start = time.process_time()
            optimizer.adaptive._estimate()
            times.append(time.process_time() - start)
    estimation = sorted(times)[REPEATS // 2]
    return {
        "model": model_name,
        "clipping": clipping,
        "batch_size": batch_size,
        "mini_batch_size": mini,
        "looked_at": optimizer.adaptive.count,
        "epoch_seconds": epoch,
        "estimation_seconds": estimation,
        "share": estimation / epoch,
    }


def main() -> None:
    """Measure all settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bn_lenet5")
    parser.add_argument("--samples", type=int, default=54_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(args.model, args.samples, *setting) for setting in SETTINGS]
    print(f"{'clipping':9}{'m':>6}{'s':>6}{'looked at':>11}{'epoch s':>10}{'estimation s':>14}{'share':>8}")
    for row in rows:
        print(
            f"{row['clipping']:9}{row['batch_size']:>6}{row['mini_batch_size'] or '-':>6}"
            f"{row['looked_at']:>11}{row['epoch_seconds']:>10.1f}{row['estimation_seconds']:>14.3f}"
            f"{row['share']:>8.1%}"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"alc_estimation_cost_{args.model}.json"
    target.write_text(json.dumps({"samples": args.samples, "rows": rows}, indent=2) + "\n")
    if max(row["share"] for row in rows) > LIMIT:
        sys.exit(f"an estimation costs more than {LIMIT:.0%} of an epoch")


if __name__ == "__main__":
    main()
