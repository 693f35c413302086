"""Waits that FSDP1 could forget, or make without need, between its streams."""

from __future__ import annotations

from test.torch_ext.suite_faults.fault import Fault, fault

__all__ = ["MISTAKES"]

_RUNTIME = "torch.distributed.fsdp._runtime_utils"
_LIMITER = "torch.distributed.fsdp._limiter_utils:_FreeEventQueue"
_ORDER = "torch.distributed.fsdp._exec_order_utils:_ExecOrderData"

_TWO = "fsdp.test_fsdp_overlap:TestForwardOverlapWorldSizeTwo."
_FORWARD = f"{_TWO}test_forward_overlap"
_BACKWARD = f"{_TWO}test_backward_overlap"
_OPTIMIZER = f"{_TWO}test_backward_and_optimizer_are_ordered"
_HYBRID = "fsdp.test_fsdp_overlap:TestHybridOverlap.test_all_reduce_overlap"


def _order(function: str, old: str, new: str, test: str, says: str) -> Fault:
    return fault(function, old, new, test, says, device="sim")


def _stream(name: str, old: str, new: str, test: str, says: str) -> Fault:
    """A stream that is another's."""
    return _order(f"{_RUNTIME}:_init_streams", f"{name} = {old}", f"{name} = {new}", test, says)


_STREAM = "state._device_handle.Stream(priority=high_priority)"

MISTAKES = {
    "gathers_on_the_stream_of_compute": _stream(
        "state._unshard_stream",
        _STREAM,
        "state._default_stream",
        _FORWARD,
        r"\+ 1 forward: computed first comes before 1 forward: gather second",
    ),
    "casts_on_the_stream_of_compute": _stream(
        "state._pre_unshard_stream",
        _STREAM,
        "state._default_stream",
        _FORWARD,
        r"\+ 1 forward: computed first comes before 1 forward: gather second(.|\n)*options=.*param_dtype",
    ),
    "reduces_on_the_stream_of_compute": _stream(
        "state._post_backward_stream",
        _STREAM,
        "state._default_stream",
        _BACKWARD,
        r"\+ 1 backward: reduce second comes before 1 backward: computed first",
    ),
    "all_reduces_on_the_stream_of_reductions": _stream(
        "state._all_reduce_stream",
        "(\n        state._device_handle.Stream() if uses_hybrid_sharding else state._default_stream\n    )",
        "state._post_backward_stream",
        _HYBRID,
        r"\+ 0 backward: all-reduce second comes before 0 backward: reduce first",
    ),
    "all_reduces_on_the_stream_of_compute": _stream(
        "state._all_reduce_stream",
        "(\n        state._device_handle.Stream() if uses_hybrid_sharding else state._default_stream\n    )",
        "state._default_stream",
        _HYBRID,
        r"\+ 0 backward: all-reduce second comes before 0 backward: computed first",
    ),
    "all_reduce_starts_before_the_reduce_scatter_ends": _order(
        f"{_RUNTIME}:_reduce_grad",
        "state._all_reduce_stream.wait_stream(state._post_backward_stream)",
        "pass",
        _HYBRID,
        "all_reduce(.|\n)*must wait for",
    ),
    "optimizer_does_not_wait_for_all_reductions": _order(
        f"{_RUNTIME}:_post_backward_final_callback",
        "current_stream.wait_stream(root_state._all_reduce_stream)",
        "pass",
        _HYBRID,
        r"\+ 0 backward: all-reduce (first|last) overlaps 0 backward: optimizer",
    ),
    "optimizer_does_not_wait_for_reductions": _order(
        f"{_RUNTIME}:_post_backward_final_callback",
        "current_stream.wait_stream(root_state._post_backward_stream)",
        "pass",
        _OPTIMIZER,
        r"\+ 1 backward: reduce (first|second|last) overlaps 1 backward: optimizer",
    ),
    "all_gathers_do_not_wait_for_the_optimizer": _order(
        f"{_RUNTIME}:_wait_for_computation_stream",
        "    unshard_stream.wait_stream(computation_stream)  # type: ignore[attr-defined]\n    #",
        "    #",
        _OPTIMIZER,
        r"\+ 0 backward: optimizer overlaps 1 forward: gather",
    ),
    "all_gathers_not_limited": _order(
        f"{_LIMITER}.dequeue_if_needed",
        "return self._dequeue()",
        "return None",
        f"{_TWO}test_limit_all_gathers",
        r"\+ 0 forward: computed first overlaps 0 backward: gather second",
    ),
    "all_gathers_limited_to_one": _order(
        f"{_LIMITER}.dequeue_if_needed",
        ">= self._max_num_inflight_all_gathers",
        ">= 1",
        f"{_TWO}test_limit_all_gathers",
        r"\+ 0 forward: computed first comes before 0 forward: gather second",
    ),
    "all_gathers_limited_unasked": _order(
        "torch.distributed.fsdp._init_utils:_init_core_state",
        "state.limit_all_gathers = limit_all_gathers",
        "state.limit_all_gathers = True",
        f"{_TWO}test_limit_all_gathers",
        r"\+ 0 forward: computed first comes before 0 backward: gather second",
    ),
    "forward_waits_for_what_it_prefetched": _order(
        f"{_RUNTIME}:_prefetch_handle",
        "    handle._prefetched = True\n",
        "    handle._prefetched = True\n"
        "    if prefetch_mode == _PrefetchMode.FORWARD:\n"
        "        state._device_handle.current_stream().wait_stream(state._unshard_stream)\n",
        f"{_TWO}test_forward_prefetch",
        r"\+ 1 forward: gather second comes before 1 forward: computed first",
    ),
    "backward_prefetch_of_the_unit_after_next": _order(
        f"{_ORDER}.get_handle_to_backward_prefetch",
        "target_index = current_index - 1\n",
        "target_index = current_index - 2\n",
        _BACKWARD,
        r"\+ 1 backward: gather (second|first) issued after 1 backward: computed (last|second)",
    ),
    "late_backward_prefetch_taken_for_the_early_one": _order(
        f"{_RUNTIME}:_get_handle_to_prefetch",
        "training_state == HandleTrainingState.BACKWARD_PRE\n"
        "        and state.backward_prefetch == BackwardPrefetch.BACKWARD_PRE",
        "training_state == HandleTrainingState.BACKWARD_PRE\n        and state.backward_prefetch is not None",
        _BACKWARD,
        r"\+ 1 backward: gather second (overlaps|comes before) 1 backward: computed last",
    ),
}
