"""A mixture of experts: each rank has its own expert, between layers that all ranks
share.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.compat import fsdp as private
from torch_ext.testing._internal._fsdp.device import delay
from torch_ext.testing._internal._fsdp.models.base import (
    DEVICEInitMode,
    FSDPInitMode,
    init_by_mode,
)
from torch_ext.testing._internal._fsdp.models.nested import (
    LayerMaker,
    NestedWrappedModule,
)

__all__ = ["MixtureOfExperts"]

_INPUT, _SHARED, _EXPERT = 8, 12, 23


class MixtureOfExperts(NestedWrappedModule):
    """Linear layers 8 to 12, 12 to 23 (shared), 23 to 12 (this rank's expert), 12 to 8.

    The expert's parameters have an attribute ``expert`` and are sharded over a group of
    this rank only; their gradients are never reduced. With ``deterministic``, experts
    differ by rank and all other weights are the same.

    Args:
        delay_before_free_ms: delay before FSDP frees the expert's parameters in
            forward, in milliseconds. On a GPU this widens the window in which a reshard
            that does not wait frees parameters in use; ``check_races`` finds it
            without.
    """

    _EXPERT_INDEX = 2

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
        self.group = group
        self.wrap_fsdp = wrap_fsdp
        self.delay_before_free_ms = delay_before_free_ms
        self.move_to_device = device_init_mode == DEVICEInitMode.DEVICE_BEFORE

    def _layers(self, make: LayerMaker, deterministic: bool) -> nn.Sequential:
        if deterministic:
            torch.manual_seed(42 + self.rank)
        expert = make.linear(_EXPERT, _SHARED)
        for parameter in expert.parameters():
            parameter.expert = True  # type: ignore[attr-defined]  # read by run_backward
        self.num_expert_params = sum(
            parameter.numel() for parameter in expert.parameters()
        )
        if deterministic:
            torch.manual_seed(0)
        shared = make.linear(_SHARED, _EXPERT)
        return nn.Sequential(
            make.linear(_INPUT, _SHARED),
            make.wrapped(shared),
            make.wrapped(expert, group=_own_group() if make.wrap_fsdp else None),
            make.linear(_SHARED, _INPUT),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.delay_before_free_ms <= 0 or not isinstance(
            self.module[self._EXPERT_INDEX], FSDP
        ):
            return self.module(x)
        reshard = private.runtime_utils._reshard

        def late_reshard(*args: Any, **kwargs: Any) -> Any:
            delay(self.delay_before_free_ms)
            return reshard(*args, **kwargs)

        with mock.patch.object(private.runtime_utils, "_reshard", late_reshard):
            return self.module(x)

    def run_backward(self, loss: torch.Tensor) -> None:
        """Run backward, and average the shared gradients over the group if FSDP does
        not.
        """
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
        """Return the model. ``RECURSIVE`` wraps the shared layer and the expert, but
        not the root.
        """

        def build(wrap: bool, kwargs: dict[str, Any]) -> nn.Module:
            return cls(
                group,
                wrap,
                device_init_mode,
                delay_before_free_ms,
                deterministic,
                **kwargs,
            )

        return init_by_mode(build, fsdp_init_mode, device_init_mode, fsdp_kwargs)


def _own_group() -> dist.ProcessGroup:
    # Each rank creates a different group, so it must not wait for its peers.
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)
