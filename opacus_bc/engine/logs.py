"""What may be logged of a run: public constants, and what follows from them and from public data."""

from __future__ import annotations

from typing import Any

from opacus_bc.engine.run import Run


def loggable(engine: Any, run: Run, delta: float) -> dict[str, float]:
    """Numbers of a run of ``engine`` that reveal nothing beyond what epsilon covers.

    **Formal guarantee**: each value is a function of the accountant's history, the sampling plan, noise and
    clip bounds, and, with ALC, of norms that were measured on public data at released weights. No loss, no
    gradient, no batch and no batch size of the private data is read.
    """
    accountant, optimizer, plan = engine.accountant, run.optimizer, run.plan
    found: dict[str, float] = {
        "epsilon": float(engine.get_epsilon(delta)) if accountant.history else 0.0,
        "delta": delta,
        "steps": run.steps,
        "noise_multiplier": float(optimizer.noise_multiplier),
        "effective_noise_multiplier": float(optimizer.effective_noise_multiplier),
        "max_grad_norm": float(optimizer.max_grad_norm),
        "sample_rate": plan.sample_rate,
        "expected_batch_size": plan.dataset_size * plan.sample_rate,
    }
    if accountant.mechanism() == "fdp" and accountant.history:
        found["mu"] = float(accountant.get_mu(delta))
    if optimizer.adaptive is not None:
        report = optimizer.layer_report()
        found["noise_to_signal"] = report.noise_to_signal
        found.update({f"public_norm/{row.layer}": row.norm for row in report.rows})
    return found
