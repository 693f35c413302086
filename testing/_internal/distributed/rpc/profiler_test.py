"""The profiler's record of calls: the caller's side, with the names of both workers,
and the callee's, which only ``torch.autograd.profiler_legacy`` includes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import profiler, profiler_legacy
from torch.distributed import rpc

from torch_ext.compat import dist_autograd
from torch_ext.testing._internal.dist_utils import (
    dist_init,
    get_function_event,
    worker_name,
)
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)

ONES = (torch.ones(3), torch.ones(3))


def marked_multiply(a: Tensor, b: Tensor) -> Tensor:
    with profiler.record_function("the worker's own block"):
        return a * b


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def multiply_elsewhere(to: str, a: Tensor, b: Tensor) -> torch.futures.Future[Tensor]:
    return rpc.rpc_async(to, marked_multiply, args=(a, b))


class ProfilerTest(RpcAgentTestFixture):
    """Each worker profiles its calls of the next one."""

    world_size = 3

    @property
    def _way(self) -> str:
        return f"({worker_name(self.rank)} -> {self.peer()})"

    @dist_init
    def test_call_events_name_both_workers_and_the_callees_operators(self) -> None:
        for mode in ("rpc_sync", "rpc_async"):
            for function, name in (
                (torch.mul, "aten::mul"),
                (marked_multiply, "marked_multiply"),
            ):
                with self.subTest(f"{mode} {name}"):
                    with profiler_legacy.profile() as profile:
                        self.call(function, *ONES, mode=mode)
                    events = profile.function_events
                    opening = f"{mode}#{name}{self._way}"
                    own = get_function_event(events, opening)
                    seen = (own.name, own.node_id, own.is_remote)
                    self.assertEqual(seen, (opening, self.rank, False))
                    remote_mul = f"{opening}#remote_op: aten::mul"
                    there = get_function_event(events, remote_mul)
                    after = (self.rank + 1) % self.world_size
                    self.assertEqual((there.node_id, there.is_remote), (after, True))

    @dist_init
    def test_remote_shows_the_creation_and_the_fetch(self) -> None:
        # The callee's work is not compared: torch sends it separately from the result,
        # and the profile may end in between.
        with profiler_legacy.profile() as profile:
            rref = rpc.remote(self.peer(), marked_multiply, args=ONES)
            rref._get_profiling_future().wait()
            rref.to_here()
        fetch = f"to_here#({worker_name(self.rank)})->({self.peer()})"
        for name in (f"rpc_remote#marked_multiply{self._way}", fetch):
            get_function_event(profile.function_events, name)

    @dist_init
    def test_blocks_that_the_callee_names_are_shown_as_its_own(self) -> None:
        with profiler_legacy.profile() as profile:
            self.call(marked_multiply, *ONES)
        block = get_function_event(profile.function_events, "the worker's own block")
        opening = f"rpc_sync#marked_multiply{self._way}"
        self.assertEqual(block.name, f"{opening}#remote_op: the worker's own block")
        self.assertTrue(block.is_remote)

    @dist_init
    def test_work_that_was_passed_on_shows_the_whole_way(self) -> None:
        with profiler_legacy.profile() as profile:
            self.call(multiply_elsewhere, self.peer(2), *ONES)
        first = f"rpc_sync#multiply_elsewhere{self._way}"
        second = f"rpc_async#marked_multiply({self.peer()} -> {self.peer(2)})"
        whole = f"{first}#remote_op: {second}#remote_op: aten::mul"
        last = get_function_event(profile.function_events, whole)
        self.assertEqual(last.node_id, (self.rank + 2) % self.world_size)

    @dist_init
    def test_only_the_calls_of_the_block_are_profiled(self) -> None:
        with profiler_legacy.profile() as profile:
            torch.ones(3)
        self.call(marked_multiply, *ONES)
        names = [event.name for event in profile.function_events]
        self.assertIn("aten::ones", names)
        self.assertFalse([name for name in names if "rpc" in name])

    @dist_init
    def test_the_backward_of_a_call_is_profiled_on_the_callers_side(self) -> None:
        a, two = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
        with dist_autograd.context() as context_id:
            product = self.call(marked_multiply, a, two)
            with profiler.profile() as profile:
                dist_autograd.backward(context_id, [product.sum()])
            for name in ("backward", "RecvRpcBackward", "SendRpcBackward"):
                name = f"torch::distributed::autograd::{name}"
                get_function_event(profile.function_events, name)
            self.assertEqual(dist_autograd.get_gradients(context_id)[a], two)
