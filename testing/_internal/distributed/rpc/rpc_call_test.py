"""``rpc_sync``, ``rpc_async``, ``remote``: arguments, results, errors, time limits."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from torch_ext.compat import rpc as private
from torch_ext.testing._internal.dist_utils import dist_init, worker_name
from torch_ext.testing._internal.distributed.rpc import _remote_functions as remote
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    CALL_MODES,
    RpcAgentTestFixture,
)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def fill_with_nine(tensor: Tensor) -> Tensor:
    return tensor.fill_(9)


class FailsToUnpickle:
    """Pickles, but raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remote.raise_value_error, ("cannot be rebuilt",)


class RpcCallTest(RpcAgentTestFixture):
    """Every worker calls the next one in a ring: each is caller and callee at once."""

    world_size = 2

    # Functions that can be called, and ways to name the callee.

    @dist_init
    def test_keyword_arguments_reach_the_callee(self) -> None:
        ones = torch.ones(3)
        self.check_call(ones * 2.5, remote.scaled, ones, by=2.5)
        self.check_call(ones * 5, torch.add, ones, 1, alpha=4)

    @dist_init
    def test_methods_and_constructor_of_a_class(self) -> None:
        accumulator = remote.Accumulator(3)
        for make in (remote.Accumulator, remote.Accumulator.starting_at):
            for mode in CALL_MODES:
                made = self.call(make, 4, mode=mode)
                self.assertEqual(made.value(), torch.tensor(4.0), msg=mode)
        two, three = torch.tensor(2), torch.tensor(3)
        self.check_call(torch.tensor(6), remote.Accumulator.product, two, three)
        self.check_call(torch.tensor(4.0), accumulator.add, 1)
        self.assertEqual(accumulator.value(), torch.tensor(3.0), "not a copy")

    @dist_init
    def test_callee_by_name_by_info_and_by_rank(self) -> None:
        info = rpc.get_worker_info(self.peer())
        for to in (self.peer(), info, info.id):
            self.check_call(self.peer(), remote.my_name, to=to)

    @dist_init
    def test_worker_calls_itself(self) -> None:
        own = worker_name(self.rank)
        self.check_call(own, remote.my_name, to=own)
        self.check_call(torch.full((2,), 3.0), torch.mul, torch.ones(2), 3, to=own)

    @dist_init
    def test_unknown_callee_is_an_error_that_names_it(self) -> None:
        for unknown in ("nobody", self.world_size + 3):
            why = str(unknown)
            self.check_call_raises(RuntimeError, why, remote.my_name, to=unknown)

    @dist_init
    def test_call_of_a_non_function_is_a_type_error(self) -> None:
        no_function: Any = "my_name"
        self.check_call_raises(TypeError, "", no_function)

    # Arguments and results.

    @dist_init
    def test_values_arrive_as_they_were_sent(self) -> None:
        values: list[Any] = [
            None,
            3,
            2.5,
            "text with ünïcode",
            b"\0bytes",
            (1, [2, {"three": {4}}]),
            torch.empty(0),
            torch.tensor(7),
            torch.tensor([True, False]),
            torch.arange(6, dtype=torch.int16).reshape(2, 3),
            torch.arange(1 << 20, dtype=torch.int32),
            torch.tensor([1 + 2j, 3 - 4j]),
            torch.randn(4, dtype=torch.bfloat16),
            torch.tensor([1.0, 0.0, 2.0, 0.0]).to_sparse(),
            {"nested": [torch.ones(2), (torch.zeros(1), None)]},
            Pair(torch.zeros(1), torch.ones(1)),
        ]
        for mode in CALL_MODES:
            for value in values:
                with self.subTest(f"{mode}: {value}"):
                    got = self.call(remote.identity, value, mode=mode)
                    self.assertEqual(type(got), type(value))
                    self.assertEqual(got, value)

    @dist_init
    def test_views_arrive_with_their_values(self) -> None:
        base = torch.arange(24.0).reshape(2, 3, 4)
        views = (base[1], base[:, 1], base.transpose(0, 2), base[..., ::2])
        for view in (*views, base.flatten()[5:9]):
            self.check_call(view, remote.identity, view)
            self.check_call(view + 1, torch.add, view, 1)

    @dist_init
    def test_callee_works_on_a_copy(self) -> None:
        for mode in CALL_MODES:
            mine = torch.zeros(3)
            nine = self.call(fill_with_nine, mine, mode=mode)
            self.assertEqual(nine, torch.full((3,), 9.0), mode)
            self.assertEqual(mine, torch.zeros(3), mode)

    @dist_init
    def test_concurrent_calls_get_their_own_answers(self) -> None:
        inputs = torch.arange(200)
        futures = [rpc.rpc_async(self.peer(), torch.mul, args=(i, 2)) for i in inputs]
        self.assertEqual(torch.futures.wait_all(futures), list(2 * inputs))

    # Errors on the callee.

    @dist_init
    def test_exception_keeps_its_type_and_names_the_callee(self) -> None:
        args = (remote.raise_value_error, "the cause")
        for message in self.check_call_raises(ValueError, "the cause", *args):
            self.assertIn(self.peer(), message)

    @dist_init
    def test_exception_through_several_hops_names_where_it_was_raised(self) -> None:
        deep, size = (remote.raise_value_error, ("deep down",)), self.world_size
        with self.assertRaisesRegex(ValueError, "deep down") as caught:
            self.call(remote.relay, *deep, 1, size)
        for hop in (1, 2):
            self.assertIn(f"name={self.peer(hop)}", str(caught.exception))

    @dist_init
    def test_exception_that_cannot_be_rebuilt_keeps_its_message(self) -> None:
        error, cause = RuntimeError, "7: out of cheese"
        for message in self.check_call_raises(error, cause, remote.raise_unrebuildable):
            self.assertIn(self.peer(), message)

    @dist_init
    def test_error_of_an_operator_comes_back(self) -> None:
        args = (torch.add, torch.ones(2), torch.ones(3))
        self.check_call_raises(RuntimeError, r"size of tensor a \(2\)", *args)

    @dist_init
    def test_function_that_the_callee_does_not_have(self) -> None:
        # It pickles by reference, which the callee cannot resolve.
        unique = f"only_on_{worker_name(self.rank)}"
        exec(f"def {unique}(): return 1", globals())
        with self.assertRaisesRegex((AttributeError, RuntimeError), unique):
            self.call(globals()[unique])
        self.check_call(self.peer(), remote.my_name)

    @dist_init
    def test_argument_that_cannot_be_rebuilt_is_an_error_on_the_callee(self) -> None:
        callee = rpc.get_worker_info(self.peer()).id
        with self.assertRaisesRegex(RuntimeError, f"Node {callee}.*cannot be rebuilt"):
            self.call(remote.identity, FailsToUnpickle())

    @dist_init
    def test_argument_that_cannot_be_pickled_is_refused_here(self) -> None:
        with self.assertRaisesRegex(TypeError, "pickle"):
            rpc.rpc_async(self.peer(), remote.identity, args=(threading.Lock(),))

    @dist_init
    def test_result_that_cannot_be_pickled_is_reported(self) -> None:
        with self.assertRaisesRegex(Exception, "pickle"):
            self.call(threading.Lock)
        self.check_call(self.peer(), remote.my_name)

    # Time limits. A closed gate holds the call back, however slow the machine is.

    @dist_init
    def test_call_past_its_time_limit_fails(self) -> None:
        for mode in ("rpc_sync", "rpc_async"):
            with self.assertRaisesRegex(RuntimeError, self.get_timeout_error_regex()):
                start = getattr(rpc, mode)
                late = start(self.peer(), remote.pass_gate, args=(1,), timeout=0.05)
                CALL_MODES[mode](late)
        self.call(remote.open_gate)

    @dist_init
    def test_default_time_limit_can_be_set_and_overridden(self) -> None:
        default = rpc.get_rpc_timeout()
        self.assertEqual(default, rpc.constants.DEFAULT_RPC_TIMEOUT_SEC)
        private.set_rpc_timeout(0.05)
        kept = rpc.get_rpc_timeout()  # as float32
        self.assertEqual(kept, 0.05, rtol=1e-6, atol=0)
        with self.assertRaisesRegex(RuntimeError, self.get_timeout_error_regex()):
            self.call(remote.pass_gate, 1)
        futures = [
            rpc.rpc_async(self.peer(), remote.pass_gate, args=(1,), timeout=limit)
            for limit in (0, default)
        ]
        private.set_rpc_timeout(default)
        self.call(remote.open_gate)
        self.assertEqual(torch.futures.wait_all(futures), [1, 1])

    # Futures.

    @dist_init
    def test_future_can_be_waited_for_twice(self) -> None:
        future = rpc.rpc_async(self.peer(), remote.identity, args=(5,))
        self.assertEqual((future.wait(), future.wait(), future.value()), (5, 5, 5))
        failed = rpc.rpc_async(self.peer(), remote.raise_value_error, args=("twice",))
        for _ in range(2):
            with self.assertRaisesRegex(ValueError, "twice"):
                failed.wait()

    @dist_init
    def test_callbacks_chain_and_may_call(self) -> None:
        def call_again(done: Future[Tensor]) -> Tensor:
            return self.call(torch.add, done.wait(), 10)

        future = rpc.rpc_async(self.peer(), torch.add, args=(torch.tensor(1), 1))
        doubled = future.then(call_again).then(lambda done: done.wait() * 2)
        self.assertEqual(doubled.wait(), torch.tensor(24))

    @dist_init
    def test_error_reaches_the_callback(self) -> None:
        def recover(done: Future[Any]) -> str:
            try:
                done.wait()
            except ValueError:
                return "recovered"
            return "no error"

        failed = rpc.rpc_async(self.peer(), remote.raise_value_error, args=("x",))
        self.assertEqual(failed.then(recover).wait(), "recovered")

    @dist_init
    def test_wait_all_waits_for_every_call_in_the_block(self) -> None:
        with private.wait_all():
            to, same = self.peer(), remote.identity
            futures = [rpc.rpc_async(to, same, args=(i,)) for i in range(10)]
        self.assertTrue(all(future.done() for future in futures))
        with self.assertRaisesRegex(ValueError, "in the block"):
            with private.wait_all():
                args = ("in the block",)
                rpc.rpc_async(self.peer(), remote.raise_value_error, args=args)
