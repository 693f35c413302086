"""Helpers of RPC tests, which run in the rank. A *worker* is a rank's RPC agent; rank
``r`` is the worker ``worker_name(r)``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import rpc
from torch.testing._internal import dist_utils as _upstream

from torch_ext.compat import rpc as private
from torch_ext.world.wording import add_note

INIT_METHOD_TEMPLATE = _upstream.INIT_METHOD_TEMPLATE
get_function_event = _upstream.get_function_event
get_num_owners_and_forks = _upstream.get_num_owners_and_forks
noop = _upstream.noop
wait_until_pending_futures_and_users_flushed = (
    _upstream.wait_until_pending_futures_and_users_flushed
)
worker_name = _upstream.worker_name

_POLL_INTERVAL_S = 0.01
# The two ways in which torch names the worker that raised: in a Python function, or
# while serving a message.
_NODE_IN_MESSAGE = re.compile(r"On WorkerInfo\(id=(\d+), name=|Error on Node (\d+):")


def dist_init(
    old_test_method: Callable[..., Any] | None = None,
    setup_rpc: bool = True,
    clean_shutdown: bool = True,
    faulty_messages: Sequence[str] | None = None,
    messages_to_delay: dict[str, float] | None = None,
) -> Callable[..., Any]:
    """Run a test method with an RPC worker in each rank. Use it with or without
    arguments.

    An RRef that outlives the body is an error at shutdown. If the body raises, the
    agent is not shut down: the connection breaks when the rank ends, and no peer waits
    for it. With ``setup_rpc=False`` the body starts and stops the agent. With
    ``clean_shutdown=False`` a worker does not wait for the work of its peers.

    The faulty agent drops the first messages of the types ``faulty_messages``, and
    delays those of ``messages_to_delay`` by seconds; None keeps the fixture's choice.
    """
    if old_test_method is None:
        return partial(
            dist_init,
            setup_rpc=setup_rpc,
            clean_shutdown=clean_shutdown,
            faulty_messages=faulty_messages,
            messages_to_delay=messages_to_delay,
        )

    @wraps(old_test_method)
    def run_as_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.worker_id = self.rank
        with mock.patch.object(private.api, "_ignore_rref_leak", False):
            self.setup_fault_injection(faulty_messages, messages_to_delay)
            if not setup_rpc:
                return old_test_method(self, *args, **kwargs)
            start_worker(self)
            with _name_remote_failures(worker_name(self.rank)):
                result = old_test_method(self, *args, **kwargs)
            rpc.shutdown(graceful=clean_shutdown)
            return result

    return run_as_worker


def start_worker(test: Any, name: str = "", **options: Any) -> None:
    """Start the agent of ``test``'s rank, with ``options`` set on its fixture's."""
    backend_options = test.rpc_backend_options
    for key, value in options.items():
        setattr(backend_options, key, value)
    rpc.init_rpc(
        name or worker_name(test.rank),
        backend=test.rpc_backend,
        rank=test.rank,
        world_size=test.world_size,
        rpc_backend_options=backend_options,
    )


@contextmanager
def _name_remote_failures(caller: str) -> Iterator[None]:
    """Note on an error that came back through remote calls which worker raised it: its
    message nests a traceback for each hop, and its own traceback points to the call.
    """
    try:
        yield
    except Exception as error:
        nodes = (
            int(match[1] or match[2]) for match in _NODE_IN_MESSAGE.finditer(str(error))
        )
        hops = [name for name in map(worker_name, nodes) if name != caller]
        if hops:
            line = f"The failure happened in a remote call on {hops[-1]}; "
            add_note(error, f"{line}{caller} only reports it.")
        raise


def initialize_pg(
    init_method: str, rank: int, world_size: int, backend: str = "gloo"
) -> None:
    """Initialize the default process group unless there is one, by another rendezvous
    file than that of the RPC agents, because both store their keys there.
    """
    if not dist.is_initialized():
        dist.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=world_size
        )


def wait_until_node_failure(
    rank: int, expected_error_regex: str = ".*", timeout: int = 60
) -> str:
    """Call ``rank`` until a call fails with a matching message, and return the message.

    Raises:
        TimeoutError: no call did so for ``timeout`` seconds.
    """
    last = "it still answered"
    for _ in _poll(timeout):
        try:
            rpc.rpc_sync(worker_name(rank), noop, timeout=timeout)
        except Exception as error:
            last = str(error)
            if re.search(expected_error_regex, last):
                return last
    raise TimeoutError(
        f"{worker_name(rank)} did not fail with an error matching "
        f"{expected_error_regex!r} in {timeout} s: {last}"
    )


def wait_until_owners_and_forks_on_rank(
    num_owners: int, num_forks: int, rank: int, timeout: int = 20
) -> None:
    """Wait until ``rank`` owns exactly ``num_owners`` RRefs with ``num_forks`` forks.

    Raises:
        ValueError: the counts still differed after ``timeout`` seconds.
    """
    expected = (num_owners, num_forks)
    for _ in _poll(timeout):
        owners, forks = rpc.rpc_sync(
            worker_name(rank), get_num_owners_and_forks, timeout=timeout
        )
        seen = (int(owners), int(forks))
        if seen == expected:
            return
    raise ValueError(
        f"After {timeout} s {worker_name(rank)} has {seen[0]} owners and {seen[1]} "
        f"forks, expected {num_owners} and {num_forks}"
    )


def _poll(timeout: float) -> Iterator[None]:
    """Yield at once, then every 10 milliseconds for ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    yield
    while time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
        yield


def poll_until(condition: Callable[[], bool], otherwise: str) -> None:
    """Poll ``condition`` until it is true.

    Raises:
        TimeoutError: with the message ``otherwise``, after 20 seconds.
    """
    for _ in _poll(20):
        if condition():
            return
    raise TimeoutError(f"After 20 s: {otherwise}")
