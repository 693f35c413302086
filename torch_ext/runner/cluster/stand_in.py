"""What host 0 has of a rank that runs on another host: this end of all that connects it with its parent half.

Runs in the supervisor; standard library and own layer only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_ext.world.channel import Channel, close_all
from torch_ext.world.protocol import Progress, RankOrder, Receipt

__all__ = ["StandIn", "on_our_clock", "taken"]


@dataclass
class StandIn:
    """A rank on another host: its place there, and this end of its descriptors."""

    host: int
    index: int
    channel: Channel
    output: int
    stacks: int
    connections: dict[int, int]

    def close(self) -> None:
        self.channel.close()
        close_all([self.output, self.stacks, *self.connections.values()])
        self.connections.clear()


def taken(host: int, index: int, order: RankOrder, descriptors: Sequence[int]) -> StandIn:
    """Take the descriptors of a rank that starts elsewhere; in the order of ``start._open_rank``."""
    channel, output, second, stacks, *more = descriptors
    close_all([second])
    for _ in range(order.has_page + bool(order.address)):  # mean nothing on another machine
        close_all([more.pop(0)])
    os.set_blocking(stacks, False)  # stacks that nobody reads must not hold up the others
    return StandIn(host, index, Channel.from_descriptor(channel), output, stacks, dict(enumerate(more)))


def on_our_clock(message: Any, shift_s: float) -> Any:
    """Return a message of a rank with its times by this machine's clock."""
    if isinstance(message, Receipt):
        met_s = (message.met_s[0] + shift_s, message.met_s[1] + shift_s) if message.met_s[1] else (0.0, 0.0)
        began_s = message.began_s + shift_s if message.began_s else 0.0
        return replace(message, time_s=message.time_s + shift_s, began_s=began_s, met_s=met_s)
    if isinstance(message, Progress):
        return replace(message, until_s=message.until_s + shift_s, raises_s=message.raises_s + shift_s)
    return message
