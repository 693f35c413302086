"""A barrier before ``init_rpc`` that names a worker which never arrived. Runs in the
rank; imports torch only.

``init_rpc`` is a rendezvous: a worker in it waits for all others until a time limit,
even if one of them failed long ago. This barrier fails at once instead, with the name
and the error of the worker at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["PeerFailedError", "startup_barrier"]

_READY = "ready"


class PeerFailedError(RuntimeError):
    """Another worker failed before it was ready, or did not become ready in time."""


@contextmanager
def startup_barrier(
    path: str, name: str, names: list[str], timeout: timedelta
) -> Iterator[None]:
    """Set worker ``name`` up in the ``with`` block, then wait until each of ``names``
    has finished its own block.

    ``path`` is a file that all workers can reach and that nothing else uses. The last
    worker removes it when it ends.

    Raises:
        PeerFailedError: another worker's block raised, or that worker was not ready
            within ``timeout``.
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
            raise PeerFailedError(
                f"{peer} failed before init_rpc, so {name} does not wait for it: "
                f"{state}"
            )


def _state_of(peer: str, store: Any, timeout: timedelta) -> str:
    try:
        return str(store.get(peer), "utf-8", "replace")
    except RuntimeError as error:
        raise PeerFailedError(
            f"{peer} was not ready for init_rpc within {timeout.total_seconds():g} s "
            "and reported no error. "
            "See the end of that worker's output."
        ) from error
