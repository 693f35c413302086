"""Which device the simulated accelerator is in a process: ``sim``, or CUDA's own. Standard library only, without torch.

Where a program is to find the simulated device as CUDA's (``TORCH_EXT_SIM=cuda``), it is ``DeviceType.CUDA`` itself on
builds of torch without CUDA's kernels; on others it stays ``sim``, and files are rewritten that say CUDA.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
from functools import cache
from pathlib import Path

__all__ = ["AS_CUDA", "VARIABLE", "is_cuda", "torch_lacks_cuda"]

VARIABLE, AS_CUDA = "TORCH_EXT_SIM", "cuda"


def is_cuda() -> bool:
    """Whether the simulated device of this process, and of those that it starts, is ``DeviceType.CUDA``."""
    return os.environ.get(VARIABLE) == AS_CUDA and torch_lacks_cuda()


@cache
def torch_lacks_cuda() -> bool:
    """Whether the installed torch has no kernels for GPUs."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    about = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    return about.get("cuda") is None and about.get("hip") is None
