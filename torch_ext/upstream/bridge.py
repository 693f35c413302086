"""When imported, replaces torch's harness by ours for all later imports of this process.

Zygotes that serve ``--upstream`` import this module before the test file. From then on
``torch.testing._internal.common_distributed`` *is* our module of that name, and so are the rest of ``REPLACED``: a test
file imports our base classes, skip decorators and device constants, and torch's own helper classes derive from ours.
Names that we do not define are still torch's.
"""

from __future__ import annotations

import importlib
import sys
import unittest
from enum import Enum
from types import ModuleType
from typing import Any

from torch_ext import accelerator
from torch_ext.compat.testing import keep_upstream, upstream_module
from torch_ext.upstream import devices

# In dependency order.
REPLACED = ("common_distributed", "common_fsdp", "dist_utils")

_TORCH = "torch.testing._internal"
_OURS = "torch_ext.testing._internal"


def _replace(name: str) -> None:
    ours = importlib.import_module(f"{_OURS}.{name}")
    keep_upstream(name)
    _resolve_through(ours, name)
    sys.modules[f"{_TORCH}.{name}"] = ours
    setattr(importlib.import_module(_TORCH), name, ours)


def _resolve_through(ours: ModuleType, name: str) -> None:
    """Make ``ours`` look up names that it lacks in torch's module ``name``."""
    own = getattr(ours, "__getattr__", None)

    def lookup(attribute: str) -> Any:
        if own is not None:
            try:
                return own(attribute)
            except AttributeError:
                pass
        return getattr(upstream_module(name), attribute)

    ours.__getattr__ = lookup  # type: ignore[method-assign]


# The hardware of a test class, its `hw_classification`; upstream's jobs select classes by it.
HardwareClassification = Enum("HardwareClassification", ["GENERIC", "ACCELERATOR", "CPU", "CUDA", "MPS", "XPU"])


def _add_later_names() -> None:
    """Add names that are newer than the installed torch to its helpers: files of a newer checkout use them."""
    for helper, name, value in (
        ("common_utils", "HardwareClassification", HardwareClassification),
        ("common_utils", "requires_gpu", unittest.skipUnless(accelerator.is_accelerator(), "requires an accelerator")),
        # For `instantiate_device_type_tests(TestX, globals(), only_for=FSDP_DEVICES)`; our wrapper adds our device.
        ("common_fsdp", "FSDP_DEVICES", ("cuda", "hpu", "xpu")),
    ):
        module = upstream_module(helper)
        if not hasattr(module, name):
            setattr(module, name, value)


for _name in REPLACED:
    _replace(_name)

_add_later_names()
devices.install()
