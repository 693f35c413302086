"""One rank of a class on several hosts: this machine's ends of what connects it with its parent half. Standard library
and own layer only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch_ext.runner.cluster.messages import Stream
from torch_ext.world.callbacks import Callbacks
from torch_ext.world.channel import Channel, ChannelClosedError, close_all, readable
from torch_ext.world.protocol import Progress, Receipt

__all__ = ["RankEnds", "on_our_clock"]

_PART_BYTES = 1 << 16


class RankEnds:
    """A channel, and pipes by their stream.

    Args:
        channel: this end of the channel.
        pipes: descriptors of this end of the pipes.
        callbacks: watches those that are read here.
        told: called with a stream and what can be read there: a message, bytes, or None at its end.
    """

    def __init__(
        self,
        channel: Channel,
        pipes: dict[Stream | int, int],
        callbacks: Callbacks,
        told: Callable[[Stream | int, Any], None],
    ) -> None:
        self._channel, self._pipes, self._callbacks, self._told = channel, pipes, callbacks, told

    def watch(self, *streams: Stream | int) -> None:
        """Read the channel and ``streams`` from now on."""
        for stream in (Stream.CHANNEL, *streams):
            self._callbacks.watch(self._file(stream), partial(self._pass_on, stream))

    def _file(self, stream: Stream | int) -> Channel | int:
        return self._channel if stream is Stream.CHANNEL else self._pipes[stream]

    def _pass_on(self, stream: Stream | int) -> bool:
        """Tell what can be read; return whether more may come."""
        payload = self._read(stream)
        if payload is None:
            self._callbacks.unwatch(self._file(stream))
        self._told(stream, payload)
        return payload is not None

    def _read(self, stream: Stream | int) -> Any:
        with contextlib.suppress(ChannelClosedError, OSError):
            if stream is Stream.CHANNEL:
                return self._channel.receive()[0]
            return os.read(self._pipes[stream], _PART_BYTES) or None
        return None

    def drain(self) -> None:
        """Tell what the rank, which has ended, had sent before."""
        for stream in (Stream.CHANNEL, *self._pipes):
            while self._has_more(stream) and self._pass_on(stream):
                pass

    def _has_more(self, stream: Stream | int) -> bool:
        file = self._file(stream)
        if not self._callbacks.watches(file):
            return False
        return file.poll() if isinstance(file, Channel) else readable(file)

    def write(self, stream: Stream | int, payload: Any) -> None:
        """Hand on what the other machine has told. Blocks while a pipe is full."""
        with contextlib.suppress(ChannelClosedError, OSError, KeyError):  # nobody reads there any more
            if stream is Stream.CHANNEL and payload is None:
                self._channel.shut()
            elif stream is Stream.CHANNEL:
                self._channel.send(payload)
            elif payload is None:
                self._callbacks.unwatch(self._pipes[stream])
                os.close(self._pipes.pop(stream))
            while isinstance(payload, bytes) and payload:
                payload = payload[os.write(self._pipes[stream], payload) :]

    def close(self) -> None:
        for file in (self._channel, *self._pipes.values()):
            self._callbacks.unwatch(file)
        self._channel.close()
        close_all(list(self._pipes.values()))
        self._pipes = {}


def on_our_clock(message: Any, shift_s: float) -> Any:
    """Return a message of a rank with its times by this machine's clock."""
    if isinstance(message, Receipt):
        met_s = (message.met_s[0] + shift_s, message.met_s[1] + shift_s) if message.met_s[1] else (0.0, 0.0)
        began_s = message.began_s + shift_s if message.began_s else 0.0
        return replace(message, time_s=message.time_s + shift_s, began_s=began_s, met_s=met_s)
    if isinstance(message, Progress):
        return replace(message, until_s=message.until_s + shift_s, raises_s=message.raises_s + shift_s)
    return message
