"""Runs that can be saved in one process and resumed in another; ``main`` is that other process."""

from __future__ import annotations

import hashlib
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

from opacus_bc import ALC, FreezeConverged, PrivacyEngine, PublicStatistics
from support import blobs, engine, reseed

N, BATCH = 160, 10  # 16 steps a pass: 20 steps end within one


class Jittered(Dataset[Any]):
    """Augmentation out of torch's default stream, as torchvision's."""

    def __init__(self, n: int, seed: int) -> None:
        self.data = blobs(n, seed=seed)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(x.shape), y


def public() -> DataLoader[Any]:
    return DataLoader(blobs(64, seed=7), batch_size=16)


@dataclass
class Case:
    """What differs between the runs."""

    sgd: bool = True
    kwargs: dict[str, Any] = field(default_factory=lambda: {"clipping": "batch", "batch_norm": "batch"})
    public_norm: Any = None
    alc: dict[str, Any] | None = None
    batch: int = BATCH
    schedulers: bool = False
    norm: bool = True
    momentum: float = 0.9


BATCH_MODE = {"clipping": "batch"}
CASES = {
    "sgd": Case(),
    "adamw": Case(sgd=False),
    "schedulers": Case(schedulers=True),
    "gbc, public batch norm": Case(kwargs={**BATCH_MODE, "mini_batch_size": 5}, public_norm={}),
    "alc, refreshed": Case(sgd=False, kwargs=dict(BATCH_MODE), alc={"refresh": 7, "layers": 2}),
    "alc by scaling, freezing": Case(
        kwargs=dict(BATCH_MODE),
        alc={"apply": "scale", "freeze": FreezeConverged(window=10, false_freeze_rate=0.5)},
        norm=False,
        momentum=0.0,
    ),
    "partition": Case(sgd=False, kwargs={**BATCH_MODE, "sampling": "partition", "batch_norm": "batch"}),
    # Shuffling resumes bit by bit at the end of a pass: 20 steps are two passes.
    "shuffle": Case(kwargs={**BATCH_MODE, "sampling": "shuffle", "batch_norm": "batch"}, batch=16),
    "individual": Case(
        kwargs={"batch_norm_refresh": 3}, public_norm={"differentiate": True, "max_batches": 3}, batch=16
    ),
    "individual, within a pass": Case(kwargs={"batch_norm_refresh": 3}, public_norm={}),
    "individual, alc": Case(kwargs={"batch_norm_refresh": 3}, alc={"refresh": 7}),
}


class Training:
    """A run of one case; another seed gives another start, as another process would."""

    def __init__(self, case: Case, *, seed: int, **engine_kwargs: Any) -> None:
        torch.manual_seed(seed)
        self.engine: PrivacyEngine = engine(**engine_kwargs)
        norm: list[nn.Module] = [nn.BatchNorm1d(8)] if case.norm else []
        model = nn.Sequential(nn.Linear(4, 8), *norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
        kwargs = dict(case.kwargs)
        if case.public_norm is not None:
            kwargs["batch_norm"] = PublicStatistics(loader=public(), **case.public_norm)
        if case.alc is not None:
            kwargs["alc"] = ALC(public(), **case.alc)
        inner: Any = optim.AdamW(model.parameters(), lr=0.01)
        if case.sgd:
            inner = optim.SGD(model.parameters(), lr=0.1, momentum=case.momentum)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=inner,
            data_loader=DataLoader(Jittered(N, seed=3), batch_size=case.batch, shuffle=True),
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            **kwargs,
        )
        reseed(self.optimizer, self.loader, seed)
        self.parts: dict[str, Any] = {"module": self.model, "optimizer": self.optimizer}
        if case.schedulers:
            from opacus.schedulers import ExponentialNoise, LambdaGradClip

            self.parts["noise_scheduler"] = ExponentialNoise(self.optimizer, gamma=0.99)
            self.parts["grad_clip_scheduler"] = LambdaGradClip(
                self.optimizer, scheduler_function=lambda epoch: 1 / (1 + 0.1 * epoch)
            )
            self.parts["lr_scheduler"] = optim.lr_scheduler.StepLR(inner, step_size=6)

    def advance(self, steps: int) -> Training:
        """Take this many optimizer steps, over as many passes as that needs."""
        before = booked(self.engine)
        while True:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                taken = booked(self.engine) - before
                if taken and taken % 5 == 0 and "lr_scheduler" in self.parts:
                    for name in ("noise_scheduler", "grad_clip_scheduler", "lr_scheduler"):
                        self.parts[name].step()
                if taken == steps:
                    return self

    def advance_pass(self) -> int:
        """One pass; the number of its steps."""
        before = booked(self.engine)
        for x, y in self.loader:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        return booked(self.engine) - before

    def save(self, path: Path, **kwargs: Any) -> None:
        self.engine.save_checkpoint(path=path, **self.parts, **{"exact": True, **kwargs})

    def load(self, path: Path, **kwargs: Any) -> Training:
        self.engine.load_checkpoint(path=path, **self.parts, **kwargs)
        return self

    def result(self) -> str:
        """Weights in training, statistics for evaluation, epsilon: every bit of them."""
        digest = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            digest.update(name.encode() + value.numpy().tobytes())
        return f"{digest.hexdigest()[:16]} {self.engine.get_epsilon(1e-5)!r} {len(self.engine.accountant)}"


def booked(engine: PrivacyEngine) -> int:
    return sum(int(entry[2]) for entry in engine.accountant.history)


def main(folder: Path) -> None:
    """Resume every case out of ``folder``, 20 steps each, and print what came out."""
    for name, case in CASES.items():
        training = Training(case, seed=99).load(folder / f"{name}.pt")
        print(name, training.advance(20).result(), sep="\t")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
