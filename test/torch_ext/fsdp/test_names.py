"""Every upstream name exists, and ``common_fsdp`` exports what its modules list."""

import importlib
import pkgutil
from collections import Counter

import pytest

from torch_ext.testing._internal import _fsdp

HELPERS = """
FSDPInitMode: NO_FSDP, RECURSIVE
DEVICEInitMode: DEVICE_BEFORE, DEVICE_AFTER, DEVICE_NEVER
CUDAInitMode: CUDA_BEFORE, CUDA_AFTER, CUDA_NEVER
FSDPTestModel: get_input, get_loss, run_backward, init
_assert_module_states
_zero_model
_get_state_dict
subtest_name
_broadcast_state_dict
get_full_params
get_devtype
DEVICE_TYPE
DEVICE_COUNT
DISTRIBUTED_BACKEND
_move_to_device
_maybe_cuda
_maybe_wrap_fsdp
DummyProcessGroup: rank, size, allreduce
TransformerWithSharedParams: get_input, forward, get_loss, run_backward, init, get_ignored_modules
NestedWrappedModule: get_input, forward, get_loss, run_backward, init
AlwaysWrapNestedWrappedModule: init
NonUniformReqGradNWM: _set_nonuniform_req_grad, init
ModuleWithDelay: get_input, forward, get_loss, run_backward, init
NestedWrappedModuleWithDelay: init
DummyDDP: forward
MixtureOfExperts: forward, run_backward, init
MLP: forward, reset_parameters
MLPStack: parallelize
DoubleLinear: forward
patch_all_gather
patch_reduce_scatter
patch_all_reduce
patch_foreach_all_gather
patch_foreach_reduce
patch_unshard
patch_reshard
patch_post_backward
patch_register_post_backward_hook_backward
reduce_scatter_with_assert
check_sharded_parity
FSDPTestMultiThread: world_size, setUp, run_subtests, perThreadSetUp, perThreadTearDown
FSDPTestMixin: _check_cpu_offload, _check_backward_prefetch, _check_forward_prefetch, run_subtests, _run,\
 _train_for_several_steps, _test_fsdp_parity
FSDPTest: setUp, world_size, process_group, init_method, _check_cpu_offload, _check_backward_prefetch,\
 _check_forward_prefetch, run_subtests, _run, _train_for_several_steps, _test_fsdp_parity
FSDPTestContinuous: world_size, backend_str, device_type, process_group, run_subtests, _train_for_several_steps
compiled_fsdp_test
test_compiled_fsdp
SkipModule: forward
NestedLinear: forward
SkipModel: forward
"""

UNSHARD_PARAMS = """
TestUnshardParamsBase: device, _test_unshard_params_writeback, _get_test_unshard_params_writeback_config,\
 _test_unshard_params_param_data, _get_test_unshard_params_param_data_config
TestUnshardParams: world_size, test_unshard_params_writeback, test_unshard_params_param_data,\
 test_unshard_singleton_param_writeback, test_unshard_params_respects_reshard, _test_unshard_params_respects_reshard,\
 test_unshard_params_recurse, _test_unshard_params_recurse, test_named_parameters_and_buffers,\
 _test_named_parameters_and_buffers, test_with_grads_core, _test_with_grads_core, test_with_grads_none_grads,\
 _test_with_grads_none_grads, test_unshard_submodule
TestUnshardParamsNoShard: world_size, test_unshard_params_writeback_no_shard, test_unshard_params_param_data_no_shard
TestUnshardParamsErrors: world_size, test_unshard_params_from_forward_raises, test_unshard_params_from_backward_raises,\
 test_rank0_only_with_writeback_raises, test_offload_to_cpu_no_shard_raises
"""

STATE_DICT = """
Model: forward
TestDummyModel: forward, get_input
TestFSDPStateDict: world_size, _broadcast_state_dict, _state_compare, _compare_models, _get_simple_nested_model,\
 _get_simple_model, _get_multibuffer_nested_model, _get_non_fsdp_root_module, _get_state_dict_mgr,\
 _validate_state_dict_contents, test_fsdp_state_dict_with_activation_checkpoint,\
 test_state_dict_with_manual_ac_wrapper, test_state_dict_with_shared_parameters,\
 test_state_dict_rank0_offload_save_load_flow, test_basic_save_and_load_state_dict,\
 test_buffers_save_and_load_state_dict, test_save_and_load_after_forward_state_dict, _initialize_model, _state_dict,\
 _load_state_dict, _dist_train, test_state_dict_save_load_flow, _test_state_dict_save_load_flow,\
 test_fsdp_state_dict_keys, test_state_dict_load_into_local_module, test_state_dict_skip_module,\
 test_wrong_state_dict_config, test_state_dict_with_ignored_modules, test_state_dict_type,\
 test_local_state_dict_with_empty_ranks, test_torch_save_load, test_shared_module_and_shared_parameter,\
 test_full_state_dict_missing_unexpected_keys_cleaned, test_sharded_load_multi_backend_pg, test_world_size_one
TestFSDPStateDict4GPUs: world_size, test_local_state_dict_reshard
INNER_SHAPE
OUTER_SHAPE
BUFFER_SHAPE
NON_ROOT_FSDP_PREFIX
_UNFLATTENED_STATE_DICT_IMPLS
_FLATTENED_STATE_DICT_IMPLS
_SUPPORTED_STATE_DICT_IMPLS
STATE_DICT_MAPPING
"""


def parse(text):
    """Return pairs (top-level name, member or None), one for each name in ``text``."""
    for line in text.strip().splitlines():
        owner, _, members = line.partition(":")
        yield owner, None
        yield from ((owner, member.strip()) for member in members.split(",") if member.strip())


def names():
    for module, text in (
        ("torch_ext.testing._internal.common_fsdp", HELPERS),
        ("test.distributed.fsdp.test_fsdp_unshard_params", UNSHARD_PARAMS),
        ("test.distributed.fsdp.test_fsdp_state_dict", STATE_DICT),
    ):
        for owner, member in parse(text):
            yield pytest.param(module, owner, member, id=f"{owner}.{member}" if member else owner)


@pytest.mark.parametrize(("module", "owner", "member"), list(names()))
def test_upstream_name_exists(module, owner, member):
    found = getattr(importlib.import_module(module), owner)
    if member is not None:
        assert hasattr(found, member) or is_parametrized(found, member)


def is_parametrized(owner, member):
    return any(name.startswith(f"{member}_") for name in vars(owner))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("CUDAInitMode", "DEVICEInitMode"),
        ("_maybe_cuda", "_move_to_device"),
        ("test_compiled_fsdp", "compiled_fsdp_test"),
    ],
)
def test_old_name_is_an_alias(old, new):
    common_fsdp = importlib.import_module("torch_ext.testing._internal.common_fsdp")
    assert getattr(common_fsdp, old) is getattr(common_fsdp, new)


def test_old_mode_names_are_the_same_members():
    common_fsdp = importlib.import_module("torch_ext.testing._internal.common_fsdp")
    for moment in ("BEFORE", "AFTER", "NEVER"):
        assert common_fsdp.CUDAInitMode[f"CUDA_{moment}"] is common_fsdp.DEVICEInitMode[f"DEVICE_{moment}"]
    assert len(common_fsdp.DEVICEInitMode) == 3


def exports():
    """Yield ``(module, name)`` of everything that the modules behind ``common_fsdp`` list in ``__all__``."""
    for found in pkgutil.walk_packages(_fsdp.__path__, f"{_fsdp.__name__}."):
        # A package's __init__ lists the names of its modules.
        if not found.name.startswith(f"{_fsdp.__name__}.extensions."):
            module = importlib.import_module(found.name)
            yield from ((module, name) for name in getattr(module, "__all__", ()))


def test_front_door_exports_what_every_module_lists():
    common_fsdp = importlib.import_module("torch_ext.testing._internal.common_fsdp")
    listed = list(exports())
    assert {"FSDPTest", "MLP", "module_trees", "patch_reshard"} <= {name for _, name in listed}
    missing = [name for module, name in listed if vars(common_fsdp).get(name) is not getattr(module, name)]
    assert missing == []


def test_no_two_modules_export_one_name():
    counts = Counter(name for _, name in exports())
    assert {name for name, count in counts.items() if count > 1} == set()


def test_upstreams_names_are_exported():
    # These three are looked up on use, so no module lists them.
    named = {owner for owner, _ in parse(HELPERS)} - {"DEVICE_TYPE", "DEVICE_COUNT", "DISTRIBUTED_BACKEND"}
    assert named - {name for _, name in exports()} == set()


def test_process_cases_share_one_run():
    common_fsdp = importlib.import_module("torch_ext.testing._internal.common_fsdp")
    runs = {
        cls._run.__func__ for cls in (common_fsdp.FSDPTest, common_fsdp.FSDPTestContinuous, common_fsdp.FSDPTestMixin)
    }
    assert len(runs) == 1
