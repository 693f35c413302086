"""Every worker learns that all its peers are ready, or which is not and why. Runs in the rank; imports torch only.

``init_rpc`` is a rendezvous: the workers that reach it wait for the others until a time limit, however long ago one of
those failed. A roll call taken just before it turns that wait into an error that names the worker at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["PeerFailedError", "roll_call"]

_READY = "ready"


class PeerFailedError(RuntimeError):
    """Another worker failed, or never arrived, while this one was ready to start."""


@contextmanager
def roll_call(path: str, name: str, names: list[str], timeout: timedelta) -> Iterator[None]:
    """Run the preparations of worker ``name`` in the body; leave once all of ``names`` have finished theirs.

    Args:
        path: a file that all workers reach and nothing else uses; the last of them to end removes it.
        name: this worker.
        names: all workers, this one included.
        timeout: how long to wait for each peer to finish its preparations.

    Raises:
        PeerFailedError: another worker's body raised (with what), or it was not heard of within ``timeout``.
    """
    store = dist.FileStore(path, len(names))
    store.set_timeout(timeout)
    try:
        yield
    except BaseException as error:
        store.set(name, f"{type(error).__name__}: {error}")
        raise
    store.set(name, _READY)
    for peer in names:
        state = _state_of(peer, store, timeout)
        if state != _READY:
            raise PeerFailedError(f"{peer} failed before init_rpc, so {name} does not wait for it: {state}")


def _state_of(peer: str, store: Any, timeout: timedelta) -> str:
    try:
        return str(store.get(peer), "utf-8", "replace")
    except RuntimeError as error:
        raise PeerFailedError(
            f"{peer} was not ready for init_rpc within {timeout.total_seconds():g} s and left no error behind; "
            "look at what that worker printed last."
        ) from error
