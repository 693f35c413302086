"""Mistakes that FSDP1 could contain."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import BEFORE, TRAINED, fault

__all__ = ["MISTAKES"]

_RUNTIME = "torch.distributed.fsdp._runtime_utils"
_HANDLE = "torch.distributed.fsdp._flat_param:FlatParamHandle"
_SUMMON = "torch.distributed.fsdp._unshard_param_utils"
_STATE = "torch.distributed.fsdp._state_dict_utils"
_OPTIM = "torch.distributed.fsdp._optim_utils"
_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel"
_SCALER = "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler"

_TRAINING_1 = "fsdp.test_fsdp_properties:TestTrainingProperties.test_sharded_training_equals_unsharded"
_NORM_1 = "fsdp.test_fsdp_properties:TestTrainingProperties.test_gradient_norm_is_that_of_all_shards"
_FULL_STATE_1 = "fsdp.test_fsdp_properties:TestStateDictProperties.test_full_state_dict_fits_any_world_size"
_CHECKPOINT_1 = "fsdp.test_fsdp_properties:TestStateDictProperties.test_sharded_checkpoint_fits_any_world_size"
_OPTIM_STATE_1 = "fsdp.test_fsdp_properties:TestStateDictProperties.test_optimizer_state_fits_any_world_size"
_STEPS_1 = "fsdp.test_fsdp_anatomy:TestSteps."
_TYPES_1 = "fsdp.test_fsdp_anatomy:TestMixedPrecision.test_types_of_a_step"
_SHARED_1 = "fsdp.test_fsdp_anatomy:TestStructure.test_shared_parameter_is_sharded_once"
_LAYOUT_1 = "fsdp.test_fsdp_anatomy:TestStructure.test_layout"
_OVERFLOW_1 = "fsdp.test_fsdp_anatomy:TestGradScaler.test_overflow_in_one_shard_skips_the_step_on_all_ranks"
_UNSHARD_1 = "fsdp.test_fsdp_unshard_params:TestUnshardParams."
_INPUT_1 = "fsdp.test_fsdp_input:TestInput.test_input_type_keywords"


MISTAKES = {
    "reduce_scatter_skipped": fault(
        f"{_RUNTIME}:_reduce_grad",
        "dist.reduce_scatter_single(\n            new_sharded_grad,\n            padded_unsharded_grad,\n"
        "            group=pg,\n        )",
        "new_sharded_grad.copy_(padded_unsharded_grad[: new_sharded_grad.numel()])",
        _TRAINING_1,
        TRAINED,
    ),
    "wrong_divisor": fault(f"{_RUNTIME}:_div_if_needed", "div_factor > 1", "div_factor > 2", _TRAINING_1, TRAINED),
    "gradient_of_the_wrong_rank": fault(
        f"{_RUNTIME}:_reduce_grad",
        "            padded_unsharded_grad,\n            group=pg,",
        "            padded_unsharded_grad.roll(new_sharded_grad.numel()),\n            group=pg,",
        _TRAINING_1,
        TRAINED,
    ),
    "all_reduce_skipped_in_hybrid_sharding": fault(
        f"{_RUNTIME}:_reduce_grad",
        "dist.all_reduce(new_sharded_grad, group=state._inter_node_pg)",
        "pass",
        _STEPS_1 + "test_hybrid_shard",
        "-   all-reduce shard of second",
    ),
    "replicas_not_averaged_in_hybrid_sharding": fault(
        f"{_RUNTIME}:_reduce_grad",
        "dist.all_reduce(new_sharded_grad, group=state._inter_node_pg)",
        "dist.all_reduce(new_sharded_grad.clone(), group=state._inter_node_pg)",
        _TRAINING_1,
        f"{TRAINED}(.|\n)*HYBRID_SHARD",
    ),
    "shard_off_by_one": fault(
        f"{_HANDLE}._get_unpadded_shard", "chunk = chunks[rank]", "chunk = chunks[rank].roll(1)", _TRAINING_1, BEFORE
    ),
    "writeback_dropped": fault(
        f"{_SUMMON}:_unshard_fsdp_state_params",
        "if writeback:\n",
        "if False:\n",
        _UNSHARD_1 + "test_unshard_params_writeback",
        "in the subtest with writeback=True",
    ),
    "reduced_gradient_overwritten": fault(
        f"{_RUNTIME}:_accumulate_sharded_grad",
        "flat_param._saved_grad_shard += sharded_grad",
        "flat_param._saved_grad_shard = sharded_grad",
        _TRAINING_1,
        f"{TRAINED}(.|\n)*accumulate='(un)?reduced'",
    ),
    "unreduced_gradient_lost": fault(
        f"{_RUNTIME}:_post_backward_hook",
        "        if not state._sync_gradients:",
        "        if not state._sync_gradients:\n            flat_param.grad.zero_()",
        _TRAINING_1,
        f"{TRAINED}(.|\n)*accumulate='unreduced'",
    ),
    "no_sync_ignored": fault(
        f"{_RUNTIME}:_post_backward_hook",
        "if not state._sync_gradients:",
        "if False:",
        _STEPS_1 + "test_no_sync",
        r"\+   reduce-scatter second",
    ),
    "no_reshard_after_forward": fault(
        f"{_RUNTIME}:_post_forward",
        "reshard_fn(state, handle)",
        "pass",
        _STEPS_1 + "test_full_shard",
        "-   all-gather second",
    ),
    "backward_prefetch_too_late": fault(
        f"{_RUNTIME}:_get_handle_to_prefetch",
        "state.backward_prefetch == BackwardPrefetch.BACKWARD_PRE",
        "state.backward_prefetch == BackwardPrefetch.BACKWARD_POST",
        _STEPS_1 + "test_full_shard",
        "all-gather second\n(.*\n)?.*backward second",
    ),
    "forward_prefetch_ignored": fault(
        f"{_RUNTIME}:_get_handle_to_prefetch",
        "training_state == HandleTrainingState.FORWARD and state.forward_prefetch",
        "False",
        _STEPS_1 + "test_full_shard_with_forward_prefetch",
        "all-gather second",
    ),
    "key_prefix_left_in": fault(
        f"{_STATE}:_full_post_state_dict_hook",
        "return _common_unshard_post_state_dict_hook(\n"
        "        module, fsdp_state, state_dict, prefix, param_hook\n    )",
        "saved = _common_unshard_post_state_dict_hook(module, fsdp_state, state_dict, prefix, param_hook)\n"
        "    if prefix:\n        _replace_by_prefix(saved, prefix, prefix + FSDP_PREFIX)\n    return saved",
        _FULL_STATE_1,
        "Additional keys in the actual mapping: .*_fsdp_wrapped_module",
    ),
    "state_loaded_on_rank_0_only": fault(
        f"{_STATE}:_full_pre_load_state_dict_hook",
        "writeback=True",
        "writeback=fsdp_state.rank == 0",
        _FULL_STATE_1,
        "loaded parameters",
    ),
    "rows_misplaced_by_a_checkpoint": fault(
        f"{_STATE}:_sharded_pre_load_state_dict_hook",
        "state_dict[fqn_from_global_root] = local_tensor",
        "state_dict[fqn_from_global_root] = local_tensor.roll(1, 0)",
        _CHECKPOINT_1,
        "loaded parameters",
    ),
    "optimizer_state_of_the_wrong_parameter": fault(
        f"{_OPTIM}:_unflatten_communicated_optim_state",
        "    return unflat_param_state",
        "    return unflat_param_state[::-1]",
        _OPTIM_STATE_1,
        "saved optimizer state",
    ),
    "optimizer_state_loaded_into_the_wrong_elements": fault(
        f"{_OPTIM}:_flatten_tensor_optim_state",
        "flat_tensor = handle.flatten_tensors(tensors_to_flatten, handle._aligned_numel)",
        "flat_tensor = handle.flatten_tensors(tensors_to_flatten, handle._aligned_numel).roll(1)",
        _OPTIM_STATE_1,
        "loaded optimizer state",
    ),
    "buffer_cast_lost": fault(
        f"{_RUNTIME}:_cast_buffers_to_dtype_and_device",
        "buffer.to(device=device, dtype=buffer_dtype)",
        "buffer.to(device=device)",
        _TYPES_1,
        r"\+ buffer: torch.float32",
    ),
    "input_cast_to_the_wrong_type": fault(
        f"{_RUNTIME}:_root_cast_forward_input",
        "state.mixed_precision.param_dtype",
        "state.mixed_precision.buffer_dtype",
        _TYPES_1,
        "Half",
    ),
    "reduced_in_the_wrong_type": fault(
        f"{_RUNTIME}:_post_backward_hook",
        "flat_param.grad.to(handle._reduce_dtype)",
        "flat_param.grad.to(handle._fwd_bwd_param_dtype)",
        _TYPES_1,
        r"\+ reduce-scatter: torch.bfloat16",
    ),
    "buffer_saved_in_low_precision": fault(
        f"{_STATE}:_common_unshard_post_state_dict_hook",
        "if mixed_precision_enabled_for_buffers:",
        "if False:",
        _TYPES_1,
        r"\+ saved buffer: torch.float16",
    ),
    "overflow_of_a_peer_ignored": fault(
        f"{_SCALER}.unscale_",
        'for found_inf in optimizer_state["found_inf_per_device"].values():',
        "for found_inf in ():",
        _OVERFLOW_1,
        "assertEqual.get_full_params.model., before",
    ),
    "shared_parameter_sharded_twice": fault(
        f"{_HANDLE}._init_flat_param_and_metadata",
        "if param in shared_param_memo:",
        "if False:",
        _SHARED_1,
        "elements in all shards of a shared weight",
    ),
    "offset_of_a_parameter_in_its_shard": fault(
        f"{_HANDLE}._get_shard_metadata",
        "numel_in_shard = intra_param_end_idx - intra_param_start_idx + 1",
        "numel_in_shard = intra_param_end_idx - intra_param_start_idx",
        _LAYOUT_1,
        r"\+ _fsdp_wrapped_module.0.weight: \(5,\)",
    ),
    "gradients_gathered_in_the_wrong_place": fault(
        f"{_HANDLE}.unshard_grad",
        "dist.all_gather_single(padded_unsharded_grad, sharded_grad, self.process_group)",
        "dist.all_gather_single(padded_unsharded_grad, sharded_grad.roll(1), self.process_group)",
        _UNSHARD_1 + "test_with_grads_core",
        "in _check_params_and_grads",
    ),
    "recursion_not_stopped": fault(
        f"{_SUMMON}:_unshard_params",
        "if not recurse:",
        "if False:",
        _UNSHARD_1 + "test_unshard_params_recurse",
        "in the subtest with recurse=False",
    ),
    "keywords_swapped": fault(
        f"{_RUNTIME}:_root_pre_forward",
        "kwargs = kwargs_tuple[0] if kwargs_tuple else {}",
        "kwargs = dict(zip(kwargs_tuple[0], reversed(kwargs_tuple[0].values()))) if kwargs_tuple else {}",
        _INPUT_1,
        "gradients of the inputs",
    ),
    "padding_not_cleared": fault(
        f"{_RUNTIME}:_get_reduce_scatter_tensors",
        "F.pad(unsharded_grad, [0, numel_to_pad])",
        "F.pad(unsharded_grad, [0, numel_to_pad], value=1.0)",
        _NORM_1,
        "norm of all gradients",
    ),
    "norm_of_the_own_shard": fault(
        f"{_FSDP}.clip_grad_norm_",
        "dist.all_reduce(total_norm, group=self.process_group)",
        "pass",
        _NORM_1,
        "norm of all gradients",
    ),
}
