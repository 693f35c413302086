"""``torch.distributed.ProcessGroupNCCL``: makes simccl backends. Attributes that only NCCL has raise an error."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch_ext.cuda_as_sim import table
from torch_ext.sim import _collectives, _native

# Methods and attributes of NCCL's class beyond those of every backend.
_NCCL_ONLY = (
    "_comm_ptr", "_end_time_estimate", "_group_end", "_group_start", "_is_initialized", "_start_time_estimate",
    "_verify_work_timeout", "comm_split_count", "deregister_mem_pool", "register_mem_pool", "uid",
)  # fmt: skip


class _NeedsNcclError(table.NeedsCudaError, AttributeError):
    """An attribute that only NCCL's class has: ``hasattr`` is False."""


def install() -> None:
    """Give simccl backends, in this process, methods of NCCL's; of its other names they say why they lack them."""
    simccl: Any = _native.ProcessGroupSimCCL
    simccl._add_ephemeral_timeout = lambda self, timeout: None  # for ranks that Inductor's cache does not serve
    simccl.__getattr__ = _refuse


def _refuse(self: Any, name: str) -> Any:
    if name in _NCCL_ONLY:
        raise _NeedsNcclError(f"torch.cuda: ProcessGroupNCCL.{name}: {table.REFUSED['ProcessGroupNCCL']}")
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)


class _Metaclass(type):
    def __call__(
        cls, store: Any, rank: int, size: int, options: Any = None, *, timeout: timedelta | None = None
    ) -> _native.ProcessGroupSimCCL:
        limit = timeout or (options if isinstance(options, timedelta) else getattr(options, "_timeout", None))
        ranks = getattr(options, "global_ranks_in_group", None)
        how = {"reconfigurable": getattr(options, "enable_reconfigure", False)}
        return _collectives.own_backend(store, rank, size, limit or _collectives.TIMEOUT_OF_NCCL, ranks, **how)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _native.ProcessGroupSimCCL)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise table.refuse(cls.__name__)


class ProcessGroupNCCL(metaclass=_Metaclass):
    """Stands for NCCL's class. A call makes this rank's simccl backend; each rank of ``store`` calls it."""

    class Options:
        """Options of an NCCL group. simccl's streams have one priority; a backend that a program makes itself uses only
        the time limit."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()
            # Torch fills them in for a group; None for a backend that a program makes itself.
            self.global_ranks_in_group: list[int] | None = None
            self.group_name = ""
            self._timeout = _collectives.TIMEOUT_OF_NCCL

    NCCLConfig = SimpleNamespace
