"""A cell made ready to train: model, private optimizer, loader and streams of randomness, and their state."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opacus.schedulers import ExponentialGradClip
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

from opacus_bc import ALC, BatchMemoryManager, PrivacyEngine, PublicStatistics, local_update
from opacus_bc.batch_norm.choices import statistics_modules
from opacus_bc.draws.sources import FixedPartition, PoissonBins, Spelled
from opacus_bc.engine.resume.files import CheckpointError
from opacus_bc.experiments.training.cells import Cell
from opacus_bc.experiments.training.data import Data, augment
from opacus_bc.experiments.training.pretrained import start, trained_parameters
from opacus_bc.experiments.training.store import read_checkpoint, write_checkpoint
from opacus_bc.experiments.training.users import made_up_users

PUBLIC_BATCH = 256
# Individual clipping holds a gradient for every sample at once. Batches come in chunks of about this many
# floats (32 MB), which stay nearer to the cache: on MNIST an epoch takes a third less time than in one piece.
PER_SAMPLE_FLOATS = 8_000_000
SMALLEST_CHUNK = 8
LOCAL_LR = 0.2  # of DP-FedAvg's steps on a user's own images
# With one backward it is activations that take memory: chunks of about 128 images of 96 x 96.
PIXELS = 128 * 96 * 96

Streams = dict[str, torch.Generator]  # "sampling", "noise", "augmentation"
Recipe = Callable[[Cell, Data, nn.Module, optim.Optimizer, Streams], tuple[Any, DataLoader[Any]]]


@dataclass(kw_only=True)
class Training:
    """A cell made ready to train: what the loop needs, and what reports on it."""

    cell: Cell
    data: Data
    model: nn.Module  # the plain module
    forward: nn.Module  # what the engine made of it
    optimizer: Any
    plain_optimizer: optim.Optimizer
    loader: DataLoader[Any]
    engine: PrivacyEngine | None
    streams: Streams
    lr_schedule: optim.lr_scheduler.LRScheduler
    clip_schedule: Any

    def reseed(self, epoch: int) -> None:
        """Make an epoch's randomness a function of (seed, epoch)."""
        children = np.random.SeedSequence([self.cell.seed, epoch]).spawn(len(self.streams) + 2)
        seeds = [int(child.generate_state(1, np.uint64)[0] >> np.uint64(1)) for child in children]
        for stream, seed in zip(self.streams.values(), seeds, strict=False):
            stream.manual_seed(seed)
        torch.manual_seed(seeds[-2])  # dropout and the like
        draws = getattr(self.loader, "draws", None)
        if isinstance(draws, (PoissonBins, FixedPartition, Spelled)) and draws.generator is not None:
            # Their numpy generator is their own.
            draws.generator.bit_generator.state = np.random.Philox(seeds[-1]).state

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over the private data, in physical batches."""
        rows = (self.cell.method.mini_set or 1) if self.cell.method.users else 1
        limit = max(self._chunk(), rows)
        individual = self.engine is not None and self.cell.method.family == "individual"
        with contextlib.ExitStack() as stack:
            loader: DataLoader[Any] = self.loader
            if individual and limit < 2 * rows * self.cell.batch_size:  # Poisson batches vary
                loader = stack.enter_context(
                    BatchMemoryManager(
                        data_loader=self.loader, max_physical_batch_size=limit, optimizer=self.optimizer
                    )
                )
            for x, y in loader:
                if self.cell.augment and len(x):
                    x = augment(
                        x,
                        generator=self.streams["augmentation"],
                        padding=self.data.crop_padding,
                        fill=self.data.black,
                    )
                yield x, y

    def _chunk(self) -> int:
        """Samples in a physical batch of individual clipping."""
        if self.cell.weights:
            return max(SMALLEST_CHUNK, PIXELS // (self.cell.image_size or 224) ** 2)
        parameters = sum(p.numel() for p in self.model.parameters())
        return max(SMALLEST_CHUNK, PER_SAMPLE_FLOATS // parameters)

    def step(self, x: Tensor, y: Tensor) -> None:
        """The usual four lines."""
        self.optimizer.zero_grad()
        if self.cell.method.local_steps:
            losses = [lambda: F.cross_entropy(self.forward(x), y)] * self.cell.method.local_steps
            local_update(self.forward, lambda params: optim.SGD(params, lr=LOCAL_LR), losses)
        else:
            torch.autograd.backward(F.cross_entropy(self.forward(x), y))
        self.optimizer.step()

    def save(self, path: Path, progress: dict[str, Any]) -> None:
        """Write a checkpoint at the end of an epoch, without generator states: each epoch is seeded anew."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.engine is not None:
            self.engine.save_checkpoint(path=path, checkpoint_dict={"progress": progress}, **self._private)
            return
        state = {name: part.state_dict() for name, part in self._plain.items()}
        state["clip"] = getattr(self.optimizer, "max_grad_norm", None)
        write_checkpoint(path, {"training": state, **progress})

    def load(self, path: Path) -> dict[str, Any] | None:
        """Go on where :meth:`save` was called; None if there is no file, or one that cannot be read."""
        if self.engine is not None:
            try:
                kept = self.engine.load_checkpoint(path=path, **self._private)
            except (FileNotFoundError, CheckpointError):
                return None
            return dict(kept["progress"])
        found = read_checkpoint(path)
        if found is None:
            return None
        for name, part in self._plain.items():
            part.load_state_dict(found["training"][name])
        if self.optimizer is not self.plain_optimizer:
            self.optimizer.max_grad_norm = found["training"]["clip"]
        return dict(found)

    @property
    def _private(self) -> dict[str, Any]:
        """What a checkpoint of the engine is taken from."""
        return {
            "module": self.forward,
            "optimizer": self.optimizer,
            "grad_clip_scheduler": self.clip_schedule,
            "lr_scheduler": self.lr_schedule,
        }

    @property
    def _plain(self) -> dict[str, Any]:
        """What a checkpoint without an engine is taken from."""
        parts = {
            "model": self.model,
            "optimizer": self.plain_optimizer,
            "alc": getattr(self.optimizer, "adaptive", None),
            "lr_schedule": self.lr_schedule,
            "clip_schedule": self.clip_schedule,
        }
        return {name: part for name, part in parts.items() if part is not None}


def prepare(cell: Cell, data: Data, *, recipe: Recipe | None = None) -> Training:
    """Build the model and make it private as the cell says.

    Args:
        cell: What to train.
        data: The data set that ``cell.dataset`` names.
        recipe: Makes the optimizer and the loader of a cell with ``published=True``, which is not private.

    Raises:
        ValueError: Such a cell came without a recipe.
    """
    if cell.published and recipe is None:
        raise ValueError("published=True is not private: `opacus-bc reproduce` has the recipe for it")
    torch.manual_seed(cell.seed)
    method = cell.method
    model, data = start(cell, data)
    if cell.channels_last:
        model = model.to(memory_format=torch.channels_last)
    plain = _optimizer(cell, model)
    streams = {name: torch.Generator() for name in ("sampling", "noise", "augmentation")}
    for number, stream in enumerate(streams.values()):
        stream.manual_seed(cell.seed * len(streams) + number)
    loader: DataLoader[Any] = DataLoader(
        data.private, batch_size=cell.batch_size, shuffle=True, generator=streams["sampling"],
        drop_last=bool(cell.weights) and not method.private,  # BatchNorm cannot normalise one sample
    )  # fmt: skip
    forward: Any = model
    optimizer: Any = plain
    engine: PrivacyEngine | None = None
    if cell.published and recipe is not None:
        optimizer, loader = recipe(cell, data, model, plain, streams)
    elif method.private:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            engine = PrivacyEngine()
        forward, optimizer, loader = _make_private(engine, cell, data, model, plain, loader, streams["noise"])
    return Training(
        cell=cell,
        data=data,
        model=model,
        forward=forward,
        optimizer=optimizer,
        plain_optimizer=plain,
        loader=loader,
        engine=engine,
        streams=streams,
        lr_schedule=optim.lr_scheduler.ExponentialLR(plain, cell.lr_decay),
        clip_schedule=ExponentialGradClip(optimizer, gamma=cell.clip_decay)
        if method.private and cell.clip_decay != 1.0
        else None,
    )


def _optimizer(cell: Cell, model: nn.Module) -> optim.Optimizer:
    parameters = trained_parameters(cell, model)
    if cell.optimizer == "adam":
        return optim.Adam(parameters, lr=cell.lr, weight_decay=cell.weight_decay)
    return optim.SGD(parameters, lr=cell.lr, momentum=cell.momentum, weight_decay=cell.weight_decay)


def _make_private(
    engine: PrivacyEngine,
    cell: Cell,
    data: Data,
    model: nn.Module,
    optimizer: optim.Optimizer,
    loader: DataLoader[Any],
    noise: torch.Generator,
) -> tuple[Any, ...]:
    method = cell.method
    public = DataLoader(data.public, batch_size=min(PUBLIC_BATCH, len(data.public)))
    policy: Any = method.batch_norm if statistics_modules(model, individual=True) else None
    if policy == "public":
        policy = PublicStatistics(loader=public, differentiate=method.differentiate)
    arguments: dict[str, Any] = {
        "module": model,
        "optimizer": optimizer,
        "data_loader": loader,
        "max_grad_norm": cell.clip,
        "clipping": method.clipping,
        "mini_batch_size": method.mini_set,
        "alc": None if method.alc is None else ALC(public, **asdict(method.alc)),
        "batch_norm": policy,
        "grad_sample_mode": None if method.clipping == "batch" else method.grad_sample_mode,
        "sampling": method.sampling,
        "noise_generator": noise,
        # Public images that were cut off by index are not compared: real data sets hold equal images.
        "compare_public": data.public_apart and not cell.trial,
    }
    if method.users:
        arguments["unit"] = made_up_users(data.private.tensors[1].numpy(), method.users)
    if cell.noise_multiplier is not None:
        return engine.make_private(**arguments, noise_multiplier=cell.noise_multiplier)
    assert cell.epsilon is not None  # Cell has seen to it
    return engine.make_private_with_epsilon(
        **arguments, target_epsilon=cell.epsilon, target_delta=cell.delta, epochs=cell.epochs
    )
