"""For people who write tensor subclasses with all-gather extensions: the tests that such a subclass must pass.

See ``EXTENSIONS.md`` for the ten lines that run them. What is imported from here stays importable from here.
"""

from torch_ext.testing._internal._fsdp.extensions import ContractError, FSDPExtensionContract
from torch_ext.testing._internal.common_fsdp import FSDPTest
from torch_ext.testing._internal.common_utils import run_tests

__all__ = ["ContractError", "FSDPExtensionContract", "FSDPTest", "run_tests"]
