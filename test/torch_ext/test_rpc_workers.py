"""The report of RPC tests when a worker fails in a remote call, and the test classes generated from their suites."""

import os
import sys
import threading
from unittest import mock

import pytest
import torch
from torch.testing._internal.distributed import ddp_under_dist_autograd_test as upstream

from torch_ext.testing._internal import dist_utils
from torch_ext.testing._internal.distributed import ddp_under_dist_autograd_test as ddp
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture
from torch_ext.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture
from torch_ext.testing._internal.distributed.rpc_utils import generate_tests


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions carry notes since Python 3.11")
@pytest.mark.parametrize(
    ("message", "worker"),
    [
        ("ValueError: On WorkerInfo(id=1, name=worker1):\nValueError('x')", "worker1"),
        ("On WorkerInfo(id=1, name=worker1):\nValueError('On WorkerInfo(id=2, name=worker2): ...", "worker2"),
        ("Error on Node 3: this backward always fails", "worker3"),
        ("1 != 2", ""),
    ],
)
def test_failure_in_a_remote_call_names_the_remote_worker_and_a_local_one_no_other(message, worker):
    with pytest.raises(ValueError) as caught:
        with dist_utils._name_remote_failures("worker0"):
            raise ValueError(message)
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    words = f"The failure happened in a remote call on {worker}; worker0 only reports it."
    assert words in notes if worker else notes == ""


def test_shutdown_signal_sent_during_the_wait_ends_it():
    waiter = threading.Thread(target=ddp.wait_for_shutdown_signal, args=(60,))
    waiter.start()
    ddp.set_shutdown_signal()
    waiter.join(60)
    assert not waiter.is_alive()


def test_shutdown_signal_serves_one_wait_and_its_absence_names_the_master():
    ddp.set_shutdown_signal()
    ddp.wait_for_shutdown_signal(timeout_s=0)
    with pytest.raises(TimeoutError, match="no shutdown signal from worker5"):
        ddp.wait_for_shutdown_signal(timeout_s=0)


def test_constants_have_upstreams_values():
    numbers = {name: value for name, value in vars(upstream).items() if name.isupper() and not isinstance(value, str)}
    assert len(numbers) >= 10 and {name: getattr(ddp, name) for name in numbers} == numbers


class ASuite(RpcAgentTestFixture):
    """A suite."""


def test_generated_class_is_found_in_the_callers_module_by_its_name():
    (name, made), *rest = generate_tests("Pre", TensorPipeRpcAgentTestFixture, [ASuite], __name__).items()
    assert (name, made.__name__, made.__qualname__, made.__module__) == ("PreASuite",) * 3 + (__name__,)
    assert made.__doc__ == "A suite." and not rest
    assert made.__mro__[1:3] == (ASuite, TensorPipeRpcAgentTestFixture)


class Meeting(RpcAgentTestFixture):
    """A suite whose workers meet at an address."""

    world_size = 2

    def setUp(self):
        change = mock.patch.dict(os.environ, RPC_INIT_WITH_TCP="1")
        change.start()
        self.addCleanup(change.stop)
        super().setUp()

    @dist_utils.dist_init
    def test_workers_meet_at_an_address(self):
        self.assertRegex(self.init_method, "tcp://127.0.0.1:[1-9]")
        self.assertEqual(self.call(torch.add, torch.ones(1), 1), torch.full((1,), 2.0))


globals().update(generate_tests("Tcp", TensorPipeRpcAgentTestFixture, [Meeting], __name__))
pytest.mark.processes(globals()["TcpMeeting"])


def test_generate_tests_refuses_invalid_arguments():
    with pytest.raises(ValueError, match="two suites are called ASuite"):
        generate_tests("", TensorPipeRpcAgentTestFixture, [ASuite, ASuite], __name__)
    with pytest.raises(TypeError, match="does not define rpc_backend, rpc_backend_options"):
        generate_tests("", ASuite, [ASuite], __name__)
    with pytest.raises(TypeError, match="got int, expected a suite"):
        generate_tests("", TensorPipeRpcAgentTestFixture, [int], __name__)
