"""Claim: individual clipping with public BatchNorm reaches 98 % on MNIST at the paper's own guarantee.

    python benchmarks/mnist_batch_norm.py --data DIR [--methods NAME ...] [--seeds 3] [--search]

BN-LeNet-5, 54,000 private and 6,000 public images, certified epsilon <= 1.57 at delta = 1e-5: what the
paper's G_0.52 (noise multiplier 2.5, 50 epochs) amounts to, where its batch clipping with ALC reaches 50.38
%. Every image is sheared upright by its own moments (``deskew``; one image at a time, so it costs no
privacy) and shifted at random by up to one pixel in training; the learning rate falls linearly to 0. The
public images serve BatchNorm statistics only, their labels are not used. ``--search`` runs what the
settings were chosen from: the same number of short runs for each method. A checkpoint is kept after every
epoch and a result after every run, so a second call goes on where the first one ended (with fresh noise).
``public alone`` trains on the 6,000 public images without privacy: what a public set from the same source
is worth by itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from opacus_bc import ALC, BatchMemoryManager, PrivacyEngine
from opacus_bc.accounting import epsilon as certified_epsilon
from opacus_bc.batch_norm.public import PublicStatistics
from opacus_bc.experiments.training.data import Data, augment, deskew, load
from opacus_bc.experiments.training.models import bn_lenet5

EPSILON, DELTA = 1.57, 1e-5
PUBLIC_BATCH, PHYSICAL_BATCH, SHIFT = 512, 64, 1
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one method is trained; ``alc`` are the arguments of `opacus_bc.ALC`."""

    norm: str = "batch"
    clipping: str = "flat"
    mini_batch_size: int | None = None
    differentiate: bool = False
    alc: dict[str, Any] | None = None
    batch_size: int = 1024
    epochs: int = 16
    lr: float = 0.8
    max_grad_norm: float = 1.0


METHODS = {
    "IC, public BatchNorm": Recipe(differentiate=True),
    "IC, GroupNorm": Recipe(norm="group"),
    "GBC s=8, public BatchNorm": Recipe(
        clipping="batch", mini_batch_size=8, batch_size=2048, lr=0.46, max_grad_norm=0.3
    ),
}
# Where the search of a method's settings started, if it moved.
START = {"GBC s=8, public BatchNorm": replace(METHODS["GBC s=8, public BatchNorm"], lr=0.23)}
# Factors of (lr * C, C): the first moves the noise on the weights, the second what is clipped.
SEARCH, SEARCH_EPOCHS = ((0.5, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 0.3)), 4


def private_parts(recipe: Recipe, data: Data) -> tuple[PrivacyEngine, nn.Module, Any, DataLoader[Any]]:
    """The model, made private at the budget of the benchmark."""
    model = bn_lenet5(recipe.norm, order="conv-norm-act")  # type: ignore[arg-type]  # a string of Norm
    public = DataLoader(data.public, batch_size=PUBLIC_BATCH)
    options: dict[str, Any] = {"clipping": recipe.clipping}
    if recipe.norm == "batch":
        options["batch_norm"] = PublicStatistics(loader=public, differentiate=recipe.differentiate)
    if recipe.mini_batch_size is not None:
        options["mini_batch_size"] = recipe.mini_batch_size
    if recipe.alc is not None:
        options["alc"] = ALC(public, **recipe.alc)
    engine = PrivacyEngine()
    module, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9),
        data_loader=DataLoader(data.private, batch_size=recipe.batch_size),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=recipe.epochs,
        max_grad_norm=recipe.max_grad_norm,
        **options,
    )
    return engine, module, optimizer, loader


def accuracy(module: nn.Module, data: Data) -> float:
    """Share of the test images that are recognised, in per cent."""
    module.eval()
    with torch.no_grad():
        right = sum(int((module(x).argmax(1) == y).sum()) for x, y in DataLoader(data.test, batch_size=1000))
    module.train()
    return 100 * right / len(data.test)


def train(recipe: Recipe, data: Data, seed: int, checkpoint: Path) -> dict[str, Any]:
    """One run: the accuracy of every epoch and the epsilon of the whole."""
    torch.manual_seed(seed)
    engine, module, optimizer, loader = private_parts(recipe, data)
    history: list[float] = []
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        history = state["history"]
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        engine.accountant.load_state_dict(state["accountant"])
        torch.manual_seed(seed + 1000 * len(history))
    draws = torch.Generator().manual_seed(seed + 1000 * len(history))
    steps = recipe.epochs * len(DataLoader(data.private, batch_size=recipe.batch_size))
    for epoch in tqdm(range(len(history), recipe.epochs), initial=len(history), total=recipe.epochs):
        size = recipe.mini_batch_size or PHYSICAL_BATCH
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=size, optimizer=optimizer
        ) as batches:
            for x, y in batches:
                for group in optimizer.param_groups:
                    group["lr"] = recipe.lr * max(0.0, 1 - len(engine.accountant) / steps)
                shifted = augment(x, generator=draws, padding=SHIFT, flip=False, fill=data.black)
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(shifted), y).backward()
                optimizer.step()
        history.append(accuracy(module, data))
        tqdm.write(f"  seed {seed} epoch {epoch + 1}: {history[-1]:.2f} %")
        parts = {"module": module, "optimizer": optimizer, "accountant": engine.accountant}
        keep(checkpoint, {"history": history, **{key: part.state_dict() for key, part in parts.items()}})
    if hasattr(optimizer, "blocks"):
        sigma = optimizer.effective_noise_multiplier
    else:
        sigma = optimizer.noise_multiplier
    return {
        "accuracy": history[-1],
        "history": history,
        "epsilon": engine.get_epsilon(DELTA),
        "noise_multiplier": optimizer.noise_multiplier,
        "sigma_eff": sigma,
        "epsilon_again": certified_epsilon(
            noise_multiplier=sigma, sample_rate=recipe.epochs / steps, steps=steps, delta=DELTA
        ),
    }


def keep(path: Path, state: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    half = path.with_suffix(".half")
    torch.save(state, half)
    os.replace(half, path)


def searched(name: str) -> list[Recipe]:
    """The short runs from which a method's settings were chosen."""
    recipe = START.get(name, METHODS[name])
    return [
        replace(recipe, epochs=SEARCH_EPOCHS, lr=recipe.lr * a / c, max_grad_norm=recipe.max_grad_norm * c)
        for a, c in SEARCH
    ]


def upright(part: TensorDataset, data: Data) -> TensorDataset:
    """The same images without their slant."""
    images, labels = part.tensors
    black = data.black.view(1, -1, 1, 1)
    return TensorDataset(torch.cat([deskew(x - black) + black for x in images.split(4096)]), labels)


def public_alone(data: Data, seed: int, epochs: int = 30) -> float:
    """Accuracy of a model that has seen the public images and nothing else."""
    torch.manual_seed(seed)
    model = bn_lenet5(order="conv-norm-act")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    loader = DataLoader(data.public, batch_size=128, shuffle=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=epochs * len(loader))
    draws = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(epochs)):
        for x, y in loader:
            optimizer.zero_grad()
            shifted = augment(x, generator=draws, padding=SHIFT, flip=False, fill=data.black)
            nn.functional.cross_entropy(model(shifted), y).backward()
            optimizer.step()
            schedule.step()
    return accuracy(model, data)


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with MNIST/raw")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search", action="store_true", help="the short runs behind the settings")
    parser.add_argument("--public-alone", action="store_true", help="what the public images are worth")
    parser.add_argument("--checkpoints", type=Path, default=Path("results/mnist_batch_norm"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook")
    data = load("mnist", args.data)
    parts = {name: upright(getattr(data, name), data) for name in ("private", "public", "test")}
    data = replace(data, **parts)
    if args.public_alone:
        print(f"public alone: {public_alone(data, 0):.2f} %")
        return
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    for name in args.methods:
        recipes = searched(name) if args.search else [METHODS[name]]
        for recipe in recipes:
            for seed in range(1 if args.search else args.seeds):
                row = {"method": name, "seed": seed, "recipe": asdict(recipe)}
                run_once(row, recipe, data, args.checkpoints)
    table(args.methods, search=args.search)


def stored(row: dict[str, Any]) -> Path:
    """Where the result of a run is kept: a file of its own, so that processes do not meet."""
    key = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:12]
    return RESULTS / "mnist_batch_norm" / f"{key}.json"


def run_once(row: dict[str, Any], recipe: Recipe, data: Data, checkpoints: Path) -> None:
    """Train unless the result is there."""
    path = stored(row)
    if not path.exists():
        checkpoint = checkpoints / f"{path.stem}.pt"
        result = train(recipe, data, row["seed"], checkpoint)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row | result) + "\n")
        checkpoint.unlink()


def table(methods: list[str], *, search: bool) -> None:
    """Print what the kept results say."""
    rows = [json.loads(path.read_text()) for path in (RESULTS / "mnist_batch_norm").glob("*.json")]
    print(f"{'method':28}{'lr':>7}{'C':>6}{'m':>6}{'epochs':>7}{'seeds':>6}{'accuracy':>17}{'epsilon':>9}")
    for name in methods:
        for recipe in searched(name) if search else [METHODS[name]]:
            mine = [r for r in rows if r["method"] == name and r["recipe"] == asdict(recipe)]
            if mine:
                values = [r["accuracy"] for r in mine]
                spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
                worst = max(r["epsilon"] for r in mine)
                settings = (
                    f"{recipe.lr:>7.3g}{recipe.max_grad_norm:>6.2g}{recipe.batch_size:>6}{recipe.epochs:>7}"
                )
                result = f"{statistics.mean(values):.2f} %{spread}"
                print(f"{name:28}{settings}{len(mine):>6}{result:>17}{worst:>9.4f}")


if __name__ == "__main__":
    main()
