"""The private torch names that torch_ext uses, one lazy module per area of torch, and the tested releases.

A name is looked up on first use, so one that has moved breaks only the feature that needs it, and the error names it.
Suites that mirror upstream files import private names of torch directly, as upstream's files do.
"""

from torch_ext.compat._lookup import MissingTorchNameError
from torch_ext.compat._versions import UntestedTorchWarning, untested_torch

__all__ = ["MissingTorchNameError", "UntestedTorchWarning", "untested_torch"]
