"""The only module that imports from Opacus anything but its documented top-level names.

``tests/test_opacus_contract.py`` checks what this package assumes about them.
"""

from opacus import PrivacyEngine as StockPrivacyEngine
from opacus.accountants import IAccountant, create_accountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.grad_sample import AbstractGradSampleModule, GradSampleHooks, register_grad_sampler
from opacus.grad_sample.instance_norm import compute_instance_norm_grad_sample
from opacus.layers.dp_rnn import DPRNNBase
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DPOptimizer,
    DPPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
    get_optimizer_class,
)
from opacus.optimizers.optimizer import _check_processed_flag as check_processed_flag
from opacus.optimizers.optimizer import _mark_as_processed as mark_as_processed
from opacus.utils.batch_memory_manager import BatchMemoryManager as StockBatchMemoryManager
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from opacus.validators.errors import UnsupportedModuleError

__all__ = [
    "AbstractGradSampleModule",
    "AdaClipDPOptimizer",
    "DPLossFastGradientClipping",
    "DPOptimizer",
    "DPPerLayerOptimizer",
    "DPRNNBase",
    "DPTensorFastGradientClipping",
    "GradSampleHooks",
    "IAccountant",
    "SimpleDistributedPerLayerOptimizer",
    "StockBatchMemoryManager",
    "StockPrivacyEngine",
    "UniformWithReplacementSampler",
    "UnsupportedModuleError",
    "check_processed_flag",
    "compute_instance_norm_grad_sample",
    "create_accountant",
    "get_noise_multiplier",
    "get_optimizer_class",
    "mark_as_processed",
    "register_grad_sampler",
]
