"""Mistakes that FSDP could contain, and the tests of the suites that must notice them.

Each is a change of a line or two of torch's own code, of the kind that a patch to FSDP may bring by accident.
"""

from __future__ import annotations

from dataclasses import dataclass

from test.torch_ext.suite_faults.mutation import Edit

__all__ = ["FAULTS", "Fault", "inject"]

# FSDP1
_RUNTIME = "torch.distributed.fsdp._runtime_utils"
_HANDLE = "torch.distributed.fsdp._flat_param:FlatParamHandle"
_SUMMON = "torch.distributed.fsdp._unshard_param_utils"
_STATE = "torch.distributed.fsdp._state_dict_utils"
_OPTIM = "torch.distributed.fsdp._optim_utils"
_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel"
_SCALER = "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler"
# FSDP2
_COMM = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

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

_TRAINING_2 = (
    "_composable.fsdp.test_fully_shard_properties:TestTrainingProperties.test_sharded_training_equals_unsharded"
)
_FULL_STATE_2 = (
    "_composable.fsdp.test_fully_shard_properties:TestStateDictProperties.test_full_state_dict_fits_any_world_size"
)
_PADDING_2 = (
    "_composable.fsdp.test_fully_shard_properties:TestExtensionProperties.test_padding_of_an_extension_never_shows"
)
_STEPS_2 = "_composable.fsdp.test_fully_shard_anatomy:TestSteps."
_STATE_2 = "_composable.fsdp.test_fully_shard_anatomy:TestState."

# What the properties say of a training that went wrong.
_BEFORE, _TRAINED = "parameters before training", "(losses of sharded|parameters after) training"


@dataclass(frozen=True)
class Fault:
    """A mistake.

    Attributes:
        edits: what it changes in torch.
        noticed_by: the test that fails for it: module below ``test.distributed``, class and method.
        says: what the report of that failure contains, a regular expression.
    """

    edits: tuple[Edit, ...]
    noticed_by: str
    says: str


def _fault(function: str, old: str, new: str, noticed_by: str, says: str) -> Fault:
    return Fault((Edit(function, old, new),), noticed_by, says)


_OF_FSDP1 = {
    "reduce_scatter_skipped": _fault(
        f"{_RUNTIME}:_reduce_grad",
        "dist.reduce_scatter_single(\n            new_sharded_grad,\n            padded_unsharded_grad,\n"
        "            group=pg,\n        )",
        "new_sharded_grad.copy_(padded_unsharded_grad[: new_sharded_grad.numel()])",
        _TRAINING_1,
        _TRAINED,
    ),
    "wrong_divisor": _fault(f"{_RUNTIME}:_div_if_needed", "div_factor > 1", "div_factor > 2", _TRAINING_1, _TRAINED),
    "gradient_of_the_wrong_rank": _fault(
        f"{_RUNTIME}:_reduce_grad",
        "            padded_unsharded_grad,\n            group=pg,",
        "            padded_unsharded_grad.roll(new_sharded_grad.numel()),\n            group=pg,",
        _TRAINING_1,
        _TRAINED,
    ),
    "all_reduce_skipped_in_hybrid_sharding": _fault(
        f"{_RUNTIME}:_reduce_grad",
        "dist.all_reduce(new_sharded_grad, group=state._inter_node_pg)",
        "pass",
        _STEPS_1 + "test_hybrid_shard",
        "-   all-reduce shard of second",
    ),
    "replicas_not_averaged_in_hybrid_sharding": _fault(
        f"{_RUNTIME}:_reduce_grad",
        "dist.all_reduce(new_sharded_grad, group=state._inter_node_pg)",
        "dist.all_reduce(new_sharded_grad.clone(), group=state._inter_node_pg)",
        _TRAINING_1,
        f"{_TRAINED}(.|\n)*HYBRID_SHARD",
    ),
    "shard_off_by_one": _fault(
        f"{_HANDLE}._get_unpadded_shard", "chunk = chunks[rank]", "chunk = chunks[rank].roll(1)", _TRAINING_1, _BEFORE
    ),
    "writeback_dropped": _fault(
        f"{_SUMMON}:_unshard_fsdp_state_params",
        "if writeback:\n",
        "if False:\n",
        _UNSHARD_1 + "test_unshard_params_writeback",
        "in _check_writeback|writeback",
    ),
    "reduced_gradient_overwritten": _fault(
        f"{_RUNTIME}:_accumulate_sharded_grad",
        "flat_param._saved_grad_shard += sharded_grad",
        "flat_param._saved_grad_shard = sharded_grad",
        _TRAINING_1,
        f"{_TRAINED}(.|\n)*accumulate='(un)?reduced'",
    ),
    "unreduced_gradient_lost": _fault(
        f"{_RUNTIME}:_post_backward_hook",
        "        if not state._sync_gradients:",
        "        if not state._sync_gradients:\n            flat_param.grad.zero_()",
        _TRAINING_1,
        f"{_TRAINED}(.|\n)*accumulate='unreduced'",
    ),
    "no_sync_ignored": _fault(
        f"{_RUNTIME}:_post_backward_hook",
        "if not state._sync_gradients:",
        "if False:",
        _STEPS_1 + "test_no_sync",
        r"\+   reduce-scatter second",
    ),
    "no_reshard_after_forward": _fault(
        f"{_RUNTIME}:_post_forward",
        "reshard_fn(state, handle)",
        "pass",
        _STEPS_1 + "test_full_shard",
        "-   all-gather second",
    ),
    "backward_prefetch_too_late": _fault(
        f"{_RUNTIME}:_get_handle_to_prefetch",
        "state.backward_prefetch == BackwardPrefetch.BACKWARD_PRE",
        "state.backward_prefetch == BackwardPrefetch.BACKWARD_POST",
        _STEPS_1 + "test_full_shard",
        "all-gather second\n(.*\n)?.*backward second",
    ),
    "forward_prefetch_ignored": _fault(
        f"{_RUNTIME}:_get_handle_to_prefetch",
        "training_state == HandleTrainingState.FORWARD and state.forward_prefetch",
        "False",
        _STEPS_1 + "test_full_shard_with_forward_prefetch",
        "all-gather second",
    ),
    "key_prefix_left_in": _fault(
        f"{_STATE}:_common_unshard_post_state_dict_hook",
        '_replace_by_prefix(state_dict, prefix + f"{FSDP_PREFIX}", prefix)',
        "pass",
        _FULL_STATE_1,
        "_fsdp_wrapped_module",
    ),
    "state_loaded_on_rank_0_only": _fault(
        f"{_STATE}:_full_pre_load_state_dict_hook",
        "writeback=True",
        "writeback=fsdp_state.rank == 0",
        _FULL_STATE_1,
        "loaded parameters",
    ),
    "rows_misplaced_by_a_checkpoint": _fault(
        f"{_STATE}:_sharded_pre_load_state_dict_hook",
        "state_dict[fqn_from_global_root] = local_tensor",
        "state_dict[fqn_from_global_root] = local_tensor.roll(1, 0)",
        _CHECKPOINT_1,
        "loaded parameters",
    ),
    "optimizer_state_of_the_wrong_parameter": _fault(
        f"{_OPTIM}:_unflatten_communicated_optim_state",
        "    return unflat_param_state",
        "    return unflat_param_state[::-1]",
        _OPTIM_STATE_1,
        "saved optimizer state",
    ),
    "optimizer_state_loaded_into_the_wrong_elements": _fault(
        f"{_OPTIM}:_flatten_tensor_optim_state",
        "flat_tensor = handle.flatten_tensors(tensors_to_flatten, handle._aligned_numel)",
        "flat_tensor = handle.flatten_tensors(tensors_to_flatten, handle._aligned_numel).roll(1)",
        _OPTIM_STATE_1,
        "loaded optimizer state",
    ),
    "buffer_cast_lost": _fault(
        f"{_RUNTIME}:_cast_buffers_to_dtype_and_device",
        "buffer.to(device=device, dtype=buffer_dtype)",
        "buffer.to(device=device)",
        _TYPES_1,
        r"\+ buffer: torch.float32",
    ),
    "input_cast_to_the_wrong_type": _fault(
        f"{_RUNTIME}:_root_cast_forward_input",
        "state.mixed_precision.param_dtype",
        "state.mixed_precision.buffer_dtype",
        _TYPES_1,
        "dtype",
    ),
    "reduced_in_the_wrong_type": _fault(
        f"{_RUNTIME}:_post_backward_hook",
        "flat_param.grad.to(handle._reduce_dtype)",
        "flat_param.grad.to(handle._fwd_bwd_param_dtype)",
        _TYPES_1,
        r"\+ reduce-scatter: torch.bfloat16",
    ),
    "buffer_saved_in_low_precision": _fault(
        f"{_STATE}:_common_unshard_post_state_dict_hook",
        "if mixed_precision_enabled_for_buffers:",
        "if False:",
        _TYPES_1,
        r"\+ saved buffer: torch.float16",
    ),
    "overflow_of_a_peer_ignored": _fault(
        f"{_SCALER}.unscale_",
        'for found_inf in optimizer_state["found_inf_per_device"].values():',
        "for found_inf in ():",
        _OVERFLOW_1,
        "in test_overflow",
    ),
    "shared_parameter_sharded_twice": _fault(
        f"{_HANDLE}._init_flat_param_and_metadata",
        "if param in shared_param_memo:",
        "if False:",
        _SHARED_1,
        "elements in all shards of a shared weight",
    ),
    "offset_of_a_parameter_in_its_shard": _fault(
        f"{_HANDLE}._get_shard_metadata",
        "numel_in_shard = intra_param_end_idx - intra_param_start_idx + 1",
        "numel_in_shard = intra_param_end_idx - intra_param_start_idx",
        _LAYOUT_1,
        r"\+ _fsdp_wrapped_module.0.weight: \(5,\)",
    ),
    "gradients_not_gathered": _fault(
        f"{_SUMMON}:_unshard_fsdp_state_params",
        "    if with_grads:\n        _unshard_grads(handle)",
        "    pass",
        _UNSHARD_1 + "test_with_grads_core",
        "grad",
    ),
    "recursion_not_stopped": _fault(
        f"{_SUMMON}:_unshard_params",
        "if not recurse:",
        "if False:",
        _UNSHARD_1 + "test_unshard_params_recurse",
        "recurse",
    ),
    "keywords_swapped": _fault(
        f"{_RUNTIME}:_root_pre_forward",
        "kwargs = kwargs_tuple[0] if kwargs_tuple else {}",
        "kwargs = dict(zip(kwargs_tuple[0], reversed(kwargs_tuple[0].values()))) if kwargs_tuple else {}",
        _INPUT_1,
        "in test_input_type",
    ),
    "padding_not_cleared": _fault(
        f"{_RUNTIME}:_get_reduce_scatter_tensors",
        "F.pad(unsharded_grad, [0, numel_to_pad])",
        "F.pad(unsharded_grad, [0, numel_to_pad], value=1.0)",
        _NORM_1,
        "norm of all gradients",
    ),
    "norm_of_the_own_shard": _fault(
        f"{_FSDP}.clip_grad_norm_",
        "dist.all_reduce(total_norm, group=self.process_group)",
        "pass",
        _NORM_1,
        "norm of all gradients",
    ),
}

_OF_FSDP2 = {
    "fully_shard_reduce_scatter_skipped": _fault(
        f"{_COMM}:foreach_reduce",
        "            reduce_scatter_comm(\n                output_tensor=",
        "            (lambda output_tensor, input_tensor, group, op: output_tensor.copy_(\n"
        "                input_tensor[: output_tensor.numel()]))(\n                output_tensor=",
        _TRAINING_2,
        _TRAINED,
    ),
    "fully_shard_divides_by_shards_only": _fault(
        f"{_COMM}:_get_gradient_divide_factors",
        "data_parallel_size *= all_reduce_group.size()",
        "pass",
        _TRAINING_2,
        rf"{_TRAINED}(.|\n)*sizes=\((2, 2|4, 1)\)",
    ),
    "fully_shard_all_reduce_skipped": _fault(
        f"{_COMM}:foreach_reduce",
        "                dist.all_reduce(\n",
        "                (lambda *args, **kwargs: None)(\n",
        _STEPS_2 + "test_hybrid",
        "-   all-reduce shard of second",
    ),
    "fully_shard_reduced_gradient_overwritten": _fault(
        f"{_COMM}:foreach_reduce",
        "fsdp_param.sharded_param.grad._local_tensor += new_sharded_grad",
        "fsdp_param.sharded_param.grad._local_tensor.copy_(new_sharded_grad)",
        _TRAINING_2,
        f"{_TRAINED}(.|\n)*accumulate='(un)?reduced'",
    ),
    "fully_shard_gradient_at_the_wrong_offset": _fault(
        f"{_COMM}:foreach_reduce",
        "flat_grad_offset += padded_sharded_numel",
        "flat_grad_offset += new_sharded_grad.numel()",
        _TRAINING_2,
        _TRAINED,
    ),
    "fully_shard_unreduced_gradient_lost": _fault(
        f"{_GROUP}:FSDPParamGroup.post_backward",
        "fsdp_param.to_accumulated_grad_if_needed()",
        "fsdp_param._unsharded_param.grad = None",
        _TRAINING_2,
        f"{_TRAINED}(.|\n)*accumulate='unreduced'",
    ),
    "fully_shard_gradient_sync_flag_ignored": _fault(
        f"{_GROUP}:FSDPParamGroup.post_backward",
        "if not self.reduce_grads:",
        "if False:",
        _STEPS_2 + "test_no_gradient_sync",
        r"\+   reduce-scatter second",
    ),
    "fully_shard_no_reshard_after_forward": _fault(
        f"{_GROUP}:FSDPParamGroup.reshard",
        "if not self._reshard_after_forward:",
        "if True:",
        _STEPS_2 + "test_reshard_after_forward",
        "-   all-gather second",
    ),
    "fully_shard_prefetches_the_wrong_unit": _fault(
        f"{_GROUP}:FSDPParamGroup._backward_prefetch",
        "target = self.comm_ctx.post_forward_order[curr_index - 1]\n",
        "target = self.comm_ctx.post_forward_order[0]\n",
        _STEPS_2 + "test_reshard_after_forward",
        r"[-+]   all-gather (first|second)",
    ),
    "fully_shard_stale_after_step": _fault(
        f"{_GROUP}:FSDPParamGroup.reshard",
        "self._to_sharded()",
        "pass",
        _TRAINING_2,
        f"{_TRAINED}|no attribute 'full_tensor'",
    ),
    "fully_shard_stale_after_load": _fault(
        f"{_GROUP}:FSDPParamGroup._register_state_dict_hooks",
        "self._to_sharded()",
        "pass",
        _STATE_2 + "test_load_reaches_parameters_that_are_still_gathered",
        "in test_load_reaches",
    ),
    "fully_shard_off_by_one": _fault(
        f"{_PARAM}._init_sharded_param",
        "sharded_param = chunks[shard_rank]",
        "sharded_param = chunks[shard_rank].roll(1, 0)",
        _TRAINING_2,
        _BEFORE,
    ),
    "fully_shard_smaller_mesh_swapped": _fault(
        f"{_PARAM}.to_sharded_post_forward",
        "sharded_numel * shard_rank",
        "sharded_numel * (shard_world_size - 1 - shard_rank)",
        _TRAINING_2,
        f"{_TRAINED}(.|\n)*reshard_after_forward=2",
    ),
    "fully_shard_extension_metadata_swapped": _fault(
        f"{_PARAM}._init_extensions",
        "self._extensions_data = ExtensionsData()",
        'self._extensions_data = globals().setdefault("_shared", ExtensionsData())',
        _PADDING_2,
        "got the metadata of one of size",
    ),
    "fully_shard_reduced_in_the_wrong_type": _fault(
        f"{_PARAM}.init_dtype_attrs",
        "self.reduce_dtype = reduce_dtype",
        "self.reduce_dtype = param_dtype",
        _STATE_2 + "test_types_of_a_step",
        r"\+ reduce-scatter: torch.bfloat16",
    ),
    "fully_shard_shared_parameter_forgotten": _fault(
        f"{_GROUP}:_get_param_module_infos",
        "param_to_module_info[param].shared_modules.append(submodule)",
        "continue",
        _STATE_2 + "test_shared_parameter_is_sharded_once",
        "in test_shared_parameter_is_sharded_once",
    ),
}

FAULTS = {**_OF_FSDP1, **_OF_FSDP2}


def inject(name: str) -> None:
    """Make mistake ``name`` in this process and in all that are forked from it."""
    for edit in FAULTS[name].edits:
        edit.apply()
