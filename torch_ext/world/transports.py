"""What torch's transports are made to do in ranks. Touches torch only if it is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch_ext.world import flight_record
from torch_ext.world.operations import watch_stores
from torch_ext.world.threads import makes_transport

__all__ = ["LOOPBACK", "belong_to", "prepare"]

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
    watch_groups(_made_group, flight_record.note_destroyed, makes_transport)
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
