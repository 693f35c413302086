"""The tests that a tensor subclass with FSDP2's all-gather extensions must pass.

``EXTENSIONS.md`` shows the ten lines that run them on your subclass. The names in this module are stable.
"""

from torch_ext.testing._internal._fsdp.extension_contract import ContractError, FSDPExtensionContract
from torch_ext.testing._internal.common_fsdp import FSDPTest
from torch_ext.testing._internal.common_utils import run_tests

__all__ = ["ContractError", "FSDPExtensionContract", "FSDPTest", "run_tests"]
