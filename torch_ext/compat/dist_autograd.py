"""Distributed autograd: private functions, and public ones that torch's type stubs lack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_ext.compat._lookup import lazy_names

if TYPE_CHECKING:
    from torch._C import _distributed_autograd as _autograd
    from torch.distributed.autograd import context as context

    backward, get_gradients, current_context = _autograd.backward, _autograd.get_gradients, _autograd._current_context
    retrieve_context = _autograd._retrieve_context

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
