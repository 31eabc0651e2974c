"""opacus_bc: batch clipping for Opacus. Train with BatchNorm left in place, and know what it costs."""

from opacus_bc import accounting
from opacus_bc.accounting import FDPAccountant, TradeOffCurve
from opacus_bc.alc.config import ALC
from opacus_bc.alc.freezing import FreezeConverged
from opacus_bc.batch_norm.buffers import MovingBufferError
from opacus_bc.batch_norm.choices import BatchNormPolicyError, UnprotectedStatisticsError
from opacus_bc.batch_norm.private import PrivateStatistics
from opacus_bc.batch_norm.public import PublicStatistics
from opacus_bc.draws.loader import BatchMemoryManager, PrivateDataLoader
from opacus_bc.draws.units import Units
from opacus_bc.engine.privacy_engine import PrivacyEngine
from opacus_bc.engine.resume.files import CheckpointError
from opacus_bc.engine.suggest import SuggestedClipping, suggest_max_grad_norm
from opacus_bc.gradients.fixer import fix
from opacus_bc.gradients.local_update import local_update
from opacus_bc.optimizers.averaging import AveragedWeights
from opacus_bc.optimizers.mini_sets import BatchClippingOptimizer
from opacus_bc.optimizers.samples import IndividualClippingOptimizer
from opacus_bc.optimizers.schedules import WarmupCosine
from opacus_bc.public.data import PublicDataError

__version__ = "0.2.0"

__all__ = [
    "ALC",
    "AveragedWeights",
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
    "SuggestedClipping",
    "TradeOffCurve",
    "Units",
    "UnprotectedStatisticsError",
    "WarmupCosine",
    "accounting",
    "fix",
    "local_update",
    "suggest_max_grad_norm",
]

accounting.register()
