"""Distributed autograd: private functions, and public ones that torch's type stubs lack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_ext.compat._lookup import lazy_names

if TYPE_CHECKING:
    from torch._C._distributed_autograd import _current_context as current_context
    from torch._C._distributed_autograd import _get_debug_info as debug_info
    from torch._C._distributed_autograd import _is_valid_context as is_valid_context
    from torch._C._distributed_autograd import _retrieve_context as retrieve_context
    from torch._C._distributed_autograd import backward, get_gradients
    from torch.distributed.autograd import context

__all__ = [
    "backward",
    "context",
    "current_context",
    "debug_info",
    "get_gradients",
    "is_valid_context",
    "retrieve_context",
]

_HOME = "torch.distributed.autograd"

__getattr__ = lazy_names(
    __name__,
    {
        "backward": (f"{_HOME}:backward",),
        "context": (f"{_HOME}:context",),
        "current_context": (f"{_HOME}:_current_context",),
        "debug_info": (f"{_HOME}:_get_debug_info",),
        "get_gradients": (f"{_HOME}:get_gradients",),
        "is_valid_context": (f"{_HOME}:_is_valid_context",),
        "retrieve_context": (f"{_HOME}:_retrieve_context",),
    },
)
