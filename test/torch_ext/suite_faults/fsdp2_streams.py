"""Waits that FSDP2 could forget, or make without need, between its streams."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import Fault, fault
from test.torch_ext.suite_faults.fsdp2_rooms import COMM, CONTEXT, GROUP, STATE

__all__ = ["MISTAKES"]

_OVERLAP = "_composable.fsdp.test_fully_shard_overlap:TestFullyShardOverlap."
_RACES = "_composable.fsdp.test_fully_shard_overlap:TestFullyShardStreams.test_no_races_in_training"


def _wait(function: str, old: str, says: str, new: str = "pass") -> Fault:
    """A wait that is missing. ``says`` is in the report of the race that follows."""
    return fault(function, old, new, _RACES, rf"RaceError(.|\n)*{says}", device="sim")


def _order(function: str, old: str, new: str, test: str, says: str) -> Fault:
    return fault(function, old, new, _OVERLAP + test, says, device="sim")


MISTAKES = {
    "fully_shard_reduction_starts_before_the_gradient_is_there": _wait(
        f"{COMM}:foreach_reduce",
        "reduce_scatter_stream.wait_stream(current_stream)",
        "cat writes what _reduce_scatter_base number [0-9]+ reads(.|\n)*must wait for the default stream",
    ),
    "fully_shard_all_gather_starts_before_its_input_is_there": _wait(
        f"{COMM}:foreach_all_gather",
        "all_gather_stream.wait_stream(all_gather_copy_in_stream)",
        "copy_ writes what _all_gather_base number [0-9]+ reads(.|\n)*must wait for",
    ),
    "fully_shard_gathered_parameter_read_too_early": _wait(
        f"{COMM}:foreach_all_gather_copy_out",
        "device_handle.current_stream().wait_event(all_gather_event)",
        "split_with_sizes_copy(.|\n)*the default stream of sim:[0-9] must wait for",
    ),
    "fully_shard_all_reduce_starts_before_the_reduce_scatter_ends": _wait(
        f"{COMM}:foreach_reduce",
        "if world_size >= 1:\n                all_reduce_stream.wait_stream(reduce_scatter_stream)",
        "all_reduce .*(.|\n)*must wait for",
        "if world_size >= 1:\n                pass",
    ),
    "fully_shard_optimizer_does_not_wait_for_reductions": _wait(
        f"{GROUP}.finalize_backward",
        "    for event in self.comm_ctx._last_post_reduce_events.values():\n"
        "        self.device_handle.current_stream().wait_event(event)\n",
        "the default stream of sim:[0-9] must wait for",
        "",
    ),
    "fully_shard_all_gather_does_not_wait_for_the_optimizer": _wait(
        f"{STATE}._root_pre_forward",
        "self._comm_ctx.all_gather_copy_in_stream.wait_stream(current_stream)",
        "must wait for the default stream",
    ),
    "fully_shard_gathered_memory_reused_too_early": _wait(
        f"{GROUP}.wait_for_unshard",
        "self._wait_all_gather_streams_on_event(all_gather_copy_out_event)",
        "handed out again(.|\n)*(must wait|record_stream)",
    ),
    "fully_shard_smaller_shard_gathered_before_it_is_copied": _wait(
        f"{GROUP}.unshard",
        "self._wait_all_gather_streams_on_event(self._reshard_after_forward_event)",
        "copy_ writes what aten::copy_ reads(.|\n)*stream [0-9]+ of sim:[0-9] must wait for",
    ),
    "fully_shard_offloaded_gradient_read_too_early": _wait(
        f"{GROUP}.finalize_backward",
        "fsdp_param.grad_offload_event.synchronize()",
        "reads float32 .* on the host(.|\n)*the host must wait for",
    ),
    "fully_shard_reduced_memory_reused_too_early": _wait(
        f"{GROUP}.post_backward",
        "self.comm_ctx.reduce_scatter_states.append(\n"
        "            ReduceScatterState(reduce_scatter_input, reduce_scatter_event)\n"
        "        )",
        "handed out again",
    ),
    "fully_shard_event_of_the_optimizer_ignored": _order(
        f"{STATE}._root_pre_forward",
        "self._comm_ctx.all_gather_copy_in_stream.wait_event(event)\n"
        "            self._comm_ctx.all_gather_stream.wait_event(event)",
        "pass",
        "test_fully_shard_post_optim_event_overlap",
        r"\+ 0 backward: optimizer overlaps 1 forward: gather last",
    ),
    "fully_shard_event_of_the_optimizer_used_twice": _order(
        f"{STATE}._root_pre_forward",
        "            self._state_ctx.post_optim_event = None\n",
        "",
        "test_fully_shard_post_optim_event_overlap",
        r"\+ 1 backward: optimizer overlaps 2 forward: gather last",
    ),
    "fully_shard_nothing_overlaps_the_gathering": _order(
        f"{CONTEXT}.get_all_gather_streams",
        "return self.all_gather_copy_in_stream, self.all_gather_stream",
        "pass",
        "test_fully_shard_training_overlap",
        r"\+ 1 forward: computed first comes before 1 forward: gather second",
    ),
    "fully_shard_nothing_prefetched_in_backward": _order(
        f"{GROUP}.pre_backward",
        "if default_prefetch:",
        "if False:",
        "test_fully_shard_training_overlap",
        r"\+ 1 backward: gather first issued after 1 backward: computed second",
    ),
    "fully_shard_reduces_on_the_stream_of_compute": _order(
        f"{GROUP}.post_backward",
        "            self.comm_ctx.reduce_scatter_stream,\n",
        "            self.device_handle.current_stream(),\n",
        "test_fully_shard_training_overlap",
        r"\+ 1 backward: reduce second comes before 1 backward: computed first",
    ),
    "fully_shard_every_backward_waits": _order(
        f"{STATE}._root_post_backward_final_callback",
        "            if self._state_ctx.is_last_backward:\n                for fsdp_param_group",
        "            if True:\n                for fsdp_param_group",
        "test_backward_that_is_not_the_last_does_not_wait",
        r"\+ 0 backward: reduce last comes before 0 backward: optimizer",
    ),
    "fully_shard_forward_prefetch_ignored": _order(
        f"{STATE}._pre_forward",
        "for fsdp_state in self._states_to_forward_prefetch:",
        "for fsdp_state in ():",
        "test_forward_prefetch_overlaps_more",
        r"\+ 0 forward: gather second issued after 0 forward: computed first",
    ),
}
