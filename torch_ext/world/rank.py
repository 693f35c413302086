"""What runs in a rank before, around and after its body. Imports the standard library and its own layer; touches torch
only if it is loaded.

Note [Life of a rank]
~~~~~~~~~~~~~~~~~~~~~
A rank starts having done nothing. Its order brings everything that a test may have changed a moment ago (environment,
working directory, umask, ``sys.argv``), which is applied before anything else. The body runs inside multiprocessing's
own bootstrap, so that whatever hooks into it (coverage, finalizers, logs) sees an ordinary process. When the body is
over, the rank hands in a receipt.

A rank that passed waits a moment for its peers, so that it does not cut connections that they still use, and then ends
without destroying its process groups, which would cost gloo 10 ms per peer. If the wait is in vain, it destroys them in
order. So does a rank that failed: its peers must see connections close instead of waiting for it.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from torch_ext.world import frames
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.protocol import STACK_SIGNAL, Ask, Collectives, Inherited, RankOrder, Receipt, Said

__all__ = ["Rank", "current", "failure", "main"]

# How long a rank that passed waits for its peers before it tears down by itself, in seconds.
_RELEASE_WAIT_S = 1.0

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_DEFAULTS = {
    # All ranks of a test are on this machine, and looking up the host's name may be slow, wrong or refused.
    "GLOO_SOCKET_IFNAME": _LOOPBACK,
    "TP_SOCKET_IFNAME": _LOOPBACK,
    # Torch's flight recorder, so that a hang can be traced to a collective; read when the first group is created.
    "TORCH_FR_BUFFER_SIZE": "512",
}


class Rank:
    """This process, as a rank: its number and its line to the parent half."""

    def __init__(self, order: RankOrder, channel: Channel) -> None:
        self.rank = order.rank
        self._channel = channel
        self._sending = threading.Lock()
        self._handed_in = False
        self._released = threading.Event()
        threading.Thread(target=self._listen, name="torch_ext listener", daemon=True).start()

    def hand_in(self, receipt: Receipt) -> bool:
        """Hand in the receipt, once. Unless it tells of a failure, wait for the other ranks to do the same.

        Returns:
            Whether every rank is done, so that this process may end without tearing anything down.
        """
        if self._handed_in:
            raise AssertionError(f"rank {self.rank} has handed in a receipt already")
        self._handed_in = True
        self._send(receipt)
        if receipt.said is not Said.FAILED and self._released.wait(_RELEASE_WAIT_S):
            return True
        self._send(Collectives(_flight_record()))  # a peer may be waiting for this rank in a collective
        return False

    def report(self, receipt: Receipt) -> None:
        """Hand in the receipt of one test and live on for the next."""
        self._send(receipt)
        if receipt.said is Said.FAILED:
            self._send(Collectives(_flight_record()))

    @property
    def handed_in(self) -> bool:
        return self._handed_in

    def _send(self, message: Any) -> None:
        with self._sending:
            self._channel.send(message)

    def _listen(self) -> None:
        try:
            while True:
                message, _ = self._channel.receive()
                if message is Ask.RELEASE:
                    self._released.set()
                elif message is Ask.COLLECTIVES:
                    self._send(Collectives(_flight_record()))
        except (ChannelClosedError, OSError):
            self._released.set()  # nobody is left to wait for


_current: Rank | None = None


def current() -> Rank | None:
    """Return this process as a rank; None if it is not one."""
    return _current


def main(order: RankOrder, descriptors: Sequence[int]) -> int:
    """Target of a rank's order.

    Descriptors: the channel, stdout, stderr, the pipe for stacks, then the task's connections.
    """
    channel, stdout, stderr, stacks, *connections = descriptors
    _apply(order)
    _redirect(stdout, stderr)
    faulthandler.enable(2)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    return _run(order, Channel.from_descriptor(channel), [Connection(each) for each in connections])


def _apply(order: RankOrder) -> None:
    wanted = {**_DEFAULTS, **order.environment}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    os.chdir(order.directory)
    os.umask(order.umask)
    sys.argv[:] = order.argv
    torch = sys.modules.get("torch")
    if torch is not None:
        # Even if the number is right: after a fork, torch replaces its pthreadpool on the next use, and two threads
        # that do so at once end the process ("Invalid thread pool!" and SIGABRT, in an autograd thread).
        torch.set_num_threads(order.threads or torch.get_num_threads())
        if torch.distributed.is_available():
            torch.distributed.set_debug_level_from_env()  # read once at import otherwise


def _redirect(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(ours, theirs)
        os.close(ours)
    # What stood here (pytest's capture, a StringIO) writes into this process's copy of it, which nobody reads.
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(order: RankOrder, channel: Channel, connections: Sequence[Connection]) -> int:
    process = multiprocessing.Process(target=_run_task, name=order.name, args=(order, channel, connections))
    return int(process._bootstrap())  # type: ignore[attr-defined]  # the entry that multiprocessing's own starters use


def _run_task(order: RankOrder, channel: Channel, connections: Sequence[Connection]) -> None:
    global _current
    _current = rank = Rank(order, channel)
    try:
        function, args, kwargs = pickle.loads(order.task)
        function(*(connections[a.index] if isinstance(a, Inherited) else a for a in args), **kwargs)
    except SystemExit:
        raise
    except BaseException as error:
        if not rank.handed_in:
            rank.hand_in(failure(error))
        raise
    if not rank.handed_in:
        rank.hand_in(Receipt(Said.PASSED, time.monotonic()))


def failure(error: BaseException) -> Receipt:
    """Return the receipt of a body that raised ``error``."""
    reason, trace = frames.read_error(error)
    return Receipt(Said.FAILED, time.monotonic(), reason, trace)


def _flight_record() -> str:
    if "torch" not in sys.modules:
        return ""
    try:
        from torch_ext.compat.c10d import _dump_fr_trace_json

        return json.dumps(json.loads(_dump_fr_trace_json(True, False)).get("entries", []))
    except (ImportError, RuntimeError, ValueError, TypeError):
        return ""  # this torch has no recorder, or no group exists yet
