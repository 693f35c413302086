# Owner(s): ["oncall: distributed"]

"""The RPC suites over the faulty agent, which loses and delays messages."""

from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import (
    FaultyRpcAgentTestFixture,
)
from torch_ext.testing._internal.distributed.rpc_utils import (
    FAULTY_AGENT_TESTS,
    generate_tests,
)

globals().update(
    generate_tests("Faulty", FaultyRpcAgentTestFixture, FAULTY_AGENT_TESTS, __name__)
)

if __name__ == "__main__":
    run_tests()
