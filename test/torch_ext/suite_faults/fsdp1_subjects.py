"""Mistakes that FSDP1 could contain in the subjects that upstream gives a suite each."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import fault

__all__ = ["MISTAKES"]

_HANDLE = "torch.distributed.fsdp._flat_param:FlatParamHandle"
_ORDER = "torch.distributed.fsdp._exec_order_utils:_ExecOrderData"
_TRAVERSAL = "torch.distributed.fsdp._traversal_utils"
_INIT = "torch.distributed.fsdp._init_utils"
_SUMMON = "torch.distributed.fsdp._unshard_param_utils"
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"

_EXEC_ORDER = "fsdp.test_fsdp_exec_order:TestFSDPExecOrder."
_LATER = f"{_EXEC_ORDER}test_invalid_later_iter_order_sharding_strategy0_iters_before_path_change_2"
_FIRST = f"{_EXEC_ORDER}test_invalid_first_iter_order_sharding_strategy0"
_MODULES = "fsdp.test_fsdp_traversal:TestTraversal."
_HYBRID = "fsdp.test_fsdp_hybrid_shard:TestFSDPHybridShard."
_META = "fsdp.test_fsdp_meta:TestFSDPWithMetaDevice."
_HALF = "fsdp.test_fsdp_pure_fp16:TestPureFP16."
_DTENSOR = "fsdp.test_fsdp_dtensor_state_dict:TestFSDPWithDeviceMeshAndDTensor."
_UNEVEN = "fsdp.test_fsdp_uneven:TestUnevenParamShard."
_APPLY = "fsdp.test_fsdp_apply:TestApply."
_FREEZING = "fsdp.test_fsdp_freezing_weights:TestFreezingWeights.test_freezing_weights_freezing_method_"
_PART = "fsdp.test_fsdp_checkpoint:TestFSDPCheckpointSubmodule."

MISTAKES = {
    "order_of_ranks_unchecked": fault(
        f"{_ORDER}._check_order",
        "if i1 != i2:",
        "if False:",
        _FIRST,
        "RuntimeError not raised",
    ),
    "order_of_ranks_reported_the_other_way_round": fault(
        f"{_ORDER}._check_order",
        "r1_param_names = self._get_names_from_handle_indices(i1)",
        "r1_param_names = self._get_names_from_handle_indices(i2)",
        _FIRST,
        "does not match .*Forward order differs across ranks",
    ),
    "order_of_later_steps_unchecked": fault(
        f"{_ORDER}._check_order",
        "if expected_handle != handle:",
        "if False:",
        _LATER,
        "no warning of a step in the order",
    ),
    "order_warned_of_in_every_step": fault(
        f"{_ORDER}.next_iter",
        "self.warn_status = _ExecOrderWarnStatus.WARNED",
        "pass",
        _LATER,
        "warnings of the step after the one that warned",
    ),
    "order_not_begun_anew_in_each_step": fault(
        f"{_ORDER}.next_iter",
        "self.current_order_index = 0",
        "pass",
        _LATER,
        "Regex didn't match: 'Expected to all-gather for",
    ),
    "evaluation_counts_for_the_order": fault(
        f"{_ORDER}._check_order",
        "if not is_training or not self._checking_order:",
        "if not self._checking_order:",
        f"{_EXEC_ORDER}test_train_eval_sharding_strategy0",
        "warnings of training",
    ),
    "shared_module_found_twice": fault(
        f"{_TRAVERSAL}:_get_fsdp_states_with_modules",
        "if optional_state is not None and optional_state not in visited_fsdp_states:",
        "if optional_state is not None:",
        f"{_MODULES}test_fsdp_modules",
        "length of the sequences mismatch: 5 != 4",
    ),
    "modules_found_from_last_to_first": fault(
        f"{_TRAVERSAL}:_get_fsdp_states_with_modules",
        "for child_module in reversed(list(submodule.children())):",
        "for child_module in submodule.children():",
        f"{_MODULES}test_fsdp_modules",
        "String comparison failed: '(last|middle|deep|shared)' != ",
    ),
    "modules_within_modules_not_found": fault(
        f"{_TRAVERSAL}:_get_fsdp_states_with_modules",
        "if child_module not in visited_modules:",
        "if child_module not in visited_modules and _get_module_fsdp_state(submodule) is None:",
        f"{_MODULES}test_fsdp_modules",
        "length of the sequences mismatch",
    ),
    "padding_in_front": fault(
        f"{_HANDLE}._get_shard",
        "F.pad(shard, [0, numel_to_pad])",
        "F.pad(shard, [numel_to_pad, 0])",
        f"{_UNEVEN}test_shards",
        "shard of 7 elements",
    ),
    "rank_beyond_the_end_holds_the_last_part": fault(
        f"{_HANDLE}._get_unpadded_shard",
        "chunk = chunks[0].new_empty(0)",
        "chunk = chunks[-1]",
        f"{_UNEVEN}test_shards",
        "shard of 4 elements|shard of 1 elements",
    ),
    "replicas_at_the_wrong_place_of_their_nodes": fault(
        f"{_INIT}:_init_inter_node_process_group",
        "if local_rank == my_local_rank:",
        "if local_rank == num_devices_per_node - 1 - my_local_rank:",
        f"{_HYBRID}test_groups",
        "ranks that replicate",
    ),
    "replicas_of_the_next_rank": fault(
        f"{_INIT}:_init_inter_node_process_group",
        "local_rank + (i * num_devices_per_node) for i in range(num_nodes)",
        "local_rank * num_nodes + i for i in range(num_nodes)",
        f"{_HYBRID}test_groups",
        "ranks that replicate",
    ),
    "averaged_over_shards_alone": fault(
        f"{_INIT}:_init_process_group_state",
        "data_parallel_world_size *= state._inter_node_pg.size()",
        "pass",
        f"{_HYBRID}test_fsdp_hybrid_shard_parity_sharding_strategy0",
        "parameters after training",
    ),
    "shards_and_replicas_of_a_mesh_swapped": fault(
        f"{_INIT}:_init_process_group_state_for_hybrid_shard",
        "state.process_group = device_mesh.get_group(mesh_dim=1)",
        "state.process_group = device_mesh.get_group(mesh_dim=0)",
        f"{_HYBRID}test_fsdp_hybrid_shard_parity_sharding_strategy0",
        "parameters after training",
    ),
    "states_synchronized_within_nodes_alone": fault(
        f"{_INIT}:_init_param_handle_from_module",
        "fully_sharded_module, managed_params, state._inter_node_pg",
        "fully_sharded_module, [], state._inter_node_pg",
        f"{_HYBRID}test_hsdp_sync_module_state_sharding_strategy0",
        "synchronized parameters",
        device="sim",
    ),
    "buffers_synchronized_across_nodes_alone": fault(
        f"{_INIT}:_init_param_handle_from_module",
        "setattr(buffer, FSDP_SYNCED, False)",
        "pass",
        f"{_HYBRID}test_hsdp_sync_module_state_sharding_strategy0",
        "synchronized buffer",
        device="sim",
    ),
    "mesh_of_one_dimension_accepted": fault(
        f"{_INIT}:_is_valid_hybrid_shard_device_mesh",
        "device_mesh.ndim == 2",
        "device_mesh.ndim <= 2",
        f"{_HYBRID}test_invalid_pg_specification_raises",
        "Expected device_mesh to have ndim=2. not found in",
    ),
    "ignored_modules_are_made": fault(
        f"{_INIT}:_get_modules_to_materialize",
        "and child_module not in ignored_modules",
        "",
        f"{_META}test_simple_model_with_meta_device_default_init",
        "modules that stay on the meta device",
    ),
    "made_without_being_reset": fault(
        f"{_INIT}:_materialize_meta_module",
        "module.reset_parameters()",
        "pass",
        f"{_META}test_nested_model_with_meta_device_default_init_auto_wrap_False",
        "times that each module was reset",
    ),
    "function_of_the_user_ignored": fault(
        f"{_INIT}:_init_param_handle_from_module",
        "if (is_meta_module or is_torchdistX_deferred_init) and param_init_fn is not None:",
        "if is_torchdistX_deferred_init and param_init_fn is not None:",
        f"{_META}test_nested_model_with_meta_device_reset_params_auto_wrap_False",
        "times that the function was called with each",
    ),
    "reduces_in_the_type_before_the_cast": fault(
        f"{_HANDLE}.init_flat_param_attributes",
        "self._reduce_dtype = flat_param.dtype",
        "pass",
        f"{_HALF}test_fp16_dtypes",
        "types of collectives",
    ),
    "state_dict_sharded_by_columns": fault(
        "torch.distributed.fsdp._shard_utils:_create_chunk_dtensor",
        "shard_placements[-1] = DShard(0)",
        "shard_placements[-1] = DShard(tensor.dim() - 1)",
        f"{_DTENSOR}test_dtensor_sharded_tensor_state_dict_identical_offload_to_cpu_False",
        "placements of a.weight",
    ),
    "dtensors_not_used_with_a_mesh": fault(
        "torch.distributed.fsdp._optim_utils:_set_optim_use_dtensor",
        "state_dict_settings.optim_state_dict_config._use_dtensor = True",
        "pass",
        f"{_DTENSOR}test_fsdp_init_with_device_mesh",
        "is no DTensor",
    ),
    "applied_to_a_part_of_a_root": fault(
        "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel._reset_lazy_init",
        "self._is_root: bool | None = None",
        "pass",
        f"{_APPLY}test_apply_to_a_part_makes_it_no_root",
        "apply decided which module is the root",
    ),
    "applied_changes_lost": fault(
        f"{_SUMMON}:_unshard_fsdp_state_params",
        "                if writeback:\n",
        "                if False:\n",
        f"{_APPLY}test_nested_module_apply",
        "parameters after apply",
    ),
    "applied_while_unsharded": fault(
        f"{_SUMMON}:_unshard_params_for_summon",
        "state.training_state = TrainingState.SUMMON_FULL_PARAMS",
        "pass",
        f"{_APPLY}test_apply_in_summon_raises_error",
        "ValueError not raised",
    ),
    "frozen_parameters_trained": fault(
        f"{_HANDLE}._init_flat_param_and_metadata",
        "requires_grad=flat_param_requires_grad,",
        "requires_grad=True,",
        f"{_FREEZING}requires_grad_with_nested_trunk_False",
        "a frozen one got a gradient",
    ),
    "nothing_is_run_again": fault(
        f"{_WRAPPER}:CheckpointWrapper.forward",
        "return self.checkpoint_fn(  # type: ignore[misc]\n            self._checkpoint_wrapped_module, ",
        "return self._checkpoint_wrapped_module(\n            ",
        f"{_PART}test_checkpoint_submodule_use_reentrant_False",
        "tensors saved for backward",
    ),
    "activations_stay_on_the_device": fault(
        f"{_WRAPPER}:OffloadWrapper.forward",
        "with save_on_cpu(pin_memory=True):",
        "if True:",
        f"{_PART}test_offloaded_activations_are_on_the_host",
        "bytes of activations held on the device",
        device="sim",
    ),
}
