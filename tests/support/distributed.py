"""What the ranks of a test do: real processes over gloo, started by :func:`launch`."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import nn, optim
from torch.distributed.nn.functional import all_reduce as sum_over_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from opacus_bc import ALC
from opacus_bc.engine.resume.files import secret_path
from support import Recorder, blobs, engine
from support.process import fork_ranks, rank_results

RANKS = 2


def results(scenario: str, folder: Path) -> list[Any]:
    """Run a scenario to its end and return what each rank found."""
    return rank_results(__file__, scenario, folder, RANKS)


def network(*, norm: bool = False, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 2)).to(dtype)


class Training:
    """One rank's (or one process's) part of a run."""

    def __init__(
        self,
        *,
        parallel: bool,
        norm: bool = False,
        dtype: torch.dtype = torch.float64,
        steps_per_epoch: int = 10,
        samples: int = 120,
        data: Dataset[Any] | None = None,
        lr: float = 0.1,
        secure: bool = False,
        wrap: dict[str, Any] | None = None,
        synchronise: bool = False,
        **kwargs: Any,
    ) -> None:
        rank = dist.get_rank() if parallel else 0
        self.dtype = dtype
        model = network(norm=norm, dtype=dtype)
        if parallel:
            model = DistributedDataParallel(model, **(wrap or {}))
        if synchronise:  # only now: DistributedDataParallel takes torch's own on a GPU alone
            model.module[1].__class__ = SynchronisedOnTheCPU
            model.module[1].process_group = None
        torch.manual_seed(1 + rank)  # ranks differ in their own streams, as they do in practice
        self.engine = engine(secure_mode=secure)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=lr, momentum=0.9),
            data_loader=DataLoader(data or blobs(samples, seed=2), batch_size=samples // steps_per_epoch),
            **{"noise_multiplier": 1.0, "max_grad_norm": 0.5, "clipping": "batch", **kwargs},
        )
        self.empty = 0

    def steps(self, count: int, *, spoiled_placeholders: bool = False) -> Training:
        taken = 0
        while count:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                output = self.model(x.to(self.dtype))
                delivery = self.loader.ledger.outstanding()
                loss = nn.functional.cross_entropy(output, y, reduction=self.optimizer.loss_reduction)
                if spoiled_placeholders and (delivery.placeholder or delivery.share == 0):
                    loss = loss * float("nan")
                loss.backward()
                self.empty += delivery.placeholder or delivery.share == 0
                self.optimizer.step()
                taken += delivery.ends_draw
                if taken == count:
                    return self
        return self

    def found(self) -> dict[str, Any]:
        plain = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        plain.eval()
        with torch.no_grad():
            output = plain(blobs(16, seed=5).tensors[0].to(self.dtype))
        return {
            "weights": torch.cat([p.detach().flatten() for p in plain.parameters()]),
            "output": output,
            "epsilon": self.engine.get_epsilon(1e-5),
            "steps": len(self.engine.accountant),
            "empty": self.empty,
            "history": list(self.engine.accountant.history),
        }


def public() -> DataLoader[Any]:
    x, y = blobs(64, seed=9).tensors
    return DataLoader(TensorDataset(x.double(), y), batch_size=16)


RUNS: dict[str, dict[str, Any]] = {
    "bc": {},
    "bc, sum": {"loss_reduction": "sum"},
    "bc, float32": {"dtype": torch.float32},
    "bc, partition": {"sampling": "partition"},
    "bc, bucket views": {"wrap": {"gradient_as_bucket_view": True}},
    "bc, small batches": {"steps_per_epoch": 60},
    "gbc": {"mini_batch_size": 3},
    "gbc, float32": {"mini_batch_size": 3, "dtype": torch.float32},
    "gbc, few": {"mini_batch_size": 2, "samples": 40, "steps_per_epoch": 10},
    "alc": {"alc": 3},
    "one backward": {"clipping": "flat", "grad_sample_mode": "bk"},
    "one backward, few": {"clipping": "flat", "grad_sample_mode": "bk", "samples": 20},
    "gbc, users": {"unit": [i % 31 for i in range(120)], "mini_batch_size": 3},
    "one backward, users": {
        "clipping": "flat",
        "grad_sample_mode": "bk",
        "unit": [i // 7 for i in range(120)],
        "mini_batch_size": 4,
    },
    "one backward, views": {"clipping": "flat", "grad_sample_mode": "bk", "views": 3},
}


def make(name: str, *, parallel: bool) -> Training:
    kwargs = dict(RUNS[name])
    if "alc" in kwargs:
        kwargs["alc"] = ALC(public(), refresh=kwargs["alc"])
    if not parallel:
        kwargs.pop("wrap", None)
    return Training(parallel=parallel, **kwargs)


def same_draws(training: Training, seed: int = 11) -> Training:
    """Streams that one process and two ranks have in common."""
    import numpy as np

    training.loader.draws.generator.bit_generator.state = np.random.Philox(seed).state
    if hasattr(training.loader.draws, "mini_sets"):
        order = np.random.default_rng(seed).permutation(training.loader.plan.dataset_size)
        total = len(training.loader.draws.mini_sets)
        training.loader.draws.mini_sets = [part.tolist() for part in np.array_split(order, total)]
    training.optimizer.noise.reseed(seed)
    return training


def compare() -> dict[str, Any]:
    return {name: same_draws(make(name, parallel=True)).steps(25).found() for name in RUNS}


CLIPPED = ("bc", "bc, float32", "bc, small batches", "gbc", "gbc, float32", "gbc, few", "alc")


def clipped_sums(name: str, *, parallel: bool) -> list[torch.Tensor]:
    """What each of eight steps would have noised."""
    training = same_draws(make(name, parallel=parallel))
    training.optimizer.noise = recorder = Recorder()
    training.steps(8)
    return recorder.steps(8)


def clipped() -> dict[str, Any]:
    return {name: clipped_sums(name, parallel=True) for name in CLIPPED}


class SynchronisedOnTheCPU(nn.SyncBatchNorm):
    """torch's needs a GPU; this one computes the same in training mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        count = torch.tensor([float(len(x))], dtype=x.dtype)
        count, total, squares = (sum_over_ranks(t) for t in (count, x.sum(0), x.square().sum(0)))
        mean = total / count
        scaled = (x - mean) / (squares / count - mean.square() + self.eps).sqrt()
        return scaled * self.weight + self.bias


def synchronised() -> dict[str, Any]:
    """BC's batch is one unit, so its statistics may be those of all ranks; small batches count as zero."""

    def training(**kwargs: Any) -> Training:
        return Training(parallel=True, norm=True, synchronise=True, batch_norm="batch", **kwargs)

    whole, small = training(sampling="partition"), training(steps_per_epoch=60)
    found = {}
    for name, run in {"whole": same_draws(whole), "small": same_draws(small)}.items():
        run.optimizer.noise = recorder = Recorder()
        run.steps(6)
        found[name] = recorder.steps(6)
    found["gbc"] = _message(lambda: training(mini_batch_size=6))
    return found


def own_streams() -> dict[str, Any]:
    """Fifty steps with what make_private set up itself, BatchNorm and empty parts included."""
    runs = {
        "bc": {"norm": True, "batch_norm": public(), "steps_per_epoch": 40},
        "gbc": {"norm": True, "alc": ALC(public(), refresh=7), "mini_batch_size": 2, "samples": 40},
        "secure bc": {"secure": True, "steps_per_epoch": 40},
        "secure gbc": {"secure": True, "mini_batch_size": 4},
    }
    return {name: Training(parallel=True, **kwargs).steps(50).found() for name, kwargs in runs.items()}


def bad_data() -> dict[str, Any]:
    """One sample of the other rank's part is not a number: the whole batch counts as zero, on every rank."""
    found = {}
    for name, kwargs in {"bc": {}, "gbc": {"mini_batch_size": 3}}.items():
        training = same_draws(Training(parallel=True, **{"noise_multiplier": 0.0, **kwargs}))
        before = training.found()["weights"]
        for x, y in training.loader:
            loss = nn.functional.cross_entropy(training.model(x.double()), y)
            (loss * (float("nan") if dist.get_rank() == 1 else 1.0)).backward()
            training.optimizer.step()
            if len(training.engine.accountant) == 1:
                break
        found[name] = training.found()["weights"] - before
    return found


def spoiled() -> dict[str, Any]:
    """What placeholders compute must not matter."""
    runs = ("bc, small batches", "gbc, few")
    return {
        name: same_draws(make(name, parallel=True)).steps(25, spoiled_placeholders=True).found()
        for name in runs
    }


def individual(*, norm: bool = False, samples: int = 120) -> dict[str, Any]:
    """Individual clipping keeps Opacus's wrapper and optimizer; BatchNorm has public statistics."""
    model = DPDDP(network(norm=norm))
    torch.manual_seed(1 + dist.get_rank())
    ours = engine()
    public = TensorDataset(blobs(40, seed=3).tensors[0].double())
    policy = {"batch_norm": DataLoader(public, batch_size=20, shuffle=True)} if norm else {}
    model, optimizer, loader = ours.make_private(
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(blobs(samples, seed=2), batch_size=samples // 10),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        **policy,
    )
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
    epsilon, steps = ours.get_epsilon(1e-5), len(ours.accountant)
    released = ours.finalize(model).state_dict()
    return {"weights": released, "epsilon": epsilon, "steps": steps, "sizes": sizes}


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class Shuffled(Dataset[Any]):
    """Hands out rows in an order of this rank's own, which only the rows themselves show."""

    def __init__(self) -> None:
        self.dataset = blobs(120, seed=2)
        order = torch.Generator().manual_seed(dist.get_rank())
        self._order = torch.randperm(120, generator=order).tolist()

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self._order[index]]


class OwnAugmented(Dataset[Any]):
    """Augments by a stream of its own: ranks differ in which rows they can read twice."""

    def __init__(self, how_often: float) -> None:
        self.dataset, self._often = blobs(120, seed=2), how_often
        self._own = torch.Generator()
        self._own.seed()

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Any:
        x, y = self.dataset[index]
        return (x + 1 if float(torch.rand((), generator=self._own)) < self._often else x), y


def _other_data() -> dict[str, Any]:
    """What ranks are told whose data sets are not the same."""

    def others(count: int = 120) -> Subset[Any]:
        """A split that this rank alone makes."""
        order = torch.Generator().manual_seed(dist.get_rank())
        return Subset(blobs(count, seed=2), torch.randperm(count, generator=order).tolist())

    def other_public() -> DataLoader[Any]:
        x, y = blobs(64, seed=9).tensors
        return DataLoader(TensorDataset(x.double() + dist.get_rank(), y), batch_size=16)

    def in_opacus_wrapper(data: Dataset[Any], **kwargs: Any) -> None:
        model = DPDDP(network())
        engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=20, shuffle=bool(kwargs)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **kwargs,
        )

    def alone() -> str:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = network()
            engine().make_private(
                module=model,
                optimizer=optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(blobs(), batch_size=20),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )
        return " ".join(str(one.message) for one in said)

    one_backward = {"clipping": "flat", "grad_sample_mode": "bk"}
    return {
        "alone": alone(),
        "same order": _message(lambda: Training(parallel=True, data=Subset(blobs(), list(range(120))))),
        "other order": _message(lambda: Training(parallel=True, data=others())),
        "other order, one backward": _message(lambda: Training(parallel=True, data=others(), **one_backward)),
        "other order, Opacus's wrapper": _message(lambda: in_opacus_wrapper(others())),
        "Opacus's wrapper, shuffled": _message(lambda: in_opacus_wrapper(blobs(), poisson_sampling=False)),
        "hidden order, one backward": _message(
            lambda: Training(parallel=True, data=Shuffled(), **one_backward)
        ),
        "seldom augmented": _message(lambda: Training(parallel=True, data=OwnAugmented(0.1))),
        "flipped": _message(lambda: Training(parallel=True, data=OwnAugmented(0.5))),
        "other contents": _message(
            lambda: Training(parallel=True, data=blobs(120, seed=dist.get_rank()), **one_backward)
        ),
        "other public data": _message(
            lambda: Training(parallel=True, norm=True, batch_norm=other_public(), **one_backward)
        ),
        "other public data of ALC": _message(lambda: Training(parallel=True, alc=other_public())),
    }


def refusals() -> dict[str, Any]:
    def own_hook() -> None:
        model = DistributedDataParallel(network())
        model.register_comm_hook(None, lambda state, bucket: bucket)
        engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(blobs(), batch_size=20),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping="batch",
        )

    def unreduced() -> None:
        training = Training(parallel=True)
        x, y = next(iter(training.loader))
        with training.model.no_sync():
            nn.functional.cross_entropy(training.model(x.double()), y).backward()
        training.optimizer.step()

    def around_ddp() -> None:
        training = Training(parallel=True)
        x, y = next(iter(training.loader))
        nn.functional.cross_entropy(training.model.module(x.double()), y).backward()
        training.optimizer.step()

    def partly_reduced() -> None:
        training = Training(parallel=True)
        x, y = next(iter(training.loader))
        nn.functional.cross_entropy(training.model(x.double()), y).backward()
        nn.functional.cross_entropy(training.model.module(x.double()), y).backward()
        training.optimizer.step()

    def wrapped_later() -> None:
        training = Training(parallel=False).steps(5)  # the look-out must not tire
        x, y = next(iter(training.loader))
        model = DistributedDataParallel(training.model)
        nn.functional.cross_entropy(model(x.double()), y).backward()

    def individual_wrapped_later() -> None:
        training = Training(parallel=False, clipping="flat")
        model = DistributedDataParallel(training.model)
        model(next(iter(training.loader))[0].double())

    def opacus_wrapper() -> None:
        model = DPDDP(network())
        engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(blobs(), batch_size=20),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping="batch",
            mini_batch_size=4,
        )

    def chunks() -> None:
        Training(parallel=True).loader.with_max_physical_batch_size(4)

    return {
        **_other_data(),
        "own hook": _message(own_hook),
        "shuffle": _message(lambda: Training(parallel=True, poisson_sampling=False)),
        "no_sync": _message(unreduced),
        "around ddp": _message(around_ddp),
        "partly reduced": _message(partly_reduced),
        "wrapped later": _message(wrapped_later),
        "individual, wrapped later": _message(individual_wrapped_later),
        "chunks": _message(chunks),
        "Opacus's wrapper": _message(opacus_wrapper),
        "torch's wrapper": _message(
            lambda: Training(
                parallel=True, norm=True, clipping="flat", batch_norm="frozen", grad_sample_mode="hooks"
            )
        ),
        "private": _message(lambda: Training(parallel=True, norm=True, batch_norm="private")),
        "different": _message(lambda: Training(parallel=True, noise_multiplier=1.0 + dist.get_rank())),
        "different users": _message(
            lambda: Training(
                parallel=True, unit=[(i + dist.get_rank()) // 4 for i in range(120)], mini_batch_size=3
            )
        ),
    }


def evaluated_alone() -> dict[str, Any]:
    """Rank 0 evaluates and saves between steps while rank 1 trains on: nothing may wait for rank 1."""
    public = DataLoader(
        TensorDataset(*[t.double() if t.is_floating_point() else t for t in blobs(32, seed=5).tensors]),
        batch_size=16,
    )
    found = {}
    for size in (None, 4):
        training = Training(parallel=True, norm=True, batch_norm=public, mini_batch_size=size).steps(3)
        if dist.get_rank() == 0:
            training.model.eval()
            training.model.module(public.dataset.tensors[0])
            training.model.state_dict()
            training.model.train()
        training.steps(3)
        training.model.eval()
        output = training.model.module(public.dataset.tensors[0])
        found[str(size)] = {**training.found(), "output": output.detach()}
    return found


def resumed_exactly() -> dict[str, Any]:
    """Ten steps, and five saved and loaded and five more, on both ranks."""
    found = {}
    for size in (None, 4):
        path = Path(tempfile.gettempdir()) / f"opacus-bc-test-{os.getppid()}.pt"
        first = Training(parallel=True, mini_batch_size=size).steps(5)
        parts = {"module": first.model, "optimizer": first.optimizer}
        first.engine.save_checkpoint(path=path, **parts, exact=True)
        dist.barrier()
        second = Training(parallel=True, mini_batch_size=size).steps(0)
        second.engine.load_checkpoint(path=path, module=second.model, optimizer=second.optimizer)
        dist.barrier()
        if dist.get_rank() == 0:
            path.unlink()
            secret_path(path).unlink()
        found[str(size)] = (first.steps(5).found(), second.steps(5).found())
    return found


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "compare": compare,
    "clipped": clipped,
    "synchronised": synchronised,
    "own_streams": own_streams,
    "bad_data": bad_data,
    "spoiled": spoiled,
    "individual": lambda: [individual(), individual(norm=True), individual(norm=True, samples=10)],
    "refusals": refusals,
    "evaluated_alone": evaluated_alone,
    "resumed_exactly": resumed_exactly,
}


def killed(folder: Path) -> None:
    """Save after five steps; rank 1 dies in the eighth, rank 0 must notice."""
    training = Training(parallel=True).steps(5)
    training.engine.save_checkpoint(
        path=folder / "run.pt", module=training.model, optimizer=training.optimizer
    )
    training.steps(2)
    if dist.get_rank() == 1:
        os._exit(7)
    try:
        training.steps(20)
    except RuntimeError as error:
        print(f"noticed: {error}")
        os._exit(3)


def resumed(folder: Path) -> dict[str, Any]:
    training = Training(parallel=True)
    training.engine.load_checkpoint(
        path=folder / "run.pt", module=training.model, optimizer=training.optimizer
    )
    return training.steps(5).found()


def main(scenario: str, folder: Path) -> list[int]:
    if scenario == "killed":
        return fork_ranks(RANKS, folder, lambda rank: killed(folder))
    if scenario == "resumed":
        return fork_ranks(RANKS, folder, lambda rank: resumed(folder))
    return fork_ranks(RANKS, folder, lambda rank: {name: run() for name, run in SCENARIOS.items()})


if __name__ == "__main__":
    codes = main(sys.argv[1], Path(sys.argv[2]))
    print("exit codes", codes)
    sys.exit(any(codes))
