"""Replaces torch's harness by ours, when imported, for all later imports of this process.

Imported by zygotes that serve ``--upstream``, before the test file. From then on
``torch.testing._internal.common_distributed`` *is* our module of that name, and likewise for the others: a test file
imports our base classes, skip decorators and device constants, and torch's own helper classes derive from ours. Names
that we do not define are still torch's.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from torch_ext.compat.testing import keep_upstream, upstream_module
from torch_ext.upstream import devices, later

__all__ = ["REPLACED"]

# In dependency order.
REPLACED = ("common_distributed", "common_fsdp", "dist_utils")

_TORCH = "torch.testing._internal"
_OURS = "torch_ext.testing._internal"


def _replace(name: str) -> None:
    try:
        ours = importlib.import_module(f"{_OURS}.{name}")
    except ModuleNotFoundError:
        return  # this build leaves that module out
    keep_upstream(name)
    _resolve_through(ours, name)
    sys.modules[f"{_TORCH}.{name}"] = ours
    setattr(importlib.import_module(_TORCH), name, ours)


def _resolve_through(ours: ModuleType, name: str) -> None:
    """Have ``ours`` answer names that it lacks with those of torch's module ``name``."""
    own = getattr(ours, "__getattr__", None)

    def lookup(attribute: str) -> Any:
        if own is not None:
            try:
                return own(attribute)
            except AttributeError:
                pass
        return getattr(upstream_module(name), attribute)

    ours.__getattr__ = lookup  # type: ignore[method-assign]


for _name in REPLACED:
    _replace(_name)

later.install()
devices.install()
