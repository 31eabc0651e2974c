"""What the ranks of an FSDP2 test do: four real processes over gloo, two of which also work as a pair."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from opacus_bc import ALC, local_update
from opacus_bc.parallel.ddp import part_of_each_mini_set
from opacus_bc.parallel.shards import as_gradient_of, local_part
from support import Recorder, blobs, engine
from support.distributed import public
from support.process import fork_ranks, rank_results

RANKS = 4
FEATURES = 4


def network(*, norm: bool = False, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Its third layer has one row: all ranks but the first hold nothing of it."""
    torch.manual_seed(seed)
    middle: list[nn.Module] = [nn.BatchNorm1d(7)] if norm else []
    layers = [nn.Linear(FEATURES, 7), *middle, nn.Tanh(), nn.Linear(7, 1), nn.Linear(1, 2)]
    return nn.Sequential(*layers).to(dtype)


def sharded(model: nn.Sequential, mesh: DeviceMesh, **kwargs: Any) -> nn.Sequential:
    fully_shard(model[0], mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)
    return model


class Training:
    """One rank's part of a run, or (without a mesh) a run in one process."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        norm: bool = False,
        dtype: torch.dtype = torch.float64,
        steps_per_epoch: int = 10,
        samples: int = 120,
        secure: bool = False,
        record: bool = True,
        model: nn.Sequential | None = None,
        optimizer: Callable[[Any], optim.Optimizer] = lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
        **kwargs: Any,
    ) -> None:
        self.dtype = dtype
        self.model = network(norm=norm, dtype=dtype) if model is None else model
        if mesh is not None:
            sharded(self.model, mesh)
        torch.manual_seed(1 + (dist.get_rank() if mesh is not None else 0))
        self.engine = engine(secure_mode=secure)
        if "alc" in kwargs:
            kwargs["alc"] = ALC(public(), **kwargs["alc"])
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=optimizer(self.model.parameters()),
            data_loader=DataLoader(blobs(samples, FEATURES, seed=2), batch_size=samples // steps_per_epoch),
            **{"noise_multiplier": 1.0, "max_grad_norm": 0.5, "clipping": "batch", **kwargs},
        )
        if record:
            self.optimizer.noise = Recorder()
        self.empty = 0

    def same_draws(self, seed: int = 11) -> Training:
        draws = self.loader.draws
        draws.generator.bit_generator.state = np.random.Philox(seed).state
        if hasattr(draws, "mini_sets"):
            order = np.random.default_rng(seed).permutation(self.loader.plan.dataset_size)
            draws.mini_sets = [part.tolist() for part in np.array_split(order, len(draws.mini_sets))]
        return self

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        reduction = self.optimizer.loss_reduction
        return nn.functional.cross_entropy(self.model(x.to(self.dtype)), y, reduction=reduction)

    def steps(self, count: int, spoil: Callable[[Any], float] = lambda delivery: 1.0) -> Training:
        taken = 0
        while taken < count:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                delivery = self.loader.ledger.outstanding()
                (self.loss(x, y) * spoil(delivery)).backward()
                self.empty += delivery.placeholder or delivery.share == 0
                self.optimizer.step()
                taken += delivery.ends_draw
                if taken == count:
                    break
        return self

    def ordered(self) -> list[nn.Parameter]:
        by_name = dict(self.optimizer.named_parameters())
        return [by_name[name] for block in self.optimizer.blocks() for name in block.names]

    def sums(self) -> list[Tensor]:
        """The clipped sum of every step, whole."""
        ordered, recorded = self.ordered(), self.optimizer.noise.sums
        steps = [recorded[i : i + len(ordered)] for i in range(0, len(recorded), len(ordered))]
        return [
            torch.cat([whole(as_gradient_of(p, v)).flatten() for p, v in zip(ordered, step, strict=True)])
            for step in steps
        ]

    def weights(self) -> Tensor:
        return torch.cat([whole(p.detach()).flatten() for _, p in self.optimizer.named_parameters()])

    def found(self) -> dict[str, Any]:
        return {
            "sums": self.sums(),
            "stds": self.optimizer.noise.stds,
            "weights": self.weights(),
            "epsilon": self.engine.get_epsilon(1e-5),
            "history": list(self.engine.accountant.history),
            "empty": self.empty,
        }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


RUNS: dict[str, dict[str, Any]] = {
    "bc": {},
    "bc, float32": {"dtype": torch.float32},
    "bc, sum": {"loss_reduction": "sum"},
    "bc, partition": {"sampling": "partition"},
    "bc, small batches": {"steps_per_epoch": 60},
    "gbc": {"mini_batch_size": 6},
    "gbc, float32": {"mini_batch_size": 6, "dtype": torch.float32},
    "gbc, small mini-sets": {"mini_batch_size": 2, "samples": 40},
    "alc": {"alc": {"refresh": 3}},
    "alc, float32": {"alc": {"refresh": 3}, "dtype": torch.float32},
    "alc, gbc, scale": {"alc": {"apply": "scale", "refresh": 2}, "mini_batch_size": 6},
}
STEPS = 6
# What is run on replicas of shards as well; the rest would show nothing new there.
REPLICATED_RUNS = ("bc", "gbc, float32", "gbc, small mini-sets", "alc, gbc, scale")


def run(name: str, mesh: DeviceMesh | None) -> Training:
    return Training(mesh, **RUNS[name]).same_draws()


def compare(mesh: DeviceMesh) -> dict[str, Any]:
    names = RUNS if mesh.ndim == 1 else REPLICATED_RUNS
    return {name: run(name, mesh).steps(STEPS).found() for name in names}


def norm_oracle(ranks: int, mini_batch_size: int | None) -> Tensor:
    """The first clipped sum with BatchNorm over each rank's part of a mini-set, by plain autograd."""
    training = Training(None, norm=True, batch_norm="batch", mini_batch_size=mini_batch_size).same_draws()
    draw = next(iter(training.loader.draws))
    x, y = training.loader.dataset.tensors
    total = torch.zeros_like(training.weights())
    parts = [part_of_each_mini_set(draw, rank=r, size=ranks) for r in range(ranks)]
    for j in range(len(parts[0].mini_sets)):
        loss = sum(p.shares[j] * training.loss(x[p.mini_sets[j]], y[p.mini_sets[j]]) for p in parts)
        gradient = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(training.model.parameters()))]
        )
        total += gradient / max(1.0, float(gradient.norm()) / (0.5 * (1 - 1e-5)))
    return total


def batch_norm(mesh: DeviceMesh) -> dict[str, Any]:
    found = {}
    for name, size in {"bc": None, "gbc": 6}.items():
        kwargs: dict[str, Any] = {"norm": True, "batch_norm": "batch", "mini_batch_size": size}
        found[name] = Training(mesh, **kwargs).same_draws().steps(1).sums()[0]
    frozen = Training(mesh, norm=True, batch_norm="frozen").steps(2)
    found["frozen"] = frozen.model[1].running_mean
    return found


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 512), nn.Tanh(), nn.Linear(512, 2)).double()


def noise_only(mesh: DeviceMesh, *, secure: bool, resumed: bool = False) -> dict[str, Any]:
    """Steps whose gradients are zero: what is left of them is noise."""
    training = Training(
        mesh,
        model=wide(),
        record=False,
        secure=secure,
        noise_multiplier=3.0,
        optimizer=lambda params: optim.SGD(params, lr=1.0),
    )
    if resumed:
        from opacus_bc.engine.resume.randomness import draw_fresh_randomness

        draw_fresh_randomness(training.engine._runs[-1])
    drawn = []
    for _ in range(4):
        before = [local_part(p).clone() for p in training.ordered()]
        training.steps(1, spoil=lambda delivery: 0.0)
        after = [local_part(p) for p in training.ordered()]
        drawn.append(torch.cat([(b - a).flatten() for a, b in zip(after, before, strict=True)]))
    std = training.optimizer.blocks()[0].noise_std
    return {"noise": torch.stack(drawn) / std, "epsilon": training.engine.get_epsilon(1e-5)}


def noise(mesh: DeviceMesh) -> dict[str, Any]:
    return {
        "torch": noise_only(mesh, secure=False),
        "secure": noise_only(mesh, secure=True),
        "resumed": noise_only(mesh, secure=False, resumed=True),
    }


def own_streams(mesh: DeviceMesh) -> dict[str, Any]:
    """Fifty steps with what make_private set up itself, small batches included."""
    training = Training(mesh, record=False, steps_per_epoch=40, alc={"refresh": 7}).steps(50)
    return {
        "weights": training.weights(),
        "epsilon": training.engine.get_epsilon(1e-5),
        "steps": len(training.engine.accountant),
        "empty": training.empty,
        "bounds": training.optimizer.clip_bounds,
    }


def bad_data(mesh: DeviceMesh) -> dict[str, Any]:
    """The last rank's part is not a number: the mini-sets it took part in count as zero, on every rank."""
    last = dist.get_rank() == mesh.mesh.flatten().tolist()[-1]

    def spoil(delivery: Any) -> float:
        return float("nan") if last and delivery.share > 0 else 1.0

    def placeholders(delivery: Any) -> float:
        return float("inf") if delivery.share == 0 else 1.0

    found = {}
    for name in ("bc", "gbc, small mini-sets"):
        found[name] = run(name, mesh).steps(4, spoil).sums()
        found[f"{name}, placeholders"] = run(name, mesh).steps(STEPS, placeholders).sums()
    return found


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest ordinary tensor that anything returned."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (list, tuple)) else [out]:
            if type(value) is Tensor:
                self.entries = max(self.entries, value.untyped_storage().nbytes() // value.element_size())
        return out


def memory(mesh: DeviceMesh | None) -> dict[str, int]:
    """Bytes that stay on this rank, and the largest tensor that a step makes."""
    training = Training(mesh, model=wide(), record=False, optimizer=lambda params: optim.Adam(params, lr=0.1))
    x, y = next(iter(training.loader))
    training.loss(x, y).backward()
    with LargestTensor() as largest:
        training.optimizer.step()
    params = training.ordered()
    state = [v for p in params for v in training.optimizer.original_optimizer.state[p].values() if v.dim()]
    held = [*params, *(p.grad for p in params), *state]
    return {
        "held": sum(local_part(t).numel() * t.element_size() for t in held),
        "whole": sum(t.numel() * t.element_size() for t in held),
        "largest": largest.entries,
        "own": max(local_part(p).numel() for p in params),
    }


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    def message(call: Callable[[], Any]) -> str:
        try:
            call()
        except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    def private(model: nn.Module, **kwargs: Any) -> Any:
        return engine().make_private(
            module=model,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(blobs(120, FEATURES, seed=2), batch_size=12),
            **{"noise_multiplier": 1.0, "max_grad_norm": 0.5, "clipping": "batch", **kwargs},
        )

    def root_not_sharded() -> None:
        model = network()
        fully_shard(model[0], mesh=mesh)
        private(model)

    def built_before() -> None:
        model = network()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        sharded(model, mesh)
        engine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(blobs(120, FEATURES, seed=2), batch_size=12),
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            clipping="batch",
        )

    def divide_factor() -> None:
        model = sharded(network(), mesh)
        model.set_gradient_divide_factor(7.0)
        private(model)

    def batch_norm(policy: Any, mini_batch_size: int | None = None) -> Callable[[], Any]:
        return lambda: private(
            sharded(network(norm=True), mesh), batch_norm=policy, mini_batch_size=mini_batch_size
        )

    def synchronised() -> None:
        private(
            sharded(nn.SyncBatchNorm.convert_sync_batchnorm(network(norm=True)), mesh), batch_norm="batch"
        )

    def unsynchronised() -> None:
        training = Training(mesh)
        x, y = next(iter(training.loader))
        training.model.set_requires_gradient_sync(False)
        training.loss(x, y).backward()
        training.optimizer.step()

    def other_reduction() -> None:
        training = Training(mesh)
        x, y = next(iter(training.loader))
        group = training.model[0]._get_fsdp_state()._fsdp_param_groups[0]
        group._reduce_scatter_comm = group._reduce_scatter_comm.inner
        training.loss(x, y).backward()
        training.optimizer.step()

    def assigned() -> None:
        training = Training(mesh)
        next(iter(training.loader))
        for p in training.ordered():
            p.grad = torch.zeros_like(p)
        training.optimizer.step()

    def around() -> None:
        training = Training(mesh)
        x, y = next(iter(training.loader))
        penalty = sum(p.to_local().square().sum() for p in training.ordered())
        (training.loss(x, y) + x.mean() * penalty).backward()

    def local() -> None:
        training = Training(mesh)
        x, y = next(iter(training.loader))
        local_update(training.model, lambda p: optim.SGD(p, lr=0.1), [lambda: training.loss(x, y)])

    def checkpoint() -> None:
        training = Training(mesh)
        training.engine.save_checkpoint(path="never", module=training.model, optimizer=training.optimizer)

    return {
        "root not sharded": message(root_not_sharded),
        "built before": message(built_before),
        "divide factor": message(divide_factor),
        "individual": message(lambda: private(sharded(network(), mesh), clipping="flat")),
        "shuffle": message(lambda: private(sharded(network(), mesh), poisson_sampling=False)),
        "public statistics": message(batch_norm(public())),
        "private statistics": message(batch_norm("private")),
        "unprotected": message(batch_norm("unprotected", 6)),
        "synchronised": message(synchronised),
        "unsynchronised": message(unsynchronised),
        "other reduction": message(other_reduction),
        "assigned": message(assigned),
        "around": message(around),
        "chunks": message(lambda: Training(mesh).loader.with_max_physical_batch_size(4)),
        "local update": message(local),
        "checkpoint": message(checkpoint),
        "different": message(lambda: Training(mesh, noise_multiplier=1.0 + dist.get_rank())),
    }


def held_back(mesh: DeviceMesh) -> dict[str, Any]:
    """A backward that FSDP2 holds back, then a fresh pass: nothing of the first may reach the second."""
    training = run("bc", mesh).same_draws(99)  # other samples than those of the second pass
    x, y = next(iter(training.loader))
    training.model.set_requires_gradient_sync(False)
    (1000 * training.loss(x, y)).backward()
    training.model.set_requires_gradient_sync(True)
    training.same_draws()
    return {"sums": training.steps(1).sums()}


def finished(mesh: DeviceMesh) -> dict[str, Any]:
    """A finished model trains without privacy again, and its optimizer does not."""
    training = run("bc", mesh).steps(1)
    released = training.engine.finalize(training.model)
    x, y = blobs(4, FEATURES).tensors
    training.loss(x, y).backward()  # needs no batch of the private loader
    groups = [g for m in (released, released[0]) for g in m._get_fsdp_state()._fsdp_param_groups]
    return {"plain": all(type(g._reduce_scatter_comm).__name__ == "DefaultReduceScatter" for g in groups)}


SCENARIOS: dict[str, Callable[[DeviceMesh], dict[str, Any]]] = {
    "compare": compare,
    "batch_norm": batch_norm,
    "noise": noise,
    "own_streams": own_streams,
    "bad_data": bad_data,
    "memory": memory,
    "refusals": refusals,
    "held_back": held_back,
    "finished": finished,
}
# What the two by two mesh (replicas, shards) has to show as well.
REPLICATED = ("compare", "batch_norm", "noise", "own_streams", "bad_data", "memory")


def replicas_differ(mesh: DeviceMesh) -> dict[str, Any]:
    """One replica's gradient is turned around before it is clipped: its norm is the others'."""
    training = run("bc", mesh)
    x, y = next(iter(training.loader))
    training.loss(x, y).backward()
    if mesh.get_local_rank(0) == 1:
        for p in training.ordered():
            p.grad = -p.grad
    try:
        training.optimizer.step()
    except RuntimeError as error:
        return {"message": str(error)}
    return {"message": "nothing was raised"}


def everything(rank: int) -> dict[str, Any]:
    pair = DeviceMesh("cpu", [0, 1])
    square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicas", "shards"))
    found: dict[str, Any] = {}
    if rank < 2:
        found["pair"] = {name: scenario(pair) for name, scenario in SCENARIOS.items()}
    dist.barrier()
    found["square"] = {name: SCENARIOS[name](square) for name in REPLICATED}
    found["square"]["replicas_differ"] = replicas_differ(square)
    return found


def results(folder: Path) -> list[dict[str, Any]]:
    """What each rank found in every scenario."""
    return rank_results(__file__, "all", folder, RANKS)


if __name__ == "__main__":
    sys.exit(any(fork_ranks(RANKS, Path(sys.argv[2]), everything)))
