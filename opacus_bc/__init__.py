"""opacus_bc: batch clipping for Opacus. Train with BatchNorm left in place, and know what it costs."""

from opacus_bc import accounting
from opacus_bc.accounting import FDPAccountant, TradeOffCurve
from opacus_bc.alc import ALC
from opacus_bc.individual import IndividualClippingOptimizer
from opacus_bc.loader import BatchMemoryManager, PrivateDataLoader
from opacus_bc.local_update import local_update
from opacus_bc.optimizer import BatchClippingOptimizer
from opacus_bc.privacy_engine import PrivacyEngine
from opacus_bc.sparsification import FreezeConverged

__version__ = "0.1.0"

__all__ = [
    "ALC",
    "BatchClippingOptimizer",
    "BatchMemoryManager",
    "FDPAccountant",
    "FreezeConverged",
    "IndividualClippingOptimizer",
    "PrivacyEngine",
    "PrivateDataLoader",
    "TradeOffCurve",
    "accounting",
    "local_update",
]

accounting.register()
