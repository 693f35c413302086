"""Mistakes that DDP could contain: in forward, in its context managers and hooks, in low precision."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import Fault, fault
from test.torch_ext.suite_faults.mutation import Edit

__all__ = ["MISTAKES"]

_FILE = "torch.nn.parallel.distributed"
_DDP = f"{_FILE}:DistributedDataParallel"
_JOIN_HOOK = f"{_FILE}:_DDPJoinHook"
_JOIN = "torch.distributed.algorithms.join:Join"
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"

_GRADIENTS = "test_c10d_ddp:TestDDPGradients."
_BUFFERS = "test_c10d_ddp:TestDDPBuffers."
_UNUSED = "test_c10d_ddp_graphs:TestDDPUnusedParameters."
_PRECISION = "test_c10d_ddp_graphs:TestDDPMixedPrecision."
_COMM_HOOKS = "algorithms.ddp_comm_hooks.test_ddp_hooks:DistributedDataParallelCommHookTest."
_UNEVEN = "algorithms.test_join:TestDDPJoin."
_JOINABLES = "algorithms.test_join:TestJoin."


def _ddp(method: str, old: str, new: str, test: str, says: str, device: str = "cpu") -> Fault:
    return fault(f"{_DDP}.{method}", old, new, test, says, device)


MISTAKES = {
    "ddp_no_sync_ignored": _ddp(
        "no_sync",
        "self.require_backward_grad_sync = False",
        "pass",
        _GRADIENTS + "test_no_sync",
        "all-reduces within no_sync",
    ),
    "ddp_no_sync_never_ends": _ddp(
        "no_sync",
        "self.require_backward_grad_sync = old_require_backward_grad_sync",
        "pass",
        _GRADIENTS + "test_no_sync",
        "all-reduces after no_sync",
    ),
    "ddp_inner_no_sync_ends_the_outer": _ddp(
        "no_sync",
        "self.require_backward_grad_sync = old_require_backward_grad_sync",
        "self.require_backward_grad_sync = True",
        _GRADIENTS + "test_no_sync_within_no_sync",
        "all-reduces in the outer no_sync",
    ),
    "ddp_ignored_parameter_reduced": Fault(
        (
            Edit(
                f"{_DDP}._build_params_for_reducer",
                'and f"{module_name}.{param_name}" not in self.parameters_to_ignore',
                "",
            ),
            Edit(
                f"{_DDP}._build_debug_param_to_name_mapping",
                "if fqn not in self.parameters_to_ignore and param.requires_grad:",
                "if param.requires_grad:",
            ),
        ),
        _GRADIENTS + "test_ignored_parameters_stay_local",
        "gradient of 0.weight, which DDP ignores",
    ),
    "ddp_shared_parameter_reduced_twice": _ddp(
        "_build_params_for_reducer",
        "if p not in memo and not memo.add(p)",
        "if True",
        _GRADIENTS + "test_shared_parameter_is_reduced_once",
        "gradient of the shared weight|elements that are reduced|Expected to mark a variable ready only once",
    ),
    "ddp_delayed_gradient_is_a_sum": _ddp(
        "_delayed_all_reduce_hook",
        "self._delay_grad_buffer.div_(world_size)",
        "pass",
        _GRADIENTS + "test_delayed_parameters_are_reduced_at_a_hook",
        "gradient of 0.weight",
    ),
    "ddp_delayed_gradient_accumulates": _ddp(
        "_clear_grad_buffer",
        "self._delay_grad_buffer.zero_()",
        "pass",
        _GRADIENTS + "test_delayed_parameters_are_reduced_at_a_hook",
        "step 1: gradient of 0.weight",
    ),
    "ddp_initial_buffers_not_sent": fault(
        "torch.distributed.utils:_sync_module_states",
        "if broadcast_buffers:",
        "if False:",
        _BUFFERS + "test_initial_state_is_that_of_rank_0",
        "initial buffer",
    ),
    "ddp_initial_state_is_that_of_rank_1": fault(
        "torch.distributed.utils:_sync_params_and_buffers",
        "process_group, module_states, broadcast_bucket_size, src\n",
        "process_group, module_states, broadcast_bucket_size, 1 - src\n",
        _BUFFERS + "test_initial_state_is_that_of_rank_0",
        "initial weight",
    ),
    "ddp_buffers_of_rank_1_sent": _ddp(
        "_sync_buffers",
        "authoritative_rank = 0",
        "authoritative_rank = 1",
        _BUFFERS + "test_buffers_of_rank_0_reach_all_before_forward",
        "buffer in forward",
    ),
    "ddp_reassigned_buffer_not_sent": _ddp(
        "_sync_buffers",
        "self._assign_modules_buffers()",
        "pass",
        _BUFFERS + "test_reassigned_buffer_is_sent",
        "reassigned buffer in forward",
    ),
    "ddp_buffers_sent_though_not_asked_for": _ddp(
        "will_sync_module_buffers",
        "and self.forward_sync_buffers\n",
        "\n",
        _BUFFERS + "test_buffers_stay_local_if_asked",
        "broadcasts in forward",
    ),
    "ddp_buffers_sent_after_no_sync": _ddp(
        "_post_forward",
        "self.require_forward_param_sync = False",
        "pass",
        _BUFFERS + "test_no_sync_saves_the_next_broadcast",
        "broadcasts of four forwards",
    ),
    "ddp_buffers_sent_too_early": _ddp(
        "_check_sync_bufs_pre_fwd",
        "== _BufferCommHookLocation.PRE_FORWARD",
        "!= _BufferCommHookLocation.PRE_FORWARD",
        _BUFFERS + "test_buffer_hook_runs_where_asked",
        "order of hook and forward",
    ),
    "ddp_buffer_hook_never_runs_after_forward": _ddp(
        "_check_sync_bufs_post_fwd",
        "== _BufferCommHookLocation.POST_FORWARD",
        "is None",
        _BUFFERS + "test_buffer_hook_runs_where_asked",
        "order of hook and forward",
    ),
    "ddp_ignored_buffer_sent": _ddp(
        "_assign_modules_buffers",
        "        if buffer_name not in self.parameters_to_ignore\n",
        "",
        _BUFFERS + "test_ignored_buffer_stays_local",
        "ignored buffer",
    ),
    "ddp_unused_parameters_not_looked_for": _ddp(
        "_post_forward",
        "if self.find_unused_parameters and not self.static_graph:\n            # Do not need",
        "if False:\n            # Do not need",
        _UNUSED + "test_branch_that_only_one_rank_takes",
        r"step 0 with \('one',\) in use.*: DDP mistook",
    ),
    "ddp_tensors_in_a_dictionary_not_found": fault(
        f"{_FILE}:_find_tensors",
        "if isinstance(obj, dict):",
        "if False:",
        _UNUSED + "test_outputs_of_every_form",
        "output in a dict: DDP mistook",
    ),
    "ddp_tensors_in_a_dataclass_not_found": fault(
        f"{_FILE}:_find_tensors",
        "if is_dataclass(obj):",
        "if False:",
        _UNUSED + "test_outputs_of_every_form",
        "output in a dataclass: DDP mistook",
    ),
    "ddp_static_graph_reduces_late_in_every_step": fault(
        f"{_FILE}:_DDPSink.backward",
        "ddp_weakref._static_graph_delay_allreduce_enqueued = True",
        "pass",
        _UNUSED + "test_static_graph_finds_unused_parameters_once",
        "step 1: DDP mistook",
    ),
    "ddp_static_graph_not_told_to_the_reducer": _ddp(
        "_set_static_graph",
        "self.reducer._set_static_graph()",
        "pass",
        _UNUSED + "test_static_graph_finds_unused_parameters_once",
        "step [0-9]: (DDP mistook|gradient of)",
    ),
    "ddp_mixed_precision_computes_in_full": _ddp(
        "_root_copy_hook",
        "param.data = param._mp_param",
        "pass",
        _PRECISION + "test_compute_in_low_precision",
        "types in forward|same dtype",
        device="sim",
    ),
    "ddp_mixed_precision_inputs_not_cast": fault(
        "torch.distributed.utils:_cast_forward_inputs",
        "return x.to(dtype)",
        "return x",
        _PRECISION + "test_compute_in_low_precision",
        "same dtype",
        device="sim",
    ),
    "ddp_mixed_precision_gradient_is_a_sum": fault(
        f"{_HOOKS}.mixed_precision_hooks:_reducer_allreduce_and_upcast_hook",
        "bucket.buffer().div_(process_group.size())",
        "pass",
        _PRECISION + "test_compute_in_low_precision",
        "gradient of 0.layer.weight",
        device="sim",
    ),
    "ddp_mixed_precision_reduce_type_ignored": fault(
        f"{_HOOKS}.mixed_precision_hooks:_reducer_allreduce_and_upcast_hook",
        "!= ddp_weakref().mixed_precision.reduce_dtype",
        "is None",
        _PRECISION + "test_compute_in_low_precision",
        "types that are reduced",
        device="sim",
    ),
    "ddp_mixed_precision_parameters_stay_low": fault(
        f"{_HOOKS}.mixed_precision_hooks:_reducer_allreduce_and_upcast_hook",
        "p.data = p._fp_param\n            # free",
        "pass\n            # free",
        _PRECISION + "test_compute_in_low_precision",
        "types of parameters after backward",
        device="sim",
    ),
    "ddp_mixed_precision_buffers_stay_full": fault(
        f"{_FILE}:_cast_buffers",
        "buf.data = buf.to(dtype=mixed_precision_config.buffer_dtype)",
        "pass",
        _PRECISION + "test_compute_in_low_precision",
        "types in forward",
        device="sim",
    ),
    "ddp_mixed_precision_copy_not_waited_for": _ddp(
        "_module_wait_for_copy_hook",
        "event.wait(stream=torch.accelerator.current_stream())",
        "pass",
        _PRECISION + "test_streams_wait_for_low_precision",
        "RaceError(.|\n)*the default stream of sim:[0-9] must wait for",
        device="sim",
    ),
    "ddp_mixed_precision_upcast_not_waited_for": fault(
        f"{_HOOKS}.mixed_precision_hooks:_reducer_allreduce_and_upcast_hook",
        "torch.accelerator.current_stream().wait_stream(stream)",
        "pass",
        _PRECISION + "test_streams_wait_for_low_precision",
        "RaceError(.|\n)*the default stream of sim:[0-9] must wait for",
        device="sim",
    ),
    "ddp_allreduce_hook_sums": fault(
        f"{_HOOKS}.default_hooks:_allreduce_fut",
        "tensor.div_(group_to_use.size())",
        "pass",
        _COMM_HOOKS + "test_ddp_comm_hook_allreduce_hook",
        "gradient of 0.weight",
    ),
    "ddp_fp16_hook_sums": fault(
        f"{_HOOKS}.default_hooks:_compress_hook",
        ".div_(world_size)",
        "",
        _COMM_HOOKS + "test_ddp_comm_hook_fp16compress_hook",
        "gradient of 0.weight",
    ),
    "ddp_fp16_hook_sends_full_precision": fault(
        f"{_HOOKS}.default_hooks:_compress_hook",
        "buffer.to(dtype).div_(world_size)",
        "buffer.clone().div_(world_size)",
        _COMM_HOOKS + "test_ddp_comm_hook_fp16compress_hook",
        "types that are reduced",
    ),
    "ddp_local_sgd_starts_late": fault(
        f"{_HOOKS}.post_localSGD_hook:post_localSGD_hook",
        "if state.iter < state.start_localSGD_iter:",
        "if state.iter <= state.start_localSGD_iter:",
        _COMM_HOOKS + "test_post_local_sgd_averages_over_the_subgroup",
        "step 2: gradient of 0.weight",
    ),
    "ddp_hook_of_wrong_type_accepted": _ddp(
        "_check_comm_hook",
        "and sig.return_annotation != torch.futures.Future[torch.Tensor]",
        "and False",
        _COMM_HOOKS + "test_hooks_that_cannot_work_are_refused",
        "ValueError not raised : for .*wrong_result",
    ),
    "ddp_joined_rank_takes_no_part_in_reductions": fault(
        f"{_JOIN_HOOK}.main_hook",
        "ddp._match_all_reduce_for_bwd_pass()",
        "pass",
        _UNEVEN + "test_ddp_uneven_inputs",
        "hung|differ in collective|Timed out|collective mismatch",
    ),
    "ddp_joined_rank_reads_its_own_flag": _ddp(
        "_check_global_requires_backward_grad_sync",
        "should_sync_backwards = requires_sync_tensor.item() != 0",
        "should_sync_backwards = True",
        _UNEVEN + "test_no_sync_of_ranks_that_go_on",
        "hung|differ in collective",
    ),
    "ddp_final_model_is_that_of_any_rank": _ddp(
        "_sync_final_model",
        "self._distributed_rank, is_last_joiner",
        "self._distributed_rank, True",
        _UNEVEN + "test_final_model_is_that_of_the_last_joiner",
        "final buffer",
    ),
    "ddp_final_buffers_not_sent": _ddp(
        "_sync_final_model",
        "broadcast_buffers=self.forward_sync_buffers",
        "broadcast_buffers=False",
        _UNEVEN + "test_final_model_is_that_of_the_last_joiner",
        "final buffer",
    ),
    "ddp_buffers_of_a_joined_rank_used": _ddp(
        "_check_and_sync_module_buffers",
        "self._find_common_rank(self._distributed_rank, False)",
        "self._find_common_rank(self._distributed_rank, True)",
        _UNEVEN + "test_buffers_come_from_a_rank_that_goes_on",
        "hung|buffer in forward|differ in",
    ),
    "ddp_join_divides_by_the_ranks_that_are_left": _ddp(
        "_pre_forward",
        "self._divide_by_initial_world_size,",
        "False,",
        _UNEVEN + "test_ddp_uneven_inputs",
        "step 2: gradient of(.|\n)*divide_by_initial_world_size=True",
    ),
    "ddp_join_ends_with_the_first_rank": fault(
        f"{_JOIN}.__exit__",
        "if num_nonjoined_procs == 0:",
        "if num_nonjoined_procs <= 1:",
        _JOINABLES + "test_join_hooks",
        "calls of the hooks|hung|differ in",
    ),
    "ddp_every_rank_joins_last": fault(
        f"{_JOIN}.__exit__",
        "is_last_joiner = False",
        "pass",
        _JOINABLES + "test_join_hooks",
        "calls of the hooks",
    ),
    "ddp_post_hooks_in_reverse": fault(
        f"{_JOIN}.__exit__",
        "# Run post-hooks\n    for join_hook in self._join_hooks:",
        "for join_hook in reversed(self._join_hooks):",
        _JOINABLES + "test_join_hooks",
        "calls of the hooks",
    ),
    "ddp_early_end_not_told": fault(
        f"{_JOIN}.notify_join_context",
        "if should_throw:",
        "if False:",
        _JOINABLES + "test_throw_on_early_termination",
        "not raised|hung|differ in",
    ),
    "ddp_delayed_gradient_lost_with_another": _ddp(
        "_clear_grad_buffer",
        "param.grad is None for param in self._delay_all_reduce_params",
        "True for param in self._delay_all_reduce_params",
        _GRADIENTS + "test_delayed_parameters_are_reduced_at_a_hook",
        "one kept, one reset",
    ),
    "ddp_low_precision_copies_keep_their_memory": fault(
        f"{_FILE}:_setup_mixed_precision_params",
        "_free_storage(param._mp_param)",
        "pass",
        _PRECISION + "test_low_precision_copies_take_memory_only_in_use",
        "bytes of copies before forward",
        device="sim",
    ),
    "ddp_ignored_buffer_cast": fault(
        f"{_FILE}:_cast_buffers",
        'if hasattr(buf, "_ddp_ignored") and buf._ddp_ignored:',
        "if False:",
        _PRECISION + "test_low_precision_copies_take_memory_only_in_use",
        "types of what is ignored",
        device="sim",
    ),
    "ddp_power_sgd_forgets_what_it_lost": fault(
        f"{_HOOKS}.powerSGD_hook:powerSGD_hook",
        "input_tensor.add_(state.error_dict[bucket_index])",
        "pass",
        _COMM_HOOKS + "test_power_sgd_keeps_what_compression_loses",
        "sent and still owed",
    ),
    "ddp_power_sgd_sums_biases": fault(
        f"{_HOOKS}.powerSGD_hook:powerSGD_hook",
        "uncompressed_tensors_memory = fut.value()[0].div_(world_size)",
        "uncompressed_tensors_memory = fut.value()[0]",
        _COMM_HOOKS + "test_power_sgd_keeps_what_compression_loses",
        "step 2: bias",
    ),
    "ddp_power_sgd_factors_not_orthogonal": fault(
        f"{_HOOKS}.powerSGD_hook:powerSGD_hook",
        "_orthogonalize(p, state.orthogonalization_epsilon)",
        "pass",
        _COMM_HOOKS + "test_power_sgd_of_full_rank_averages",
        "step 2: gradient of",
    ),
    "ddp_power_sgd_begins_a_step_late": fault(
        f"{_HOOKS}.powerSGD_hook:powerSGD_hook",
        "if state.iter < state.start_powerSGD_iter:",
        "if state.iter <= state.start_powerSGD_iter:",
        _COMM_HOOKS + "test_power_sgd_keeps_what_compression_loses",
        "step 2: rank of the weight",
    ),
    "ddp_optimizer_in_backward_takes_sums": fault(
        f"{_HOOKS}.optimizer_overlap_hooks:_apply_optim_in_backward_hook",
        "bucket.buffer().div_(process_group.size())",
        "pass",
        _COMM_HOOKS + "test_optimizer_in_backward",
        "step 0",
        device="sim",
    ),
    "ddp_optimizer_in_backward_leaves_gradients": fault(
        f"{_HOOKS}.optimizer_overlap_hooks:_apply_optim_in_backward_hook",
        "param.grad = None",
        "pass",
        _COMM_HOOKS + "test_optimizer_in_backward",
        "gradient of",
        device="sim",
    ),
    "ddp_optimizer_in_backward_takes_own_gradients": fault(
        f"{_HOOKS}.optimizer_overlap_hooks:_apply_optim_in_backward_hook",
        "p.grad = g",
        "pass",
        _COMM_HOOKS + "test_optimizer_in_backward",
        "step 0",
        device="sim",
    ),
}
