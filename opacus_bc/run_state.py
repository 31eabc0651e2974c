"""What a run is besides weights and accountant: taken for a checkpoint, checked against it, put back."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

from opacus_bc.block_optimizer import BlockOptimizer
from opacus_bc.norm_state import check_norm_state, load_norm_state, norm_state
from opacus_bc.optimizer import BatchClippingOptimizer
from opacus_bc.run import Run


def run_state(run: Run) -> dict[str, Any]:
    """Public constants, the step, and the states of clipping and BatchNorm; nothing that is private."""
    optimizer = run.optimizer
    adaptive = optimizer.adaptive if isinstance(optimizer, BlockOptimizer) else None
    return {
        **_constants(run),
        **run.noise_and_bounds(),
        "public_data": run.public_data,
        "steps": run.steps,
        "alc": None if adaptive is None else adaptive.state_dict(),
        "batch_norm": norm_state(run.policy),
        "draws_used": optimizer.ledger.draws_used if isinstance(optimizer, BatchClippingOptimizer) else 0,
    }


def _constants(run: Run) -> dict[str, Any]:
    """In what a resumed run must agree with its checkpoint."""
    return {
        "optimizer": type(run.optimizer.original_optimizer).__name__,
        "clipping": run.clipping,
        "sampling": run.sampling,
        "mini_set_size": run.mini_set_size,
        "dataset_size": len(cast(Sized, run.data_loader.dataset)),
        "steps_per_epoch": run.steps_per_epoch,
        "planned_steps": run.planned_steps,
        "start": run.start,
    }


_OTHERWISE = {
    "planned_steps": "pass the same epochs. Noise cannot be calibrated anew for steps that were made; "
    "training on beyond them is possible, and epsilon then grows above target_epsilon",
    "start": "pass the same budget and bounds; optimizer.max_grad_norm may be changed after loading",
}


def between_draws(run: Run) -> bool:
    """Whether all that was drawn has been used, so that nothing is lost with this process."""
    optimizer = run.optimizer
    return not isinstance(optimizer, BatchClippingOptimizer) or optimizer.ledger.between_draws


def check_run_state(run: Run, state: dict[str, Any]) -> None:
    """Refuse a checkpoint of another set-up; changes nothing.

    Raises:
        ValueError: Names what differs.
    """
    for name, now in _constants(run).items():
        if state[name] != now:
            raise ValueError(
                f"the checkpoint was written with {name}={state[name]!r}, this run has {now!r}: "
                + _OTHERWISE.get(name, "call make_private with the same arguments and data")
            )
    check_norm_state(run.policy, state["batch_norm"])
    adaptive = run.optimizer.adaptive if isinstance(run.optimizer, BlockOptimizer) else None
    if (adaptive is None) != (state["alc"] is None):
        with_it, without = ("has", "none") if adaptive is None else ("has none", "one")
        raise ValueError(f"the checkpoint {with_it} ALC state and this run {without}: pass the same alc=")
    if state["public_data"] != run.public_data:
        raise ValueError(
            "public_data are not those of the checkpoint, so private samples may be among them: pass the "
            "same public loader (a random split needs a fixed seed)"
        )
    if hasattr(run.wrapper, "max_grad_norm") and state["max_grad_norm"] != run.optimizer.max_grad_norm:
        raise ValueError(
            f"the checkpoint's max_grad_norm={state['max_grad_norm']!r} is not "
            f"{run.optimizer.max_grad_norm!r}, and ghost clipping keeps its bound in the module: pass the "
            "same to make_private"
        )


def load_run_state(run: Run, state: dict[str, Any] | None) -> None:
    """Go on where :func:`run_state` was taken; weights and accountant have been loaded already.

    Args:
        run: The run.
        state: What was taken, or None for a checkpoint that has none (Opacus's own).
    """
    optimizer = run.optimizer
    load_norm_state(run.policy, None if state is None else state["batch_norm"])
    if state is None:
        return
    if optimizer.noise_multiplier != state["noise_multiplier"]:
        optimizer.noise_multiplier = state["noise_multiplier"]
    if optimizer.max_grad_norm != state["max_grad_norm"]:
        optimizer.max_grad_norm = state["max_grad_norm"]
    if isinstance(optimizer, BlockOptimizer) and optimizer.adaptive is not None:
        optimizer.adaptive.load_state_dict(state["alc"])
    run.steps = state["steps"]


def restart_draws(run: Run, state: dict[str, Any] | None) -> None:
    """Forget what this process has drawn; the next pass makes up the rest of the saved one.

    A shuffled pass cannot be continued, since its order is gone: the next one is new, and booked as such.
    """
    optimizer = run.optimizer
    if not isinstance(optimizer, BatchClippingOptimizer):
        return
    optimizer.ledger.begin_pass()
    used = 0 if state is None or run.sampling == "shuffle" else state["draws_used"]
    optimizer.ledger.resume_after = used if used < run.steps_per_epoch else 0
