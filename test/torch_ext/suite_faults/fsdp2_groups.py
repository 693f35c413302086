"""Mistakes that FSDP2 could contain in what groups modules, meshes and communication in ways of the user's own."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import TRAINED, fault
from test.torch_ext.suite_faults.fsdp2_rooms import COMM, INIT, MODULE, PARAM, STATE, SUITE, of_group, of_param

__all__ = ["MISTAKES"]

_GROUPS = f"{SUITE}module_groups:TestFullyShardModuleGroups."
_COLLECTIVES = f"{SUITE}custom_comms:TestFullyShardCustomCollectives."
_SEPARATE = f"{SUITE}custom_comms:TestFullyShardSeparateReduceScatterGroup."
_BUFFERS = f"{SUITE}custom_comms:TestFullyShardReduceScatterBuffers.test_set_reduce_scatter_max_input_buffers"

_PER_PARAM = f"{SUITE}meshes:TestFullyShardPerParamMesh."
_ALL = f"{SUITE}meshes:TestFullyShardMeshOfAllDimensions."

_HOOKS = "torch.distributed.fsdp._fully_shard._fsdp_state:_register_group_forward_hooks"
_FREED = _GROUPS + "test_parameters_of_a_group_are_freed_after_its_last_module"
_CHUNKS = _GROUPS + "test_loss_in_chunks"
_SOME = _GROUPS + "test_only_some_modules_of_a_group_run"
_SEPARATED = _SEPARATE + "test_set_separate_reduce_scatter_group"

MISTAKES = {
    "fully_shard_group_never_freed_after_forward": fault(
        _HOOKS,
        "return post_hook(hook_module, input, output)",
        "return cast_output_dtype(output)",
        _FREED,
        "after first and after second",
    ),
    "fully_shard_group_freed_after_its_first_module": fault(
        _HOOKS, "modules_to_run.remove(module)", "modules_to_run.clear()", _FREED, "after first and after second"
    ),
    "fully_shard_group_casts_outputs_of_its_last_module_alone": fault(
        _HOOKS,
        "return cast_output_dtype(output)",
        "return output",
        _GROUPS + "test_inputs_and_outputs_of_all_modules_are_cast",
        "types of inputs and outputs",
    ),
    "fully_shard_group_casts_inputs_of_its_first_module_alone": fault(
        f"{STATE}._pre_forward",
        "args, kwargs = self._cast_forward_inputs(args, kwargs)",
        "args, kwargs = self._cast_forward_inputs(args, kwargs) if state_first_in_pass else (args, kwargs)",
        _GROUPS + "test_inputs_and_outputs_of_all_modules_are_cast",
        "types of inputs and outputs|same dtype",
    ),
    "fully_shard_tied_parameter_set_on_one_module": fault(
        f"{PARAM}._setattr_on_modules",
        "unsafe_setattr_param(shared_module, shared_param_name, param)",
        "pass",
        _GROUPS + "test_train_parity_with_tied_parameters",
        "mixed torch.Tensor and DTensor|is not",
    ),
    "fully_shard_partial_group_not_completed": fault(
        f"{STATE}._force_complete_incomplete_states",
        "if state is self or not state._modules_to_run_forward:",
        "if True:",
        _SOME,
        "in check_sharded_parity",
    ),
    "fully_shard_partial_group_remembers_who_ran": fault(
        f"{STATE}._root_post_backward_final_callback",
        "state._modules_to_run_forward.clear()",
        "pass",
        _CHUNKS,
        "step|after backward",
    ),
    "fully_shard_set_custom_all_gather_ignored": fault(
        f"{MODULE}.set_custom_all_gather",
        "fsdp_param_group._all_gather_comm = comm",
        "pass",
        _COLLECTIVES + "test_set_custom_all_gather",
        "elements gathered",
    ),
    "fully_shard_custom_all_gather_buffer_not_asked_for": fault(
        f"{COMM}:foreach_all_gather",
        "all_gather_comm.allocate(",
        "DefaultAllGather().allocate(",
        _COLLECTIVES + "test_set_custom_all_gather",
        "elements allocated",
    ),
    "fully_shard_set_custom_reduce_scatter_ignored": fault(
        f"{MODULE}.set_custom_reduce_scatter",
        "fsdp_param_group._reduce_scatter_comm = comm",
        "pass",
        _COLLECTIVES + "test_set_custom_reduce_scatter",
        "elements reduced",
    ),
    "fully_shard_custom_reduce_scatter_input_not_asked_for": fault(
        f"{COMM}:foreach_reduce",
        "reduce_scatter_input = reduce_scatter_comm.allocate(",
        "reduce_scatter_input = DefaultReduceScatter().allocate(",
        _COLLECTIVES + "test_set_custom_reduce_scatter",
        "elements allocated",
    ),
    "fully_shard_allocation_from_the_group_ignored": of_group(
        "set_allocate_memory_from_process_group",
        "ProcessGroupAllocAllGather(self._all_gather_process_group)",
        "DefaultAllGather()",
        _COLLECTIVES + "test_set_allocate_memory_from_process_group_for_comm",
        "DefaultAllGather",
    ),
    "fully_shard_allocation_from_the_group_replaces_custom_collectives": of_group(
        "set_allocate_memory_from_process_group",
        "(DefaultReduceScatter | ProcessGroupAllocReduceScatter),",
        "object,",
        _COLLECTIVES + "test_allocation_from_the_group_and_custom_collectives_exclude_each_other",
        "AssertionError not raised",
    ),
    "fully_shard_separate_group_for_every_module": of_group(
        "_set_separate_reduce_scatter_group",
        "if ranks not in new_groups:",
        "if mesh_info.reduce_scatter_process_group is None:",
        _SEPARATED,
        "number of groups of reduce-scatters",
    ),
    "fully_shard_separate_group_made_again": of_group(
        "_set_separate_reduce_scatter_group", "if existing is not None:", "if False:", _SEPARATED, "asked for again"
    ),
    "fully_shard_separate_group_not_reset": of_group(
        "_set_separate_reduce_scatter_group",
        "mesh_info.reduce_scatter_process_group = None",
        "pass",
        _SEPARATED,
        "reset",
    ),
    "fully_shard_separate_group_of_all_modules": fault(
        f"{MODULE}.set_separate_reduce_scatter_group",
        "modules = list(self_module.modules()) if recurse else [self_module]",
        "modules = list(fully_shard.state(self_module)._state_ctx.all_states[0]._modules[0].modules())",
        _SEPARATE + "test_a_separate_group_of_one_module",
        "reduced in a group apart|IndexError",
    ),
    "fully_shard_separate_group_gathers_too": of_group(
        "unshard",
        "self._all_gather_process_group,",
        "self._reduce_scatter_process_group,",
        _SEPARATED,
        "groups of all-gathers",
    ),
    "fully_shard_one_input_buffer_too_many": of_group(
        "post_backward",
        "and len(states) >= max_input_buffers",
        "and len(states) > max_input_buffers",
        _BUFFERS,
        "kept when the next begins",
    ),
    "fully_shard_input_buffers_by_the_smallest_wish": fault(
        f"{STATE}._init_shared_state",
        "self._comm_ctx.reduce_scatter_max_input_buffers = max(",
        "self._comm_ctx.reduce_scatter_max_input_buffers = min(",
        _BUFFERS,
        "kept when the next begins",
    ),
    "fully_shard_input_buffers_kept_after_backward": fault(
        f"{STATE}._root_post_backward_final_callback",
        "self._comm_ctx.reduce_scatter_states.clear()",
        "pass",
        _BUFFERS,
        f"kept (after backward|when the next begins)|{TRAINED}",
    ),
    "fully_shard_two_objects_for_one_mesh": fault(
        f"{INIT}:_init_param_group",
        "if existing_mesh_info is not param_mesh_info:",
        "if False:",
        _PER_PARAM + "test_one_group_has_one_mesh",
        "ValueError not raised",
    ),
    "fully_shard_custom_collective_for_several_groups": fault(
        f"{MODULE}.set_custom_reduce_scatter",
        "if len(state._fsdp_param_groups) > 1:",
        "if False:",
        _PER_PARAM + "test_custom_collectives_are_refused",
        "ValueError not raised",
    ),
    "fully_shard_second_group_not_finished": fault(
        f"{STATE}._root_post_backward_final_callback",
        "for fsdp_param_group in reversed(state._fsdp_param_groups):",
        "for fsdp_param_group in state._fsdp_param_groups[:1]:",
        _PER_PARAM + "test_train_parity",
        "gradient of|NoneType",
    ),
    "fully_shard_second_group_not_gathered": fault(
        f"{STATE}._pre_forward",
        "args, kwargs = fsdp_param_group.pre_forward(module, args, kwargs)",
        "args, kwargs = self._fsdp_param_groups[0].pre_forward(module, args, kwargs)",
        _PER_PARAM + "test_train_parity",
        "mixed torch.Tensor and DTensor",
    ),
    "fully_shard_shards_of_a_dimension_not_interleaved": of_param(
        "_init_sharding_spec_spmd",
        "sf *= spmd_mesh.size(j)",
        "pass",
        _ALL + "test_tensor_parallelism",
        r"Tensor-likes are not close(.|\n)*gradient",
    ),
    "fully_shard_gradient_averaged_twice_over_data": of_param(
        "_get_grad_inner_tensor",
        "if self.mesh_info.is_spmd_mesh:",
        "if False:",
        _ALL + "test_tensor_parallelism",
        r"\n\W*gradient\n",
    ),
    "fully_shard_parameter_may_be_sharded_over_data": of_param(
        "_init_sharding_spec_spmd",
        "if not isinstance(orig_placements[idx], Replicate):",
        "if False:",
        _ALL + "test_what_cannot_work_is_refused",
        "not raised",
    ),
    "fully_shard_mesh_not_compared": of_param(
        "_init_sharding_spec_spmd",
        "and spmd_mesh is not self.mesh_info.spmd_mesh",
        "and False",
        _ALL + "test_what_cannot_work_is_refused",
        "not raised",
    ),
}
