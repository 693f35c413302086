"""Small models whose state is saved and loaded, and how tests of state dicts wrap them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import enable_wrap, wrap

from torch_ext.testing._internal._fsdp import device
from torch_ext.testing._internal._fsdp.models.skip import SkipModel

__all__ = ["FSDPContainer", "Model", "TestDummyModel", "compute_device", "linear", "shard", "skipping_model"]

INNER_SHAPE = [4, 4]
OUTER_SHAPE = [4, 5]
BUFFER_SHAPE = [5, 5]

HALF = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)


def compute_device() -> torch.device:
    """Return the device of this rank of the default group."""
    return device.rank_device(dist.get_rank())


def shard(module: nn.Module, *args: Any, **kwargs: Any) -> FSDP:
    """Wrap ``module``, moving it to this rank's device."""
    options = {"device_id": compute_device(), **kwargs}
    return FSDP(module, *args, **options)


def linear() -> nn.Linear:
    """Return a layer without bias on this rank's device. Shapes: ``(*, 10)`` in and out."""
    return nn.Linear(10, 10, bias=False, device=compute_device())


class Model(nn.Module):
    """An inner layer, which may be under FSDP of its own, applied twice and followed by an outer one.

    Shapes: ``(*, 4)`` in, ``(*, 5)`` out.
    """

    def __init__(
        self,
        wrap_fsdp: bool,
        register_buffers: bool = False,
        ignore_inner: bool = False,
        mixed_precision: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Linear(INNER_SHAPE[0], INNER_SHAPE[1])
        self.outer = nn.Linear(OUTER_SHAPE[0], OUTER_SHAPE[1])
        if register_buffers:
            for layer in (self.inner, self.outer):
                layer.register_buffer("buffer", torch.randn(BUFFER_SHAPE))
                layer.register_buffer("non_persistent_buffer", torch.randn(BUFFER_SHAPE), persistent=False)
        if wrap_fsdp:
            self.inner = shard(
                self.inner,
                ignored_modules=[self.inner] if ignore_inner else [],
                mixed_precision=HALF if mixed_precision else None,
                process_group=process_group,
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.outer(self.inner(x) + self.inner(x))
        return output


class TestDummyModel(nn.Module):
    """Two of its three layers are one module, two of its three loose parameters one tensor; always the same weights."""

    __test__ = False  # upstream's name reads like a test case's

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.net2 = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.net3 = self.net2
        self.random_parameter = nn.Parameter(torch.randn(10))
        self.shared_parameter = self.random_parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net3(self.net2(self.net1(x)))
        return output

    def get_input(self) -> torch.Tensor:
        return torch.rand(8, 8, device=device.get_devtype())


class FSDPContainer(nn.Module):
    """A layer outside FSDP, then two modules that may be under it."""

    def __init__(self, fsdp_1: nn.Module, fsdp_2: nn.Module) -> None:
        super().__init__()
        self.non_fsdp_lin = linear()
        self.fsdp_1 = fsdp_1
        self.fsdp_2 = fsdp_2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fsdp_2(self.fsdp_1(self.non_fsdp_lin(x)))
        return output


def skipping_model(double_nest: bool, wrap_fsdp: bool = True) -> nn.Module:
    """Return a ``SkipModel`` whose ``linear_skip`` FSDP does not manage."""
    with enable_wrap(wrapper_cls=FSDP) if wrap_fsdp else nullcontext():
        model = SkipModel(double_nest=double_nest)
        skipped = model.linear_skip
        del model.linear_skip
        wrapped: nn.Module = wrap(model, device_id=compute_device())
        model.linear_skip = skipped
    return wrapped
