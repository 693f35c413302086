"""Delays on the device where it can sleep, in the host otherwise."""

from __future__ import annotations

import time

import torch

from torch_ext import accelerator
from torch_ext.testing._internal._fsdp import device

__all__ = ["delay"]


def delay(milliseconds: float) -> None:
    """Delay the work that follows by about ``milliseconds``; nothing happens for zero or less.

    A device that can sleep does so in its current stream and the host goes on at once, which is what makes a missing
    synchronisation show. Elsewhere the host itself waits, so that the order of operations between ranks still shifts.
    """
    if milliseconds <= 0:
        return
    if _device_sleeps():
        from torch_ext.testing._internal.common_utils import get_cycles_per_ms

        torch.get_device_module(device.get_devtype().type)._sleep(int(milliseconds * get_cycles_per_ms()))
    else:
        time.sleep(milliseconds / 1000)


def _device_sleeps() -> bool:
    return device.get_devtype().type == accelerator.device_type() and accelerator.capabilities().device_sleep
