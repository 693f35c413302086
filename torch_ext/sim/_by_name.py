"""Code outside that decides by the name of a device: DDP's bfloat16 hooks, subgroups, staging of checkpoints in shared
memory, and the safetensors package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import distributed as ddp

from torch_ext.sim._devices import device_count, index_of
from torch_ext.sim._imports import when_imported
from torch_ext.sim._name import IS_CUDA, NAME

__all__ = ["register"]

_BF16_HOOKS = ("bf16_compress_hook", "bf16_compress_wrapper_hook")
_SAFETENSORS = ("safetensors", "safetensors.torch")


def register() -> None:
    """Let DDP's bfloat16 hooks serve the device, groups be split by it, and safetensors load to it."""
    _allow_bf16_hooks()
    _count_devices_for_subgroups()
    when_imported("torch.cuda._pin_memory_utils", _pin_for_cuda_alone)
    for name in _SAFETENSORS:
        when_imported(name, _take_device)


def _allow_bf16_hooks() -> None:
    """DDP asks for CUDA with NCCL, or XPU, by name: simccl reduces bfloat16 too."""
    kind: Any = ddp.DistributedDataParallel
    check = kind._check_comm_hook

    @functools.wraps(check)
    def _check_comm_hook(self: Any, hook: Callable[..., Any]) -> None:
        if self.device_type == NAME and getattr(hook, "__name__", "") in _BF16_HOOKS:
            check(self, _under_another_name(hook))  # the other checks stand
        else:
            check(self, hook)

    kind._check_comm_hook = _check_comm_hook


def _count_devices_for_subgroups() -> None:
    """``new_subgroups()`` makes a group of each host's ranks: of as many as CUDA has devices there."""
    original = c10d.new_subgroups

    @functools.wraps(original)
    def new_subgroups(group_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        return original(device_count() if group_size is None else group_size, *args, **kwargs)

    for module in (c10d, dist):
        setattr(module, "new_subgroups", new_subgroups)  # noqa: B010 - mypy refuses to assign a function


def _pin_for_cuda_alone(module: ModuleType) -> None:
    """Checkpoints that are staged in shared memory are pinned where they lie, by CUDA's driver: leave that out."""
    for name in ("pin_memory", "unpin_memory"):
        setattr(module, name, _unless_cuda(getattr(module, name)))


def _unless_cuda(original: Any) -> Any:
    def call(*arguments: int) -> None:
        if torch.cuda.is_available() and not IS_CUDA:
            original(*arguments)

    return call


def _under_another_name(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def compress_hook(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    compress_hook.__name__ = "compress_hook"
    return compress_hook


def _take_device(safetensors: ModuleType) -> None:
    """Name the device as safetensors can: it knows a list of names, and plain indices of the accelerator."""
    original = safetensors.safe_open
    if getattr(original, "takes_sim", False):
        return

    @functools.wraps(original, updated=())
    def safe_open(filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> Any:
        if isinstance(device, str | torch.device) and torch.device(device).type == NAME:
            device = index_of(device)
        return original(filename, framework=framework, device=device, **kwargs)

    setattr(safe_open, "takes_sim", True)  # noqa: B010 - mypy refuses attributes of functions
    setattr(safetensors, "safe_open", safe_open)  # noqa: B010 - mypy knows no such name
