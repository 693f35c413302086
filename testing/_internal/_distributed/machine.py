"""Reports to the runner which devices its classes must share. Runs in a child of a zygote."""

from __future__ import annotations

from collections.abc import Sequence

from torch_ext import accelerator
from torch_ext.world.channel import Channel
from torch_ext.world.protocol import Devices


def main(_: None, descriptors: Sequence[int]) -> int:
    """Target of a child: send how many devices there are. Descriptor: the channel to the supervisor."""
    variable = accelerator.visible_devices_variable()
    number = accelerator.device_count() if variable else 0
    Channel.from_descriptor(descriptors[0]).send(Devices(number, variable))
    return 0
