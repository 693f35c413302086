"""Private names of ``torch.distributed``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_ext.compat._lookup import lazy_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_group, _get_default_store

    # Missing from torch's stubs.
    _dump_fr_trace_json: Callable[[bool, bool], bytes]
    _set_thread_isolation_mode: Callable[[bool], None]

__all__ = [
    "_coalescing_manager",
    "_dump_fr_trace_json",
    "_get_default_group",
    "_get_default_store",
    "_set_thread_isolation_mode",
    "ranks_of_groups",
]


def ranks_of_groups() -> dict[str, list[int]]:
    """Return the global ranks of every process group of this process, by the group's name."""
    from torch.distributed.distributed_c10d import _world

    names = _world.pg_names
    return {names[group]: sorted(ranks) for group, ranks in _world.pg_group_ranks.items() if group in names}


__getattr__ = lazy_names(
    __name__,
    {
        "_coalescing_manager": ("torch.distributed.distributed_c10d:_coalescing_manager",),
        "_dump_fr_trace_json": ("torch._C._distributed_c10d:_dump_fr_trace_json",),
        "_get_default_group": ("torch.distributed.distributed_c10d:_get_default_group",),
        "_get_default_store": ("torch.distributed.distributed_c10d:_get_default_store",),
        "_set_thread_isolation_mode": ("torch._C._distributed_c10d:_set_thread_isolation_mode",),
    },
)
