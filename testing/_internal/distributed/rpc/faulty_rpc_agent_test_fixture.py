"""The faulty TensorPipe agent, which drops and delays chosen types of message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import rpc

from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)

# torch resends exactly these when a send fails, so only these may be dropped without an
# error for the user: three of the RRef protocol, one of distributed autograd.
retryable_message_types = [
    *(f"RREF_{step}" for step in ("FORK_REQUEST", "CHILD_ACCEPT", "USER_DELETE")),
    "CLEANUP_AUTOGRAD_CONTEXT_REQ",
]

# Seconds. Calls of Python functions, and of operators and scripted functions.
default_messages_to_delay = dict.fromkeys(("PYTHON_CALL", "SCRIPT_CALL"), 1.5)

# Fewer than torch's 5 attempts, so such a message always arrives in the end.
_DROPS_PER_MESSAGE = 3


class FaultyRpcAgentTestFixture(RpcAgentTestFixture):
    """RPC over TensorPipe that drops the first sends of some message types and delays
    others, which ``dist_init`` names for each test.

    Runs alone: this agent takes every transport there is, and each rank's shared-memory
    transport keeps a core busy. Its options cannot leave that out.
    """

    alone = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.messages_to_fail: Sequence[str] = list(retryable_message_types)
        self.messages_to_delay: dict[str, float] = dict(default_messages_to_delay)

    @property
    def rpc_backend(self) -> Any:
        # The import registers the agent and replaces BackendType, which init_rpc() does
        # not notice where it infers the agent: not in the process of TensorPipe tests.
        from torch_ext.compat.rpc import faulty_agent_module  # noqa: F401

        return rpc.backend_registry.BackendType["FAULTY_TENSORPIPE"]

    @property
    def rpc_backend_options(self) -> Any:
        return rpc.backend_registry.construct_rpc_backend_options(
            self.rpc_backend,
            init_method=self.init_method,
            num_worker_threads=8,
            num_fail_sends=_DROPS_PER_MESSAGE,
            messages_to_fail=self.messages_to_fail,
            messages_to_delay=self.messages_to_delay,
        )

    def setup_fault_injection(
        self,
        faulty_messages: Sequence[str] | None,
        messages_to_delay: dict[str, float] | None,
    ) -> None:
        if faulty_messages is not None:
            self.messages_to_fail = faulty_messages
        if messages_to_delay is not None:
            self.messages_to_delay = messages_to_delay
