"""Linear layers with FSDP at several depths, with delays, experts, skipped modules."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import always_wrap_policy, wrap

from torch_ext.compat import fsdp as private
from torch_ext.testing._internal._fsdp.device import delay, with_compute_device
from torch_ext.testing._internal._fsdp.models.base import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTestModel,
    _maybe_wrap_fsdp,
    _move_to_device,
    init_by_mode,
)

__all__ = [
    "AlwaysWrapNestedWrappedModule",
    "MixtureOfExperts",
    "ModuleWithDelay",
    "NestedLinear",
    "NestedWrappedModule",
    "NestedWrappedModuleWithDelay",
    "NonUniformReqGradNWM",
    "SkipModel",
    "SkipModule",
]


_Make = Callable[..., nn.Module]


class NestedWrappedModule(FSDPTestModel):
    """Five linear layers, ``(4, 8)`` in and out. The inner ones are wrapped with FSDP,
    one of them twice.

    The input differs by rank. The loss is the sum of the output. With ``deterministic``
    all instances have the same weights.
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

        def linear(inputs: int, outputs: int) -> nn.Module:
            now = device_init_mode == DEVICEInitMode.DEVICE_BEFORE
            return _move_to_device(nn.Linear(inputs, outputs), now)

        def wrapped(*layers: nn.Module, alone: bool = False) -> nn.Module:
            module = layers[0] if len(layers) == 1 else nn.Sequential(*layers)
            over = _own_group() if alone and wrap_fsdp else group
            return _maybe_wrap_fsdp(module, wrap_fsdp, over, **fsdp_kwargs)

        self.module = self._layers(linear, wrapped, deterministic)

    def _layers(
        self, linear: _Make, wrapped: _Make, deterministic: bool
    ) -> nn.Sequential:
        """Return layers of ``linear``, wrapped by ``wrapped``; with ``alone=True`` over
        a group of this rank only.
        """
        return nn.Sequential(
            linear(8, 4),
            wrapped(wrapped(linear(4, 16)), linear(16, 16)),
            wrapped(linear(16, 4)),
            linear(4, 8),
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
        """Return the model. Most classes leave the root to the caller to wrap."""
        build = functools.partial(
            cls, group, device_init_mode=device_init_mode, deterministic=deterministic
        )
        return init_by_mode(build, fsdp_init_mode, device_init_mode, fsdp_kwargs)


class AlwaysWrapNestedWrappedModule(NestedWrappedModule):
    """The same layers, every module and the root wrapped over the default group."""

    @classmethod
    def init(
        cls,
        group: Any,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
    ) -> nn.Module:
        plain = NestedWrappedModule(group, False, device_init_mode, deterministic)
        policy = always_wrap_policy
        build = functools.partial(_maybe_wrap_fsdp, plain, auto_wrap_policy=policy)
        return init_by_mode(build, fsdp_init_mode, device_init_mode, fsdp_kwargs)


class NonUniformReqGradNWM(NestedWrappedModule):
    """The same layers, the last two in one FSDP module, only the last one trainable.

    With ``use_orig_params=True`` all trainable elements are then on one rank and other
    ranks have no gradient, which gradient scaling must not take for an overflow.
    """

    # With or without an FSDP module in between.
    _TRAINABLE = re.compile(r"module\.2.*\.1.*")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._set_nonuniform_req_grad(self, self._TRAINABLE)

    def _layers(
        self, linear: _Make, wrapped: _Make, deterministic: bool
    ) -> nn.Sequential:
        return nn.Sequential(
            linear(8, 4),
            wrapped(wrapped(linear(4, 16)), linear(16, 16)),
            wrapped(linear(16, 4), linear(4, 8)),
        )

    @staticmethod
    def _set_nonuniform_req_grad(
        model: nn.Module, req_grad_mask: str | re.Pattern[str]
    ) -> None:
        for name, parameter in model.named_parameters():
            if re.match(req_grad_mask, name) is None:
                parameter.requires_grad_(False)


def _delaying(owner: Any, name: str, milliseconds: int) -> AbstractContextManager[Any]:
    """Return a context that delays each call of the function ``name`` of ``owner``."""
    function = getattr(owner, name)

    def late(*args: Any, **kwargs: Any) -> Any:
        delay(milliseconds)
        return function(*args, **kwargs)

    return mock.patch.object(owner, name, late)


class ModuleWithDelay(FSDPTestModel):
    """Wraps a test model and delays it after its loss, before each reduce-scatter of
    its gradients, or both.

    On a GPU a delay widens the window in which a missing wait shows. On ``sim``, run
    under ``check_races``, which finds each missing wait with or without a delay.
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
        milliseconds = self.delay_before_reduction_ms
        with _delaying(dist, "reduce_scatter_single", milliseconds):
            self.module.run_backward(loss)

    @staticmethod
    def init(
        module_class: type[FSDPTestModel],
        *model_args: Any,
        delay_after_loss_ms: int,
        delay_before_reduction_ms: int,
        **model_kwargs: Any,
    ) -> ModuleWithDelay:
        """Return ``module_class.init(*model_args, **model_kwargs)`` with the delays."""
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
        nested = NestedWrappedModule.init(
            group, fsdp_init_mode, device_init_mode, fsdp_kwargs, deterministic
        )
        return ModuleWithDelay(nested, delay_after_loss_ms, delay_before_reduction_ms)


class MixtureOfExperts(NestedWrappedModule):
    """Linear layers 8 to 12, 12 to 23 (shared), 23 to 12 (this rank's expert), 12 to 8.

    The expert's parameters have an attribute ``expert`` and are sharded over a group of
    this rank only; their gradients are never reduced. With ``deterministic``, experts
    differ by rank and all other weights are the same. ``delay_before_free_ms`` delays
    FSDP before it frees the expert's parameters in forward.
    """

    def __init__(
        self,
        group: Any,
        wrap_fsdp: bool,
        device_init_mode: DEVICEInitMode,
        delay_before_free_ms: int,
        deterministic: bool,
        **fsdp_kwargs: Any,
    ) -> None:
        super().__init__(
            group, wrap_fsdp, device_init_mode, deterministic, **fsdp_kwargs
        )
        self.group, self.wrap_fsdp = group, wrap_fsdp
        self.delay_before_free_ms = delay_before_free_ms

    def _layers(
        self, linear: _Make, wrapped: _Make, deterministic: bool
    ) -> nn.Sequential:
        if deterministic:
            torch.manual_seed(42 + self.rank)
        expert = linear(23, 12)
        for parameter in expert.parameters():
            parameter.expert = True  # type: ignore[attr-defined]  # read by run_backward
        self.num_expert_params = sum(each.numel() for each in expert.parameters())
        if deterministic:
            torch.manual_seed(0)
        shared = linear(12, 23)
        return nn.Sequential(
            linear(8, 12), wrapped(shared), wrapped(expert, alone=True), linear(12, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.delay_before_free_ms <= 0 or not isinstance(self.module[2], FSDP):
            return self.module(x)
        with _delaying(private.runtime_utils, "_reshard", self.delay_before_free_ms):
            return self.module(x)

    def run_backward(self, loss: torch.Tensor) -> None:
        """Run backward; average shared gradients over the group if FSDP does not."""
        super().run_backward(loss)
        if self.wrap_fsdp:
            return
        for parameter in self.parameters():
            if parameter.grad is not None and not hasattr(parameter, "expert"):
                parameter.grad.div_(self.world_size)
                dist.all_reduce(parameter.grad, group=self.group)

    @classmethod
    def init(
        cls,
        group: Any,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
        delay_before_free_ms: int = 0,
    ) -> nn.Module:
        build = functools.partial(
            cls,
            group,
            device_init_mode=device_init_mode,
            delay_before_free_ms=delay_before_free_ms,
            deterministic=deterministic,
        )
        return init_by_mode(build, fsdp_init_mode, device_init_mode, fsdp_kwargs)


def _own_group() -> dist.ProcessGroup:
    # Each rank creates a different group, so it must not wait for its peers.
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


class SkipModule(nn.Module):
    """One linear layer, not wrapped. Shapes: ``(*, 10)`` in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = _square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


class NestedLinear(nn.Module):
    """One linear layer, wrapped if ``fsdp_wrap``. Shapes: ``(*, 10)`` in and out."""

    def __init__(self, fsdp_wrap: bool) -> None:
        super().__init__()
        self.nested_linear = _wrap_if_enabled(_square()) if fsdp_wrap else _square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nested_linear(x)


class SkipModel(nn.Module):
    """A plain layer, a skipped module, and a wrapped one, whose layer is wrapped too if
    ``double_nest``: ``(*, 10)`` in and out.
    """

    def __init__(self, double_nest: bool) -> None:
        super().__init__()
        self.linear = _square()
        self.linear_skip = SkipModule()
        self.nested_linear = _wrap_if_enabled(NestedLinear(fsdp_wrap=double_nest))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nested_linear(self.linear_skip(self.linear(x)))


def _square() -> nn.Module:
    return _move_to_device(nn.Linear(10, 10, bias=False), True)


def _wrap_if_enabled(module: nn.Module) -> nn.Module:
    return wrap(module, **with_compute_device({}))
