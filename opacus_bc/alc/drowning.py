"""A warning where noise drowns the signal, from public data and public constants."""

from __future__ import annotations

import warnings

from opacus_bc.mechanism.names import Unit
from opacus_bc.mechanism.warn import users_level

# In the comparisons under benchmarks/results every run whose noise had 147 times the norm of the signal or
# more stayed 14 points and more behind individual clipping; no other run had more than 29 times. What is
# compared with this number is less than that ratio: it takes the largest signal that there could be.
DROWNED = 50.0
_REMEDIES = {
    "mini-set": "clip samples instead of mini-sets (clipping='flat', with batch_norm=public_loader for "
    "BatchNorm), or smaller mini-sets; take a larger batch; train fewer layers",
    "sample": "take a larger batch; train fewer layers",
    "user": "draw more users a step; train fewer layers",
}


def warn_of_drowning(noise_to_signal: float, unit: Unit) -> None:
    """Warn of updates that are almost only noise.

    Args:
        noise_to_signal: Of the whole update, at least; see :class:`opacus_bc.alc.report.LayerReport`.
        unit: What one clipped vector belongs to.
    """
    if noise_to_signal > DROWNED:
        warnings.warn(
            f"the noise of an update has at least {noise_to_signal:.3g} times the norm of its signal "
            f"(measured on public data); above {DROWNED:g} times little is learnt: {_REMEDIES[unit]}. A "
            "smaller max_grad_norm does not help below the typical norm, because the signal shrinks with it",
            stacklevel=users_level(),
        )
