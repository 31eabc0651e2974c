"""What was compared, in words and numbers, for the head of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opacus_bc.experiments.compare.plan import Plan
from opacus_bc.experiments.training.data import Data
from opacus_bc.experiments.training.session import PIXELS, SMALLEST_CHUNK


def facts(plan: Plan, found: Data, *, tune: bool) -> dict[str, Any]:
    """Data set, model, settings that all rows share, and the command that makes the report again."""
    return {
        "command": plan.command(tune=tune),
        "dataset": Path(plan.source.dataset).name,
        "model": plan.model,
        "private_size": len(found.private),
        "public_size": len(found.public),
        "test_size": len(found.test),
        **({"samples": found.samples} if found.samples != "images" else {}),
        "epochs": plan.epochs,
        "seeds": plan.seeds,
        "epsilon": list(plan.budgets),
        "delta": plan.delta,
        "optimizer": "SGD with momentum 0.9, constant learning rate, no augmentation",
        "individual clipping": "; ".join([_chunks(plan), *_ways(plan)]),
        "sampling": "Poisson, unless the adjacency column says otherwise",
        **({"start": _start(plan)} if plan.weights else {}),
    }


def _start(plan: Plan) -> str:
    """What fine-tuning starts from, in words."""
    first = f" from {plan.train_from} on (what lies before is frozen)" if plan.train_from else ""
    return (
        f"weights {plan.weights}, images of {plan.source.image_size} pixels, trained: {plan.train}{first}, "
        "unless a method says otherwise"
    )


def _chunks(plan: Plan) -> str:
    """How a step's batch is cut."""
    size = plan.source.image_size
    return (
        "in chunks of about 32 MB of per-sample gradients"
        if size is None
        else f"in chunks of {max(SMALLEST_CHUNK, PIXELS // size**2)} images"
    )


def _ways(plan: Plan) -> list[str]:
    """Which rows of the table make per-sample gradients in one backward, and which with Opacus's hooks."""
    words = {"bk": "in one backward (grad_sample_mode='bk')", "hooks": "with Opacus's hooks"}
    chosen = [m for m in plan.methods if m.family == "individual"]
    rows = {mode: [m.title for m in chosen if m.grad_sample_mode == mode] for mode in words}
    return [f"{words[mode]}: {' and '.join(titles)}" for mode, titles in rows.items() if titles]
