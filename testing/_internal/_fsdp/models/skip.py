"""FSDP1 models with a module that wrapping skips."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.fsdp.wrap import wrap

from torch_ext.testing._internal._fsdp import device

__all__ = ["NestedLinear", "SkipModel", "SkipModule"]

_WIDTH = 10


def _linear() -> nn.Linear:
    return nn.Linear(_WIDTH, _WIDTH, bias=False)


def _wrap(module: nn.Module) -> nn.Module:
    """Wrap ``module`` if ``enable_wrap`` is active."""
    return wrap(module, **device.with_compute_device({}))


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
    """A plain layer, a skipped module, and a wrapped one, whose layer is wrapped too if
    ``double_nest``.

    Shapes: ``(*, 10)`` in and out.
    """

    def __init__(self, double_nest: bool) -> None:
        super().__init__()
        self.linear = _linear().to(device.device_type())
        self.linear_skip = SkipModule().to(device.device_type())
        self.nested_linear = _wrap(NestedLinear(fsdp_wrap=double_nest))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nested_linear(self.linear_skip(self.linear(x)))
