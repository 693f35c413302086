"""The device halves of gloo backends: each serves the ``sim`` tensors that a program gives to a gloo backend.

==============================  ====================================================================================
a group's own backend           the group gives ``sim`` tensors to the half itself
``ProcessGroupGloo(...)``       its methods do; the half is made with the first such call, in which all ranks take part
a wrapper around one of these   likewise, with a wrapper around the half
==============================  ====================================================================================

Torch's wrappers compare the calls of ranks (``TORCH_DISTRIBUTED_DEBUG=DETAIL``). Both halves' wrappers use the same
helper group, so that a call with device tensors on one rank and host tensors on another differ, as on CUDA, where gloo
has no halves. In a wrapper that a program makes itself, this comparison begins once there is a half. ``simccl`` refuses
sparse tensors; a half reduces copies of them on the host.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]  # not in the stubs
from torch.distributed import distributed_c10d as c10d

from torch_ext.sim._name import NAME
from torch_ext.sim._patches import wrap

__all__ = ["Make", "global_ranks", "install", "make_half", "reduce_sparse", "wrap_half", "wrappers_of_a_group"]

Make = Callable[[c10d.Store, int, list[int], timedelta], Any]
"""Makes a half from a store, the rank, the group's global ranks and its time limit. Called on every rank."""

# Methods of backends that take tensors.
_CALLS = (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "scatter",
    "send",
)  # fmt: skip


@dataclass(frozen=True)
class _Wrapped:
    backend: Any
    helper: Any  # the group of gloo by which ranks compare their calls


# Constructor arguments and halves of backends made in Python. Torch holds groups' backends without a Python object.
_stores: WeakKeyDictionary[Any, c10d.Store] = WeakKeyDictionary()
_wrapped: WeakKeyDictionary[Any, _Wrapped] = WeakKeyDictionary()
_halves: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class _NewWrappers(threading.local):
    wrappers: list[Any] | None = None


_new = _NewWrappers()


def install(make: Make) -> None:
    """Make the methods of gloo's backends, and of wrappers around them, accept ``sim`` tensors."""
    if not dist.is_gloo_available():
        return
    _remember(c10d.ProcessGroupGloo, _remember_store)
    _remember(c10d._ProcessGroupWrapper, _remember_wrapped)
    for kind in (c10d.ProcessGroupGloo, c10d._ProcessGroupWrapper):
        wrap(kind, *_CALLS)(functools.partial(_by_device, make))


@contextmanager
def wrappers_of_a_group() -> Iterator[list[Any]]:
    """Yield a list that collects the wrappers made by this thread: torch makes them for a group and names none."""
    before, _new.wrappers = _new.wrappers, []
    try:
        yield _new.wrappers
    finally:
        _new.wrappers = before


def wrap_half(half: Any, wrapper: Any) -> Any:
    """Return a wrapper around ``half`` that compares calls by the same helper as ``wrapper``."""
    return c10d._ProcessGroupWrapper(half, _wrapped[wrapper].helper)


def reduce_sparse(tensors: list[torch.Tensor], reduce_on_host: Callable[[list[torch.Tensor]], Any]) -> Any:
    """Reduce ``tensors``, one sparse COO tensor, in place. The host waits, so that the work returned is complete."""
    on_host = [tensor.cpu() for tensor in tensors]
    reduce_on_host(on_host).wait()
    for tensor, reduced in zip(tensors, on_host, strict=True):
        tensor.copy_(reduced)
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[tensors[0].device])
    future.set_result(tensors)
    return _create_work_from_future(future)


def _remember(kind: Any, remember: Callable[..., None]) -> None:
    original = kind.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        remember(self, *args, **kwargs)

    # `functools.wraps` would set `__wrapped__`, our "already patched" flag; keep an existing one.
    __init__.__dict__.update(getattr(original, "__dict__", {}))
    __init__.__doc__ = original.__doc__
    kind.__init__ = __init__


def _remember_store(self: Any, store: c10d.Store, *_others: Any, **_named: Any) -> None:
    _stores[self] = store


def _remember_wrapped(self: Any, backend: Any, gloo_backend: Any) -> None:
    _wrapped[self] = _Wrapped(backend, gloo_backend)
    if _new.wrappers is not None:
        _new.wrappers.append(self)


def global_ranks(store: c10d.Store, rank: int, size: int) -> list[int]:
    """Return the global ranks of the ``size`` ranks of ``store``, all of which must call this. Without a default
    group, ``rank`` is the global rank.
    """
    store.set(f"global_rank/{rank}", str(dist.get_rank() if dist.is_initialized() else rank))
    return [int(store.get(f"global_rank/{other}")) for other in range(size)]


def _by_device(make: Make, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a backend's method, or its half's if the tensors are on the device and there is a half."""
    tensor = _first_tensor((args, tuple(kwargs.values())))
    half = None if tensor is None or tensor.device.type != NAME else _half(self, make)
    if tensor is None or half is None:
        return original(self, *args, **kwargs)
    if tensor.layout == torch.sparse_coo and original.__name__ == "allreduce":
        keyword = next((key for key in ("tensors", "tensor") if key in kwargs), "")
        tensors, *others = args or (kwargs.pop(keyword),)
        reduced = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return reduce_sparse(reduced, lambda on_host: original(self, on_host, *others, **kwargs))
    return getattr(half, original.__name__)(*args, **kwargs)


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list | tuple):
        return next((found for each in value if (found := _first_tensor(each)) is not None), None)
    return None


def make_half(
    gloo: Any, store: c10d.Store, make: Make, default_ranks: Callable[[c10d.Store, int, int], list[int]]
) -> Any:
    """Make the half of ``gloo``, a backend or a wrapper around it, which uses ``store``.

    Where ``gloo`` lacks the global ranks of its group, ``default_ranks(store, rank, size)`` returns them.
    """
    store, rank, options = c10d.PrefixStore(f"{NAME}/", store), gloo.rank(), gloo.options
    ranks = list(options.global_ranks_in_group) or default_ranks(store, rank, gloo.size())
    return make(store, rank, ranks, options._timeout)


def _half(backend: Any, make: Make) -> Any:
    """Return the half of ``backend``, made on first use; ``None`` if ``backend`` is not gloo's."""
    half = _halves.get(backend)
    if half is not None:
        return half
    if backend in _stores:
        half = make_half(backend, _stores[backend], make, global_ranks)
    elif backend in _wrapped:
        inner = _half(_wrapped[backend].backend, make)
        half = None if inner is None else wrap_half(inner, backend)
    if half is not None:
        _halves[backend] = half
    return half
