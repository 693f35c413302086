"""An address of its own for each world. Runs wherever worlds are started; standard library only.

Note [An address for each world]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Two ranks of gloo's find each other by address, port and a number that counts the connections of a process; nothing
says which job they belong to, and whoever finds nobody tries again. If all worlds shared 127.0.0.1, a rank whose peer
has died could reach whoever was given the peer's port next, in a world beside its own, and take part there.

So each world has an address of 127.0.0.0/8 for itself, and gloo is bound to it in all its ranks. An abstract socket of
that name reserves it: the kernel gives a name to one socket only, in the same network namespace that the address is
from. Every rank inherits the socket, so an address is free again when the last process of its world is gone, and nobody
is left who could still be looking for a peer. A rank of another world cannot be reached by mistake then, because no
process listens for gloo at an address that is not its world's. Ranks find it in ``TORCH_EXT_ADDRESS``, for servers of
their own.

Where there are no abstract sockets (macOS) or no such addresses, worlds share 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

__all__ = ["VARIABLE", "reserve"]

VARIABLE = "TORCH_EXT_ADDRESS"

_ATTEMPTS = 16


def reserve() -> tuple[str, int]:
    """Reserve an address that no other living world on this machine has.

    Returns:
        The address, and the descriptor that keeps it reserved as long as any process has it open; an empty string and
        -1 if there is none to be had.
    """
    if not sys.platform.startswith("linux"):
        return "", -1
    for _ in range(_ATTEMPTS):
        first, second, third = os.urandom(3)
        address = f"127.{1 + first % 254}.{second}.{1 + third % 254}"
        with contextlib.suppress(OSError):
            return address, _take(address)
    return "", -1


def _take(address: str) -> int:
    """Return the descriptor that reserves ``address``.

    Raises:
        OSError: another world has it, or this machine does not.
    """
    with socket.socket(socket.AF_INET) as probe:
        probe.bind((address, 0))
    with socket.socket(socket.AF_UNIX) as name:
        name.bind(f"\0torch_ext {address}")
        return name.detach()
