"""The interface between RPC suites and agents: one suite serves every agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed import rpc
from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture as _UpstreamFixture,
)

from torch_ext.testing._internal import dist_utils

if TYPE_CHECKING:
    # The class that generate_tests mixes in. Suites use its rank, file_name and
    # assertions.
    from torch_ext.testing._internal.common_distributed import (
        MultiProcessTestCase as _MixedInLater,
    )
else:
    _MixedInLater = object

# How to obtain the result here, for each way to call.
CALL_MODES: dict[str, Callable[[Any], Any]] = {
    "rpc_sync": lambda result: result,
    "rpc_async": lambda future: future.wait(),
    "remote": lambda rref: rref.to_here(),
}


# Errors that a caller may see when the callee's agent goes away during connecting,
# sending or waiting.
_SHUTDOWN_ERRORS = (
    "(?i:eof)[: ]",
    "(?i:connection (reset|refused|closed))",
    "(?i:broken pipe)",
    "(pipe|context|listener) closed",
    "ECANCELED|operation canceled",
    "RPC agent is shutting down|agent is not running|not initialized",
)


class RpcAgentTestFixture(_UpstreamFixture, _MixedInLater):
    """Base class of RPC suites and of agents' fixtures."""

    world_size = 4

    @property
    def pg_init_method(self) -> str:
        """The rendezvous of a process group, which needs another file than agents."""
        return f"{self.file_init_method}_pg"

    def peer(self, distance: int = 1) -> str:
        """Return the name of the worker ``distance`` places after this, in a ring."""
        return dist_utils.worker_name((self.rank + distance) % self.world_size)

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        to: Any = None,
        mode: str = "rpc_sync",
        **kwargs: Any,
    ) -> Any:
        """Call ``function`` on worker ``to`` (default: the next) and return its result
        here.
        """
        to = self.peer() if to is None else to
        result = getattr(rpc, mode)(to, function, args=args, kwargs=kwargs or None)
        return CALL_MODES[mode](result)

    def check_call(
        self,
        expected: Any,
        function: Callable[..., Any],
        *args: Any,
        to: Any = None,
        **kwargs: Any,
    ) -> None:
        """Check the result of :meth:`call` in each of ``CALL_MODES``."""
        for mode in CALL_MODES:
            with self.subTest(f"{mode}: {function} to {to}"):
                got = self.call(function, *args, to=to, mode=mode, **kwargs)
                self.assertEqual(got, expected)

    def check_call_raises(
        self,
        error: type[Exception],
        message: str,
        function: Callable[..., Any],
        *args: Any,
        to: Any = None,
    ) -> list[str]:
        """Check the error of :meth:`call` in each mode; return the whole messages."""
        messages = []
        for mode in CALL_MODES:
            with self.subTest(mode), self.assertRaisesRegex(error, message) as caught:
                self.call(function, *args, to=to, mode=mode)
            messages.append(str(caught.exception))
        return messages

    def get_shutdown_error_regex(self) -> str:
        """Return a pattern for the errors of calls to a worker that has shut down."""
        return "|".join(f"({pattern})" for pattern in _SHUTDOWN_ERRORS)

    def get_timeout_error_regex(self) -> str:
        """Return a pattern for the error of a call that timed out."""
        return "RPC ran for more than"
