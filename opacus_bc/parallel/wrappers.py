"""What stands around a module: torch.compile, DistributedDataParallel, FSDP2, Opacus's wrappers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from opacus_bc._opacus import AbstractGradSampleModule, GradSampleHooks
from opacus_bc.mechanism.types import Memo


def uncompiled(module: Any) -> Any:
    """The module inside torch.compile's wrappers."""
    while hasattr(module, "_orig_mod"):
        module = module._orig_mod
    return module


def data_parallel(module: Any) -> DistributedDataParallel | None:
    """The DistributedDataParallel in ``module``, under torch.compile or not."""
    module = uncompiled(module)
    return module if isinstance(module, DistributedDataParallel) else None


def bare(module: Any) -> nn.Module:
    """The module inside torch.compile's and DistributedDataParallel's wrappers: what policies work on."""
    while hasattr(module, "_orig_mod") or isinstance(module, DistributedDataParallel):
        module = module._orig_mod if hasattr(module, "_orig_mod") else module.module
    inside: nn.Module = module
    return inside


def unwrap(module: Any) -> nn.Module:
    """The module inside Opacus's, torch.compile's and DistributedDataParallel's wrappers."""
    plain = bare(module)
    while isinstance(plain, (AbstractGradSampleModule, GradSampleHooks)):
        plain = bare(plain._module)
    return plain


def is_distributed(module: nn.Module) -> bool:
    """Whether the module is one of torch's or Opacus's wrappers for several processes."""
    return isinstance(module, (DistributedDataParallel, FSDPModule)) or type(module).__name__ == (
        "DifferentiallyPrivateDistributedDataParallel"
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` is around the module or any part of it, or ``compile()`` was called on it."""
    return any(
        hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules()
    )


def is_scripted(module: nn.Module) -> bool:
    """Whether the module or any part of it is TorchScript's, scripted or traced."""
    return any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())


class LateWrapping:
    """Refuses a DistributedDataParallel that comes after ``make_private``: it averages different draws."""

    def __init__(self, module: nn.Module) -> None:
        self._handle = module.register_forward_pre_hook(self._look)

    def __deepcopy__(self, memo: Memo) -> LateWrapping:
        return self  # a copy of the model is watched by the same counter

    def remove(self) -> None:
        """Stop looking."""
        self._handle.remove()

    def _look(self, module: nn.Module, _inputs: object) -> None:
        if not module.training or torch.compiler.is_compiling():
            return
        wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if wrapper is not None and dist.get_world_size(wrapper.process_group) > 1:
            raise RuntimeError(
                "DistributedDataParallel was put around this module after make_private, which draws, clips "
                "and accounts for one process then: wrap the module first, and make the wrapper private"
            )
