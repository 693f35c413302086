"""Adapts code that checks devices by name: DDP's bfloat16 hooks, subgroups, staging of checkpoints in shared memory,
and the safetensors package.
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

from torch_ext.sim import _native
from torch_ext.sim._devices import index_of
from torch_ext.sim._imports import when_imported
from torch_ext.sim._name import IS_CUDA, NAME
from torch_ext.sim._patches import wrap

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
    """Make DDP accept its bfloat16 hooks, which it allows by name only for CUDA with NCCL and for XPU."""

    @wrap(ddp.DistributedDataParallel, "_check_comm_hook")
    def _check_comm_hook(check: Callable[..., None], self: Any, hook: Callable[..., Any]) -> None:
        if self.device_type == NAME and getattr(hook, "__name__", "") in _BF16_HOOKS:
            # Rename the hook: only the check of its name is skipped.
            hook = functools.wraps(hook)(functools.partial(hook))
            setattr(hook, "__name__", "compress_hook")  # noqa: B010 - mypy knows no such attribute of a callable
        check(self, hook)


def _count_devices_for_subgroups() -> None:
    """Let ``new_subgroups()`` make groups of as many ranks as there are devices, where torch counts those of CUDA."""
    for module in (c10d, dist):

        @wrap(module, "new_subgroups")
        def new_subgroups(
            original: Callable[..., Any], group_size: int | None = None, *args: Any, **kwargs: Any
        ) -> Any:
            return original(_native.device_count() if group_size is None else group_size, *args, **kwargs)


def _pin_for_cuda_alone(module: ModuleType) -> None:
    """Pin checkpoints that are staged in shared memory by CUDA's driver only if there is one."""

    @wrap(module, "pin_memory", "unpin_memory")
    def pin(original: Callable[..., None], *arguments: int) -> None:
        if torch.cuda.is_available() and not IS_CUDA:
            original(*arguments)


def _take_device(safetensors: ModuleType) -> None:
    """Name the device as safetensors can: it knows a list of names, and plain indices of the accelerator."""

    @wrap(safetensors, "safe_open")
    def safe_open(
        original: Callable[..., Any], filename: Any, framework: str, device: Any = "cpu", **kwargs: Any
    ) -> Any:
        if isinstance(device, str | torch.device) and torch.device(device).type == NAME:
            device = index_of(device)
        return original(filename, framework=framework, device=device, **kwargs)
