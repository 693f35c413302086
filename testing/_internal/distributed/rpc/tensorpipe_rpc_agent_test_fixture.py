"""The TensorPipe agent, for ``generate_tests``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed import rpc

from torch_ext.testing._internal.common_distributed import tp_transports
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture

if TYPE_CHECKING:
    from torch_ext.compat.rpc import RpcBackendOptions

__all__ = ["TensorPipeRpcAgentTestFixture"]


class TensorPipeRpcAgentTestFixture(RpcAgentTestFixture):
    """RPC over TensorPipe, with the transports that work on this machine."""

    @property
    def rpc_backend(self) -> Any:
        return rpc.BackendType["TENSORPIPE"]

    @property
    def rpc_backend_options(self) -> RpcBackendOptions:
        return rpc.TensorPipeRpcBackendOptions(init_method=self.init_method, _transports=tp_transports())
