"""Mistakes that the suites at upstream's paths must notice too, and some that only they do."""

from __future__ import annotations

from dataclasses import replace

from test.torch_ext.suite_faults import fsdp1, fsdp2
from test.torch_ext.suite_faults.fault import Fault, fault

__all__ = ["MISTAKES"]

_STATE_DICT = "fsdp.test_fsdp_state_dict:TestFSDPStateDict."
_STATE_DETAILS = "fsdp.test_fsdp_state_dict_details:TestFSDPStateDictDetails."
_OPTIM = "fsdp.test_fsdp_optim_state:TestFSDPOptimState."
_OPTIM_RESHARDING = "fsdp.test_fsdp_optim_state:TestFSDPOptimStateResharding."
_EXTENSIONS = "_composable.fsdp.test_fully_shard_extensions:TestFullyShardAllGatherExtensionsMultiThread."


def _again(mistake: Fault, noticed_by: str, says: str) -> Fault:
    return replace(mistake, noticed_by=noticed_by, says=says)


MISTAKES = {
    "key_prefix_left_in_a_full_state_dict": _again(
        fsdp1.MISTAKES["key_prefix_left_in"],
        _STATE_DICT + "test_fsdp_state_dict_keys_state_dict_type_state_dict",
        "in _test_fsdp_state_dict_keys|in test_fsdp_state_dict_keys",
    ),
    "full_state_dict_loaded_on_rank_0_only": _again(
        fsdp1.MISTAKES["state_loaded_on_rank_0_only"],
        _STATE_DICT + "test_state_dict_save_load_flow_state_dict_type_state_dict",
        "in _test_state_dict_save_load_flow",
    ),
    "buffers_of_a_state_dict_in_low_precision": _again(
        fsdp1.MISTAKES["buffer_saved_in_low_precision"],
        _STATE_DICT + "test_buffers_save_and_load_state_dict_state_dict_type_state_dict_mixed_precision_True",
        "torch.float16 != torch.float32",
    ),
    "saved_state_is_no_copy": fault(
        "torch.distributed.fsdp._state_dict_utils:_full_post_state_dict_hook",
        "state_dict[fqn].detach().clone()",
        "state_dict[fqn].detach()",
        _STATE_DETAILS + "test_state_dict_does_not_change_with_the_model",
        # What is shown of a parameter that was not copied lies in memory that was given back.
        "SIGSEGV|in test_state_dict_does_not_change_with_the_model",
    ),
    "optimizer_states_of_two_parameters_swapped": _again(
        fsdp1.MISTAKES["optimizer_state_of_the_wrong_parameter"],
        _OPTIM + "test_optim_state_dict_nested_state_dict_type0_use_multiple_param_groups_False",
        "in _check_same_state",
    ),
    "resumes_with_optimizer_state_in_the_wrong_elements": _again(
        fsdp1.MISTAKES["optimizer_state_loaded_into_the_wrong_elements"],
        _OPTIM_RESHARDING + "test_training_resumes_in_a_smaller_world",
        "in .*test_training_resumes_in_a_smaller_world",
    ),
    "metadata_of_two_extensions_swapped": _again(
        fsdp2.MISTAKES["fully_shard_extension_metadata_swapped"],
        _EXTENSIONS + "test_metadata_belongs_to_its_weight",
        "was given the metadata of",
    ),
}
