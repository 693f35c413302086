"""Importing this module puts our harness in the place of torch's, for every import that follows in this process.

Runs in zygotes that serve ``--upstream``, before the test file is imported. Afterwards
``torch.testing._internal.common_distributed`` *is* our module of that name, and so on: the base classes, skip
decorators and device constants that a file imports are ours, and so is the harness beneath torch's own helper classes
that derive from them. A name that we do not define stays torch's.
"""

from __future__ import annotations

import importlib
import sys

from torch_ext.compat.testing import keep_upstream
from torch_ext.upstream import devices

__all__ = ["REPLACED"]

# Ours by torch's name; in the order of their dependence.
REPLACED = ("common_distributed", "common_fsdp", "dist_utils")

_TORCH = "torch.testing._internal"
_OURS = "torch_ext.testing._internal"


def _replace(name: str) -> None:
    try:
        ours = importlib.import_module(f"{_OURS}.{name}")
    except ModuleNotFoundError:
        return  # a part of the library that this build leaves out
    keep_upstream(name)
    sys.modules[f"{_TORCH}.{name}"] = ours
    setattr(importlib.import_module(_TORCH), name, ours)


for _name in REPLACED:
    _replace(_name)

devices.install()
