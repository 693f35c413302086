"""Linear layers for tests that wrap some modules by hand and skip others; made on the device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp.wrap import wrap

from torch_ext.testing._internal._fsdp import device

__all__ = ["NestedLinear", "SkipModel", "SkipModule"]

_WIDTH = 10


def _linear() -> nn.Linear:
    return nn.Linear(_WIDTH, _WIDTH, bias=False)


def _wrap(module: nn.Module, **kwargs: Any) -> nn.Module:
    """Wrap ``module`` if the caller is inside ``enable_wrap``."""
    return wrap(module, **device.with_compute_device(kwargs))


class SkipModule(nn.Module):
    """One linear layer, left unwrapped. Shapes: ``(*, 10)`` in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = _linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


class NestedLinear(nn.Module):
    """One linear layer, wrapped by itself if ``fsdp_wrap``. Shapes: ``(*, 10)`` in and out."""

    def __init__(self, fsdp_wrap: bool) -> None:
        super().__init__()
        layer = _linear().to(device.device_type())
        self.nested_linear = _wrap(layer) if fsdp_wrap else layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nested_linear(x)


class SkipModel(nn.Module):
    """A bare layer, a skipped module and a wrapped one, which is wrapped inside as well if ``double_nest``."""

    def __init__(self, double_nest: bool) -> None:
        super().__init__()
        self.linear = _linear().to(device.device_type())
        self.linear_skip = SkipModule().to(device.device_type())
        self.nested_linear = _wrap(NestedLinear(fsdp_wrap=double_nest))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nested_linear(self.linear_skip(self.linear(x)))
