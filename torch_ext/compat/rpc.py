"""RPC: private names, and public ones that torch's type stubs lack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_ext.compat._lookup import lazy_names

if TYPE_CHECKING:
    from torch._C._distributed_rpc import RpcBackendOptions, WorkerInfo
    from torch._C._distributed_rpc import _delete_all_user_and_unforked_owner_rrefs as delete_unforked_rrefs
    from torch._C._distributed_rpc import _rref_context_get_debug_info as rref_debug_info
    from torch._C._distributed_rpc import _set_rpc_timeout as set_rpc_timeout
    from torch.distributed.rpc import api
    from torch.distributed.rpc._testing import __name__ as faulty_agent_module
    from torch.distributed.rpc.api import _all_gather as all_gather
    from torch.distributed.rpc.api import _barrier as barrier
    from torch.distributed.rpc.api import _get_current_rpc_agent as current_agent
    from torch.distributed.rpc.api import _use_rpc_pickler as use_rpc_pickler
    from torch.distributed.rpc.api import _wait_all as wait_all
    from torch.distributed.rpc.internal import _InternalRPCPickler as InternalRPCPickler

__all__ = [
    "InternalRPCPickler",
    "RpcBackendOptions",
    "WorkerInfo",
    "all_gather",
    "api",
    "barrier",
    "current_agent",
    "delete_unforked_rrefs",
    "faulty_agent_module",
    "rref_debug_info",
    "set_rpc_timeout",
    "use_rpc_pickler",
    "wait_all",
    "watch_agents",
]

_HOME = "torch.distributed.rpc"


def watch_agents(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have what starts an agent of RPC replaced by what ``wrap`` returns for it, in this process. Idempotent. Does
    nothing in a torch without RPC.
    """
    functions: Any = sys.modules.get(f"{_HOME}.api")
    start = getattr(functions, "_set_and_start_rpc_agent", None)
    if start is not None and not hasattr(start, "__wrapped__"):
        functions._set_and_start_rpc_agent = wrap(start)


__getattr__ = lazy_names(
    __name__,
    {
        "InternalRPCPickler": (f"{_HOME}.internal:_InternalRPCPickler",),
        "RpcBackendOptions": (f"{_HOME}:RpcBackendOptions",),
        "WorkerInfo": (f"{_HOME}:WorkerInfo",),
        "all_gather": (f"{_HOME}.api:_all_gather",),
        "api": (f"{_HOME}:api",),
        "current_agent": (f"{_HOME}.api:_get_current_rpc_agent",),
        "faulty_agent_module": (f"{_HOME}._testing:__name__",),
        "barrier": (f"{_HOME}.api:_barrier",),
        "delete_unforked_rrefs": (f"{_HOME}.api:_delete_all_user_and_unforked_owner_rrefs",),
        "rref_debug_info": (f"{_HOME}:_rref_context_get_debug_info",),
        "set_rpc_timeout": (f"{_HOME}:_set_rpc_timeout",),
        "use_rpc_pickler": (f"{_HOME}.api:_use_rpc_pickler",),
        "wait_all": (f"{_HOME}.api:_wait_all",),
    },
)
