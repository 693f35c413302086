"""Delays around a model's loss and gradient reduction."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn

from torch_ext.testing._internal._fsdp.collectives import REDUCE_SCATTER
from torch_ext.testing._internal._fsdp.delays import delay
from torch_ext.testing._internal._fsdp.models.base import FSDPTestModel
from torch_ext.testing._internal._fsdp.models.nested import NestedWrappedModule
from torch_ext.testing._internal._fsdp.modes import DEVICEInitMode, FSDPInitMode

__all__ = ["ModuleWithDelay", "NestedWrappedModuleWithDelay"]


class ModuleWithDelay(FSDPTestModel):
    """Wraps a test model and delays it after its loss, before each reduce-scatter of its gradients, or both.

    A delay shows a stream that does not wait for another one: the optimiser that steps before gradients are reduced,
    the reduction that reads a gradient still being computed.
    """

    def __init__(self, module: nn.Module, delay_after_loss_ms: int, delay_before_reduction_ms: int) -> None:
        super().__init__()
        self.module: Any = module
        self.delay_after_loss_ms = delay_after_loss_ms
        self.delay_before_reduction_ms = delay_before_reduction_ms

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        return self.module.get_input(device)

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def get_loss(self, input: Any, output: Any) -> torch.Tensor:
        loss = self.module.get_loss(input, output)
        delay(self.delay_after_loss_ms)
        return loss

    def run_backward(self, loss: torch.Tensor) -> None:
        reduce_scatter = getattr(dist, REDUCE_SCATTER)

        def late_reduce_scatter(*args: Any, **kwargs: Any) -> Any:
            delay(self.delay_before_reduction_ms)
            return reduce_scatter(*args, **kwargs)

        with mock.patch.object(dist, REDUCE_SCATTER, late_reduce_scatter):
            self.module.run_backward(loss)

    @staticmethod
    def init(
        module_class: type[FSDPTestModel],
        *model_args: Any,
        delay_after_loss_ms: int,
        delay_before_reduction_ms: int,
        **model_kwargs: Any,
    ) -> ModuleWithDelay:
        """Return ``module_class.init(*model_args, **model_kwargs)`` with the two delays, in milliseconds."""
        module = module_class.init(*model_args, **model_kwargs)
        return ModuleWithDelay(module, delay_after_loss_ms, delay_before_reduction_ms)


class NestedWrappedModuleWithDelay(ModuleWithDelay):
    """A :class:`NestedWrappedModule` with delays, constructed like the other test models."""

    @staticmethod
    def init(  # type: ignore[override]  # a fixed module class, with the constructor arguments of that class
        group: Any,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode = DEVICEInitMode.DEVICE_AFTER,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
        delay_after_loss_ms: int = 0,
        delay_before_reduction_ms: int = 0,
    ) -> ModuleWithDelay:
        """Return the delayed model; see :meth:`NestedWrappedModule.init` for what is wrapped."""
        nested = NestedWrappedModule.init(group, fsdp_init_mode, device_init_mode, fsdp_kwargs, deterministic)
        return ModuleWithDelay(nested, delay_after_loss_ms, delay_before_reduction_ms)
