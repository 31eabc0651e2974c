"""What an exact resume must know of a BatchNorm policy; all of it is released or public."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from opacus_bc.batch_norm import BatchNormPolicy
from opacus_bc.buffers import snapshot
from opacus_bc.norm_gradients import Upstream
from opacus_bc.norm_types import ConstantStatistics, PolicyLayer
from opacus_bc.private_statistics import PrivateKeeper
from opacus_bc.public_statistics import ConstantsKeeper, weights_fingerprint


def norm_state(policy: BatchNormPolicy) -> dict[str, Any]:
    """Counters, training constants and released statistics. (Buffers are in the module's state.)"""
    state: dict[str, Any] = {"policy": policy.name, "layers": sorted(policy.layers)}
    keeper = policy.keeper
    if isinstance(keeper, ConstantsKeeper):
        paths = {module: name for name, module in policy.root.named_modules()}
        state["steps"], state["refreshes"] = keeper.steps, keeper.refreshes
        state["constants"] = {name: _constants(layer, paths) for name, layer in policy.layers.items()}
    elif isinstance(keeper, PrivateKeeper):
        names = {layer: name for name, layer in policy.layers.items()}
        state["releases"], state["current"] = keeper.releases, keeper.current
        state["released"] = {
            names[layer]: (mean.clone(), var.clone()) for layer, mean, var in keeper._released
        }
    return state


def _constants(layer: nn.Module, paths: dict[nn.Module, str]) -> dict[str, Any]:
    assert isinstance(layer, ConstantStatistics)
    before = layer.upstream
    return {
        "mean": layer.constant_mean.clone(),
        "var": layer.constant_var.clone(),
        "upstream": None if before is None else (paths[before.layer], before.mean_grad, before.var_grad),
    }


def check_norm_state(policy: BatchNormPolicy, state: dict[str, Any]) -> None:
    """Refuse the state of another policy or of other layers; changes nothing.

    Raises:
        ValueError: Says what differs.
    """
    if (state["policy"], state["layers"]) != (policy.name, sorted(policy.layers)):
        raise ValueError(
            f"the checkpoint was written with batch_norm policy {state['policy']!r} on {state['layers']}, "
            f"this model has {policy.name!r} on {sorted(policy.layers)}: pass the same batch_norm= to "
            "make_private"
        )


def load_norm_state(policy: BatchNormPolicy, state: dict[str, Any] | None) -> None:
    """Go on where :func:`norm_state` was taken; the module's own state has been loaded already.

    Buffers that no policy answers for are taken as they are now: they were checked when the checkpoint was
    written.

    Args:
        policy: The policy at work.
        state: What :func:`norm_state` returned, or None for a checkpoint that has none.
    """
    constant = [layer for layer in policy.layers.values() if isinstance(layer, ConstantStatistics)]
    with ExitStack() as shown:
        for layer in constant:
            shown.enter_context(layer._with_buffers())
        policy._before = snapshot(policy.root)
    keeper = policy.keeper
    for layer in constant if policy.name == "frozen" else ():
        if layer.running_mean is not None and layer.running_var is not None:
            layer.constant_mean = layer.running_mean.detach().clone()
            layer.constant_var = layer.running_var.detach().clone()
    if state is None:
        if isinstance(keeper, ConstantsKeeper):
            keeper.refresh_constants()
    elif isinstance(keeper, ConstantsKeeper):
        keeper.steps, keeper.refreshes = state["steps"], state["refreshes"]
        modules = dict(policy.root.named_modules())
        for name, held in state["constants"].items():
            _load_constants(policy.layers[name], held, modules)
    elif isinstance(keeper, PrivateKeeper):
        keeper.releases = state["releases"]
        keeper._released = [
            (_policy_layer(policy.layers[name]), mean, var) for name, (mean, var) in state["released"].items()
        ]
        keeper._released_at = weights_fingerprint(policy.root) if state["current"] else None


def _load_constants(layer: nn.Module, held: dict[str, Any], modules: dict[str, nn.Module]) -> None:
    assert isinstance(layer, ConstantStatistics)
    layer.constant_mean = _like(layer.constant_mean, held["mean"])
    layer.constant_var = _like(layer.constant_var, held["var"])
    layer.upstream = None
    if held["upstream"] is not None:
        path, mean_grad, var_grad = held["upstream"]
        weight = modules[path].weight
        assert isinstance(weight, Tensor)
        layer.upstream = Upstream(modules[path], _like(weight, mean_grad), _like(weight, var_grad))


def _like(other: Tensor, value: Tensor) -> Tensor:
    return value.to(device=other.device, copy=True)


def _policy_layer(layer: nn.Module) -> PolicyLayer:
    assert isinstance(layer, PolicyLayer)
    return layer
