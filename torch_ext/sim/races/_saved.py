"""Storages in pinned memory that are saved or pickled: reads of the host that torch's dispatcher does not see.

``torch.save``, checkpoints and ``all_gather_object`` write all bytes of a tensor's storage, whichever the tensor shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from torch_ext.sim import _native

__all__ = ["see_saved_storages"]

# Methods that write a storage to a file, and which argument the storage is.
_WRITERS = ((torch.UntypedStorage, "_write_file", 0), (torch._C.PyTorchFileWriter, "write_record", 2))


def see_saved_storages() -> None:
    """Tell every check from now on of storages of the host that are written to files."""
    for owner, name, position in _WRITERS:
        setattr(owner, name, _telling(getattr(owner, name), position))


def _telling(write: Callable[..., Any], position: int) -> Callable[..., Any]:
    @wraps(write)
    def telling(*args: Any) -> Any:
        if _native.is_checking_races():
            storage = args[position]
            if isinstance(storage, torch.UntypedStorage) and storage.device.type == "cpu":
                whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                _native.use_tensors("save", [whole], False)
        return write(*args)

    return telling
