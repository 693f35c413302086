"""The device type of the simulated accelerator in a process: ``sim`` or CUDA's. Standard library only, without torch.

See Note [Two personalities] in sim/build.py.
"""

from __future__ import annotations

import os

SIM = "sim"
VARIABLE, AS_CUDA = "TORCH_EXT_SIM", "cuda"


def is_cuda() -> bool:
    """Whether the simulated device of this process and its children is ``DeviceType.CUDA``."""
    return os.environ.get(VARIABLE) == AS_CUDA
