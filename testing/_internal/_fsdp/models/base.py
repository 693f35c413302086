"""The interface of FSDP1 test models, and how they are built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

from torch_ext.testing._internal._fsdp import device

__all__ = [
    "CUDAInitMode",
    "DEVICEInitMode",
    "DummyDDP",
    "DummyProcessGroup",
    "FSDPInitMode",
    "FSDPTestModel",
    "_maybe_cuda",
    "_maybe_wrap_fsdp",
    "_move_to_device",
    "fully_shard_children",
]


class FSDPInitMode(Enum):
    """Which modules of a test model are wrapped with FSDP."""

    NO_FSDP = auto()
    RECURSIVE = auto()  # submodules, and the root if the model's ``init`` says so


class DEVICEInitMode(Enum):
    """When a test model moves to the device: before FSDP wraps it, after, or never. Old
    names start with ``CUDA_``.
    """

    DEVICE_BEFORE = auto()
    DEVICE_AFTER = auto()
    DEVICE_NEVER = auto()
    CUDA_BEFORE = DEVICE_BEFORE
    CUDA_AFTER = DEVICE_AFTER
    CUDA_NEVER = DEVICE_NEVER


CUDAInitMode = DEVICEInitMode


class FSDPTestModel(nn.Module, ABC):
    """A model with its own input, loss and backward, for one loop to train them all."""

    @abstractmethod
    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the inputs of a step. They may differ by rank, but not by call."""

    @abstractmethod
    def get_loss(self, input: Any, output: Any) -> torch.Tensor:
        """Return the scalar loss of ``output``, computed from ``input``."""

    @abstractmethod
    def run_backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass, and reductions that the wrapper does not do."""

    @staticmethod
    @abstractmethod
    def init(*args: Any, **kwargs: Any) -> nn.Module:
        """Return a model, wrapped and moved as the modes say."""


def _move_to_device(model: nn.Module, move_to_device: bool) -> nn.Module:
    return model.to(device.device_type()) if move_to_device else model


_maybe_cuda = _move_to_device


def _maybe_wrap_fsdp(
    model: nn.Module, wrap_fsdp: bool, *args: Any, **kwargs: Any
) -> nn.Module:
    if not wrap_fsdp:
        return model
    return FSDP(model, *args, **device.with_compute_device(kwargs))


def init_by_mode(
    build: Callable[..., nn.Module],
    fsdp_init_mode: FSDPInitMode,
    device_init_mode: DEVICEInitMode,
    fsdp_kwargs: dict[str, Any] | None,
) -> nn.Module:
    """Return ``build(wrap, **kwargs)`` for the mode, moved to the device if
    ``device_init_mode`` is ``DEVICE_AFTER``.

    Raises:
        ValueError: the mode is not a :class:`FSDPInitMode`.
    """
    if fsdp_init_mode == FSDPInitMode.NO_FSDP:
        return build(False)
    if fsdp_init_mode == FSDPInitMode.RECURSIVE:
        model = build(True, **(fsdp_kwargs or {}))
        return _move_to_device(model, device_init_mode == DEVICEInitMode.DEVICE_AFTER)
    raise ValueError(
        f"Unsupported FSDP init mode: {fsdp_init_mode}. Pass one of "
        f"{', '.join(map(str, FSDPInitMode))}."
    )


def fully_shard_children(model: nn.Module, **options: Any) -> nn.Module:
    """Apply ``fully_shard`` to the children of ``model``, then to it. Return it."""
    for child in model.children():
        fully_shard(child, **options)
    fully_shard(model, **options)
    return model


class DummyProcessGroup:
    """A process group of ``size`` ranks, seen from ``rank``, without communication."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, *args: Any, **kwargs: Any) -> _DoneWork:
        """Leave the tensors as they are and return completed work."""
        return _DoneWork()


class _DoneWork:
    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(1)
        return future


class DummyDDP(nn.Module):
    """DDP's structure (the model is ``module``) without its gradient reduction."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
