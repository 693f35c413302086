"""Which threads of this process may go on, and what the others wait for. Runs in ranks and in parent halves. Standard
library and own layer only; touches torch only if it is loaded. Linux only: elsewhere nothing is ever proven.

Note [Provable hangs]
~~~~~~~~~~~~~~~~~~~~~
A world hangs if nobody can end the waits of its ranks. Threads and processes that we do not know can, so the rule lists
what cannot act, and everything else can. A thread cannot go on by itself if it is one of these:

1. *In a private futex without a time limit* (``/proc/self/task/TID/syscall``): a lock, a condition, a queue, a join,
   an idle thread of a pool, with Python frames or without. No other process has this memory. So only another thread of
   this process wakes it, and that one would have to be able to go on, or a handler of a signal: see below.
2. *In an operation of a process group, a store or RPC*, whatever the system call: the innermost Python frame tells the
   operation (``operations.py``), and its own limit must lie past the test's. A peer ends it, or whoever knows the
   address of the store: a rank, which is blocked itself, or another process, see below.
3. *In an entry of the page of waits* (``wait_page.py``): waits for a peer in memory that ranks alone share.
4. *A transport's own thread*, which hands on what peers send and otherwise sleeps. It has one of the names in
   ``_TRANSPORTS``, and it appeared while a store, a process group or an RPC agent was made (:func:`makes_transport`).
   A name alone may be inherited, or given by anybody.

Every other thread makes its rank able to go on: one that computes, sleeps, polls, reads, waits for a child, for a lock
in shared memory or for a time limit, and one of a library that sits in ``epoll``. Frames come from
``sys._current_frames()``; threads that the ``threading`` module does not know are judged by rule 1 alone, since nothing
says which frame is theirs.

A signal can end any wait. It comes from a timer, so a rank with one is able to go on; from a file (SIGIO), so is a rank
that handles that; or from another process. Any process of the run but ranks of this world and the harness can act,
by a signal, a key of a store, or in ways that nobody lists, and so can each thread of the parent half by the same four
rules: see ``processes.py``. Only where all ranks wait in memory that they alone share, the others do not matter.
``hangs.py`` decides over several looks.

How torch's transports are set up in ranks, and the address that they use. Touches torch only if it is loaded.

Note [An address for each world]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Two ranks of gloo's find each other by address, port and a number that counts the connections of a process; nothing
says which job they belong to, and whoever finds nobody tries again. If all worlds shared 127.0.0.1, a rank whose peer
has died could reach whoever was given the peer's port next, in a world beside its own, and take part there.

So each world has an address of 127.0.0.0/8 for itself, and gloo is bound to it in all its ranks. An abstract socket of
that name reserves it: the kernel gives a name to one socket only, in the same network namespace that the address is
from. Every rank inherits the socket, so an address is free again when the last process of its world is gone, and nobody
is left who could still be looking for a peer. A rank of another world cannot be reached by mistake then, because no
process listens for gloo at an address that is not its world's. Ranks find it in ``TORCH_EXT_ADDRESS``, for servers of
their own.

Where there are no abstract sockets (macOS) or no such addresses, worlds share 127.0.0.1.
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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from torch_ext.world import _os, operations
from torch_ext.world.operations import Operation, ThreadWait, operation_of, waits_of_threads, watch_stores
from torch_ext.world.protocol import Progress

__all__ = [
    "LISTENER",
    "LOOPBACK",
    "VARIABLE",
    "Task",
    "belong_to",
    "judge_tasks",
    "leave_out",
    "makes_transport",
    "observe",
    "prepare",
    "reserve",
]

# The name of the thread in which a rank answers its parent half.
LISTENER = "torch_ext listener"

# Numbers of system calls, by what a thread does in them.
_CALLS = {
    "x86_64": {202: "lock", 24: "yield", 230: "sleep", 35: "sleep", 232: "poll", 281: "poll", 7: "poll", 271: "poll",
               23: "poll", 270: "poll", 45: "poll", 47: "poll"},
    "aarch64": {98: "lock", 124: "yield", 115: "sleep", 101: "sleep", 22: "poll", 73: "poll", 72: "poll", 207: "poll",
                212: "poll"},
}.get(platform.machine(), {})  # fmt: skip
# In these, a thread waits in an operation. One that polls is between two of them for a moment, or longer if it waits
# for a core: then it is looked at so many more times.
_WAITS = ("lock", "sleep", "poll", "shared")
_MORE_LOOKS, _BETWEEN_LOOKS_S = 10, 0.003
# Names of threads that serve the network: of gloo, of stores, of TensorPipe, one of whose threads never sleeps.
_TRANSPORTS = ("gloo_tcp_loop", "pt_tcpstore", "TP_")
_SERVES = ("poll", "running", "yield")

_FUTEX_PRIVATE, _FUTEX_REALTIME, _FUTEX_COMMAND = 128, 256, 127
_FUTEX_WAIT, _FUTEX_WAIT_BITSET = 0, 9
_TIMESPEC = struct.Struct("@qq")
# An operation that looks after its peers wakes at least this often, in seconds.
_SLICE_S = 2.0
_TASKS = "/proc/self/task"

# Threads by their number and start, which together are never used twice: those that appeared while a transport was
# made, and those of the harness.
_made: set[tuple[int, str]] = set()
_before_making: list[set[int]] = []  # the threads before each transport that is being made now
_ours: set[tuple[int, str]] = set()


@dataclass(frozen=True)
class Task:
    """One thread, as the kernel and the interpreter see it.

    Attributes:
        tid: the kernel's id of it.
        name: for users.
        doing: ``"lock"`` in a private futex, ``"shared"`` in another, ``"sleep"``, ``"poll"``, or anything else.
        until_s: when its system call's own limit ends, by ``time.monotonic``; infinite if it has none.
        switches: how often it has been scheduled.
        operation: what its innermost Python frame is in; None if it is not known.
        sliced: whether it waits in short slices, and so is scheduled all the time.
        on_page: whether it has an entry in the page of waits.
        of_transport: whether it is native and appeared while a transport was made.
        serves: whether it is such a thread that hands on what peers send.
    """

    tid: int
    name: str
    doing: str
    until_s: float
    switches: int
    operation: Operation | None = None
    sliced: bool = False
    on_page: bool = False
    of_transport: bool = False
    serves: bool = False


def makes_transport(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``make`` with the threads noted that appear while it runs: it makes a store, a group or an RPC agent."""

    @functools.wraps(make)
    def make_transport(*args: Any, **kwargs: Any) -> Any:
        before = _tids()
        _before_making.append(before)
        try:
            return make(*args, **kwargs)
        finally:
            _before_making.remove(before)
            _made.update((tid, _start_of(tid)) for tid in _tids() - before)

    return make_transport


def leave_out(*, others: bool = False) -> None:
    """Have :func:`observe` leave out the calling thread, or all ``others`` that this process has now: they are the
    harness's.
    """
    own = {threading.get_native_id()}
    tids = _tids() - own if others else own
    _ours.update((tid, _start_of(tid)) for tid in tids)


def observe(between_tests: bool = False) -> Progress:
    """Return whether the threads of this process can go on, the calling one left out.

    Args:
        between_tests: its main thread waits for the harness's next word.
    """
    tasks = list(_tasks(_os.getpid() if between_tests else 0))
    progress = judge_tasks(tasks, operations.own_summary())
    signals = tuple(_signals())
    return replace(
        progress,
        blocked=progress.blocked and not signals,
        may_act=progress.may_act + signals,
        among_ranks=progress.among_ranks and not _handles_signals(),
    )


def judge_tasks(tasks: list[Task], record: str) -> Progress:
    """Judge one look at all threads; a pure function.

    Args:
        tasks: every thread but the one that looks.
        record: changes whenever a collective begins or ends.
    """
    own = [task for task in tasks if not (task.serves and task.doing in _SERVES)]
    limits = [_blocked_until(task) for task in own]
    able = tuple(_words(task) for task, limit in zip(own, limits, strict=True) if limit is None)
    known = [(task, limit) for task, limit in zip(own, limits, strict=True) if limit is not None]
    until_s = min((limit for task, limit in known if not _raises(task)), default=math.inf)
    raises_s = min((limit for task, limit in known if _raises(task)), default=math.inf)
    waits = tuple(task.operation.wait for task in own if task.operation is not None)
    seen = ";".join(f"{task.tid}:{_schedule(task)}" for task in sorted(own, key=lambda task: task.tid))
    in_memory = [task.on_page for task in own if task.on_page or task.doing != "lock" or _is_in_operation(task)]
    return Progress(not able, until_s, seen, waits, record, able, bool(in_memory) and all(in_memory), raises_s)


def _is_in_operation(task: Task) -> bool:
    return task.operation is not None and task.operation.limit_s is not None


def _raises(task: Task) -> bool:
    """Whether the limit of the thread's wait is an error. Gloo's threads wait with the limit of their group."""
    return _is_in_operation(task) or task.of_transport


def _words(task: Task) -> str:
    where = f" in {task.operation.wait.words}" if task.operation is not None else ""
    doing = {"sleep": "sleeps", "poll": "waits for a file or socket", "shared": "waits for a lock in shared memory"}
    return f"{task.name} {doing.get(task.doing, 'runs, or is in a system call that may end')}{where}"


def _schedule(task: Task) -> str:
    """What stays the same while the thread is blocked."""
    return task.operation.position if task.operation is not None and task.sliced else str(task.switches)


def _blocked_until(task: Task) -> float | None:
    """Return before when the thread's wait does not end by itself; None if it may go on at any time."""
    known = task.operation.limit_s if task.operation is not None else None
    if known is not None and task.doing in _WAITS:
        return known if task.sliced else min(known, task.until_s)
    return task.until_s if task.doing == "lock" else None


def _tids() -> set[int]:
    try:
        return {int(name) for name in os.listdir(_TASKS)}
    except OSError:
        return set()


def _start_of(tid: int) -> str:
    try:
        with open(f"{_TASKS}/{tid}/stat", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _tasks(between_tests: int) -> Iterator[Task]:
    frames = sys._current_frames()
    # A frame that refers to itself lives until Python looks for garbage, and all others here would live with it, whose
    # variables are a test's tensors.
    frames.pop(threading.get_ident(), None)
    known = {thread.native_id: thread for thread in threading.enumerate()}
    tids = _tids()
    if not _CALLS or not tids:
        yield Task(0, "a thread", "unknown", math.inf, 0)
        return
    told = waits_of_threads()
    for tid in tids - {threading.get_native_id(), between_tests}:
        thread = known.get(tid)
        frame = frames.get(thread.ident or -1) if thread is not None else None
        task = _task(tid, f"thread {thread.name!r}" if thread is not None else "", frame, told.get(tid))
        if task is not None:
            yield task


def _task(tid: int, name: str, frame: FrameType | None, told: ThreadWait | None) -> Task | None:
    """Return a thread; None if it is gone, or one of the harness."""
    try:
        with open(f"{_TASKS}/{tid}/comm", errors="replace") as stream:
            comm = stream.read().strip()
        with open(f"{_TASKS}/{tid}/status", errors="replace") as stream:
            switches = sum(int(line.split()[-1]) for line in stream if "ctxt_switches" in line)
        identity = tid, _start_of(tid)
        if identity in _ours:
            return None
        operation = operation_of(frame) if frame is not None else None
        call = _call_of(tid)
        if operation is not None and operation.limit_s is not None:
            for _ in range(_MORE_LOOKS):
                if _read_call(call)[0] in _WAITS:
                    break
                time.sleep(_BETWEEN_LOOKS_S)
                call = _call_of(tid)
    except OSError:
        return None if not os.path.exists(f"{_TASKS}/{tid}") else Task(tid, "a thread", "unknown", math.inf, 0)
    doing, until_s = _read_call(call)
    if told is not None:
        operation = _as_told(operation, told)
    sliced = doing == "sleep" or until_s < _os.monotonic() + _SLICE_S or (operation is not None and operation.sliced)
    is_made = identity in _made or any(tid not in before for before in list(_before_making))
    of_transport = not name and is_made
    serves = of_transport and comm.startswith(_TRANSPORTS)
    shown = name or f"native thread {comm!r}"
    return Task(tid, shown, doing, until_s, switches, operation, sliced, told is not None, of_transport, serves)


def _call_of(tid: int) -> list[str]:
    with open(f"{_TASKS}/{tid}/syscall") as stream:
        return stream.read().split()


def _as_told(operation: Operation | None, told: ThreadWait) -> Operation:
    """Return what a thread is in whose wait stands on the page. ``operation``: as its Python frame has it, if any."""
    if operation is None:
        return Operation(told.wait, told.until_s, str(told.since_ns))
    until_s = told.until_s if operation.limit_s is None else min(told.until_s, operation.limit_s)
    return replace(operation, limit_s=until_s, position=f"{operation.position}:{told.since_ns}")


def _read_call(call: list[str]) -> tuple[str, float]:
    """Return what a line of ``syscall`` says a thread does, and until when at most."""
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
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(timeout)
            seconds, nanoseconds = _TIMESPEC.unpack(memory.read(_TIMESPEC.size))
    except (OSError, ValueError, struct.error):
        return 0.0
    at = seconds + nanoseconds * 1e-9
    if operation & _FUTEX_COMMAND == _FUTEX_WAIT:
        return _os.monotonic() + at
    return at if not operation & _FUTEX_REALTIME else at - time.time() + _os.monotonic()


def _signals() -> Iterator[str]:
    """What sends this process signals, other processes aside."""
    if _has_timer():
        yield "a timer that sends a signal (signal.alarm() or the like)"
    if callable(signal.getsignal(signal.SIGIO)):
        yield "the handler of SIGIO, which files send"
    with open("/proc/self/status", errors="replace") as stream:
        if re.search(r"^TracerPid:\s+[1-9]", stream.read(), re.MULTILINE):
            yield "a debugger"


def _has_timer() -> bool:
    try:
        with open("/proc/self/timers") as stream:
            sends = {int(number) for number in re.findall(r"^signal: (\d+)/", stream.read(), re.MULTILINE)}
    except OSError:  # the kernel has no such timers, or does not show them
        sends = set()
    return bool(sends) or signal.getitimer(signal.ITIMER_REAL)[0] > 0


def _handles_signals() -> bool:
    """Whether a handler in Python runs when some signal comes to this process."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return any(callable(handler) and handler is not signal.default_int_handler for handler in handlers)


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


# What the world that this process belongs to wants of its transports.
_address = ""
_on_group: Callable[[float, float], None] | None = None


def prepare() -> None:
    """Have stores tell what is waited for in them, the threads of transports known, and gloo and groups do what
    :func:`belong_to` asks of them. Idempotent: a zygote does it before it forks, so that its children need not.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return
    from torch_ext.compat.c10d import bind_gloo, watch_groups
    from torch_ext.compat.rpc import watch_agents

    watch_stores(makes_transport)
    watch_groups(_made_group, operations.note_destroyed, makes_transport)
    watch_agents(makes_transport)
    bind_gloo(LOOPBACK, lambda: _address, makes_transport)


def belong_to(address: str, made_group: Callable[[float, float], None]) -> None:
    """Have gloo listen at ``address`` in this process, or if it is empty, wherever torch would have it listen; and have
    ``made_group`` called with the beginning and the end of the making of every process group.
    """
    global _address, _on_group
    _address, _on_group = address, made_group


def _made_group(began_s: float, ended_s: float) -> None:
    if _on_group is not None:
        _on_group(began_s, ended_s)


VARIABLE = "TORCH_EXT_ADDRESS"

_ATTEMPTS = 16


def reserve() -> tuple[str, int]:
    """Reserve an address that no other living world on this machine has.

    Returns:
        The address, and the descriptor that keeps it reserved as long as any process has it open; an empty string and
        -1 if there is none to be had.
    """
    if not sys.platform.startswith("linux"):
        return "", -1
    for _ in range(_ATTEMPTS):
        first, second, third = os.urandom(3)
        address = f"127.{1 + first % 254}.{second}.{1 + third % 254}"
        with contextlib.suppress(OSError):
            return address, _take(address)
    return "", -1


def _take(address: str) -> int:
    """Return the descriptor that reserves ``address``.

    Raises:
        OSError: another world has it, or this machine does not.
    """
    with socket.socket(socket.AF_INET) as probe:
        probe.bind((address, 0))
    with socket.socket(socket.AF_UNIX) as name:
        name.bind(f"\0torch_ext {address}")
        return name.detach()
