"""Private names of ``torch.distributed.fsdp``, of its foundations, and of the Inductor that compiles it.

``runtime_utils`` and ``param_group`` are whole modules because helpers patch their globals: a function imported from
them would not be the one that FSDP calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_ext.compat._lookup import lazy_names

if TYPE_CHECKING:
    from torch._dynamo import config as _dynamo_config
    from torch._inductor import config as _inductor_config
    from torch._inductor.codegen.common import get_scheduling_for_device as get_scheduling_for_device
    from torch._inductor.codegen.common import init_backend_registration as init_backend_registration
    from torch._inductor.utils import is_gpu as is_gpu
    from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint
    from torch.distributed._state_dict_utils import _gather_state_dict as _gather_state_dict
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as checkpoint_wrapper
    from torch.distributed.fsdp import ShardingStrategy, _runtime_utils
    from torch.distributed.fsdp._common_utils import TrainingState as TrainingState
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._init_utils import (
        NO_RESHARD_AFTER_FORWARD_STRATEGIES as NO_RESHARD_AFTER_FORWARD_STRATEGIES,
    )
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._triton import has_triton as has_triton

    HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2
    dynamo_config, inductor_config = _dynamo_config, _inductor_config
    param_group = _fsdp_param_group
    runtime_utils = _runtime_utils

__getattr__ = lazy_names(
    __name__,
    {
        "HYBRID_SHARD_ZERO2": ("torch.distributed.fsdp:ShardingStrategy._HYBRID_SHARD_ZERO2",),
        "NO_RESHARD_AFTER_FORWARD_STRATEGIES": (
            "torch.distributed.fsdp._init_utils:NO_RESHARD_AFTER_FORWARD_STRATEGIES",
        ),
        "TorchDispatchMode": ("torch.utils._python_dispatch:TorchDispatchMode",),
        "TrainingState": ("torch.distributed.fsdp._common_utils:TrainingState",),
        "_gather_state_dict": ("torch.distributed._state_dict_utils:_gather_state_dict",),
        "checkpoint": ("torch.distributed._composable:checkpoint",),
        "checkpoint_wrapper": ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper:checkpoint_wrapper",),
        "dynamo_config": ("torch._dynamo:config",),
        "get_scheduling_for_device": ("torch._inductor.codegen.common:get_scheduling_for_device",),
        "has_triton": ("torch.utils._triton:has_triton",),
        "inductor_config": ("torch._inductor:config",),
        "init_backend_registration": ("torch._inductor.codegen.common:init_backend_registration",),
        "is_gpu": ("torch._inductor.utils:is_gpu",),
        "param_group": ("torch.distributed.fsdp._fully_shard:_fsdp_param_group",),
        "runtime_utils": ("torch.distributed.fsdp:_runtime_utils",),
    },
)
