"""Claim: from scratch, public BatchNorm learns at least what GroupNorm learns, at equal search effort.

    python benchmarks/from_scratch.py --data DIR --search [--networks convnet resnet8] [--methods ...]
    python benchmarks/from_scratch.py --data DIR [--networks ...] [--methods ...] [--epsilons 8] [--seeds 0]
    python benchmarks/from_scratch.py --data DIR --search ... [--refresh 10] [--public-batch 1000]
                                      [--statistics-of fashion-mnist]
    python benchmarks/from_scratch.py --table

CIFAR-10 from scratch under individual clipping in one backward. Every image is brought to mean 0 and
standard deviation 1 by itself, which costs no privacy. 45,000 images are private. The 5,000 public ones are
cut in two: SHARED of them give BatchNorm its statistics, the others judge settings. ``--search`` makes the
first SEARCH_EPOCHS epochs of the very run for every rate in RATES, the same list for every method, and
looks at the judging images alone. It reads the private images, so epsilon covers one run with given
settings and not the search. Without it, the run whose rate was best there goes on to EPOCHS epochs, and the
10,000 test images are looked at once, after the last one. What is judged are averaged weights
(opacus_bc.AveragedWeights). ``--refresh``, ``--public-batch`` and ``--statistics-of`` say how often public
statistics are taken anew, from how many images, and of which data set; their runs have names of their own.

Finished runs are kept in ``results/from_scratch.json``, checkpoints of every epoch in ``--work``: a call
goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from from_scratch_networks import NETWORKS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_bc import AveragedWeights, BatchMemoryManager, PrivacyEngine, PublicStatistics, accounting
from opacus_bc.experiments.training.data import Data, load

EPOCHS, SEARCH_EPOCHS = 12, 3
BATCH, CLIP, MOMENTUM, DECAY = 1000, 1.0, 0.9, 0.97
RATES = (0.5, 0.25, 1.0)
DELTA = 1e-5
SHARED = 2500  # public images for statistics; the rest of the 5,000 judges settings
PUBLIC_BATCH, REFRESH = 250, 2
ROWS_AT_ONCE = 250
METHODS: Mapping[str, tuple[str, bool]] = {  # norm, and whether gradients follow public statistics
    "group": ("group", False),
    "public": ("batch", True),
    "public, constants": ("batch", False),
}
RESULTS = Path(__file__).parent / "results" / "from_scratch.json"


def noise_multiplier(epsilon: float, private: TensorDataset) -> float:
    """The noise that makes EPOCHS epochs cost ``epsilon``."""
    steps = -(-len(private) // BATCH)
    return accounting.noise_multiplier(
        target_epsilon=epsilon, target_delta=DELTA, sample_rate=1 / steps, steps=EPOCHS * steps
    )


def standardised(images: TensorDataset) -> TensorDataset:
    """Every image with mean 0 and standard deviation 1: a function of that image alone."""
    x, y = images.tensors
    centred = x - x.mean((1, 2, 3), keepdim=True)
    return TensorDataset(centred / x.std((1, 2, 3), keepdim=True).clamp_min(0.1), y)


def in_colour(images: TensorDataset) -> TensorDataset:
    """Grey images of 28 pixels in CIFAR-10's shape."""
    x, y = images.tensors
    return TensorDataset(F.pad(x, (2, 2, 2, 2), value=float(x.min())).expand(-1, 3, -1, -1), y)


def accuracy(model: nn.Module, judged: TensorDataset) -> float:
    """Share of the images that are recognised, in per cent."""
    training = model.training
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(judged, batch_size=500))
    model.train(training)
    return 100.0 * right / len(judged)


def run(
    data: Data, judged: TensorDataset, setting: dict[str, Any], epochs: int, work: Path
) -> dict[str, Any]:
    """Train one setting for so many epochs and judge its averaged weights after the last one."""
    norm, differentiate = METHODS[setting["method"]]
    seed = setting["seed"]
    torch.manual_seed(seed)
    model = NETWORKS[setting["network"]](norm)
    shared = TensorDataset(data.public.tensors[0][:SHARED])
    statistics_of = DataLoader(shared, batch_size=setting.get("public_batch", PUBLIC_BATCH))
    draws = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings(action="ignore"):
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=setting["lr"], momentum=MOMENTUM),
            data_loader=DataLoader(data.private, batch_size=BATCH, generator=draws),
            noise_multiplier=noise_multiplier(setting["epsilon"], data.private),
            max_grad_norm=CLIP,
            noise_generator=torch.Generator().manual_seed(1000 + seed),
            grad_sample_mode="bk",
            **({"batch_norm": PublicStatistics(loader=statistics_of, differentiate=differentiate),
                "batch_norm_refresh": setting.get("refresh", REFRESH)} if norm == "batch" else {}),
        )  # fmt: skip
    averaged = AveragedWeights(optimizer, decay=DECAY)
    path, done, seconds = work / f"{key(setting)}.pt", 0, 0.0
    if path.exists():
        kept = engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
        averaged.load_state_dict(kept["averaged"])
        done, seconds = kept["done"], kept["seconds"]
        if done > epochs:
            raise SystemExit(f"{path} has {done} epochs: remove it to train {epochs}")
    for epoch in range(done, epochs):
        start = time.process_time()
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=ROWS_AT_ONCE, optimizer=optimizer
        ) as chunks:
            for x, y in chunks:
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        seconds += time.process_time() - start
        more = {"averaged": averaged.state_dict(), "done": epoch + 1, "seconds": seconds}
        engine.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict=more, exact=True)
        print(f"{key(setting, epochs)}: {epoch + 1} of {epochs} epochs", flush=True)
    with averaged.applied():
        found = accuracy(model, judged)
    return {**setting, "epochs": epochs, "accuracy": found, "epsilon_spent": engine.get_epsilon(DELTA),
            "steps": len(engine.accountant), "cpu_seconds": seconds}  # fmt: skip


def key(setting: Mapping[str, Any], epochs: int | None = None) -> str:
    """The name of a run, and with its length that of its result."""
    names = [setting["network"], setting["method"], f"eps {setting['epsilon']:g}", f"lr {setting['lr']:g}"]
    more = ("refresh", "public_batch", "statistics_of")
    names += [f"{name} {setting[name]}" for name in more if name in setting]
    length = [] if epochs is None else [f"{epochs} epochs"]
    return ", ".join([*names, f"seed {setting['seed']}", *length])


def kept() -> dict[str, Any]:
    """Finished runs by name."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def once(
    data: Data, judged: TensorDataset, setting: dict[str, Any], epochs: int, work: Path
) -> dict[str, Any]:
    """The kept run, or train it and keep it."""
    name = key(setting, epochs)
    if name not in kept():
        found = run(data, judged, setting, epochs, work)
        RESULTS.write_text(json.dumps({**kept(), name: found}, indent=1) + "\n")
        print(f"{name}: {found['accuracy']:.2f} %", flush=True)
    row: dict[str, Any] = kept()[name]
    return row


def best_rate(network: str, method: str, epsilon: float) -> float:
    """The rate whose search run was best on the judging images.

    Raises:
        SystemExit: A search run is missing.
    """
    found = {}
    for lr in RATES:
        setting = {"network": network, "method": method, "epsilon": epsilon, "lr": lr, "seed": 0}
        name = key(setting, SEARCH_EPOCHS)
        if name not in kept():
            raise SystemExit(f"no search run {name!r}: call with --search first")
        found[lr] = kept()[name]["accuracy"]
    return max(found, key=lambda lr: found[lr])


def table() -> None:
    """Print every kept run."""
    for name, row in kept().items():
        print(f"{name:<70} {row['accuracy']:6.2f} %  {row['cpu_seconds'] / row['epochs']:5.0f} s an epoch")


def main() -> None:
    """Train what is missing, and print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/from_scratch"))
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["group", "public"])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--refresh", type=int)
    parser.add_argument("--public-batch", type=int)
    parser.add_argument("--statistics-of", choices=["mnist", "fashion-mnist"])
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        table()
        return
    if given.data is None:
        parser.error("--data DIR: the folder with cifar10.npz")
    torch.set_num_threads(1)
    given.work.mkdir(parents=True, exist_ok=True)
    data = load("cifar10", given.data)
    data = replace(data, private=standardised(data.private), public=standardised(data.public))
    judging = TensorDataset(*(tensor[SHARED:] for tensor in data.public.tensors))
    if given.statistics_of:
        data = replace(data, public=standardised(in_colour(load(given.statistics_of, given.data).public)))
    for network, epsilon, seed in product(given.networks, given.epsilons, given.seeds):
        setting = {"network": network, "epsilon": epsilon, "seed": seed}
        chosen = {"refresh": given.refresh, "public_batch": given.public_batch}
        chosen |= {"statistics_of": given.statistics_of}
        setting |= {name: value for name, value in chosen.items() if value is not None}
        for lr, method in product(given.rates, given.methods) if given.search else ():
            once(data, judging, {**setting, "method": method, "lr": lr}, SEARCH_EPOCHS, given.work)
        for method in () if given.search else given.methods:
            lr = best_rate(network, method, epsilon)
            once(data, standardised(data.test), {**setting, "method": method, "lr": lr}, EPOCHS, given.work)
    table()


if __name__ == "__main__":
    main()
