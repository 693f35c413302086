"""Private names of ``torch.distributed.fsdp``, of its foundations, and of the Inductor that compiles it.

``runtime_utils`` and ``param_group`` are whole modules because helpers patch their globals: a function imported from
them would not be the one that FSDP calls.
"""

from __future__ import annotations

from typing import Any

from torch_ext.compat import lazy_names


def replicating_group(module: Any) -> Any:
    """Return the process group whose ranks hold equal shards of an FSDP1 module; None if each rank has its own."""
    from torch.distributed.fsdp import ShardingStrategy

    whole = module.sharding_strategy is ShardingStrategy.NO_SHARD
    return module.process_group if whole else getattr(module, "_inter_node_pg", None)


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
