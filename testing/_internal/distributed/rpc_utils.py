"""Combines RPC suites with agents: the test file of an agent calls
:func:`generate_tests` with the agent's fixture and the suites that apply to it. A suite
is written against :class:`RpcAgentTestFixture` and knows no agent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from unittest import mock

from torch_ext.testing._internal._distributed.helpers import reserved_port
from torch_ext.testing._internal.common_distributed import MultiProcessTestCase
from torch_ext.testing._internal.distributed import ddp_under_dist_autograd_test as ddp
from torch_ext.testing._internal.distributed.nn.api import remote_module_test
from torch_ext.testing._internal.distributed.rpc import (
    async_execution_test,
    dist_autograd_test,
    dist_optimizer_test,
    faulty_agent_rpc_test,
    rpc_agent_test_fixture,
    rpc_call_test,
    rpc_lifecycle_test,
    rref_test,
    tensorpipe_agent_test,
)

# Suites for every agent but the faulty one, which has its own.
GENERIC_TESTS: list[type] = [
    rpc_call_test.RpcCallTest,
    async_execution_test.AsyncExecutionTest,
    rpc_lifecycle_test.RpcLifecycleTest,
    rref_test.RRefTest,
    dist_autograd_test.DistAutogradTest,
    dist_optimizer_test.DistOptimizerTest,
    remote_module_test.RemoteModuleTest,
    remote_module_test.ThreeWorkersRemoteModuleTest,
    ddp.DdpUnderDistAutogradTest,
    ddp.DdpComparisonTest,
]

# Likewise, on an accelerator of any type.
GENERIC_CUDA_TESTS: list[type] = [
    dist_autograd_test.CudaDistAutogradTest,
    ddp.CudaDdpComparisonTest,
]

TENSORPIPE_TESTS: list[type] = [tensorpipe_agent_test.TensorPipeAgentRpcTest]
TENSORPIPE_CUDA_TESTS: list[type] = []

FAULTY_AGENT_TESTS: list[type] = [
    faulty_agent_rpc_test.FaultyAgentRpcTest,
    faulty_agent_rpc_test.FaultyAgentDistAutogradTest,
]


class SpawnHelper(MultiProcessTestCase):
    """Starts the ranks of each test, and with ``RPC_INIT_WITH_TCP=1`` chooses the
    address of their rendezvous.
    """

    def setUp(self) -> None:
        super().setUp()
        if os.environ.get("RPC_INIT_WITH_TCP") == "1":
            stack = contextlib.ExitStack()
            self.addCleanup(stack.close)
            port = str(stack.enter_context(reserved_port()))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            stack.enter_context(mock.patch.dict(os.environ, address))
        self._spawn_processes()


def generate_tests(
    prefix: str, mixin: type, tests: Sequence[type], module_name: str
) -> dict[str, type]:
    """Return a test class for each suite over the agent whose fixture is ``mixin``, by
    its name: ``prefix`` and the suite's. Add them to the globals of ``module_name``,
    the calling module, where ranks find them.

    Raises:
        TypeError: ``mixin`` leaves part of the fixture undefined, or a suite is not a
            fixture.
        ValueError: two suites have the same name.
    """
    missing: frozenset[str] = getattr(mixin, "__abstractmethods__", frozenset())
    if missing:
        raise TypeError(
            f"{mixin.__name__} is not an agent's fixture: it does not define "
            f"{', '.join(sorted(missing))}"
        )
    generated: dict[str, type] = {}
    for suite in tests:
        if not issubclass(suite, rpc_agent_test_fixture.RpcAgentTestFixture):
            expected = "expected a suite derived from RpcAgentTestFixture"
            raise TypeError(f"got {suite.__name__}, {expected}")
        name = prefix + suite.__name__
        if name in generated:
            raise ValueError(f"two suites are called {suite.__name__}; rename one")
        members = {"__module__": module_name, "__doc__": suite.__doc__}
        generated[name] = type(name, (suite, mixin, SpawnHelper), members)
    return generated
