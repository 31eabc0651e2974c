"""Claim: at equal (epsilon, delta), how layers are grouped and scaled decides what batch clipping learns.

    python benchmarks/alc_mnist.py --data DIR [--epochs 3] [--epsilon 8] [--seeds 1]

BN-LeNet-5 on real MNIST (54,000 private, 6,000 public images), batch clipping, public BatchNorm statistics,
public layer norms. Every row has the same budget; only ALC differs. Prints a table and keeps every finished
row in benchmarks/results/alc_mnist_epsilon_*.json: a second call goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus_bc import ALC, PrivacyEngine
from opacus_bc.experiments.training.data import Data, load
from opacus_bc.experiments.training.models import bn_lenet5

CLIP = 0.2  # the paper's C for BN-LeNet-5
BATCH = 64
LR = 0.025
LR_DECAY = 0.9  # an epoch
DELTA = 1e-5
LAYERS = 8  # of BN-LeNet-5 by module
# Scaling at C * sqrt(L) puts the noise on every layer that clipping by module at C puts there.
ROWS: dict[str, tuple[float, dict[str, Any] | None]] = {
    "flat (no ALC)": (CLIP, None),
    "per tensor": (CLIP, {"layers": "parameter"}),
    "per module": (CLIP, {"layers": "module"}),
    "4 groups": (CLIP, {"layers": 4}),
    "per module, optimal noise": (CLIP, {"layers": "module", "noise": "optimal"}),
    "per module, scale": (CLIP, {"layers": "module", "apply": "scale"}),
    "per module, scale, C sqrt(8)": (CLIP * math.sqrt(LAYERS), {"layers": "module", "apply": "scale"}),
}


def accuracy(model: nn.Module, data: Data) -> float:
    """Share of the test images that are recognised."""
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in DataLoader(data.test, batch_size=1000):
            right += int((model(x).argmax(dim=1) == y).sum())
    model.train()
    return right / len(data.test)


def run(
    data: Data, clip: float, alc: dict[str, Any] | None, *, epochs: int, epsilon: float, seed: int
) -> dict[str, Any]:
    """Train once and say what came out."""
    torch.manual_seed(seed)
    model = bn_lenet5()
    plain = torch.optim.SGD(model.parameters(), lr=LR)
    public = DataLoader(data.public, batch_size=BATCH)
    with warnings.catch_warnings(action="ignore"):
        engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=plain,
        data_loader=DataLoader(data.private, batch_size=BATCH),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=clip,
        clipping="batch",
        alc=None if alc is None else ALC(public, **alc),
        batch_norm=public,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain, gamma=LR_DECAY)
    start = time.perf_counter()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
    blocks = optimizer.blocks()
    noise = math.sqrt(
        sum(
            p.numel() * (b.noise_std / m) ** 2
            for b in blocks
            for n, m in zip(b.names, b.factors, strict=True)
            for p in [model.get_parameter(n)]
        )
    )
    return {
        "accuracy": accuracy(model, data),
        "epsilon": engine.get_epsilon(DELTA),
        "noise_multiplier": optimizer.noise_multiplier,
        "sigma_eff": optimizer.effective_noise_multiplier,
        "blocks": len(blocks),
        "noise_norm": noise,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Run all rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with MNIST/raw")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = load("mnist", args.data)
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / f"alc_mnist_epsilon_{args.epsilon:g}.json"
    settings = {"epochs": args.epochs, "epsilon": args.epsilon, "delta": DELTA, "batch_size": BATCH, "lr": LR}
    before = json.loads(kept.read_text()) if kept.exists() else {}
    same = before.items() >= settings.items()
    rows: list[dict[str, Any]] = before["rows"] if same else []
    print(
        f"{'':30}{'seed':>5}{'accuracy':>9}{'epsilon':>9}{'sigma':>8}{'sigma_eff':>10}{'noise':>12}{'s':>6}"
    )
    for seed in range(args.seeds):
        for name, (clip, alc) in ROWS.items():
            found = [row for row in rows if (row["name"], row["seed"]) == (name, seed)]
            if not found:
                found = [run(data, clip, alc, epochs=args.epochs, epsilon=args.epsilon, seed=seed)]
                rows.append({"name": name, "seed": seed, "clip": clip} | found[0])
                kept.write_text(json.dumps({**settings, "rows": rows}, indent=2) + "\n")
            row = found[0]
            print(
                f"{name:30}{seed:>5}{row['accuracy']:>9.2%}{row['epsilon']:>9.3f}{row['noise_multiplier']:>8.3f}"
                f"{row['sigma_eff']:>10.4f}{row['noise_norm']:>12.3f}{row['seconds']:>6.0f}",
                flush=True,
            )
    print(f"\n{'mean over seeds':30}{'accuracy':>9}{'std':>8}")
    for name in ROWS:
        values = [100 * row["accuracy"] for row in rows if row["name"] == name]
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        print(f"{name:30}{statistics.mean(values):>8.2f}%{spread:>8.2f}")


if __name__ == "__main__":
    main()
