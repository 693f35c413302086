"""Conditions and names of subtests."""

from __future__ import annotations

import unittest
from collections.abc import Mapping
from typing import Any

from torch.distributed.fsdp import CPUOffload

from torch_ext.testing._internal._fsdp import device

__all__ = ["skip_parameter_offload", "skip_without_accelerator", "subtest_name"]


def skip_without_accelerator(reason: str) -> None:
    """Skip the running subtest, or the test if it has none, on the host."""
    if not device.is_accelerator():
        raise unittest.SkipTest(reason)


def skip_parameter_offload(cpu_offload: CPUOffload | None) -> None:
    """Likewise, if ``cpu_offload`` offloads parameters."""
    if cpu_offload is not None and cpu_offload.offload_params:
        why = "CPUOffload(offload_params=True) needs an accelerator to offload from"
        skip_without_accelerator(why)


def subtest_name(test_name_mapping: Mapping[str, str], *args: Any) -> str:
    """Join the names that ``test_name_mapping`` gives to ``str`` of each argument.

    >>> subtest_name({"True": "offload", "False": "on_device"}, True, None)
    'offload_none'
    """
    return "_".join(
        "none" if arg is None else test_name_mapping[str(arg)] for arg in args
    )
