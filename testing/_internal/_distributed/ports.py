"""Ports that stay reserved between their choice and the bind of their listener."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

__all__ = ["reserved_port"]

_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a TCP port of this machine that nobody else is given until the block is left.

    A port that is found, let go and bound later may be another process's by then. Here a socket stays bound to it and
    never listens. The kernel gives no such port to anybody who asks for a free one, be it to listen or to connect,
    while a store that names it may bind it, because stores set ``SO_REUSEADDR``.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_LOOPBACK, 0))
        yield held.getsockname()[1]
