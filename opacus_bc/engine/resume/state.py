"""What a run is besides weights and accountant: taken for a checkpoint, checked against it, put back."""

from __future__ import annotations

from typing import Any

from opacus_bc.engine.run import Run


def run_state(run: Run) -> dict[str, Any]:
    """Public constants, the step, and the states of clipping and BatchNorm; nothing that is private."""
    adaptive = run.optimizer.adaptive
    return {
        **_constants(run),
        **run.noise_and_bounds(),
        "public_data": run.public_data,
        "steps": run.steps,
        "alc": None if adaptive is None else adaptive.state_dict(),
        "batch_norm": run.policy.state_dict(),
        "draws_used": run.loader.ledger.resume_after or run.loader.ledger.draws_used,
    }


def _constants(run: Run) -> dict[str, Any]:
    """In what a resumed run must agree with its checkpoint."""
    return {
        "protects": run.plan.protected,
        "optimizer": type(run.optimizer.original_optimizer).__name__,
        "clipping": run.clipping,
        "sampling": run.plan.kind,
        "mini_set_size": run.plan.clipped_together,
        "dataset_size": run.plan.dataset_size,
        "steps_per_epoch": run.plan.steps_per_epoch,
        "views": run.plan.views,
        "planned_steps": run.optimizer.licence.planned_steps,
        "start": run.start,
    }


_OF_OLD = {"protects": "sample", "views": 1}  # what checkpoints mean that do not say it
_OTHERWISE = {
    "planned_steps": "pass the same epochs. Noise cannot be calibrated anew for steps that were made; "
    "training on beyond them is possible, and epsilon then grows above target_epsilon",
    "start": "pass the same budget and bounds; optimizer.max_grad_norm may be changed after loading",
}


def check_run_state(run: Run, state: dict[str, Any]) -> None:
    """Refuse a checkpoint of another set-up and say what differs; changes nothing."""
    for name, now in _constants(run).items():
        before = state.get(name, _OF_OLD.get(name))
        if before != now:
            raise ValueError(
                f"the checkpoint was written with {name}={before!r}, this run has {now!r}: "
                + _OTHERWISE.get(name, "call make_private with the same arguments and data")
            )
    run.policy.check_state(state["batch_norm"])
    adaptive = run.optimizer.adaptive
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
    """Go on where ``state`` was taken (None: by Opacus); weights and accountant have been loaded already."""
    optimizer = run.optimizer
    if state is None:
        run.policy.load_state_dict(None, steps=optimizer.steps_taken)
        return
    run.policy.load_state_dict(state["batch_norm"], steps=state["steps"])
    for name in ("noise_multiplier", "max_grad_norm"):
        if getattr(optimizer, name) != state[name]:
            setattr(optimizer, name, state[name])
    if optimizer.adaptive is not None:
        optimizer.adaptive.load_state_dict(state["alc"])
    optimizer.licence.steps_taken = state["steps"]


def restart_draws(run: Run, state: dict[str, Any] | None) -> None:
    """Forget what this process has drawn; the next pass makes up the rest of the saved one.

    A shuffled pass cannot be continued, since its order is gone: the next one is new, and booked as such.
    """
    ledger, plan = run.loader.ledger, run.plan
    ledger.begin_pass()
    used = 0 if state is None or plan.kind == "shuffle" else state["draws_used"]
    ledger.resume_after = used if used < plan.steps_per_epoch else 0
