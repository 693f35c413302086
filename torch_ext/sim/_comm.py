"""Broadcast, scatter and gather between the devices of one process, for DataParallel and ``torch.cuda.comm``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import comm

from torch_ext.sim._name import IS_CUDA, NAME

__all__ = ["register"]

_HOST = -1  # as a destination


def register() -> None:
    """Add the functions to ``torch._C``, unless a CUDA build of torch has its own, for CUDA."""
    if hasattr(torch._C, "_scatter") and not IS_CUDA:
        return
    for function in (
        _broadcast, _broadcast_coalesced, _broadcast_out, _gather, _gather_out, _scatter, _scatter_out,
    ):  # fmt: skip
        setattr(torch._C, function.__name__, function)
    # The real module warns, at each backward pass, that there is no NCCL.
    setattr(comm, "nccl", SimpleNamespace(is_available=lambda tensors: False))  # noqa: B010 - mypy knows no such name


def _device(index: int) -> torch.device:
    return torch.device("cpu") if index == _HOST else torch.device(NAME, index)


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    return [tensor.to(_device(index), non_blocking=True) for index in devices]


def _broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.copy_(tensor, non_blocking=True) for each in out]


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    return [[each.to(_device(index), non_blocking=True) for each in tensors] for index in devices]


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[Any] | None,
) -> list[torch.Tensor]:
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    moved = []
    for chunk, index, stream in zip(chunks, devices, streams or [None] * len(devices), strict=False):
        with stream or contextlib.nullcontext():
            moved.append(chunk.contiguous().to(_device(index), non_blocking=True))
    return moved


def _scatter_out(
    tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: Sequence[Any] | None
) -> list[torch.Tensor]:
    parts = tensor.split([each.size(dim) for each in out], dim)
    return [each.copy_(part, non_blocking=True) for each, part in zip(out, parts, strict=True)]


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    index = torch.accelerator.current_device_index() if destination is None else destination
    return torch.cat([each.to(_device(index), non_blocking=index != _HOST) for each in tensors], dim)


def _gather_out(tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    return out.copy_(torch.cat([each.to(out.device) for each in tensors], dim))
