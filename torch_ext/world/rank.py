"""What runs in a rank before, around and after its body. Imports the standard library and its own layer; touches torch
only if loaded.

Note [Life of a rank]
~~~~~~~~~~~~~~~~~~~~~
A rank is started having done nothing. Its order brings everything that a test may have changed a moment ago
(environment, working directory, umask, ``sys.argv``) and is applied before anything else. The body runs inside
``multiprocessing``'s own bootstrap, so whatever hooks into that (coverage, finalizers, logs) sees a process like any
other. A receipt is handed in when the body is over; a rank that has nothing to report waits a moment for the others, so
that it does not cut connections that they still use, and then ends without tearing down process groups, which costs
gloo 10 ms a peer. One that waits in vain tears down in order, and so does one that failed: its peers shall see closed
connections, not silence.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from torch_ext.world.outcome import Receipt, Said
from torch_ext.world.wire import Channel, ChannelClosedError

__all__ = ["STACK_SIGNAL", "Ask", "Collectives", "Inherited", "RankOrder", "current", "failure", "main"]

# Real-time signals are the ones that neither torch nor tests use; macOS has none.
STACK_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else getattr(signal, "SIGUSR2", 0)

# How long a rank that passed waits for its peers before it tears down by itself, in seconds.
_RELEASE_WAIT_S = 1.0

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_DEFAULTS = {
    # Name look-up of the host may be slow, wrong or refused; the ranks of a test are all on this machine.
    "GLOO_SOCKET_IFNAME": _LOOPBACK,
    "TP_SOCKET_IFNAME": _LOOPBACK,
    # Torch's flight recorder, so that a hang can be traced to a collective; read when the first group is created.
    "TORCH_FR_BUFFER_SIZE": "512",
}


@dataclass(frozen=True)
class Inherited:
    """Stands for connection number ``index`` among a body's arguments, which are pickled before it exists."""

    index: int


@dataclass(frozen=True)
class RankOrder:
    """Everything a rank is told.

    Attributes:
        body: pickled ``(function, args, kwargs)``; unpickled in the rank once the rest is applied.
        threads: intra-op threads; 0 leaves torch alone.
    """

    rank: int
    world_size: int
    name: str
    body: bytes
    environment: dict[str, str]
    directory: str
    umask: int
    argv: tuple[str, ...]
    threads: int


class Ask:
    """What the parent half sends to a rank."""

    RELEASE = "release"
    COLLECTIVES = "collectives"


@dataclass(frozen=True)
class Collectives:
    """A rank's answer: its last collectives as torch's flight recorder tells them, JSON; empty if there are none."""

    json: str


class Rank:
    """This process, as a rank: its number and its line to the parent half."""

    def __init__(self, order: RankOrder, channel: Channel) -> None:
        self.rank = order.rank
        self.world_size = order.world_size
        self._channel = channel
        self._sending = threading.Lock()
        self._handed_in = False
        self._released = threading.Event()
        threading.Thread(target=self._listen, name="torch_ext listener", daemon=True).start()

    def hand_in(self, receipt: Receipt) -> bool:
        """Hand in the receipt, once; unless it tells of a failure, wait for the other ranks to do the same.

        Returns:
            Whether every rank is done, so that this process may end without tearing anything down.
        """
        if self._handed_in:
            raise AssertionError(f"rank {self.rank} has handed in a receipt already")
        self._handed_in = True
        self._send(receipt)
        if receipt.said is not Said.FAILED and self._released.wait(_RELEASE_WAIT_S):
            return True
        self._send(Collectives(_flight_record()))  # whoever waits for this rank in a collective will want to know
        return False

    def report(self, receipt: Receipt) -> None:
        """Hand in the receipt of one of several tests that this rank runs in turn; it lives on."""
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
                if message == Ask.RELEASE:
                    self._released.set()
                elif message == Ask.COLLECTIVES:
                    self._send(Collectives(_flight_record()))
        except (ChannelClosedError, OSError):
            self._released.set()  # nobody is left to wait for


_current: Rank | None = None


def current() -> Rank | None:
    """Return this process as a rank; None if it is not one."""
    return _current


def main(order: RankOrder, descriptors: Sequence[int]) -> int:
    """Target of a rank's order.

    Descriptors: the channel, stdout, stderr, the pipe for stacks, then the body's connections.
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
        # Also where the number is right already: a fork leaves torch's pthreadpool to be replaced on its next use,
        # which is not safe in several threads at once ("Invalid thread pool!" and SIGABRT, in an autograd thread).
        torch.set_num_threads(order.threads or torch.get_num_threads())
        if torch.distributed.is_available():
            torch.distributed.set_debug_level_from_env()  # read once at import otherwise


def _redirect(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(ours, theirs)
        os.close(ours)
    # Whatever stood here (pytest's capture, a StringIO) writes into the parent's copy, where nobody would read it.
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(order: RankOrder, channel: Channel, connections: Sequence[Connection]) -> int:
    process = multiprocessing.Process(target=_body, name=order.name, args=(order, channel, connections))
    return int(process._bootstrap())  # type: ignore[attr-defined]  # the entry that multiprocessing's own starters use


def _body(order: RankOrder, channel: Channel, connections: Sequence[Connection]) -> None:
    global _current
    _current = rank = Rank(order, channel)
    try:
        function, args, kwargs = pickle.loads(order.body)
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
    own = os.path.dirname(os.path.abspath(__file__)) + os.sep
    shown = traceback.TracebackException.from_exception(error, capture_locals=False)
    _drop_frames(shown, lambda frame: not _is_harness(frame, own))
    last = "".join(shown.format_exception_only()).strip()
    return Receipt(
        Said.FAILED,
        time.monotonic(),
        reason=last.splitlines()[0] if last else type(error).__name__,
        trace="".join(shown.format()),
    )


# Frames between the world and a test's body; they are the same in every failure and tell a reader nothing.
_HARNESS = re.compile(
    r"/testing/_internal/(common_distributed|common_utils|hypothesis_utils|_distributed/\w+)\.py$"
    r"|/multiprocessing/process\.py$|/unittest/(case|mock)\.py$|/torch/distributed/c10d_logger\.py$"
)


def _is_harness(frame: traceback.FrameSummary, own: str) -> bool:
    return frame.filename.startswith(own) or bool(_HARNESS.search(frame.filename))


def _drop_frames(shown: traceback.TracebackException, keep: Callable[[traceback.FrameSummary], bool]) -> None:
    kept = [frame for frame in shown.stack if keep(frame)]
    if kept:
        shown.stack[:] = kept
    for linked in (shown.__cause__, shown.__context__):
        if linked is not None:
            _drop_frames(linked, keep)


def _flight_record() -> str:
    if "torch" not in sys.modules:
        return ""
    try:
        from torch_ext.compat.c10d import _dump_fr_trace_json

        return json.dumps(json.loads(_dump_fr_trace_json(True, False)).get("entries", []))
    except (ImportError, RuntimeError, ValueError, TypeError):
        return ""  # this torch has no recorder, or no group exists yet: the stacks have to do
