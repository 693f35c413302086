"""Distributed autograd: private functions, and public ones that torch's type stubs lack."""

from __future__ import annotations

from torch_ext.compat import lazy_names

_HOME = "torch.distributed.autograd"

__getattr__ = lazy_names(
    __name__,
    {
        "backward": (f"{_HOME}:backward",),
        "context": (f"{_HOME}:context",),
        "current_context": (f"{_HOME}:_current_context",),
        "get_gradients": (f"{_HOME}:get_gradients",),
        "retrieve_context": (f"{_HOME}:_retrieve_context",),
    },
)
