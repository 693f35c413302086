"""Linear layers of several sizes, with FSDP at several depths, and variants with
delays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp.wrap import always_wrap_policy

from torch_ext.testing._internal._fsdp.device import delay
from torch_ext.testing._internal._fsdp.models.base import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTestModel,
    _maybe_wrap_fsdp,
    _move_to_device,
    init_by_mode,
)
from torch_ext.testing._internal._fsdp.patches import REDUCE_SCATTER

__all__ = [
    "AlwaysWrapNestedWrappedModule",
    "ModuleWithDelay",
    "NestedWrappedModule",
    "NestedWrappedModuleWithDelay",
    "NonUniformReqGradNWM",
]


@dataclass(frozen=True)
class LayerMaker:
    """Makes the layers of a nested model, moved and wrapped according to the model's
    arguments.
    """

    group: Any
    wrap_fsdp: bool
    move_to_device: bool
    fsdp_kwargs: dict[str, Any] = field(default_factory=dict)

    def linear(self, features_in: int, features_out: int) -> nn.Module:
        return _move_to_device(
            nn.Linear(features_in, features_out), self.move_to_device
        )

    def wrapped(self, *layers: nn.Module, group: Any = None) -> nn.Module:
        """Return the layer, or a sequence of several, wrapped over ``group`` (by
        default the model's).
        """
        module = layers[0] if len(layers) == 1 else nn.Sequential(*layers)
        return _maybe_wrap_fsdp(
            module,
            self.wrap_fsdp,
            self.group if group is None else group,
            **self.fsdp_kwargs,
        )


class NestedWrappedModule(FSDPTestModel):
    """Five linear layers. The inner ones are wrapped with FSDP, one of them twice; the
    first and the last are not.

    Shapes: ``(4, 8)`` in and out. The input differs by rank. The loss is the sum of the
        output. With ``deterministic`` all instances have the same weights.
    """

    def __init__(
        self,
        group: Any,
        wrap_fsdp: bool,
        device_init_mode: DEVICEInitMode,
        deterministic: bool,
        **fsdp_kwargs: Any,
    ) -> None:
        super().__init__()
        self.rank, self.world_size = group.rank(), group.size()
        if deterministic:
            torch.manual_seed(0)
        make = LayerMaker(
            group,
            wrap_fsdp,
            device_init_mode == DEVICEInitMode.DEVICE_BEFORE,
            fsdp_kwargs,
        )
        self.module = self._layers(make, deterministic)

    def _layers(self, make: LayerMaker, deterministic: bool) -> nn.Sequential:
        return nn.Sequential(
            make.linear(8, 4),
            make.wrapped(make.wrapped(make.linear(4, 16)), make.linear(16, 16)),
            make.wrapped(make.linear(16, 4)),
            make.linear(4, 8),
        )

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1 + self.rank)
        return (torch.rand(4, 8, device=device),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def get_loss(self, input: Any, output: torch.Tensor) -> torch.Tensor:
        return output.sum()

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    @classmethod
    def init(
        cls,
        group: Any,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
    ) -> nn.Module:
        """Return the model. Each class decides which modules ``RECURSIVE`` wraps; most
        leave the root to the caller.
        """

        def build(wrap: bool, kwargs: dict[str, Any]) -> nn.Module:
            return cls._build(group, wrap, device_init_mode, deterministic, **kwargs)

        return init_by_mode(build, fsdp_init_mode, device_init_mode, fsdp_kwargs)

    @classmethod
    def _build(
        cls,
        group: Any,
        wrap_fsdp: bool,
        device_init_mode: DEVICEInitMode,
        deterministic: bool,
        **kwargs: Any,
    ) -> nn.Module:
        """Return the model, wrapped with ``kwargs`` if ``wrap_fsdp``."""
        return cls(group, wrap_fsdp, device_init_mode, deterministic, **kwargs)


class AlwaysWrapNestedWrappedModule(NestedWrappedModule):
    """The same layers. ``RECURSIVE`` wraps every module, the root included, over the
    default group.
    """

    @classmethod
    def _build(
        cls,
        group: Any,
        wrap_fsdp: bool,
        device_init_mode: DEVICEInitMode,
        deterministic: bool,
        **kwargs: Any,
    ) -> nn.Module:
        plain = NestedWrappedModule(group, False, device_init_mode, deterministic)
        return _maybe_wrap_fsdp(
            plain, wrap_fsdp, auto_wrap_policy=always_wrap_policy, **kwargs
        )


class NonUniformReqGradNWM(NestedWrappedModule):
    """The same layers, with the last two in one FSDP module, and only the last layer's
    parameters trainable.

    With ``use_orig_params=True`` all trainable elements are then on one rank and other
    ranks have no gradient, which gradient scaling must not take for an overflow.
    Without ``use_orig_params`` the flat parameter is frozen as a whole.
    """

    # With or without an FSDP module in between.
    _TRAINABLE = re.compile(r"module\.2.*\.1.*")

    def _layers(self, make: LayerMaker, deterministic: bool) -> nn.Sequential:
        return nn.Sequential(
            make.linear(8, 4),
            make.wrapped(make.wrapped(make.linear(4, 16)), make.linear(16, 16)),
            make.wrapped(make.linear(16, 4), make.linear(4, 8)),
        )

    @staticmethod
    def _set_nonuniform_req_grad(
        model: nn.Module, req_grad_mask: str | re.Pattern[str]
    ) -> None:
        for name, parameter in model.named_parameters():
            if re.match(req_grad_mask, name) is None:
                parameter.requires_grad_(False)

    @classmethod
    def _build(cls, *args: Any, **kwargs: Any) -> nn.Module:
        model = super()._build(*args, **kwargs)
        cls._set_nonuniform_req_grad(model, cls._TRAINABLE)
        return model


class ModuleWithDelay(FSDPTestModel):
    """Wraps a test model and delays it after its loss, before each reduce-scatter of
    its gradients, or both.

    On a GPU a delay widens the window in which a missing wait shows: of the optimizer
    for the reduction, or of the reduction for a gradient. It proves nothing. On
    ``sim``, run under ``check_races``, which finds each missing wait with or without a
    delay.
    """

    def __init__(
        self,
        module: nn.Module,
        delay_after_loss_ms: int,
        delay_before_reduction_ms: int,
    ) -> None:
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
        """Return ``module_class.init(*model_args, **model_kwargs)`` with the two
        delays, in milliseconds.
        """
        module = module_class.init(*model_args, **model_kwargs)
        return ModuleWithDelay(module, delay_after_loss_ms, delay_before_reduction_ms)


class NestedWrappedModuleWithDelay(ModuleWithDelay):
    """A :class:`NestedWrappedModule` with delays, built like the other test models."""

    @staticmethod
    def init(  # type: ignore[override]  # takes the arguments of its one module class
        group: Any,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode = DEVICEInitMode.DEVICE_AFTER,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
        delay_after_loss_ms: int = 0,
        delay_before_reduction_ms: int = 0,
    ) -> ModuleWithDelay:
        """Return the model with delays in milliseconds.
        :meth:`NestedWrappedModule.init` says what is wrapped.
        """
        nested = NestedWrappedModule.init(
            group, fsdp_init_mode, device_init_mode, fsdp_kwargs, deterministic
        )
        return ModuleWithDelay(nested, delay_after_loss_ms, delay_before_reduction_ms)
