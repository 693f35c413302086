"""Private torch names that torch_ext's own code touches, one lazy module per torch area, and the tested releases.

Only what is used is looked up, so a name that moved costs the one feature that needs it, and the error says which.
Suites that mirror upstream files import torch's private names themselves, where upstream's file does.
"""

from torch_ext.compat._lookup import MissingTorchNameError
from torch_ext.compat._versions import UntestedTorchWarning, untested_torch

__all__ = ["MissingTorchNameError", "UntestedTorchWarning", "untested_torch"]
