"""What a process holds of a model that ``fully_shard`` has cut up, and what of that is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from opacus_bc.parallel.ranks import Ranks

# torch's CPU generators use 32 bits of a seed, so seeds of shards are kept apart by distance, not by chance;
# a shard's own streams (one or two for each device) lie within it.
SEED_DISTANCE = 64


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: its shard, or all of an ordinary tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def as_gradient_of(p: Tensor, value: Tensor) -> Tensor:
    """``value``, which is this process's part, as a gradient for ``p``."""
    value = value.to(p.dtype)
    if not isinstance(p, DTensor):
        return value
    gradient: Tensor = DTensor.from_local(
        value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return gradient


def fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the module or on a part of it."""
    return any(isinstance(child, FSDPModule) for child in module.modules())


def reshard(module: nn.Module) -> None:
    """Let go of weights that a forward has gathered, so that ``module.parameters()`` are the shards."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


class Sharding:
    """The processes that hold one model together: a mesh of (shards), or of (replicas, shards)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        device = torch.device(mesh.device_type)
        groups = mesh.get_all_groups()
        self.shards = Ranks(groups[-1], device)
        self.replicas = Ranks(groups[0], device) if mesh.ndim == 2 else None
        self.ranks = self.shards if mesh.ndim == 1 else Ranks(dist.group.WORLD, device)

    @property
    def noise_offset(self) -> int:
        """What keeps this shard's noise streams apart from all others'; the same on its replicas."""
        return SEED_DISTANCE * self.shards.rank


class Policy(Protocol):
    """What is asked of a BatchNorm policy here."""

    name: str
    layers: dict[str, nn.Module]


def check_sharded(
    root: nn.Module, parameters: Sequence[Tensor], *, sampling: str, policy: Policy, freeze: bool
) -> Sharding:
    """Refuse what cannot be shown to be private under FSDP2; ``parameters`` are those of the optimizer."""
    if not isinstance(root, FSDPModule):
        raise ValueError("a part of this module is sharded, the module itself is not: fully_shard(model) too")
    if not hasattr(root, "set_custom_reduce_scatter") or not hasattr(root, "reset_iter_state"):
        raise NotImplementedError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter or reset_iter_state, "
            "with which gradients of several mini-sets are kept apart: use a newer torch"
        )
    if sampling == "shuffle":
        raise ValueError("sampling='shuffle' is each rank's own order: use 'poisson' or 'partition'")
    if policy.name not in ("none", "batch", "frozen"):
        raise NotImplementedError(
            f"batch_norm={policy.name!r} keeps running statistics, which is not built for FSDP2: use 'batch' "
            "(pass it explicitly beside alc=) or 'frozen'"
        )
    if freeze:
        raise NotImplementedError("ALC(freeze=...) counts entries of whole tensors: leave it out with FSDP2")
    kept = {id(layer) for layer in policy.layers.values()}
    for name, child in root.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise ValueError(
                f"{name} is a SyncBatchNorm: ranks without samples of a mini-set take part with "
                "placeholders, which would enter its statistics; use BatchNorm (statistics of a rank's part)"
            )
        if isinstance(child, FSDPModule) and id(child) in kept:
            raise ValueError(f"{name} is sharded by itself: call fully_shard on the module around it")
    mesh = _mesh_of(parameters)
    for group in communication_groups(root):
        own = type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter"
        if own or group._all_reduce_hook is not None or group.gradient_divide_factor is not None:
            raise ValueError(
                "this module has a reduction, an all-reduce hook or a divide factor of its own, which would "
                "change gradients before they are clipped: pass one without"
            )
    return Sharding(mesh)


def _mesh_of(parameters: Sequence[Tensor]) -> DeviceMesh:
    meshes = []
    for p in parameters:
        if not isinstance(p, DTensor):
            raise ValueError(
                "the optimizer holds parameters that are not sharded: build it after fully_shard, and shard "
                "all that it trains (no ignored_params)"
            )
        *replicated, sharded = p.placements
        if not isinstance(sharded, Shard) or not all(isinstance(r, Replicate) for r in replicated):
            raise ValueError(
                f"a parameter is placed as {p.placements}: FSDP2 alone is supported (shards, or replicas of "
                "shards), without tensor parallelism"
            )
        if p.device.type != p.device_mesh.device_type:
            raise NotImplementedError("parameters that are offloaded to the CPU are not supported")
        meshes.append(p.device_mesh)
    mesh = meshes[0]
    if any(other != mesh for other in meshes):
        raise ValueError("parameters are sharded over different meshes: use one")
    if mesh.ndim > 2 or (mesh.ndim == 2 and mesh.size() != dist.get_world_size()):
        raise ValueError(f"{mesh} must be (shards) or (replicas, shards) over all processes")
    if mesh.size() > 1 and mesh.size(mesh.ndim - 1) == 1:
        raise ValueError(f"{mesh} shards nothing: use DistributedDataParallel, or more than one shard")
    return mesh


def communication_groups(root: nn.Module) -> list[Any]:
    """FSDP2's own records of what is communicated together (the only private names of it used here)."""
    states = [child._get_fsdp_state() for child in root.modules() if isinstance(child, FSDPModule)]
    return [group for state in states for group in state._fsdp_param_groups]
