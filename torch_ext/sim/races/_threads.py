"""Happens-before edges between ranks that are threads of one process.

======================================  ==============================================================================
start and end of a rank's thread        the starting thread comes before it, the waiting thread after it
``Condition`` and classes built on it   a release of the lock comes before the next acquisition: ``Event``, ``Queue``,
                                        ``Barrier``, ``Semaphore``, futures of ``concurrent.futures``
collectives of torch's threaded group   all ranks, and the streams that are current where they call, before all
======================================  ==============================================================================

A plain ``Lock`` and a ``SimpleQueue`` cannot be observed: an order that they alone give counts as missing.

Note [Collectives of threads]
Torch's threaded group runs a collective in the thread of rank 0, on the streams that are current there. It waits for
no stream of another rank, so on a GPU any side stream races with it. That is no mistake of the program under test. Here
each rank's part counts as made by that rank, on the stream that is current where it calls, and as ordered like a
collective with ``async_op=False``; the group's real work in rank 0's thread is ignored.
"""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torch_ext.sim import _native
from torch_ext.sim._name import NAME

# Enters a context around each rank's part of each collective, until the returned function is called. The context gets
# an object that the ranks share, the collective's name, such as `AllReduce`, and the tensors that it reads and writes.
AroundCollectives = Callable[[Callable[..., contextlib.AbstractContextManager[None]]], Callable[[], None]]

_HANDOVER = "_torch_ext_handover"  # attribute of a collective
_starter = 0  # the thread that started the ranks and waits for them; its handovers are ignored
_lock_handovers: weakref.WeakKeyDictionary[Any, _native.RaceHandover] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Within, this thread is ``rank``, with its own host lane."""
    _native.begin_rank_thread(rank)
    try:
        yield
    finally:
        _native.end_rank_thread()


def watch_handovers(around_collectives: AroundCollectives) -> Callable[[], None]:
    """Track the edges between threads from now on, until the returned function is called."""
    global _starter
    _starter = threading.get_ident()
    undo = contextlib.ExitStack()
    undo.callback(around_collectives(_collective))
    for name, gives, takes in (("__enter__", False, True), ("__exit__", True, False), ("wait", True, True)):
        watched = _watched(getattr(threading.Condition, name), gives=gives, takes=takes)
        _replace(undo, threading.Condition, name, watched)
    _replace(undo, threading.Event, "is_set", _is_set(threading.Event.is_set))
    return undo.close


def _replace(undo: contextlib.ExitStack, owner: type, name: str, new: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, new)


def _give(condition: Any) -> None:
    if threading.get_ident() != _starter:
        # Keyed by the lock, because the conditions of a queue share one.
        _lock_handovers.setdefault(condition._lock, _native.RaceHandover()).give()


def _take(condition: Any) -> None:
    handover = _lock_handovers.get(condition._lock)
    if handover is not None and threading.get_ident() != _starter:
        handover.take()


def _watched(original: Callable[..., Any], *, gives: bool, takes: bool) -> Callable[..., Any]:
    def call(self: threading.Condition, *args: Any, **kwargs: Any) -> Any:
        if gives:
            _give(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            if takes:
                _take(self)

    return call


def _is_set(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_set(self: Any) -> bool:
        done = original(self)
        if done:
            _take(self._cond)
        return done

    return is_set


@contextlib.contextmanager
def _collective(
    meeting: object, kind: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Surround one rank's part of a collective of ``kind``, such as ``AllReduce``; see Note [Collectives of threads].

    ``meeting`` is one object for all ranks that take part.
    """
    name = "threaded::" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()
    devices = sorted({tensor.device.index for tensor in (*reads, *writes) if tensor.device.type == NAME})
    handover: _native.RaceHandover = vars(meeting).setdefault(_HANDOVER, _native.RaceHandover())
    _native.use_tensors(name, reads, False)
    handover.give(devices)
    _native.set_unobserved(True)
    try:
        yield
    finally:
        _native.set_unobserved(False)
    handover.take(devices)
    _native.use_tensors(name, writes, True)
