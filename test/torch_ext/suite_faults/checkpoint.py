"""Mistakes that checkpoints could contain: in optimizers' state, in resharding, in saving while training goes on."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import Fault, fault

__all__ = ["MISTAKES"]

_ROOM = "torch.distributed.checkpoint"
_STATE = "checkpoint.test_state_dict:TestStateDict."
_RESHARDING = (
    "checkpoint.test_state_dict:TestDTensorReshardMeshChange.test_dtensor_checkpoint_resharding_with_empty_shard"
)


_SAVED = "checkpoint.test_planner:TestSavePlan."
_LOADED = "checkpoint.test_planner:TestLoadPlan."


def _planner(function: str, old: str, new: str, test: str, says: str) -> Fault:
    return fault(f"{_ROOM}.{function}", old, new, test, says)


def _optimizer(function: str, old: str, new: str, test: str, says: str) -> Fault:
    return fault(f"{_ROOM}.state_dict:{function}", old, new, _STATE + test, says)


MISTAKES = {
    "checkpoint_hyperparameters_of_the_first_group": _optimizer(
        "_split_optim_state_dict",
        "if fqn in cast(list[str], loaded_param_group[_PARAMS]):\n                        pg_mapping"
        "[id(loaded_param_group)] = len(return_osd[_PG]) - 1",
        "if fqn in cast(list[str], loaded_param_group[_PARAMS]):\n                        pg_mapping"
        "[id(loaded_param_group)] = 0",
        "test_multiple_param_groups",
        "loaded: lr of group|KeyError|lr",
    ),
    "checkpoint_flat_state_of_the_last_group": _optimizer(
        "_unflatten_optim_state_dict",
        "cast(list[str], pg_state[-1][_PARAMS])[0]",
        "cast(list[str], pg_state[0][_PARAMS])[0]",
        "test_multiple_param_groups",
        "loaded: lr of group 1",
    ),
    "checkpoint_fresh_state_trains": _optimizer(
        "_init_optim_state",
        "else 0.0\n",
        'else param_group["lr"]\n',
        "test_state_of_a_fresh_optimizer_changes_nothing",
        r"\n\W*parameters\n",
    ),
    "checkpoint_fresh_state_leaves_no_learning_rate": _optimizer(
        "_init_optim_state",
        'param_group["lr"] = lrs.pop(0)',
        "pass",
        "test_state_of_a_fresh_optimizer_changes_nothing",
        r"\n\W*learning rates\n",
    ),
    "checkpoint_fresh_state_leaves_gradients": _optimizer(
        "_init_optim_state",
        "optim.zero_grad(set_to_none=True)",
        "pass",
        "test_state_of_a_fresh_optimizer_changes_nothing",
        r"\n\W*gradients\n",
    ),
    "checkpoint_missing_state_ignored": _optimizer(
        "_split_optim_state_dict",
        "elif info.strict:",
        "elif False:",
        "test_missing_state_is_named",
        "not raised|does not match",
    ),
    "checkpoint_region_of_the_wrong_shard": fault(
        f"{_ROOM}.resharding:_shards_get_overlap_region_wrt_saved_tensor",
        "offset_for_current_tensor = saved_shard_offset - current_shard_offset",
        "offset_for_current_tensor = 0",
        _RESHARDING,
        "loaded uneven",
    ),
    "checkpoint_last_shard_not_read": fault(
        f"{_ROOM}.planner_helpers:create_read_items_for_chunk_list",
        "while saved_ptr < num_saved:",
        "while saved_ptr < num_saved - 1:",
        _RESHARDING,
        "loaded (uneven|even|few|one)",
    ),
    "checkpoint_shards_that_meet_taken_for_none": fault(
        f"{_ROOM}.resharding:_check_shard_metadata_pair_overlap",
        "if shard1.offsets[i] >= shard2.offsets[i] + shard2.sizes[i]:",
        "if shard1.offsets[i] + 1 >= shard2.offsets[i] + shard2.sizes[i]:",
        _RESHARDING,
        "loaded (uneven|even|few|one)",
    ),
    "checkpoint_saved_later_without_a_copy": fault(
        f"{_ROOM}.staging:DefaultStager._stage",
        "state_dict = self._state_dict_stager.stage(state_dict, non_blocking=False)",
        "pass",
        f"{_STATE}test_async_save_keeps_the_moment_of_the_call",
        "saved (0|1).(weight|bias)",
    ),
    "checkpoint_staged_into_the_first_copy": fault(
        f"{_ROOM}._state_dict_stager:StateDictStager._stage_untyped_storage",
        "cached_storage.copy_(storage, non_blocking=non_blocking)",
        "pass",
        f"{_STATE}test_async_save_stages_once_and_again",
        "save 2: saved (0|1).(weight|bias)",
    ),
    "checkpoint_written_before_it_is_staged": fault(
        f"{_ROOM}.staging:DefaultStager.stage",
        "return self._staging_future\n",
        "return state_dict\n",
        f"{_STATE}test_async_save_stages_once_and_again",
        "staging_completion",
    ),
    "checkpoint_error_in_the_background_swallowed": fault(
        f"{_ROOM}._async_thread_executor:save_wrapper",
        "    return save(\n        staged_dict,\n        checkpoint_id=checkpoint_id,\n"
        "        storage_writer=storage_writer,\n        planner=planner,\n        process_group=process_group,\n"
        "        no_dist=no_dist,\n        use_collectives=use_collectives,\n    )",
        "    import contextlib\n    with contextlib.suppress(BaseException):\n        return save(\n"
        "            staged_dict, checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner,\n"
        "            process_group=process_group, no_dist=no_dist, use_collectives=use_collectives)",
        f"{_STATE}test_async_save_that_fails_says_so",
        "CheckpointException not raised",
    ),
    "checkpoint_with_frozen_parameters": _optimizer(
        "_get_model_state_dict",
        "            if param.requires_grad:\n",
        "            if True:\n",
        "test_options_of_the_model_state",
        "without frozen parameters",
    ),
    "checkpoint_offloaded_on_every_rank": _optimizer(
        "_maybe_full_or_cpu_state_dict",
        "if (not info.cpu_offload or not torch.distributed.is_initialized())",
        "if True",
        "test_options_of_the_model_state",
        "names of the full state",
    ),
    "checkpoint_always_strict": _optimizer(
        "_load_model_state_dict",
        "state_dict=state_dict, strict=info.strict, assign=assign",
        "state_dict=state_dict, strict=True, assign=assign",
        "test_options_of_the_model_state",
        "Missing key",
    ),
    "checkpoint_fresh_state_left_out": _optimizer(
        "_get_optim_state_dict",
        "_init_optim_state(optim)",
        "pass",
        "test_state_of_a_fresh_optimizer_changes_nothing",
        "parameters with state",
    ),
    "checkpoint_broadcast_fsdp1_state_wanted_on_every_rank": fault(
        f"{_ROOM}.state_dict:_verify_options",
        "rank0_only=(options.cpu_offload or options.broadcast_from_rank0)",
        "rank0_only=False",
        f"{_STATE}test_full_optimizer_state_of_fsdp1_is_on_rank_0",
        'rank 1 raised ValueError.*must have the keys "state"',
        device="sim",
    ),
    "checkpoint_patched_optimizer_loads_nothing": _optimizer(
        "_patch_optimizer_state_dict",
        "_load_state_dict_call(optim_state_dict=state_dict)",
        "pass",
        "test_patched_state_dicts",
        r"\n\W*loaded\n",
    ),
    "checkpoint_patched_model_loads_nothing": _optimizer(
        "_patch_model_state_dict",
        "_load_state_dict_call(model_state_dict=state_dict)",
        "pass",
        "test_patched_state_dicts",
        r"\n\W*loaded\n",
    ),
    "checkpoint_of_a_submodule_has_all": _optimizer(
        "_get_model_state_dict",
        "if not fqn.startswith(prefix):",
        "if False:",
        "test_state_of_submodules",
        "names, True",
    ),
    "checkpoint_of_a_submodule_keeps_prefixes": _optimizer(
        "_get_model_state_dict",
        "if info.keep_submodule_prefixes:",
        "if True:",
        "test_state_of_submodules",
        "names, False",
    ),
    "checkpoint_replicas_written_by_the_first_rank": _planner(
        "_dedup_save_plans:dedup_save_plans",
        "if save_to_lowest_rank:",
        "if True:",
        f"{_SAVED}test_what_all_ranks_have_is_written_once",
        "ranks that write",
    ),
    "checkpoint_kept_plan_is_never_new": _planner(
        "planner_helpers:_compare_save_plans",
        "if len(plan.items) != len(other_plan.items):",
        "if False:",
        f"{_SAVED}test_plans_are_kept_while_nothing_changes",
        "sends its plan",
    ),
    "checkpoint_kept_plan_of_another_size": _planner(
        "planner_helpers:_compare_save_plans",
        "tensor_data.size != other_tensor_data.size",
        "False",
        f"{_SAVED}test_plans_are_kept_while_nothing_changes",
        "out of bounds chunk: tensor-size",
    ),
    "checkpoint_plan_not_kept": _planner(
        "default_planner:DefaultSavePlanner.finish_plan",
        'if hasattr(self, "_pending_local_plan"):',
        "if False:",
        f"{_SAVED}test_plans_are_kept_while_nothing_changes",
        "sends its plan",
    ),
    "checkpoint_missing_name_passed_over": _planner(
        "default_planner:create_default_local_load_plan",
        "if strict:",
        "if False:",
        f"{_LOADED}test_partial_load",
        "CheckpointException not raised",
    ),
    "checkpoint_size_not_compared": _planner(
        "default_planner:create_default_local_load_plan",
        "and md.size != obj.size()",
        "and False",
        f"{_LOADED}test_sizes_that_differ_are_named",
        "CheckpointException not raised|Regex",
    ),
}
