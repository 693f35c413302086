"""The name of the simulated accelerator's device type, for every other file of this package: see Note [Two
personalities] in build.py.
"""

from __future__ import annotations

from torch_ext import personality

# Whether this process simulates DeviceType.CUDA instead of using PrivateUse1.
IS_CUDA = personality.is_cuda()
NAME = personality.AS_CUDA if IS_CUDA else personality.SIM
# The name that the backend reports: kSimBackend in csrc/device.h.
REPORTED_BACKEND = "nccl" if IS_CUDA else "simccl"
# The dispatch key, and the name of the DeviceType.
KEY = "CUDA" if IS_CUDA else "PrivateUse1"
