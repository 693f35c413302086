# Owner(s): ["oncall: distributed"]

"""The RPC suites over TensorPipe."""

from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (  # noqa: E501
    TensorPipeRpcAgentTestFixture,
)
from torch_ext.testing._internal.distributed.rpc_utils import (
    GENERIC_CUDA_TESTS,
    GENERIC_TESTS,
    TENSORPIPE_CUDA_TESTS,
    TENSORPIPE_TESTS,
    generate_tests,
)

globals().update(
    generate_tests(
        "TensorPipe",
        TensorPipeRpcAgentTestFixture,
        GENERIC_TESTS + TENSORPIPE_TESTS + GENERIC_CUDA_TESTS + TENSORPIPE_CUDA_TESTS,
        __name__,
    )
)

if __name__ == "__main__":
    run_tests()
