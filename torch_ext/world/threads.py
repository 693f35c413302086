"""Judges the threads of this process: which may go on, and where the rest wait. Tracks the threads of transports, and
the address of the world. Runs in ranks and parent halves; touches torch only if it is loaded.

Note [Provable hangs]
~~~~~~~~~~~~~~~~~~~~~
A world hangs if no thread or process can end the waits of its ranks. Unknown ones may, so the rule lists the waits in
which a thread cannot go on by itself:

1. *A private futex without a time limit* (``/proc/self/task/TID/syscall``): a lock, a condition, a queue, a join, an
   idle thread of a pool. Only another thread of this process or a signal handler can wake the thread.
2. *An operation of a process group, a store or RPC*, in any system call, if its own limit lies past the test's. The
   innermost Python frame shows it (``operations.py``). Only a peer can end it, which is blocked too, or a process that
   has the address of the store: see below.
3. *An entry of the page of waits*: the thread waits for a peer in memory that only ranks share.
4. *A transport's own thread*, which forwards messages of peers and otherwise sleeps. Its name is in ``_TRANSPORTS``,
   and it appeared while a store, a process group or an RPC agent was made (:func:`makes_transport`): a test may set the
   name, and a thread may inherit it.

Any other thread may go on: one that computes, sleeps, polls, reads, or waits for a child, a lock in shared memory or a
time limit; or a library's thread in ``epoll``. Only rule 1 applies to threads that ``threading`` does not know, since
their frames (``frames.py``) cannot be told apart.

A signal can end any wait: a rank with a timer, or a handler of SIGIO (which files send), may go on. Other processes of
the run can act, by a signal, a key of a store or otherwise, and so can each thread of the parent half that these rules
do not block: see Note [Who else may act]. They cannot act on ranks that all wait in memory that only ranks share.
``watch.py`` decides after several looks.

Note [An address for each world]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Two ranks find each other in gloo by address, port and a count of the process's connections, and a rank that finds no
peer retries. If all worlds shared 127.0.0.1, a rank whose peer has died could reach the next owner of the peer's port,
in another world.

So each world has an address in 127.0.0.0/8, to which all its ranks bind gloo. An abstract socket named after the
address reserves it: the kernel gives a name to one socket only. Every rank inherits the socket, so the address is free
again when the last process of the world is gone. Without such sockets or addresses, worlds share 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import re
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from torch_ext.world import _os, operations
from torch_ext.world.frames import frames_of_threads
from torch_ext.world.operations import Operation, ThreadWait, operation_of, waits_of_threads, watch_stores
from torch_ext.world.protocol import Progress

# The name of the thread that answers the parent half.
LISTENER = "torch_ext listener"

# System calls, by number.
_CALLS = {
    "x86_64": {202: "lock", 24: "yield", 230: "sleep", 35: "sleep", 232: "poll", 281: "poll", 7: "poll", 271: "poll",
               23: "poll", 270: "poll", 45: "poll", 47: "poll"},
    "aarch64": {98: "lock", 124: "yield", 115: "sleep", 101: "sleep", 22: "poll", 73: "poll", 72: "poll", 207: "poll",
                212: "poll"},
}.get(platform.machine(), {})  # fmt: skip
# System calls in which an operation waits. An operation that polls leaves them for a moment, or longer if its thread
# waits for a core: look again up to _MORE_LOOKS times.
_WAITS = ("lock", "sleep", "poll", "shared")
_MORE_LOOKS, _BETWEEN_LOOKS_S = 10, 0.003
# Names of network threads: gloo's, the stores', and TensorPipe's, one of which never sleeps.
_TRANSPORTS = ("gloo_tcp_loop", "pt_tcpstore", "TP_")
_SERVES = ("poll", "running", "yield")

_FUTEX_PRIVATE, _FUTEX_REALTIME, _FUTEX_COMMAND = 128, 256, 127
_FUTEX_WAIT, _FUTEX_WAIT_BITSET = 0, 9
_TIMESPEC = struct.Struct("@qq")
# An operation that polls wakes at least this often, in seconds.
_SLICE_S = 2.0

# Threads by number and start time, a unique pair: `_made` appeared while a transport was made, `_harness`
# are ours.
_made: set[tuple[int, str]] = set()
_before_making: list[set[int]] = []  # the threads before each transport that is being made now
_making = threading.local()  # has ``transport`` while this thread makes one
_harness: set[tuple[int, str]] = set()


@dataclass(frozen=True)
class ThreadState:
    """One thread, as the kernel and the interpreter see it."""

    tid: int  # the kernel's number
    name: str  # for users
    doing: str  # "lock" in a private futex, "shared" in another, "sleep", "poll", or anything else
    until_s: float  # end of the system call's own limit, by `time.monotonic`; infinite if it has none
    switches: int  # number of context switches
    operation: Operation | None = None  # of its innermost Python frame; None if unknown
    sliced: bool = False  # waits in short slices, and so is scheduled all the time
    on_page: bool = False  # has an entry in the page of waits
    of_transport: bool = False  # native, and appeared while a transport was made
    serves: bool = False  # a transport's thread that forwards messages of peers

    @property
    def is_in_operation(self) -> bool:
        return self.operation is not None and self.operation.limit_s is not None

    @property
    def limit_s(self) -> float | None:
        """The time before which the wait does not end by itself; None if the thread may go on at any time."""
        known = self.operation.limit_s if self.operation is not None else None
        if known is not None and self.doing in _WAITS:
            return known if self.sliced else min(known, self.until_s)
        return self.until_s if self.doing == "lock" else None

    @property
    def schedule(self) -> str:
        """A text that stays the same while the thread is blocked."""
        return self.operation.position if self.operation is not None and self.sliced else str(self.switches)

    @property
    def description(self) -> str:
        where = f" in {self.operation.wait.description}" if self.operation is not None else ""
        doing = {"sleep": "sleeps", "poll": "waits for a file or socket", "shared": "waits for a lock in shared memory"}
        return f"{self.name} {doing.get(self.doing, 'runs, or is in a system call that may end')}{where}"


_UNKNOWN = ThreadState(0, "a thread", "unknown", math.inf, 0)


def makes_transport(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``make``, which makes a store, a group or an RPC agent: record the threads that appear while it runs."""

    @functools.wraps(make)
    def make_transport(*args: Any, **kwargs: Any) -> Any:
        if hasattr(_making, "transport"):  # a group makes a store: the outer call records the threads
            return make(*args, **kwargs)
        _making.transport, before = True, _os.threads_of()
        _before_making.append(before)
        try:
            return make(*args, **kwargs)
        finally:
            del _making.transport
            _before_making.remove(before)
            _made.update((tid, _os.start_of(tid)) for tid in _os.threads_of() - before)

    return make_transport


def leave_out(*, others: bool = False) -> None:
    """Mark the calling thread, or with ``others`` all other current threads, as the harness's, which :func:`observe`
    leaves out.
    """
    own = {threading.get_native_id()}
    tids = _os.threads_of() - own if others else own
    _harness.update((tid, _os.start_of(tid)) for tid in tids)


def is_left_out(tid: int | None) -> bool:
    """Whether the thread with this number was marked by :func:`leave_out`."""
    return tid is not None and any(tid == known for known, _ in list(_harness))


def observe(between_tests: bool = False) -> Progress:
    """Return whether the threads of this process can go on. Leaves out the calling thread and, with ``between_tests``,
    the main thread, which waits for the harness's next message.
    """
    progress = judge_threads(list(_threads(_os.getpid() if between_tests else 0)), operations.own_summary())
    signals = tuple(_signals())
    return replace(
        progress,
        blocked=progress.blocked and not signals,
        may_act=progress.may_act + signals,
        among_ranks=progress.among_ranks and not _handles_signals(),
    )


def judge_threads(threads: list[ThreadState], record: str) -> Progress:
    """Judge one sample of all threads but the sampling one. ``record`` changes when a collective begins or ends."""
    own = sorted((each for each in threads if not (each.serves and each.doing in _SERVES)), key=lambda each: each.tid)
    may_act = tuple(each.description for each in own if each.limit_s is None)
    # An operation raises at its limit. Gloo's threads wait with their group's limit.
    limits = [(each.is_in_operation or each.of_transport, each.limit_s) for each in own]
    until_s = min((limit for raises, limit in limits if limit is not None and not raises), default=math.inf)
    raises_s = min((limit for raises, limit in limits if limit is not None and raises), default=math.inf)
    waits = tuple(each.operation.wait for each in own if each.operation is not None)
    seen = ";".join(f"{each.tid}:{each.schedule}" for each in own)
    in_memory = [each.on_page for each in own if each.on_page or each.doing != "lock" or each.is_in_operation]
    return Progress(not may_act, until_s, seen, waits, record, may_act, bool(in_memory) and all(in_memory), raises_s)


def _threads(between_tests: int) -> Iterator[ThreadState]:
    frames = frames_of_threads()
    known = {thread.native_id: thread for thread in threading.enumerate()}
    tids = _os.threads_of()
    if not _CALLS or not tids:
        yield _UNKNOWN
        return
    entries = waits_of_threads()
    for tid in tids - {threading.get_native_id(), between_tests}:
        thread = known.get(tid)
        frame = frames.get(thread.ident or -1) if thread is not None else None
        found = _thread(tid, f"thread {thread.name!r}" if thread is not None else "", frame, entries.get(tid))
        if found is not None:
            yield found


def _thread(tid: int, name: str, frame: FrameType | None, entry: ThreadWait | None) -> ThreadState | None:
    """Return the state of thread ``tid``; None if the thread is gone or the harness's."""
    folder = f"/proc/self/task/{tid}"
    try:
        comm = _os.read_file(f"{folder}/comm").decode(errors="replace").strip()
        lines = _os.lines_of(f"{folder}/status")
        switches = sum(int(line.split()[-1]) for line in lines if "ctxt_switches" in line)
        identity = tid, _os.start_of(tid)
        if identity in _harness:
            return None
        operation = operation_of(frame) if frame is not None else None
        call = _call_of(tid)
        if operation is not None and operation.limit_s is not None:
            for _ in range(_MORE_LOOKS):
                if _read_call(call)[0] in _WAITS:
                    break
                _os.sleep(_BETWEEN_LOOKS_S)
                call = _call_of(tid)
    except OSError:
        return replace(_UNKNOWN, tid=tid) if tid in _os.threads_of() else None
    doing, until_s = _read_call(call)
    if entry is not None:
        operation = _on_page(operation, entry)
    sliced = doing == "sleep" or until_s < _os.monotonic() + _SLICE_S or (operation is not None and operation.sliced)
    is_made = identity in _made or any(tid not in before for before in list(_before_making))
    of_transport = not name and is_made
    serves = of_transport and comm.startswith(_TRANSPORTS)
    shown = name or f"native thread {comm!r}"
    return ThreadState(tid, shown, doing, until_s, switches, operation, sliced, entry is not None, of_transport, serves)


def _call_of(tid: int) -> list[str]:
    return _os.read_file(f"/proc/self/task/{tid}/syscall").decode().split()


def _on_page(operation: Operation | None, entry: ThreadWait) -> Operation:
    """Return the operation of a thread with an entry in the page; ``operation``: its Python frame's, if any."""
    if operation is None:
        return Operation(entry.wait, entry.until_s, str(entry.since_ns))
    until_s = min(entry.until_s, math.inf if operation.limit_s is None else operation.limit_s)
    return replace(operation, limit_s=until_s, position=f"{operation.position}:{entry.since_ns}")


def _read_call(call: list[str]) -> tuple[str, float]:
    """Return a thread's activity according to a line of ``syscall``, and its latest end (``time.monotonic``)."""
    if not call[0].isdigit():
        return "running", math.inf
    doing = _CALLS.get(int(call[0]), "unknown")
    if doing != "lock":
        return doing, math.inf
    operation, timeout = int(call[2], 16), int(call[4], 16)
    if operation & _FUTEX_COMMAND not in (_FUTEX_WAIT, _FUTEX_WAIT_BITSET):
        return "unknown", math.inf
    where = doing if operation & _FUTEX_PRIVATE else "shared"
    return where, _futex_limit(operation, timeout) if timeout else math.inf


def _futex_limit(operation: int, timeout: int) -> float:
    try:
        seconds, nanoseconds = _TIMESPEC.unpack(_os.read_memory(timeout, _TIMESPEC.size))
    except (OSError, ValueError, struct.error):
        return 0.0
    at = seconds + nanoseconds * 1e-9
    if operation & _FUTEX_COMMAND == _FUTEX_WAIT:
        return _os.monotonic() + at
    return at if not operation & _FUTEX_REALTIME else at - _os.wall_clock() + _os.monotonic()


def _signals() -> Iterator[str]:
    """Yield the senders of signals to this process, other processes aside."""
    if _has_timer():
        yield "a timer that sends a signal (signal.alarm() or the like)"
    if callable(signal.getsignal(signal.SIGIO)):
        yield "the handler of SIGIO, which files send"
    if any(re.match(r"TracerPid:\s+[1-9]", line) for line in _os.lines_of("/proc/self/status")):
        yield "a debugger"


def _has_timer() -> bool:
    with contextlib.suppress(OSError):  # the kernel lacks or hides such timers
        if any(re.match(r"signal: \d+/", line) for line in _os.lines_of("/proc/self/timers")):
            return True
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0


def _handles_signals() -> bool:
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return any(callable(handler) and handler is not signal.default_int_handler for handler in handlers)


# Transports

LOOPBACK = "lo"
_ATTEMPTS = 16

_address = ""  # set by belong_to()


def prepare() -> None:
    """Wrap torch's stores, groups and agents: their waits and threads become known, and gloo obeys :func:`belong_to`.
    Idempotent: a zygote does it for its children.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return
    from torch_ext.compat.c10d import bind_gloo, watch_groups
    from torch_ext.compat.rpc import watch_agents

    watch_stores(makes_transport)
    watch_groups(operations.note_destroyed, makes_transport)
    watch_agents(makes_transport)
    bind_gloo(LOOPBACK, lambda: _address, makes_transport)


def belong_to(address: str) -> None:
    """Make gloo listen at ``address`` in this process; empty: torch decides."""
    global _address
    _address = address


def reserve() -> tuple[str, int]:
    """Reserve an address that no other live world on this machine has. Return it with a descriptor, which keeps the
    reservation while any process has it open; ``("", -1)`` if there is none.
    """
    for _ in range(_ATTEMPTS):
        first, second, third = os.urandom(3)
        address = f"127.{1 + first % 254}.{second}.{1 + third % 254}"
        # An error means that another world has the address, or that this machine lacks it.
        with contextlib.suppress(OSError), socket.socket() as probe, socket.socket(socket.AF_UNIX) as name:
            probe.bind((address, 0))
            name.bind(f"\0torch_ext {address}")
            return address, name.detach()
    return "", -1
