"""pytest plugin: Opacus's own tests meet this package's engine and memory manager instead of Opacus's."""

import opacus
import opacus.privacy_engine
import opacus.utils.batch_memory_manager

from opacus_bc import BatchMemoryManager, PrivacyEngine

opacus.PrivacyEngine = PrivacyEngine
opacus.privacy_engine.PrivacyEngine = PrivacyEngine
opacus.utils.batch_memory_manager.BatchMemoryManager = BatchMemoryManager
