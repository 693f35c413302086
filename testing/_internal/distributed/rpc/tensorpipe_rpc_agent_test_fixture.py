"""The TensorPipe agent."""

from __future__ import annotations

from typing import Any

from torch.distributed import rpc

from torch_ext import accelerator
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)


class TensorPipeRpcAgentTestFixture(RpcAgentTestFixture):
    """RPC over TensorPipe's socket transport, which takes a third of the processor time
    of all transports together, because the shared-memory transport polls.
    ``TensorPipeAgentRpcTest`` covers the other transports.
    """

    @property
    def rpc_backend(self) -> Any:
        return rpc.backend_registry.BackendType["TENSORPIPE"]

    @property
    def rpc_backend_options(self) -> Any:
        # Device memory uses other channels, which TensorPipe chooses by device.
        channels = None if accelerator.is_accelerator() else ["basic"]
        return rpc.TensorPipeRpcBackendOptions(
            init_method=self.init_method, _transports=["uv"], _channels=channels
        )
