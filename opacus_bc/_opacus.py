"""The only module that imports from Opacus anything but its documented top-level names.

``tests/engine/test_opacus_contract.py`` checks what this package assumes about them.
"""

from opacus import PrivacyEngine as StockPrivacyEngine
from opacus.accountants import IAccountant, create_accountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.data_loader import DPDataLoader
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import (
    AbstractGradSampleModule,
    GradSampleHooks,
    GradSampleModule,
    register_grad_sampler,
)
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.instance_norm import compute_instance_norm_grad_sample
from opacus.grad_sample.utils import get_gsm_class, get_hooks_class
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.layers.dp_rnn import DPRNNBase, RNNLinear
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
    get_optimizer_class,
)
from opacus.utils.batch_memory_manager import BatchMemoryManager as StockBatchMemoryManager
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "AbstractGradSampleModule",
    "AdaClipDPOptimizer",
    "DPDataLoader",
    "DPLossFastGradientClipping",
    "DPMultiheadAttention",
    "DPOptimizer",
    "DPOptimizerFastGradientClipping",
    "DPPerLayerOptimizer",
    "DPRNNBase",
    "DPTensorFastGradientClipping",
    "DifferentiallyPrivateDistributedDataParallel",
    "DistributedDPOptimizer",
    "DistributedDPOptimizerFastGradientClipping",
    "GradSampleHooks",
    "GradSampleHooksFastGradientClipping",
    "GradSampleModule",
    "GradSampleModuleFastGradientClipping",
    "IAccountant",
    "ModuleValidator",
    "RNNLinear",
    "SimpleDistributedPerLayerOptimizer",
    "StockBatchMemoryManager",
    "StockPrivacyEngine",
    "UnsupportedModuleError",
    "compute_instance_norm_grad_sample",
    "create_accountant",
    "get_gsm_class",
    "get_hooks_class",
    "get_noise_multiplier",
    "get_optimizer_class",
    "register_grad_sampler",
]
