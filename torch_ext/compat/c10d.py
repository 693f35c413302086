"""Private names of ``torch.distributed`` that torch_ext's own code touches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_ext.compat._lookup import lazy_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.distributed_c10d import _get_default_group

    _set_thread_isolation_mode: Callable[[bool], None]  # torch's stubs do not list it

__all__ = ["_get_default_group", "_set_thread_isolation_mode"]

__getattr__ = lazy_names(
    __name__,
    {
        "_get_default_group": ("torch.distributed.distributed_c10d:_get_default_group",),
        "_set_thread_isolation_mode": ("torch._C._distributed_c10d:_set_thread_isolation_mode",),
    },
)
