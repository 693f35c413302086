"""Mistakes that FSDP1 could contain in laying out flat parameters, and over tensor parallelism."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import Fault, fault

__all__ = ["MISTAKES"]

_HANDLE = "torch.distributed.fsdp._flat_param:FlatParamHandle"
_EXTENSION = "torch.distributed.tensor.parallel.fsdp"

_FLAT = "fsdp.test_fsdp_flatten_params:TestFlattenParams."
_TENSOR_PARALLEL = "fsdp.test_fsdp_tp_integration:TestTPFSDPIntegration."


def _layout(function: str, old: str, new: str, test: str, says: str) -> Fault:
    return fault(f"{_HANDLE}.{function}", old, new, _FLAT + test, says)


def _both(module: str, old: str, new: str, test: str, says: str, device: str = "cpu") -> Fault:
    return fault(module, old, new, _TENSOR_PARALLEL + test, says, device)


MISTAKES = {
    "shared_parameter_flattened_twice": _layout(
        "_init_flat_param_and_metadata",
        "if param in shared_param_memo:",
        "if False:",
        "test_numel_with_shared_params",
        r"Expected 31 but got 47(.|\n)*elements",
    ),
    "shared_parameter_without_its_first_module": _layout(
        "_init_flat_param_and_metadata",
        "shared_param_memo[param] = (submodule, submodule_name, param_name)",
        'shared_param_memo[param] = (submodule, "", param_name)',
        "test_numel_with_shared_params",
        "shared parameters",
    ),
    "parameters_not_asked_for_flattened": _layout(
        "_init_flat_param_and_metadata",
        "if param not in params_set:",
        "if param.numel() not in {each.numel() for each in params_set}:",
        "test_partial_flattening",
        "names left",
    ),
    "alignment_in_bytes": fault(
        "torch.distributed.fsdp._flat_param:_get_aligned_numel",
        "ALIGNMENT // unsharded_dtype_size",
        "ALIGNMENT",
        f"{_FLAT}test_flat_param_shard_metadata_aligned_full_precision",
        "elements with padding",
    ),
    "alignment_of_single_precision": fault(
        "torch.distributed.fsdp._flat_param:_get_dtype_size",
        "torch.empty((), dtype=dtype).element_size()",
        "4",
        f"{_FLAT}test_flat_param_shard_metadata_aligned_mixed_precision",
        "elements with padding",
    ),
    "not_padded_to_the_world": _layout(
        "_init_flat_param_and_metadata",
        "numel_to_pad = self.world_size - (total_numel % self.world_size)",
        "numel_to_pad = 0",
        "test_numel_without_shared_params",
        "elements with padding",
    ),
    "padding_is_never_of_the_last": _layout(
        "_get_shard_metadata",
        "min(unsharded_param_end_idx, unsharded_end_idx)",
        "unsharded_param_end_idx",
        "test_flat_param_shard_metadata_unaligned",
        "elements held of each",
    ),
    "parameter_that_ends_with_the_shard_not_held": _layout(
        "_get_shard_metadata",
        "unsharded_start_idx <= unsharded_param_end_idx",
        "unsharded_start_idx < unsharded_param_start_idx + 1",
        "test_flat_param_shard_metadata_unaligned",
        "elements held of each",
    ),
    "offset_in_the_parameter_taken_for_that_in_the_shard": _layout(
        "_get_shard_metadata",
        "offset_in_shard = 0",
        "offset_in_shard = intra_param_start_idx",
        "test_flat_param_shard_metadata_unaligned",
        "shard of b.weight",
    ),
    "shard_metadata_names_what_is_not_held": _layout(
        "shard_metadata",
        "if not shard_param_info.in_shard:",
        "if False:",
        "test_flat_param_shard_metadata_unaligned",
        "elements held of each",
    ),
    "views_without_strides": _layout(
        "_get_unflat_views_unaligned",
        "if contiguous\n",
        "if True\n",
        "test_output_with_strides",
        "(output|strides of weight)",
    ),
    "aligned_views_without_strides": _layout(
        "_get_unflat_views_aligned",
        "if flat_param._contiguities[idx]",
        "if True",
        "test_output_with_strides",
        "(output|strides of weight)",
    ),
    "aligned_views_into_padding": _layout(
        "_get_unflat_views_aligned",
        "if is_padding:",
        "if is_padding and idx > len(flat_param._shapes):",
        "test_output_without_shared_params",
        "shape '.*' is invalid for input|output",
    ),
    "several_types_flattened": _layout(
        "_validate_tensors_to_flatten",
        "if dtype is not None and tensor.dtype != dtype:",
        "if False:",
        "test_parameters_that_cannot_be_flattened",
        "uniform dtype .*not raised",
    ),
    "frozen_and_trained_flattened": _layout(
        "_validate_tensors_to_flatten",
        "not self._use_orig_params\n",
        "self._use_orig_params\n",
        "test_parameters_that_cannot_be_flattened",
        "uniform `requires_grad`.*not raised",
    ),
    "nothing_flattened_in_silence": _layout(
        "_init_flat_param_and_metadata",
        "if len(params_to_flatten) == 0:",
        "if False:",
        "test_flatten_nothing",
        "params. were not found",
    ),
    "unchanged_parameters_written_back": _layout(
        "_writeback_orig_params",
        "or not _same_storage(param, flat_param_tensor)",
        "or True",
        "test_writeback_orig_params_no_shard",
        "nothing has changed, but something was written back",
    ),
    "new_memory_of_a_parameter_unnoticed": _layout(
        "_writeback_orig_params",
        "or not _same_storage(param, flat_param_tensor)",
        "or False",
        "test_writeback_orig_params_no_shard",
        "new memory was not noticed",
    ),
    "tensor_parallel_part_taken_for_replicated": _both(
        f"{_EXTENSION}:_chunk_dtensor",
        "shard_placements[-1] = tp_placement",
        "shard_placements[-1] = Replicate()",
        "test_fsdp_tp_integration",
        "placements of a.weight",
    ),
    "tensor_parallel_parts_all_sharded_by_rows": _both(
        f"{_EXTENSION}:_chunk_dtensor",
        "tp_placement = tp_placements[0]",
        "tp_placement = DShard(0)",
        "test_fsdp_tp_integration",
        "placements of b.weight",
    ),
    "tensor_parallel_ranks_averaged": _both(
        "torch.distributed.fsdp._init_utils:_init_process_group_state",
        "data_parallel_world_size = state.world_size",
        "data_parallel_world_size = dist.get_world_size()",
        "test_fsdp_tp_extension_grad",
        "gradient of (a|b|c).(weight|bias)",
    ),
    "tensor_parallel_states_of_the_first_rank_of_all": _both(
        "torch.distributed.fsdp._init_utils:_sync_module_params_and_buffers",
        "    _sync_params_and_buffers(\n        process_group,\n",
        "    _sync_params_and_buffers(\n        dist.group.WORLD,\n",
        "test_fsdp_tp_sync_module_state",
        r"\n\W*parameters\n",
        device="sim",
    ),
    "tensor_parallel_states_not_synchronized": _both(
        "torch.distributed.fsdp._init_utils:_sync_module_params_and_buffers",
        "                match getattr(detached_param, attr):\n                    case torch.Tensor() as v:\n"
        "                        module_states.append(v)",
        "                match getattr(detached_param, attr):\n                    case torch.Tensor() as v:\n"
        "                        pass",
        "test_fsdp_tp_sync_module_state",
        r"\n\W*parameters\n",
        device="sim",
    ),
    "tensor_parallel_state_gathered_over_all": _both(
        f"{_EXTENSION}:_all_gather_dtensor",
        "for i in range(len(placements) - 1):",
        "for i in range(len(placements)):",
        "test_sharded_state_dict_is_loaded",
        "loaded parameters: |size of tensor|shape|numel",
    ),
}
