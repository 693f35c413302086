"""The store that the ranks of a program meet at, in a process of its own, as torchrun's agent has it.

Its listening socket exists before the ranks do, so nobody can take its port, and it outlives whichever rank ends first.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch_ext.world.channel import Channel, ChannelClosedError, channel_pair
from torch_ext.world.tree import Child, ZygoteClient

__all__ = ["HOST_NAME", "Store", "main"]

HOST_NAME = "127.0.0.1"
_BACKLOG = 1024
_ANSWER_S = 2.0


class Store:
    """The supervisor's side.

    Args:
        zygote: starts the process.
        environment: of the process.

    Raises:
        ZygoteDiedError: the zygote is gone.
    """

    def __init__(self, zygote: ZygoteClient, environment: Mapping[str, str]) -> None:
        self._channel, theirs = channel_pair()
        with socket.socket() as listening:
            listening.bind((HOST_NAME, 0))
            listening.listen(_BACKLOG)
            self.port: int = listening.getsockname()[1]
            try:
                self._process: Child = zygote.start(
                    "torch_ext.program.store:main",
                    self.port,
                    [theirs.fileno(), listening.fileno()],
                    environment,
                )
            finally:
                theirs.close()

    def was_used(self) -> bool:
        """Whether a rank has ever set a key; False if that cannot be told."""
        with contextlib.suppress(ChannelClosedError, OSError):
            self._channel.send("keys")
            if self._channel.poll(_ANSWER_S):
                return bool(self._channel.receive()[0])
        return False

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        self._process.close()


def main(port: int, descriptors: Sequence[int]) -> int:
    """Program of the process: serve until the supervisor closes the channel. Descriptors: it, and the socket."""
    from torch.distributed import TCPStore

    channel = Channel.from_descriptor(descriptors[0])
    store = TCPStore(
        HOST_NAME,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_ANSWER_S),
        master_listen_fd=descriptors[1],
    )
    before = store.num_keys()
    with contextlib.suppress(ChannelClosedError):
        while True:
            channel.receive()
            channel.send(store.num_keys() - before)
    os._exit(0)  # the store's thread may be in the middle of an answer that nobody waits for
