"""What a comparison will do, checked before it does anything."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch.utils.data import DataLoader

from opacus_bc.accounting import noise_multiplier
from opacus_bc.accounting.display import objection_to_delta
from opacus_bc.accounting.events import check_count, check_delta
from opacus_bc.experiments.compare import presets
from opacus_bc.experiments.compare.presets import Setting
from opacus_bc.experiments.compare.request import FineTuning, Images, make_source
from opacus_bc.experiments.training import models
from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import NAMES, Data, Source, limited
from opacus_bc.experiments.training.methods import (
    BASELINE,
    DEFAULT,
    NEEDS_WEIGHTS,
    PRETRAINED,
    Method,
    Train,
    select,
)
from opacus_bc.experiments.training.pretrained import check_start
from opacus_bc.experiments.training.store import Store
from opacus_bc.experiments.training.tables import is_table
from opacus_bc.experiments.training.timm_networks import TIMM
from opacus_bc.mechanism.fingerprint import fingerprint as nested_fingerprint
from opacus_bc.public.contents import count_shared


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked request."""

    source: Source
    preset: presets.Preset
    model: str
    budgets: tuple[float, ...]
    delta: float
    methods: tuple[Method, ...]
    seeds: int
    epochs: int
    jobs: int
    store: Store
    content: str = ""
    train: Train = "all"
    train_from: str = ""
    limit: int | None = None
    private_size: int = 0

    def objection_to_delta(self) -> str | None:
        """What is wrong with a delta of 1/N or more, N counting whom most of the methods protect."""
        sizes = [
            (m.users or self.private_size, "user" if m.users else "sample") for m in self.methods if m.private
        ]
        size, unit = max(sizes, default=(0, "sample"))
        return objection_to_delta(self.delta, size, unit, "--delta")

    @property
    def weights(self) -> str:
        """Name of the file with pretrained weights; empty for random ones."""
        return "" if self.source.weights is None else self.source.weights.name

    def cell(self, method: Method, budget: float | None, setting: Setting, seed: int) -> Cell:
        """One run."""
        return Cell(
            method=method,
            dataset=self.source.dataset,
            model=self.model,
            epsilon=budget,
            delta=self.delta,
            epochs=self.epochs,
            batch_size=setting.batch_size,
            lr=setting.lr,
            clip=setting.clip,
            seed=seed,
            content=self.content,
            channels_last=bool(self.weights),
            weights=self.weights,
            image_size=self.source.image_size,
            train=self.train,
            train_from=self.train_from,
            limit=self.limit,
        )

    def trial(self, method: Method, budget: float, setting: Setting, sizes: tuple[int, int]) -> Cell:
        """The run in small, on public images alone: one epoch, with the run's noise in an update and, as near
        as whole numbers come, its sample rate.

        Args:
            method: What is trained.
            budget: Of the run, not of the trial, which touches no private image and has none.
            setting: Of the run.
            sizes: Number of private images, and of public ones that stand in for them.
        """
        private, public = sizes
        size = round(setting.batch_size * public / private)
        small = presets.fitted(replace(setting, batch_size=size), method, public)
        length = math.ceil(private / setting.batch_size)
        sigma = noise_multiplier(
            target_epsilon=budget, target_delta=self.delta, sample_rate=1 / length,
            steps=self.epochs * length, sampling=method.sampling,
        )  # fmt: skip
        noise = sigma * small.batch_size / setting.batch_size
        return replace(
            self.cell(method, budget, setting, 0),
            epsilon=None, noise_multiplier=noise, batch_size=small.batch_size, epochs=1, trial=True,
        )  # fmt: skip

    def command(self, *, tune: bool) -> str:
        """What makes the same report again, wherever the data are."""
        words = ["opacus-bc", "compare", "--dataset", Path(self.source.dataset).name, "--model", self.model]
        words += ["--epsilon", *(f"{budget:g}" for budget in self.budgets), "--delta", f"{self.delta:g}"]
        words += ["--seeds", str(self.seeds), "--epochs", str(self.epochs)]
        if self.weights:
            words += ["--weights", self.weights, "--image-size", str(self.source.image_size)]
            words += ["--train", self.train, *(["--train-from", self.train_from] if self.train_from else [])]
        if self.source.target:
            words += ["--target", self.source.target]
        if self.source.public is not None:
            words += ["--public", self.source.public.name]
        if self.limit is not None:
            words += ["--limit", str(self.limit)]
        if self.methods != tuple(select((), PRETRAINED if self.weights else DEFAULT)):
            words += ["--methods", *(method.name for method in self.methods)]
        return shlex.join([*words, "--tune"] if tune else words)

    def rows(self) -> list[tuple[Method, float | None]]:
        """Every line of the table: a method without privacy once, the others for each budget."""
        return [(m, None) for m in self.methods if not m.private] + [
            (m, budget) for budget in self.budgets for m in self.methods if m.private
        ]


def make_plan(
    *,
    images: Images,
    start: FineTuning,
    model: str | None,
    epsilon: Sequence[float],
    delta: float | Literal["auto"],
    methods: Sequence[str],
    seeds: int,
    epochs: int | None,
    out: Path | None,
    jobs: int | None,
) -> Plan:
    """Check everything that can be checked before any work is done.

    Raises:
        ValueError: One line that names the argument, the value and what would be right.
    """
    if not epsilon:
        raise ValueError("--epsilon: give at least one budget")
    for budget in epsilon:
        if not (math.isfinite(budget) and budget > 0):
            raise ValueError(f"--epsilon {budget:g}: must be a positive number")
    check_count("--seeds", seeds, 1)
    images.check()
    start.check(model)
    if start.weights is not None and is_table(images.dataset):
        raise ValueError(f"--weights {start.weights}: goes with images, not with {images.dataset}")
    preset = presets.preset(images.dataset, pretrained=start.weights is not None)
    chosen = preset.epochs if epochs is None else check_count("--epochs", epochs, 1)
    processes = os.cpu_count() or 1 if jobs is None else check_count("--jobs", jobs, 1)
    if delta != "auto":
        check_delta(delta, "--delta")
    selected = select(methods, DEFAULT if start.weights is None else PRETRAINED)
    lost = [method.name for method in selected if method.name in NEEDS_WEIGHTS]
    if lost and start.weights is None:
        raise ValueError(f"--methods {' '.join(lost)}: goes with --weights FILE, a state dict to start from")
    if BASELINE not in selected:
        selected = [BASELINE, *selected]
    store = Store(out if out is not None else Path("runs") / f"compare-{images.name}")
    source = make_source(images, start, store.root)
    if model is not None and ":" in model and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a user's own module is looked for; workers inherit it
    models.find_factory(model or preset.model)  # a wrong name is told before a data set is read
    found = limited(source.load(), images.limit)
    if found.public_apart:
        _check_public(images, found)
    _check_model(model or preset.model, found, image_size=source.image_size)
    own_data = source.dataset not in NAMES
    content = fingerprint(
        found if own_data else None, model if model is not None and ":" in model else None, start.weights
    )
    plan = Plan(
        source=source,
        preset=preset,
        model=model or preset.model,
        budgets=tuple(sorted(set(epsilon))),
        delta=automatic_delta(len(found.private)) if delta == "auto" else float(delta),
        methods=tuple(selected),
        seeds=seeds,
        epochs=chosen,
        content=content,
        jobs=processes,
        store=store,
        train=start.train,
        train_from=start.train_from,
        limit=images.limit,
        private_size=len(found.private),
    )
    # Once, and not in every cell. What one method makes of the network the others make of it too.
    check_start(plan.cell(BASELINE, None, preset.setting(BASELINE), 0), found)
    store.check_writable()
    return plan


def _check_public(images: Images, found: Data) -> None:
    """Compare the folders, whether or not any method looks at the public one."""
    shared, looked_at = count_shared(DataLoader(found.public), DataLoader(found.private))
    if shared:
        raise ValueError(
            f"--public {images.public}: {shared} of {looked_at} of its images that were looked at are "
            f"private ones of --dataset {images.dataset}, byte by byte, and public images are not protected. "
            "Take them out of one of the folders, or leave --public out: then a tenth of the training images "
            "is cut off as public"
        )


def _check_model(model: str, found: Data, *, image_size: int | None = None) -> None:
    """See that the model takes these samples and has an output for every class."""
    images = found.public.tensors[0][:2]
    if image_size is not None:
        images = torch.zeros(2, 3, image_size, image_size)
    try:
        network = models.build(model, in_channels=found.in_channels, num_classes=found.num_classes).eval()
        with torch.no_grad():
            outputs = network(images)
    except Exception as error:  # a user's factory may fail in any way it likes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"--model {model}: fails on {found.samples} of {tuple(images.shape[1:])}: {reason}"
        ) from error
    shape = tuple(getattr(outputs, "shape", ()))
    if len(shape) != 2 or shape[1] < found.num_classes:
        raise ValueError(
            f"--model {model}: gives {shape} for 2 {found.samples} of {found.num_classes} classes"
        )


def fingerprint(own_data: Data | None, own_model: str | None, weights: Path | None = None) -> str:
    """What a user's own images and model are, beside their names: changed ones must not get kept results.

    Empty without either; a model is known by the source of the module that its factory is in.
    """
    if own_model is not None and own_model.startswith(TIMM):
        own_model = None  # its name says it all
    if own_data is None and own_model is None and weights is None:
        return ""
    parts = () if own_data is None else (own_data.private, own_data.public, own_data.test)
    source = ""
    if own_model is not None:
        with contextlib.suppress(KeyError, OSError, TypeError):  # some modules have no source
            source = inspect.getsource(sys.modules[own_model.partition(":")[0]])
    known: list[object] = [[part.tensors for part in parts], source]
    if weights is not None:
        known.append(hashlib.sha256(weights.read_bytes()).hexdigest())
    return nested_fingerprint(known)[:20]


def automatic_delta(private_size: int) -> float:
    """The largest power of ten below 2/(3n): a delta of 1/n would allow to publish one sample in clear.

    >>> automatic_delta(54_000), automatic_delta(1350), automatic_delta(1000), automatic_delta(675)
    (1e-05, 0.0001, 0.0001, 0.0001)
    """
    return float(f"1e-{math.floor(math.log10(1.5 * private_size)) + 1}")
