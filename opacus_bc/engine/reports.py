"""Reports on a run from public data alone: layers, norms and noise."""

from __future__ import annotations

from torch import nn

from opacus_bc.alc.drowning import warn_of_drowning
from opacus_bc.alc.groups import by_module
from opacus_bc.alc.measuring import LARGEST_COUNT
from opacus_bc.alc.report import LayerReport, live_entries, measured_report
from opacus_bc.engine.run import Run
from opacus_bc.mechanism.types import Loader, Loss
from opacus_bc.public.contents import check_contents
from opacus_bc.public.data import PublicDataError, check_disjoint, check_yields_samples
from opacus_bc.public.norms import Gradient, loss_gradient

NOTHING_MEASURED = (
    "the gradients on the public data are all zero or not finite, so they say nothing: check the public "
    "loader, the model and criterion= (None means cross entropy)"
)


def public_report(
    run: Run, loader: Loader, *, criterion: Loss | None, gradient: Gradient | None, compare_public: bool
) -> LayerReport:
    """Norms of the vectors that a run clips, measured on public data, and the noise that they will feel.

    **Formal guarantee**: see :func:`opacus_bc.public.norms.parameter_norms`: the result is a function of
    released weights and public data, and neither model nor random streams are different afterwards.
    """
    if run.policy.finished:
        raise ValueError("layer_report(public_loader) was called after finalize(): call it during training")
    check_yields_samples(loader)
    check_disjoint(loader, run.data_loader)
    if compare_public:
        check_contents(loader, run.data_loader)
    optimizer, plan = run.optimizer, run.plan
    parameters = dict(optimizer.named_parameters())
    frozen = {} if optimizer.adaptive is None else optimizer.adaptive.frozen
    measured = run.meter(
        list(parameters),
        loader=loader,
        gradient=gradient or loss_gradient(criterion or nn.functional.cross_entropy),
        mini_set_size=plan.clipped_together,
        count=LARGEST_COUNT[plan.unit],
        seed=0,
        frozen=frozen,
    )
    if not any(any(norms.values()) for norms in measured):
        raise PublicDataError(NOTHING_MEASURED)
    report = measured_report(
        measured,
        by_module(list(parameters)) if optimizer.adaptive is None else optimizer.adaptive.layers,
        optimizer.layers,
        live=live_entries(parameters, frozen),
        blocks=optimizer.blocks(),
        vectors=plan.vectors,
        unit=plan.unit,
        step=run.steps,
    )
    warn_of_drowning(report.noise_to_signal, plan.unit)
    return report


def warn_at_start(run: Run) -> None:
    """Warn of a run in which noise will drown the signal, where norms on public data are known already."""
    if run.optimizer.adaptive is not None:
        warn_of_drowning(run.optimizer.layer_report().noise_to_signal, run.plan.unit)
