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


_CORE = "fsdp.test_fsdp_core:"
_PRECISION = "fsdp.test_fsdp_mixed_precision:TestFSDPMixedPrecisionSharded."
_ACCUMULATION = "fsdp.test_fsdp_grad_acc:TestGradAcc."
_FULLY_SHARD = "_composable.fsdp.test_fully_shard_"
_TRAINING_CORE = f"{_FULLY_SHARD}training:TestFullyShard1DTrainingCore."
_COMM = f"{_FULLY_SHARD}comm:TestFullyShard"
_MEMORY = f"{_FULLY_SHARD}memory:TestFullyShardMemory."

_RUNTIME = "torch.distributed.fsdp._runtime_utils"
_REDUCE = "torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce"


def _again(mistake: Fault, noticed_by: str, says: str, device: str = "cpu") -> Fault:
    return replace(mistake, noticed_by=noticed_by, says=says, device=device)


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
    "gradient_divided_twice": fault(
        f"{_RUNTIME}:_reduce_grad",
        "        _div_if_needed(padded_unsharded_grad, state._gradient_predivide_factor)\n",
        "        _div_if_needed(padded_unsharded_grad, state._gradient_predivide_factor ** 2)\n",
        _CORE + "TestParityWithDDP.test_single_iteration_and_moving_after_wrapping",
        "in _compare",
    ),
    "offloaded_gradient_is_what_was_sent": fault(
        f"{_RUNTIME}:_reduce_grad",
        "    grad_to_offload = _accumulate_sharded_grad(state, handle, new_sharded_grad)\n"
        "    _post_reduce_grad_callback(state, handle, grad_to_offload)",
        "    _accumulate_sharded_grad(state, handle, new_sharded_grad)\n"
        "    sent = padded_unsharded_grad.chunk(state.world_size)[handle.rank]\n"
        "    _post_reduce_grad_callback(state, handle, sent)",
        _CORE + "TestParityWithDDP.test_delays",
        "in _compare(.|\n)*offload_params=True",
        device="sim",
    ),
    "scaled_gradients_given_to_the_optimizer": fault(
        "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler.unscale_",
        "inv_scale = self._scale.double().reciprocal().float()",
        "inv_scale = torch.ones_like(self._scale)",
        _CORE + "TestParityWithEmptyShards.test_sharded_grad_scaler_acts_as_one",
        "assertEqual.before - after",
    ),
    "overflow_unknown_to_ranks_without_shards": _again(
        fsdp1.MISTAKES["overflow_of_a_peer_ignored"],
        _CORE + "TestParityWithEmptyShards.test_sharded_grad_scaler_acts_as_one",
        "assertEqual.scaler.get_scale",
    ),
    "output_hook_registered_twice": fault(
        f"{_RUNTIME}:_register_pre_backward_hooks",
        "            t.register_hook(\n",
        "            t.register_hook(lambda gradient: gradient)\n            t.register_hook(\n",
        _CORE + "TestHooks.test_output_has_one_hook_before_backward_saved_as0",
        "hooks of the output after forward",
    ),
    "post_backward_hook_not_registered": fault(
        f"{_RUNTIME}:_pre_forward",
        "        _register_post_backward_hook(state, handle)\n",
        "        pass\n",
        _CORE + "TestHooks.test_forward_registers_hooks_of_every_module_device_init_mode0_mixed_precision0",
        "in test_forward_registers_hooks_of_every_module",
    ),
    "low_precision_shard_not_freed": fault(
        "torch.distributed.fsdp._flat_param:FlatParamHandle._free_low_precision_sharded_param",
        "_free_storage(self.flat_param._mp_shard)",
        "pass",
        _PRECISION + "test_mixed_precision_e2e_all_half",
        "bytes held by a shard in low precision",
    ),
    "reduce_type_ignored": _again(
        fsdp1.MISTAKES["reduced_in_the_wrong_type"],
        _PRECISION + "test_mixed_precision_e2e_reduce_only",
        "types of what is reduced",
    ),
    "gradient_sync_within_no_sync": _again(
        fsdp1.MISTAKES["no_sync_ignored"],
        _ACCUMULATION + "test_whole_gradients_are_kept_by_no_sync_alone",
        "gradients within no_sync",
    ),
    "accumulated_gradient_overwritten": _again(
        fsdp1.MISTAKES["reduced_gradient_overwritten"],
        _ACCUMULATION + "test_grad_acc_prefetch",
        "in _test_grad_acc",
    ),
    "fully_shard_gradient_divided_twice": fault(
        _REDUCE,
        "reduce_output = _to_dtype_if_needed(reduce_output, orig_dtype)",
        "reduce_output = _to_dtype_if_needed(reduce_output / world_size, orig_dtype)",
        _TRAINING_CORE + "test_list_of_modules_is_one_group",
        r"Tensor-likes are not close(.|\n)*weight\.grad",
    ),
    "fully_shard_prefetched_parameter_is_stale": _again(
        fsdp2.MISTAKES["fully_shard_stale_after_step"],
        _TRAINING_CORE + "test_explicit_prefetching_of_modules_out_of_order",
        "not a DTensor: its module is unsharded|loss of step 1",
    ),
    "fully_shard_offloaded_gradient_is_what_was_sent": fault(
        _REDUCE,
        "new_sharded_grad = new_sharded_grad.to(\n",
        "new_sharded_grad = reduce_scatter_input[: new_sharded_grad.numel()].view_as(new_sharded_grad).to(\n",
        _TRAINING_CORE + "test_train_parity_multi_group_cpu_offload",
        r"Tensor-likes are not close(.|\n)*weight\.grad",
        device="sim",
    ),
    "fully_shard_replicas_drift": _again(
        fsdp2.MISTAKES["fully_shard_all_reduce_skipped"],
        f"{_FULLY_SHARD}training:TestFullyShardHSDPTraining.test_replicas_stay_equal",
        "in test_replicas_stay_equal",
    ),
    "fully_shard_gathers_once_more": fault(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.reshard",
        "if not self._reshard_after_forward:",
        "if False:",
        _COMM + "Communication.test_fully_shard_communication_count",
        r"Expected 3 but got 6(.|\n)*False",
    ),
    "fully_shard_wrong_unit_prefetched": _again(
        fsdp2.MISTAKES["fully_shard_prefetches_the_wrong_unit"],
        _COMM + "Prefetch.test_order_without_prefetch_settings",
        "'gather last, gather first, ",
    ),
    "fully_shard_reduce_type_ignored": _again(
        fsdp2.MISTAKES["fully_shard_reduced_in_the_wrong_type"],
        _COMM + "CollectiveOps.test_types_on_the_wire",
        "reduce_dtype=torch.bfloat16",
    ),
    "fully_shard_reshard_after_forward_ignored": _again(
        fsdp2.MISTAKES["fully_shard_no_reshard_after_forward"],
        _MEMORY + "test_training_step_reshard_after_forward_True",
        "peak of forward",
        device="sim",
    ),
    "fully_shard_resharding_frees_nothing": fault(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_sharded",
        "    self.free_unsharded_param()\n",
        "",
        _MEMORY + "test_unshard_and_reshard",
        "after a forward: 9.00 layers are held, expected 3.00",
        device="sim",
    ),
    "compiled_module_runs_eagerly": fault(
        "torch.nn.modules.module:Module.compile",
        "self._compiled_call_impl = torch.compile(self._call_impl, *args, **kwargs)",
        "self._compiled_call_impl = self._call_impl",
        f"{_FULLY_SHARD}compile:TestFullyShardCompileCompute.test_only_modules_of_a_class_are_compiled",
        "0 not greater than 0",
    ),
}
