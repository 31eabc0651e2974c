"""opacus_bc: batch clipping for Opacus. Train with BatchNorm left in place, and know what it costs."""

from opacus_bc import accounting
from opacus_bc.accounting import FDPAccountant, TradeOffCurve
from opacus_bc.alc import ALC
from opacus_bc.buffers import MovingBufferError
from opacus_bc.checkpoint import CheckpointError
from opacus_bc.individual import IndividualClippingOptimizer
from opacus_bc.loader import BatchMemoryManager, PrivateDataLoader
from opacus_bc.local_update import local_update
from opacus_bc.norm_policies import BatchNormPolicyError, UnprotectedStatisticsError
from opacus_bc.optimizer import BatchClippingOptimizer
from opacus_bc.privacy_engine import PrivacyEngine
from opacus_bc.private_statistics import PrivateStatistics
from opacus_bc.public_data import PublicDataError
from opacus_bc.public_statistics import PublicStatistics
from opacus_bc.sparsification import FreezeConverged

__version__ = "0.1.0"

__all__ = [
    "ALC",
    "BatchClippingOptimizer",
    "BatchMemoryManager",
    "BatchNormPolicyError",
    "CheckpointError",
    "FDPAccountant",
    "FreezeConverged",
    "IndividualClippingOptimizer",
    "MovingBufferError",
    "PrivacyEngine",
    "PrivateDataLoader",
    "PrivateStatistics",
    "PublicDataError",
    "PublicStatistics",
    "TradeOffCurve",
    "UnprotectedStatisticsError",
    "accounting",
    "local_update",
]

accounting.register()
