"""How torch's transports are set up in ranks, and the address that they use. Touches torch only if it is loaded.

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
from collections.abc import Callable

from torch_ext.world import collectives
from torch_ext.world.operations import watch_stores
from torch_ext.world.threads import makes_transport

__all__ = ["LOOPBACK", "VARIABLE", "belong_to", "prepare", "reserve"]

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


# What the world that this process belongs to wants of its transports.
_address = ""
_on_group: Callable[[float, float], None] | None = None


def prepare() -> None:
    """Have stores tell what is waited for in them, the threads of transports known, and gloo and groups do what
    :func:`belong_to` asks of them. Idempotent: a zygote does it before it forks, so that its children need not.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return
    from torch_ext.compat.c10d import bind_gloo, watch_groups
    from torch_ext.compat.rpc import watch_agents

    watch_stores(makes_transport)
    watch_groups(_made_group, collectives.note_destroyed, makes_transport)
    watch_agents(makes_transport)
    bind_gloo(LOOPBACK, lambda: _address, makes_transport)


def belong_to(address: str, made_group: Callable[[float, float], None]) -> None:
    """Have gloo listen at ``address`` in this process, or if it is empty, wherever torch would have it listen; and have
    ``made_group`` called with the beginning and the end of the making of every process group.
    """
    global _address, _on_group
    _address, _on_group = address, made_group


def _made_group(began_s: float, ended_s: float) -> None:
    if _on_group is not None:
        _on_group(began_s, ended_s)


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
