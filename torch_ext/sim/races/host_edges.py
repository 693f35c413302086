"""Happens-before edges that collectives on the host make between ranks with symmetric memory: those of gloo, and
``dist.barrier`` of its groups. Each rank leaves what it knows in the group's store before it calls, and takes what the
ranks left whose data it gets.

The edges of a call with ``async_op=True``, of a transfer and of a store that the program uses by itself are not seen:
an order that they alone give counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torch_ext.sim import _native

__all__ = ["watch"]

_FROM_ROOT, _TO_ROOT = ("broadcast_", "scatter_"), ("reduce_", "gather_")
_TRANSFERS = ("send", "recv_", "recv_any_source_")

_library: torch.library.Library | None = None


def watch() -> None:
    """Watch the collectives of this process from now on."""
    global _library
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")
        for name in _operations():
            if name not in _TRANSFERS:
                _library.impl(name, _watched(name, getattr(torch.ops.c10d, name).default), "AutogradCPU")


def _operations() -> list[str]:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    return [name.removeprefix("c10d::") for name in registered if name.startswith("c10d::")]


def _watched(name: str, operation: Any) -> Callable[..., Any]:
    arguments = [each.name for each in operation._schema.arguments]

    def call(*given: Any) -> Any:
        values = dict(zip(arguments, given, strict=False))
        is_asynchronous = values.get("async_op", name != "monitored_barrier_")
        if is_asynchronous or not _native.is_checking_races():
            with torch._C._AutoDispatchBelowAutograd():
                return operation(*given)
        group = dist.ProcessGroup.unbox(values["process_group"])
        rank, store, root = group.rank(), group.get_group_store(), values.get("root_rank")
        number = store.add(f"torch_ext/races/{rank}", 1)
        keys = [f"torch_ext/races/{number}/{each}" for each in range(group.size())]
        store.set(keys[rank], _native.host_stamp())  # type: ignore[arg-type]  # any bytes
        with torch._C._AutoDispatchBelowAutograd():
            result = operation(*given)
        if result is not None:
            dist.Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
        gives = set(range(group.size())) if name not in _TO_ROOT or rank == root else set()
        gives = {int(root)} if root is not None and name in _FROM_ROOT else gives
        # A rank that has no symmetric memory, or is not checked, has left nothing.
        left = [keys[each] for each in gives - {rank} if store.check([keys[each]])]
        _native.host_learns([store.get(key) for key in left])
        return result

    return call
