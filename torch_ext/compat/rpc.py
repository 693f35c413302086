"""RPC: private names, and public ones that torch's type stubs lack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch_ext.compat import lazy_names

_HOME = "torch.distributed.rpc"


def watch_agents(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function that starts an RPC agent, ``start``, by ``wrap(start)``, in this process. Idempotent. Does
    nothing in a torch without RPC.
    """
    functions: Any = sys.modules.get(f"{_HOME}.api")
    start = getattr(functions, "_set_and_start_rpc_agent", None)
    if start is not None and not hasattr(start, "__wrapped__"):
        functions._set_and_start_rpc_agent = wrap(start)


__getattr__ = lazy_names(
    __name__,
    {
        "WorkerInfo": (f"{_HOME}:WorkerInfo",),
        "all_gather": (f"{_HOME}.api:_all_gather",),
        "api": (f"{_HOME}:api",),
        "current_agent": (f"{_HOME}.api:_get_current_rpc_agent",),
        "faulty_agent_module": (f"{_HOME}._testing:__name__",),
        "barrier": (f"{_HOME}.api:_barrier",),
        "delete_unforked_rrefs": (f"{_HOME}.api:_delete_all_user_and_unforked_owner_rrefs",),
        "set_rpc_timeout": (f"{_HOME}:_set_rpc_timeout",),
        "wait_all": (f"{_HOME}.api:_wait_all",),
    },
)
