"""Sends tensors of the device to other processes through ``torch.multiprocessing``.

Note [Shared tensors]
~~~~~~~~~~~~~~~~~~~~~
As with CUDA, ``share_memory_()`` has nothing to do and ``is_shared()`` is True: a tensor of the device can always be
sent to another process, and both then see what either writes. Memory of a device belongs to its process, so the first
time that a storage is sent its bytes move to memory that processes share, and the storage, with every tensor on it,
goes on there. Such memory does not count as the device's, and cannot be resized. It is on the device of the same index
at the other end. Streams are not ordered across processes: synchronize before you send.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from torch_ext.sim import _native
from torch_ext.sim._name import NAME

__all__ = ["register"]


def register() -> None:
    """Let ``torch.multiprocessing`` send storages of the device."""
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    if storage.device.type != NAME:
        return reductions.reduce_storage(storage)
    host = None
    if storage.nbytes() > 0:
        host = _native.shared_host_storage(storage)
        if host is None:
            host = torch.UntypedStorage._new_shared(storage.nbytes())
            _native.move_to_shared(storage, host)
    return _rebuild_storage, (host, storage.device.index)


def _rebuild_storage(host: torch.UntypedStorage | None, index: int) -> torch.UntypedStorage:
    if host is None:
        return torch.UntypedStorage(0, device=torch.device(NAME, index))
    return _native.storage_over(host, index)
