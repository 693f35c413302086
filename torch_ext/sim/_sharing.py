"""Sends tensors of the device to other processes through ``torch.multiprocessing``, and to other libraries by DLPack.

Note [Shared tensors]
~~~~~~~~~~~~~~~~~~~~~
As with CUDA, ``share_memory_()`` is a no-op and ``is_shared()`` is True: any tensor of the device can be sent to
another process, and each process sees the other's writes. Device memory belongs to one process, so sending a storage
for the first time moves its bytes, and with them every tensor on the storage, to memory that processes share. Shared
memory does not count as the device's and cannot be resized. The receiver finds the tensor on the device of the same
index. Streams are not ordered across processes: synchronize before you send.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils import dlpack

from torch_ext.sim import _native
from torch_ext.sim._name import IS_CUDA, NAME
from torch_ext.sim._patches import wrap


def register() -> None:
    """Let ``torch.multiprocessing`` send storages of the device."""
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
    if not IS_CUDA:
        # Torch 2.13 to 2.15 compare the type with "privateuse1", a name that a registered device no longer has.
        wrap(torch.Tensor, "__dlpack_device__")(_dlpack_device)


def _dlpack_device(original: Any, tensor: torch.Tensor) -> Any:
    if tensor.device.type != NAME:
        return original(tensor)
    return dlpack.DLDeviceType.kDLExtDev, tensor.device.index


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
