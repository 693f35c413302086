"""Names of upstream's harness that are newer than the installed torch, and ask nothing of torch: test files of a newer
checkout run with them.
"""

from __future__ import annotations

import unittest
from enum import Enum

from torch_ext import accelerator
from torch_ext.compat.testing import upstream_module

__all__ = ["HardwareClassification", "install"]


class HardwareClassification(Enum):
    """What a test class is written for, as its ``hw_classification`` says. Jobs of upstream choose by it."""

    GENERIC = "generic"
    ACCELERATOR = "accelerator"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"
    XPU = "xpu"


def install() -> None:
    """Add each of the names to torch's helpers, where they lack it."""
    for helper, name, value in (
        ("common_utils", "HardwareClassification", HardwareClassification),
        ("common_utils", "requires_gpu", unittest.skipUnless(accelerator.is_accelerator(), "requires an accelerator")),
        # For `instantiate_device_type_tests(TestX, globals(), only_for=FSDP_DEVICES)`, which adds the one under test.
        ("common_fsdp", "FSDP_DEVICES", ("cuda", "hpu", "xpu")),
    ):
        module = upstream_module(helper)
        if not hasattr(module, name):
            setattr(module, name, value)
