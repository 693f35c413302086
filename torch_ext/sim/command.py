"""What ``python -m torch_ext build`` and ``info`` do. Importing this package has built and registered the simulator."""

from __future__ import annotations

import torch

from torch_ext.sim import build
from torch_ext.sim._name import NAME

__all__ = ["show"]


def show(*, details: bool) -> None:
    """Print where the finished build is; with ``details``, also torch's version and how many devices there are."""
    print(build.ensure_built())
    if details:
        print(f"torch {torch.__version__}, {torch.get_device_module(NAME).device_count()} {NAME} devices")
