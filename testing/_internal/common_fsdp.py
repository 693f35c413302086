"""FSDP test helpers, device-neutral: models, patches, parity checks and test cases under upstream's names.

``DEVICE_TYPE``, ``DEVICE_COUNT`` and ``DISTRIBUTED_BACKEND`` are asked of :mod:`torch_ext.accelerator` when they are
read, never at import. A test file may assign them here; everything behind this module then obeys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_ext.testing._internal._fsdp import device as _device
from torch_ext.testing._internal._fsdp.cases import FSDPTest, FSDPTestContinuous, FSDPTestMixin, FSDPTestMultiThread
from torch_ext.testing._internal._fsdp.compiled import compiled_fsdp_test, test_compiled_fsdp
from torch_ext.testing._internal._fsdp.device import get_devtype, rank_device
from torch_ext.testing._internal._fsdp.models.base import (
    DummyDDP,
    DummyProcessGroup,
    FSDPTestModel,
    _maybe_cuda,
    _maybe_wrap_fsdp,
    _move_to_device,
)
from torch_ext.testing._internal._fsdp.models.delay import ModuleWithDelay, NestedWrappedModuleWithDelay
from torch_ext.testing._internal._fsdp.models.experts import MixtureOfExperts
from torch_ext.testing._internal._fsdp.models.mlp import MLP, DoubleLinear, MLPStack
from torch_ext.testing._internal._fsdp.models.nested import (
    AlwaysWrapNestedWrappedModule,
    NestedWrappedModule,
    NonUniformReqGradNWM,
)
from torch_ext.testing._internal._fsdp.models.skip import NestedLinear, SkipModel, SkipModule
from torch_ext.testing._internal._fsdp.models.transformer import TransformerWithSharedParams
from torch_ext.testing._internal._fsdp.modes import CUDAInitMode, DEVICEInitMode, FSDPInitMode
from torch_ext.testing._internal._fsdp.parity import check_sharded_parity, reduce_scatter_with_assert
from torch_ext.testing._internal._fsdp.patches import (
    patch_all_gather,
    patch_all_reduce,
    patch_foreach_all_gather,
    patch_foreach_reduce,
    patch_post_backward,
    patch_reduce_scatter,
    patch_register_post_backward_hook_backward,
    patch_reshard,
    patch_unshard,
)
from torch_ext.testing._internal._fsdp.state import (
    _assert_module_states,
    _broadcast_state_dict,
    _get_state_dict,
    _zero_model,
    get_full_params,
    subtest_name,
)
from torch_ext.testing._internal._fsdp.subcases import leave_out_parameter_offload, leave_out_without_accelerator

if TYPE_CHECKING:
    DEVICE_TYPE: str
    DEVICE_COUNT: int
    DISTRIBUTED_BACKEND: str

__all__ = [
    "DEVICE_COUNT",
    "DEVICE_TYPE",
    "DISTRIBUTED_BACKEND",
    "MLP",
    "AlwaysWrapNestedWrappedModule",
    "CUDAInitMode",
    "DEVICEInitMode",
    "DoubleLinear",
    "DummyDDP",
    "DummyProcessGroup",
    "FSDPInitMode",
    "FSDPTest",
    "FSDPTestContinuous",
    "FSDPTestMixin",
    "FSDPTestModel",
    "FSDPTestMultiThread",
    "MLPStack",
    "MixtureOfExperts",
    "ModuleWithDelay",
    "NestedLinear",
    "NestedWrappedModule",
    "NestedWrappedModuleWithDelay",
    "NonUniformReqGradNWM",
    "SkipModel",
    "SkipModule",
    "TransformerWithSharedParams",
    "_assert_module_states",
    "_broadcast_state_dict",
    "_get_state_dict",
    "_maybe_cuda",
    "_maybe_wrap_fsdp",
    "_move_to_device",
    "_zero_model",
    "check_sharded_parity",
    "compiled_fsdp_test",
    "get_devtype",
    "get_full_params",
    "leave_out_parameter_offload",
    "leave_out_without_accelerator",
    "patch_all_gather",
    "patch_all_reduce",
    "patch_foreach_all_gather",
    "patch_foreach_reduce",
    "patch_post_backward",
    "patch_reduce_scatter",
    "patch_register_post_backward_hook_backward",
    "patch_reshard",
    "patch_unshard",
    "rank_device",
    "reduce_scatter_with_assert",
    "subtest_name",
    "test_compiled_fsdp",
]


def __getattr__(name: str) -> Any:
    if name in _device.DEFAULTS:
        return _device.DEFAULTS[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
