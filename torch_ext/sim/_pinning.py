"""Host memory that torch pins where it lies: checkpoints that are staged in shared memory. There is nothing to pin."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from torch_ext.sim._imports import when_imported

__all__ = ["register"]


def register() -> None:
    """Leave CUDA's driver out of it where there is none."""
    when_imported("torch.cuda._pin_memory_utils", _replace)


def _replace(module: ModuleType) -> None:
    for name in ("pin_memory", "unpin_memory"):
        setattr(module, name, _unless_cuda(getattr(module, name)))


def _unless_cuda(original: Any) -> Any:
    def call(*arguments: int) -> None:
        if torch.cuda.is_available():
            original(*arguments)

    return call
