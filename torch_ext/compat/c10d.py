"""Private names of ``torch.distributed``."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

from torch_ext.compat import lazy_names

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def ranks_of_groups() -> dict[str, list[int]]:
    """Return the global ranks of every process group of this process, by the group's name."""
    from torch.distributed.distributed_c10d import _world

    names = _world.pg_names
    return {names[group]: sorted(ranks) for group, ranks in _world.pg_group_ranks.items() if group in names}


def flight_record() -> list[dict[str, Any]]:
    """Return the collectives in torch's flight recorder."""
    from torch import _C

    native: Any = _C._distributed_c10d  # the stubs lack the function
    # Found anew in each call: the simulated accelerator replaces the function.
    return list(json.loads(native._dump_fr_trace_json(True, False)).get("entries", []))


def names_of_group(name: str) -> tuple[str, ...]:
    """Return the name of a process group and its description."""
    from torch.distributed.distributed_c10d import _world

    return (name, *(group.group_desc for group, each in _world.pg_names.items() if each == name))


def operations() -> list[str]:
    """Return the names of the operations of process groups."""
    from torch._C import _dispatch_get_registrations_for_dispatch_key as registered

    return [name.removeprefix("c10d::") for name in registered("CPU") if name.startswith("c10d::")]


_watches_groups = False


def watch_groups(on_destroyed: Callable[[list[str]], None], wrap: Wrap) -> None:
    """Call ``on_destroyed`` after process groups of this process were destroyed, with their names; an empty list means
    all. ``wrap``, called once, returns the replacement of torch's function that makes a group.
    """
    from torch.distributed import distributed_c10d

    global _watches_groups
    make = getattr(distributed_c10d, "_new_process_group_helper", None)
    if make is None or _watches_groups:  # not by its __wrapped__: the simulator replaces it too
        return
    _watches_groups = True
    distributed_c10d._new_process_group_helper = wrap(make)

    def report(forget: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(forget)
        def unregister(*names: Any) -> None:
            forget(*names)
            on_destroyed([str(name) for name in names])

        return unregister

    for name in ("_unregister_process_group", "_unregister_all_process_groups"):
        setattr(distributed_c10d, name, report(getattr(distributed_c10d, name)))


def bind_gloo(interface: str, address: Callable[[], str], wrap: Wrap) -> None:
    """Make gloo listen at ``address()`` wherever it would use the first address of ``interface``, in this process. With
    an empty address, torch chooses. ``wrap`` returns the replacement of each function that makes a group or a device.

    Groups whose devices a test has made itself, for other interfaces or names, are left alone.
    """
    from torch.distributed import is_gloo_available

    if not is_gloo_available():
        return
    from torch.distributed import ProcessGroupGloo

    Gloo: Any = ProcessGroupGloo  # the stubs lack private names
    if hasattr(Gloo.__init__, "__wrapped__"):
        return
    make_group, make_device = wrap(Gloo.__init__), wrap(Gloo.create_device)
    Gloo.create_default_device = staticmethod(wrap(Gloo.create_default_device))
    loopback = (interface, "localhost", "127.0.0.1")

    @functools.wraps(make_group)
    def __init__(self: Any, store: Any, rank: int, size: int, *how: Any, **timeout: Any) -> None:
        chosen = [*how, *timeout.values()]
        keeps_choice = (chosen and not hasattr(chosen[0], "total_seconds")) or not address()
        if keeps_choice or os.environ.get("GLOO_SOCKET_IFNAME") != interface:
            make_group(self, store, rank, size, *how, **timeout)
            return
        options = Gloo._Options()  # as torch's constructor does for a time limit alone
        options._devices = [make_device(hostname=address())]
        options._threads = 2
        if chosen:
            options._timeout = chosen[0]
        make_group(self, store, rank, size, options)

    @functools.wraps(make_device)
    def create_device(hostname: str = "", interface: str = "", **options: Any) -> Any:
        if (hostname or interface) in loopback and address():
            return make_device(hostname=address(), **options)
        return make_device(hostname, interface, **options)

    Gloo.__init__, Gloo.create_device = __init__, staticmethod(create_device)


__getattr__ = lazy_names(
    __name__,
    {
        "_AutoDispatchBelowAutograd": ("torch._C:_AutoDispatchBelowAutograd",),
        "_coalescing_manager": ("torch.distributed.distributed_c10d:_coalescing_manager",),
        "_get_default_group": ("torch.distributed.distributed_c10d:_get_default_group",),
        "_get_default_store": ("torch.distributed.distributed_c10d:_get_default_store",),
        "_set_thread_isolation_mode": ("torch._C._distributed_c10d:_set_thread_isolation_mode",),
    },
)
