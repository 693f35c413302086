"""The name of the simulated accelerator's device type, for every other file of this package: see Note [Two
personalities] in build.py.
"""

from __future__ import annotations

from torch_ext import personality

__all__ = ["IS_CUDA", "KEY", "NAME"]

# Whether the device of this process is CUDA's, as far as torch and programs can tell.
IS_CUDA = personality.is_cuda()
NAME = personality.AS_CUDA if IS_CUDA else personality.SIM
# Of the dispatcher, and of DeviceType.
KEY = "CUDA" if IS_CUDA else "PrivateUse1"
