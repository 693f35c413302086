"""Calls, RRefs and contexts when the faulty agent loses or delays messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed import rpc

from torch_ext.compat import dist_autograd
from torch_ext.compat import rpc as private
from torch_ext.testing._internal.dist_utils import (
    dist_init,
    wait_until_owners_and_forks_on_rank,
    wait_until_pending_futures_and_users_flushed,
    worker_name,
)
from torch_ext.testing._internal.distributed.rpc import _remote_functions as remote
from torch_ext.testing._internal.distributed.rpc.dist_autograd_test import (
    wait_until_forgotten,
)
from torch_ext.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import (
    default_messages_to_delay,
    retryable_message_types,
)
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)


class Call(NamedTuple):
    """A function with arguments for which it returns ``ANSWER``."""

    kind: str  # of its messages
    function: Callable[..., Any]
    args: tuple[Any, ...]


OPERATOR = Call("SCRIPT", torch.add, (torch.ones(2), 1))
SCRIPTED = Call("SCRIPT", remote.scripted_double, (torch.ones(2),))
PYTHON = Call("PYTHON", remote.scaled, (torch.full((2,), 2.0),))
ANSWER = torch.full((2,), 2.0)

# Longer than any time limit that a test sets, yet short enough to wait for.
DELAY_S = 0.4
LIMIT_S = 0.05


def lost(message: str) -> Callable[..., Any]:
    return dist_init(faulty_messages=[message], messages_to_delay={})


def late(message: str) -> Callable[..., Any]:
    return dist_init(faulty_messages=[], messages_to_delay={message: DELAY_S})


def lost_creation(call: Call, to: int = 1) -> Callable[..., Any]:
    """Return the test of a remote value whose creation is lost."""

    @lost(f"{call.kind}_REMOTE_CALL")
    def test(self: RpcAgentTestFixture) -> None:
        if self.rank != 0:
            return
        rref = rpc.remote(worker_name(to), call.function, args=call.args)
        wait_until_pending_futures_and_users_flushed()
        with self.assertRaisesRegex(RuntimeError, "RRef creation"):
            rref.to_here()
        with self.assertRaisesRegex(RuntimeError, "RRef creation"):
            rpc.rpc_async(worker_name(to), remote.add_to_rref, args=(rref, 1))

    return test


def late_creation(call: Call, to: int = 1) -> Callable[..., Any]:
    """Return the test of a remote value whose creation exceeds its time limit."""

    @late(f"{call.kind}_REMOTE_CALL")
    def test(self: RpcAgentTestFixture) -> None:
        if self.rank == 0:
            worker, function, args = worker_name(to), call.function, call.args
            rref = rpc.remote(worker, function, args=args, timeout=LIMIT_S)
            check_creation_late(self, rref, to)

    return test


def check_creation_late(
    case: RpcAgentTestFixture, rref: rpc.RRef[Any], to: int, owners: int = 1
) -> None:
    with times_out(case):
        rref._get_future().wait()
    wait_until_pending_futures_and_users_flushed()
    with case.assertRaisesRegex(RuntimeError, "RRef creation"):
        rref.to_here()
    if to != case.rank:
        # The creation still arrives; leaving before that would fail on the owner.
        wait_until_owners_and_forks_on_rank(owners, owners, rank=to)


def late_call(call: Call) -> Callable[..., Any]:
    """Return the test of a call that exceeds its time limit, or the default one."""

    @late(f"{call.kind}_CALL")
    def test(self: RpcAgentTestFixture) -> None:
        _, function, args = call
        for limit in ({"timeout": LIMIT_S}, {}):
            if not limit:
                private.set_rpc_timeout(LIMIT_S)
            with times_out(self):
                rpc.rpc_sync(self.peer(), function, args=args, **limit)
            with times_out(self):
                rpc.rpc_async(self.peer(), function, args=args, **limit).wait()
        # No limit at all, although the default is too short.
        unlimited = rpc.rpc_sync(self.peer(), function, args=args, timeout=0)
        private.set_rpc_timeout(rpc.constants.DEFAULT_RPC_TIMEOUT_SEC)
        by_default = self.call(function, *args)
        self.assertEqual((unlimited, by_default), (ANSWER, ANSWER))

    return test


def times_out(case: RpcAgentTestFixture) -> Any:
    return case.assertRaisesRegex(RuntimeError, case.get_timeout_error_regex())


class FaultyAgentRpcTest(RpcAgentTestFixture):
    """Messages that torch resends survive loss. Losing any other is an error, and so is
    exceeding a time limit.
    """

    world_size = 3

    @dist_init
    def test_options_are_the_fixtures(self) -> None:
        self.assertEqual(self.rpc_backend.name, "FAULTY_TENSORPIPE")
        options: Any = self.rpc_backend_options
        self.assertEqual((options.num_worker_threads, options.num_fail_sends), (8, 3))
        self.assertEqual(set(options.messages_to_fail), set(retryable_message_types))
        self.assertEqual(options.messages_to_delay, default_messages_to_delay)
        self.assertEqual(options.rpc_timeout, rpc.constants.DEFAULT_RPC_TIMEOUT_SEC)

    @dist_init(
        faulty_messages=["RREF_FORK_REQUEST"], messages_to_delay={"SCRIPT_CALL": 0.5}
    )
    def test_faults_named_for_the_test_replace_the_fixtures(self) -> None:
        options: Any = self.rpc_backend_options
        self.assertEqual(set(options.messages_to_fail), {"RREF_FORK_REQUEST"})
        self.assertEqual(options.messages_to_delay, {"SCRIPT_CALL": 0.5})

    @dist_init(faulty_messages=[], messages_to_delay={})
    def test_no_faults(self) -> None:
        options: Any = self.rpc_backend_options
        self.assertEqual(list(options.messages_to_fail), [])
        self.assertEqual(dict(options.messages_to_delay), {})
        for _, function, args in (OPERATOR, SCRIPTED, PYTHON):
            self.assertEqual(self.call(function, *args), ANSWER)

    # Lost messages that torch resends.

    @dist_init(messages_to_delay={})
    def test_lost_rref_messages_are_sent_again(self) -> None:
        rref = rpc.remote(self.peer(), torch.add, args=(torch.ones(2), 1))
        chained = rpc.remote(self.peer(2), remote.add_to_rref, args=(rref, 3))
        got = (rref.to_here(), chained.to_here())
        self.assertEqual(got, (ANSWER, torch.full((2,), 5.0)))
        private.delete_unforked_rrefs()

    @lost("RREF_USER_DELETE")
    def test_lost_goodbye_of_a_user_still_frees_the_value(self) -> None:
        if self.rank != 0:
            return
        rref = rpc.remote(worker_name(1), torch.add, args=(torch.ones(2), 1))
        rref.to_here()
        wait_until_owners_and_forks_on_rank(1, 1, rank=1)
        del rref
        wait_until_owners_and_forks_on_rank(0, 0, rank=1)

    # Lost messages that torch does not resend.

    test_lost_creation_by_an_operator = lost_creation(OPERATOR)
    test_lost_creation_by_a_python_function = lost_creation(PYTHON)
    test_lost_creation_by_an_operator_on_this_worker = lost_creation(OPERATOR, to=0)
    test_lost_creation_by_a_python_function_on_this_worker = lost_creation(PYTHON, to=0)

    # Not PYTHON_CALL, which shutdown needs as well.
    @lost("SCRIPT_CALL")
    def test_lost_call_is_an_error_and_not_a_hang(self) -> None:
        # The agent's message quotes the dropped payload raw, which Python cannot always
        # decode.
        with self.assertRaises((RuntimeError, UnicodeDecodeError)):
            self.call(OPERATOR.function, *OPERATOR.args)

    # Late messages.

    test_late_creation_by_an_operator = late_creation(OPERATOR)
    test_late_creation_by_a_scripted_function = late_creation(SCRIPTED)
    test_late_creation_by_a_python_function = late_creation(PYTHON)
    test_late_creation_on_this_worker = late_creation(PYTHON, to=0)
    test_late_call_of_an_operator = late_call(OPERATOR)
    test_late_call_of_a_scripted_function = late_call(SCRIPTED)
    test_late_call_of_a_python_function = late_call(PYTHON)

    @late("PYTHON_REMOTE_CALL")
    def test_late_creation_through_a_proxy(self) -> None:
        if self.rank == 0:
            rref = rpc.remote(worker_name(1), remote.Accumulator, args=(2,))
            self.assertEqual(rref.rpc_sync().value(), torch.tensor(2.0))
            value = rref.remote(timeout=LIMIT_S).value()
            check_creation_late(self, value, to=1, owners=2)

    @late("SCRIPT_RREF_FETCH_CALL")
    def test_late_fetch_can_be_tried_again(self) -> None:
        rref = rpc.remote(self.peer(), torch.add, args=(torch.ones(2), 1))
        with times_out(self):
            rref.to_here(timeout=LIMIT_S)
        self.assertEqual(rref.to_here(), ANSWER)


class FaultyAgentDistAutogradTest(RpcAgentTestFixture):
    """Contexts end on every worker although the first messages about it are lost."""

    world_size = 3

    @lost("CLEANUP_AUTOGRAD_CONTEXT_REQ")
    def test_context_cleanup_survives_lost_messages(self) -> None:
        a, b = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
        others = [self.peer(1), self.peer(2)]
        with dist_autograd.context() as context_id:
            for other in others:
                self.call(remote.multiply, a, b, to=other)
                self.assertTrue(self.call(remote.knows_context, context_id, to=other))
        wait_until_forgotten(others, context_id)
