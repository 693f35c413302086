"""Calls, RRefs and contexts when messages are lost or late. Runs over the faulty agent
only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
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
    knows_context,
    multiply,
    wait_until_forgotten,
)
from torch_ext.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import (
    default_messages_to_delay,
    retryable_message_types,
)
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)


@torch.jit.script
def scripted_double(tensor: Tensor) -> Tensor:
    return tensor + tensor


# A call of each kind of function. Each kind has its own message type.
OPERATOR, SCRIPTED, PYTHON = (
    (torch.add, (torch.ones(2), 1)),
    (scripted_double, (torch.ones(2),)),
    (remote.scaled, (torch.full((2,), 2.0),)),
)
ANSWER = torch.full((2,), 2.0)

# Longer than any time limit that a test sets, yet short enough to wait for.
DELAY_S = 0.4
LIMIT_S = 0.05

_Call = tuple[Callable[..., Any], tuple[Any, ...]]


def lost(message: str) -> Callable[..., Any]:
    return dist_init(faulty_messages=[message], messages_to_delay={})


def late(message: str) -> Callable[..., Any]:
    return dist_init(faulty_messages=[], messages_to_delay={message: DELAY_S})


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
        self.assertEqual(
            (list(options.messages_to_fail), dict(options.messages_to_delay)), ([], {})
        )
        for function, args in (OPERATOR, SCRIPTED, PYTHON):
            self.assertEqual(self.call(function, *args), ANSWER)

    # Lost messages that torch resends.

    @dist_init(messages_to_delay={})
    def test_lost_rref_messages_are_sent_again(self) -> None:
        rref = rpc.remote(self.peer(), torch.add, args=(torch.ones(2), 1))
        chained = rpc.remote(self.peer(2), remote.add_to_rref, args=(rref, 3))
        self.assertEqual(
            (rref.to_here(), chained.to_here()), (ANSWER, torch.full((2,), 5.0))
        )
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

    def _test_creation_lost(self, call: _Call, to: int) -> None:
        if self.rank != 0:
            return
        function, args = call
        rref = rpc.remote(worker_name(to), function, args=args)
        wait_until_pending_futures_and_users_flushed()
        with self.assertRaisesRegex(RuntimeError, "RRef creation"):
            rref.to_here()
        with self.assertRaisesRegex(RuntimeError, "RRef creation"):
            rpc.rpc_async(worker_name(to), remote.add_to_rref, args=(rref, 1))

    @lost("SCRIPT_REMOTE_CALL")
    def test_lost_creation_by_an_operator(self) -> None:
        self._test_creation_lost(OPERATOR, 1)

    @lost("PYTHON_REMOTE_CALL")
    def test_lost_creation_by_a_python_function(self) -> None:
        self._test_creation_lost(PYTHON, 1)

    @lost("SCRIPT_REMOTE_CALL")
    def test_lost_creation_by_an_operator_on_this_worker(self) -> None:
        self._test_creation_lost(OPERATOR, 0)

    @lost("PYTHON_REMOTE_CALL")
    def test_lost_creation_by_a_python_function_on_this_worker(self) -> None:
        self._test_creation_lost(PYTHON, 0)

    # Not PYTHON_CALL, which shutdown needs as well.
    @lost("SCRIPT_CALL")
    def test_lost_call_is_an_error_and_not_a_hang(self) -> None:
        function, args = OPERATOR
        # The agent's message quotes the dropped payload raw, which Python cannot always
        # decode.
        with self.assertRaises((RuntimeError, UnicodeDecodeError)):
            self.call(function, *args)

    # Late messages.

    def _times_out(self) -> Any:
        return self.assertRaisesRegex(RuntimeError, self.get_timeout_error_regex())

    def _test_creation_late(self, call: _Call, to: int) -> None:
        if self.rank == 0:
            function, args = call
            rref = rpc.remote(worker_name(to), function, args=args, timeout=LIMIT_S)
            self._check_creation_late(rref, to)

    def _check_creation_late(
        self, rref: rpc.RRef[Any], to: int, owners: int = 1
    ) -> None:
        with self._times_out():
            rref._get_future().wait()
        wait_until_pending_futures_and_users_flushed()
        with self.assertRaisesRegex(RuntimeError, "RRef creation"):
            rref.to_here()
        if to != self.rank:
            # The creation itself still arrives; leaving before that would fail on the
            # owner.
            wait_until_owners_and_forks_on_rank(owners, owners, rank=to)

    @late("SCRIPT_REMOTE_CALL")
    def test_late_creation_by_an_operator(self) -> None:
        self._test_creation_late(OPERATOR, 1)

    @late("SCRIPT_REMOTE_CALL")
    def test_late_creation_by_a_scripted_function(self) -> None:
        self._test_creation_late(SCRIPTED, 1)

    @late("PYTHON_REMOTE_CALL")
    def test_late_creation_by_a_python_function(self) -> None:
        self._test_creation_late(PYTHON, 1)

    @late("PYTHON_REMOTE_CALL")
    def test_late_creation_on_this_worker(self) -> None:
        self._test_creation_late(PYTHON, 0)

    @late("PYTHON_REMOTE_CALL")
    def test_late_creation_through_a_proxy(self) -> None:
        if self.rank == 0:
            rref = rpc.remote(worker_name(1), remote.Accumulator, args=(2,))
            self.assertEqual(rref.rpc_sync().value(), torch.tensor(2.0))
            value = rref.remote(timeout=LIMIT_S).value()
            self._check_creation_late(value, to=1, owners=2)

    @late("SCRIPT_RREF_FETCH_CALL")
    def test_late_fetch_can_be_tried_again(self) -> None:
        rref = rpc.remote(self.peer(), torch.add, args=(torch.ones(2), 1))
        with self._times_out():
            rref.to_here(timeout=LIMIT_S)
        self.assertEqual(rref.to_here(), ANSWER)

    def _test_call_late(self, call: _Call) -> None:
        function, args = call
        for limit in ({"timeout": LIMIT_S}, {}):
            if not limit:
                private.set_rpc_timeout(LIMIT_S)
            with self._times_out():
                rpc.rpc_sync(self.peer(), function, args=args, **limit)
            with self._times_out():
                rpc.rpc_async(self.peer(), function, args=args, **limit).wait()
        # No limit at all, although the default is too short.
        unlimited = rpc.rpc_sync(self.peer(), function, args=args, timeout=0)
        private.set_rpc_timeout(rpc.constants.DEFAULT_RPC_TIMEOUT_SEC)
        by_default = self.call(function, *args)
        self.assertEqual((unlimited, by_default), (ANSWER, ANSWER))

    @late("SCRIPT_CALL")
    def test_late_call_of_an_operator(self) -> None:
        self._test_call_late(OPERATOR)

    @late("SCRIPT_CALL")
    def test_late_call_of_a_scripted_function(self) -> None:
        self._test_call_late(SCRIPTED)

    @late("PYTHON_CALL")
    def test_late_call_of_a_python_function(self) -> None:
        self._test_call_late(PYTHON)


class FaultyAgentDistAutogradTest(RpcAgentTestFixture):
    """Contexts end on every worker although the messages that end them are lost at
    first.
    """

    world_size = 3

    @lost("CLEANUP_AUTOGRAD_CONTEXT_REQ")
    def test_context_cleanup_survives_lost_messages(self) -> None:
        a, b = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
        others = [self.peer(1), self.peer(2)]
        with dist_autograd.context() as context_id:
            for other in others:
                rpc.rpc_sync(other, multiply, args=(a, b))
                self.assertTrue(rpc.rpc_sync(other, knows_context, args=(context_id,)))
        wait_until_forgotten(others, context_id)
