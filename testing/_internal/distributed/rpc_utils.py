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
from torch_ext.testing._internal.distributed.ddp_under_dist_autograd_test import (
    CudaDdpComparisonTest,
    DdpComparisonTest,
    DdpUnderDistAutogradTest,
)
from torch_ext.testing._internal.distributed.nn.api.remote_module_test import (
    RemoteModuleTest,
    ThreeWorkersRemoteModuleTest,
)
from torch_ext.testing._internal.distributed.rpc.async_execution_test import (
    AsyncExecutionTest,
)
from torch_ext.testing._internal.distributed.rpc.dist_autograd_test import (
    CudaDistAutogradTest,
    DistAutogradTest,
)
from torch_ext.testing._internal.distributed.rpc.dist_optimizer_test import (
    DistOptimizerTest,
)
from torch_ext.testing._internal.distributed.rpc.faulty_agent_rpc_test import (
    FaultyAgentDistAutogradTest,
    FaultyAgentRpcTest,
)
from torch_ext.testing._internal.distributed.rpc.profiler_test import ProfilerTest
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)
from torch_ext.testing._internal.distributed.rpc.rpc_call_test import RpcCallTest
from torch_ext.testing._internal.distributed.rpc.rpc_lifecycle_test import (
    RpcLifecycleTest,
)
from torch_ext.testing._internal.distributed.rpc.rref_test import RRefTest
from torch_ext.testing._internal.distributed.rpc.tensorpipe_agent_test import (
    TensorPipeAgentRpcTest,
)

# Suites for every agent but the faulty one, which has its own.
GENERIC_TESTS: list[type] = [
    RpcCallTest,
    AsyncExecutionTest,
    RpcLifecycleTest,
    RRefTest,
    DistAutogradTest,
    DistOptimizerTest,
    RemoteModuleTest,
    ThreeWorkersRemoteModuleTest,
    ProfilerTest,
    DdpUnderDistAutogradTest,
    DdpComparisonTest,
]

# Likewise, on an accelerator of any type.
GENERIC_CUDA_TESTS: list[type] = [CudaDistAutogradTest, CudaDdpComparisonTest]

TENSORPIPE_TESTS: list[type] = [TensorPipeAgentRpcTest]
TENSORPIPE_CUDA_TESTS: list[type] = []

FAULTY_AGENT_TESTS: list[type] = [FaultyAgentRpcTest, FaultyAgentDistAutogradTest]


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
        if not issubclass(suite, RpcAgentTestFixture):
            expected = "expected a suite derived from RpcAgentTestFixture"
            raise TypeError(f"got {suite.__name__}, {expected}")
        name = prefix + suite.__name__
        if name in generated:
            raise ValueError(f"two suites are called {suite.__name__}; rename one")
        members = {"__module__": module_name, "__doc__": suite.__doc__}
        generated[name] = type(name, (suite, mixin, SpawnHelper), members)
    return generated
