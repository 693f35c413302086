"""Small FSDP1 models for tests of state dicts."""

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
from torch_ext.testing._internal._fsdp.device import compute_device
from torch_ext.testing._internal._fsdp.models.base import fsdp_on_device

__all__ = [
    "BUFFER_SHAPE",
    "FP16_MIXED_PRECISION",
    "INNER_SHAPE",
    "OUTER_SHAPE",
    "NestedLinear",
    "SharedParametersModel",
    "SkipModel",
    "SkipModule",
    "StateDictModel",
    "partly_managed_model",
]

INNER_SHAPE = [4, 4]
OUTER_SHAPE = [4, 5]
BUFFER_SHAPE = [5, 5]

FP16_MIXED_PRECISION = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)


def linear() -> nn.Linear:
    """Return a linear layer without bias on this rank's device. Shapes: ``(*, 10)`` in and out."""
    return nn.Linear(10, 10, bias=False, device=compute_device())


class StateDictModel(nn.Module):
    """An inner layer, applied twice, and an outer one. With ``wrap_fsdp`` the inner layer is wrapped.

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
            self.inner = fsdp_on_device(
                self.inner,
                ignored_modules=[self.inner] if ignore_inner else [],
                mixed_precision=FP16_MIXED_PRECISION if mixed_precision else None,
                process_group=process_group,
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.outer(self.inner(x) + self.inner(x))
        return output


class SharedParametersModel(nn.Module):
    """Has a layer and a parameter that are each used under two names. Always the same weights."""

    __test__ = False  # suites import it under upstream's name, which looks like that of a test case

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
    """An unwrapped layer, then two modules that may be wrapped."""

    def __init__(self, fsdp_1: nn.Module, fsdp_2: nn.Module) -> None:
        super().__init__()
        self.non_fsdp_lin = linear()
        self.fsdp_1 = fsdp_1
        self.fsdp_2 = fsdp_2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fsdp_2(self.fsdp_1(self.non_fsdp_lin(x)))
        return output


def partly_managed_model(double_nest: bool, wrap_fsdp: bool = True) -> nn.Module:
    """Return a ``SkipModel`` whose ``linear_skip`` is not managed by FSDP."""
    with enable_wrap(wrapper_cls=FSDP) if wrap_fsdp else nullcontext():
        model = SkipModel(double_nest=double_nest)
        skipped = model.linear_skip
        del model.linear_skip
        wrapped: nn.Module = wrap(model, device_id=compute_device())
        model.linear_skip = skipped
    return wrapped


_WIDTH = 10


def _linear() -> nn.Linear:
    return nn.Linear(_WIDTH, _WIDTH, bias=False)


def _wrap(module: nn.Module, **kwargs: Any) -> nn.Module:
    """Wrap ``module`` if ``enable_wrap`` is active."""
    return wrap(module, **device.with_compute_device(kwargs))


class SkipModule(nn.Module):
    """One linear layer, not wrapped. Shapes: ``(*, 10)`` in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = _linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


class NestedLinear(nn.Module):
    """One linear layer, wrapped if ``fsdp_wrap``. Shapes: ``(*, 10)`` in and out."""

    def __init__(self, fsdp_wrap: bool) -> None:
        super().__init__()
        layer = _linear().to(device.device_type())
        self.nested_linear = _wrap(layer) if fsdp_wrap else layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nested_linear(x)


class SkipModel(nn.Module):
    """A plain layer, a skipped module, and a wrapped one, whose layer is wrapped too if ``double_nest``.

    Shapes: ``(*, 10)`` in and out.
    """

    def __init__(self, double_nest: bool) -> None:
        super().__init__()
        self.linear = _linear().to(device.device_type())
        self.linear_skip = SkipModule().to(device.device_type())
        self.nested_linear = _wrap(NestedLinear(fsdp_wrap=double_nest))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nested_linear(self.linear_skip(self.linear(x)))
