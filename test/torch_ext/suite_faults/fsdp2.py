"""Mistakes that FSDP2 could contain."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import BEFORE, TRAINED, fault

__all__ = ["MISTAKES"]

_COMM = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

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

MISTAKES = {
    "fully_shard_reduce_scatter_skipped": fault(
        f"{_COMM}:foreach_reduce",
        "            reduce_scatter_comm(\n                output_tensor=",
        "            (lambda output_tensor, input_tensor, group, op: output_tensor.copy_(\n"
        "                input_tensor[: output_tensor.numel()]))(\n                output_tensor=",
        _TRAINING_2,
        TRAINED,
    ),
    "fully_shard_divides_by_shards_only": fault(
        f"{_COMM}:_get_gradient_divide_factors",
        "data_parallel_size *= all_reduce_group.size()",
        "pass",
        _TRAINING_2,
        rf"{TRAINED}(.|\n)*sizes=\((2, 2|4, 1)\)",
    ),
    "fully_shard_all_reduce_skipped": fault(
        f"{_COMM}:foreach_reduce",
        "                dist.all_reduce(\n",
        "                (lambda *args, **kwargs: None)(\n",
        _STEPS_2 + "test_hybrid",
        "-   all-reduce shard of second",
    ),
    "fully_shard_reduced_gradient_overwritten": fault(
        f"{_COMM}:foreach_reduce",
        "fsdp_param.sharded_param.grad._local_tensor += new_sharded_grad",
        "fsdp_param.sharded_param.grad._local_tensor.copy_(new_sharded_grad)",
        _TRAINING_2,
        f"{TRAINED}(.|\n)*accumulate='(un)?reduced'",
    ),
    "fully_shard_gradient_at_the_wrong_offset": fault(
        f"{_COMM}:foreach_reduce",
        "flat_grad_offset += padded_sharded_numel",
        "flat_grad_offset += new_sharded_grad.numel()",
        _TRAINING_2,
        TRAINED,
    ),
    "fully_shard_unreduced_gradient_lost": fault(
        f"{_GROUP}:FSDPParamGroup.post_backward",
        "fsdp_param.to_accumulated_grad_if_needed()",
        "fsdp_param._unsharded_param.grad = None",
        _TRAINING_2,
        f"{TRAINED}(.|\n)*accumulate='unreduced'",
    ),
    "fully_shard_gradient_sync_flag_ignored": fault(
        f"{_GROUP}:FSDPParamGroup.post_backward",
        "if not self.reduce_grads:",
        "if False:",
        _STEPS_2 + "test_no_gradient_sync",
        r"\+   reduce-scatter second",
    ),
    "fully_shard_no_reshard_after_forward": fault(
        f"{_GROUP}:FSDPParamGroup.reshard",
        "if not self._reshard_after_forward:",
        "if True:",
        _STEPS_2 + "test_reshard_after_forward",
        "-   all-gather second",
    ),
    "fully_shard_prefetches_the_wrong_unit": fault(
        f"{_GROUP}:FSDPParamGroup._backward_prefetch",
        "target = self.comm_ctx.post_forward_order[curr_index - 1]\n",
        "target = self.comm_ctx.post_forward_order[0]\n",
        _STEPS_2 + "test_reshard_after_forward",
        r"[-+]   all-gather (first|second)",
    ),
    "fully_shard_stale_after_step": fault(
        f"{_GROUP}:FSDPParamGroup.reshard",
        "self._to_sharded()",
        "pass",
        _TRAINING_2,
        f"{TRAINED}|no attribute 'full_tensor'",
    ),
    "fully_shard_stale_after_load": fault(
        f"{_PARAM}.reset_sharded_param",
        "    if not same_local_tensor:\n",
        "    if False:\n",
        _STATE_2 + "test_assigned_state_is_what_the_next_forward_uses",
        "assertEqual.model.rows., reference.rows.",
    ),
    "fully_shard_off_by_one": fault(
        f"{_PARAM}._init_sharded_param",
        "sharded_param = chunks[shard_rank]",
        "sharded_param = chunks[shard_rank].roll(1, 0)",
        _TRAINING_2,
        BEFORE,
    ),
    "fully_shard_smaller_mesh_swapped": fault(
        f"{_PARAM}.to_sharded_post_forward",
        "sharded_numel * shard_rank",
        "sharded_numel * (shard_world_size - 1 - shard_rank)",
        _TRAINING_2,
        f"{TRAINED}(.|\n)*reshard_after_forward=2",
    ),
    "fully_shard_extension_metadata_swapped": fault(
        f"{_PARAM}._init_extensions",
        "self._extensions_data = ExtensionsData()",
        'self._extensions_data = globals().setdefault("_shared", ExtensionsData())',
        _PADDING_2,
        "got the metadata of one of size",
    ),
    "fully_shard_reduced_in_the_wrong_type": fault(
        f"{_PARAM}.init_dtype_attrs",
        "self.reduce_dtype = reduce_dtype",
        "self.reduce_dtype = param_dtype",
        _STATE_2 + "test_types_of_a_step",
        r"\+ reduce-scatter: torch.bfloat16",
    ),
    "fully_shard_shared_parameter_forgotten": fault(
        f"{_GROUP}:_get_param_module_infos",
        "param_to_module_info[param].shared_modules.append(submodule)",
        "continue",
        _STATE_2 + "test_shared_parameter_is_sharded_once",
        "cannot modify FQNs",
    ),
}
