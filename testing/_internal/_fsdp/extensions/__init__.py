"""The contract of FSDP2's all-gather extensions, as tests that run on any tensor
subclass.
"""

from torch_ext.testing._internal._fsdp.extensions.contract import FSDPExtensionContract
from torch_ext.testing._internal._fsdp.extensions.values import ContractError

__all__ = ["ContractError", "FSDPExtensionContract"]
