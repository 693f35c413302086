"""Private names of ``torch.distributed.fsdp`` and its neighbours.

``runtime_utils`` and ``param_group`` are modules because a helper replaces some of their globals: a function imported
from them would not be the one that FSDP calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_ext.compat._lookup import lazy_names

if TYPE_CHECKING:
    from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint
    from torch.distributed.distributed_c10d import _get_default_group
    from torch.distributed.fsdp import _runtime_utils
    from torch.distributed.fsdp._common_utils import TrainingState as TrainingState
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._init_utils import (
        NO_RESHARD_AFTER_FORWARD_STRATEGIES as NO_RESHARD_AFTER_FORWARD_STRATEGIES,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils._triton import has_triton as has_triton

    get_default_group = _get_default_group
    param_group = _fsdp_param_group
    runtime_utils = _runtime_utils

__getattr__ = lazy_names(
    __name__,
    {
        "FakeStore": ("torch.testing._internal.distributed.fake_pg:FakeStore",),
        "NO_RESHARD_AFTER_FORWARD_STRATEGIES": (
            "torch.distributed.fsdp._init_utils:NO_RESHARD_AFTER_FORWARD_STRATEGIES",
        ),
        "TrainingState": ("torch.distributed.fsdp._common_utils:TrainingState",),
        "checkpoint": (
            "torch.distributed._composable:checkpoint",
            "torch.distributed._composable.checkpoint_activation:checkpoint",
        ),
        "get_default_group": ("torch.distributed.distributed_c10d:_get_default_group",),
        "has_triton": ("torch.utils._triton:has_triton",),
        "param_group": ("torch.distributed.fsdp._fully_shard:_fsdp_param_group",),
        "runtime_utils": ("torch.distributed.fsdp:_runtime_utils",),
    },
)
