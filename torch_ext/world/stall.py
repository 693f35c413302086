"""What the threads of this process wait for, and whether any of them can go on by itself. Runs in ranks, and in the
parent half of ranks that are threads. Standard library and own layer only; touches torch only if it is loaded. Linux
only: elsewhere nothing is ever proven.

Note [Provable hangs]
~~~~~~~~~~~~~~~~~~~~~
A rank that is silent may compute, sleep or wait for a timer. It hangs provably only if each of its threads is blocked
in something that nobody can end: a lock or condition without a time limit of its own before the test's, or an operation
of a process group, a store or RPC (which may poll, or wait in memory that ranks share). The kernel tells what a thread
is blocked in and for how long (``/proc/self/task/*/syscall``); its innermost Python frame tells which operation it is.
A kernel of the device may wait for an operation that was called long before: such a thread, with Python code or
without, has an entry in the rank's page of waits, which says until when.
A thread that reads from a pipe, or waits for the lock of a file (``flock()``, ``lockf()``), is blocked as long as all
processes are that could end the wait, all of which must be ranks of the world; see ``holders.py``. A process whose
alarm is set is not blocked: its handler may do anything. The kernel tells nobody of the alarms of another process, so
that nothing is ever proven about a child: a wait for one (``waitpid()``), or for what one holds, has the test's limit.
Nor is it about a rank that waits for a key of a store, or handles a signal, while somebody may act who is no rank; see
``outsiders.py``.
Threads of transports that sleep until the network wakes them are left out, since they only hand on what peers send. A
world hangs if all of its live ranks are blocked in this way at two looks some seconds apart and no blocked thread has
run in between (see ``watch.py``). Whatever is not understood counts as able to go on: then the test's own time limit
decides.
"""

from __future__ import annotations

import math
import os
import platform
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType

from torch_ext.world import _os, flight_record, holders, outsiders
from torch_ext.world.operations import Operation, operation_of
from torch_ext.world.protocol import Progress
from torch_ext.world.wait_page import ThreadWait, waits_of_threads

__all__ = ["LISTENER", "Task", "judge_tasks", "observe"]

# What a thread does that waits in an operation. One that looks again and again for what it waits for is between two of
# these for a moment, or longer if it has to wait for a core: then it is looked at so many more times.
_WAITS = ("lock", "sleep", "poll", "shared")
_MORE_LOOKS, _BETWEEN_LOOKS_S = 10, 0.003
# What a thread does in calls that may be waits for certain processes.
_HELD = ("read", "flock", "fcntl")
# The name of the thread in which a rank answers its parent half, and looks at all others.
LISTENER = "torch_ext listener"

# Numbers of system calls, by what a thread does in them.
_CALLS = {
    "x86_64": {0: "read", 73: "flock", 72: "fcntl", 202: "lock", 230: "sleep", 35: "sleep", 232: "poll", 281: "poll",
               7: "poll", 271: "poll", 23: "poll", 270: "poll", 45: "poll", 47: "poll"},
    "aarch64": {63: "read", 32: "flock", 25: "fcntl", 98: "lock", 115: "sleep", 101: "sleep", 22: "poll", 73: "poll",
                72: "poll", 207: "poll", 212: "poll"},
}.get(platform.machine(), {})  # fmt: skip

_FUTEX_PRIVATE, _FUTEX_REALTIME, _FUTEX_COMMAND = 128, 256, 127
_FUTEX_WAIT, _FUTEX_WAIT_BITSET = 0, 9
_LOCK_EX, _F_SETLKW = 2, 7
_TIMESPEC = struct.Struct("@qq")
# An operation that looks after its peers wakes at least this often, in seconds.
_SLICE_S = 2.0
# Threads without Python code that serve the network: they wait with a time limit and start over, or poll all the time.
_TRANSPORT_THREADS = ("gloo_tcp_loop", "pt_tcpstore", "TP_", "simccl")


@dataclass(frozen=True)
class Task:
    """One thread, as the kernel and the interpreter see it.

    Attributes:
        tid: the kernel's id of it.
        name: the kernel's name of it.
        doing: ``"lock"``, ``"sleep"``, ``"poll"``, ``"shared"`` for a lock in memory that other processes may share,
            ``"held"`` if it waits for what certain processes hold, or anything else for what is not understood.
        until_s: when its system call's own limit ends, by ``time.monotonic``; infinite if it has none.
        switches: how often it has been scheduled.
        operation: what its innermost Python frame is in; None for a thread without Python code.
        sliced: whether it waits in short slices, and so is scheduled all the time.
        enders: the processes that hold what it waits for.
    """

    tid: int
    name: str
    doing: str
    until_s: float
    switches: int
    operation: Operation | None = None
    sliced: bool = False
    enders: tuple[int, ...] = ()


def observe() -> Progress:
    """Return what the threads of this process wait for, the calling one left out."""
    progress = judge_tasks(list(_tasks()), flight_record.summary())
    handles = outsiders.handles_signals()
    # An alarm comes to this process, or a signal by its child's end or from its child.
    interrupted = outsiders.has_alarm() or (handles and bool(_os.own_children()))
    return replace(progress, blocked=progress.blocked and not interrupted, reachable=progress.reachable or handles)


def judge_tasks(tasks: list[Task], record: str) -> Progress:
    """Judge one look at all threads; a pure function.

    Args:
        tasks: every thread but the one that looks.
        record: changes whenever a collective begins or ends.
    """
    own = [task for task in tasks if not _hands_on(task)]
    limits = [_blocked_until(task) for task in own]
    waits = tuple(
        replace(task.operation.wait, enders=task.enders) if task.enders else task.operation.wait
        for task in own
        if task.operation is not None
    )
    enders = tuple(sorted({process for task in own for process in task.enders}))
    seen = ";".join(f"{task.tid}:{_schedule(task)}" for task in sorted(own, key=lambda task: task.tid))
    blocked = bool(own) and all(limit is not None for limit in limits)
    until_s = min((limit for limit in limits if limit is not None), default=math.inf)
    keyed = any(task.operation is not None and task.operation.keyed for task in own)
    return Progress(blocked, until_s, f"{seen}|{record}", waits, enders, keyed)


def _hands_on(task: Task) -> bool:
    return task.operation is None and (task.doing == "poll" or task.name.startswith(_TRANSPORT_THREADS))


def _schedule(task: Task) -> str:
    """What stays the same while the thread is blocked."""
    if task.operation is not None and task.sliced:
        return task.operation.position
    return f"{task.switches}{task.enders or ''}"


def _blocked_until(task: Task) -> float | None:
    """Return before when the thread's wait does not end by itself; None if it may go on at any time."""
    known = task.operation.limit_s if task.operation is not None else None
    if known is not None and task.doing in _WAITS:
        return known if task.sliced else min(known, task.until_s)
    if task.doing == "held":
        return min(task.until_s, math.inf if known is None else known) if task.enders else None
    return task.until_s if task.doing == "lock" else None


def _tasks() -> Iterator[Task]:
    frames = sys._current_frames()
    # A frame that refers to itself lives until Python looks for garbage, and all others here would live with it, whose
    # variables are a test's tensors.
    frames.pop(threading.get_ident(), None)
    native = {thread.native_id: thread.ident for thread in threading.enumerate()}
    own = threading.get_native_id()
    try:
        tids = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        tids = []
    if not _CALLS or not tids:
        yield Task(0, "", "unknown", math.inf, 0)
        return
    told = waits_of_threads()
    listening = {thread.native_id for thread in threading.enumerate() if thread.name == LISTENER}
    for tid in tids:
        if tid != own and tid not in listening:
            task = _task(tid, frames.get(native.get(tid) or -1), told.get(tid))
            if task is not None:
                yield task


def _task(tid: int, frame: FrameType | None, told: ThreadWait | None) -> Task | None:
    try:
        with open(f"/proc/self/task/{tid}/comm", errors="replace") as stream:
            name = stream.read().strip()
        with open(f"/proc/self/task/{tid}/status", errors="replace") as stream:
            switches = sum(int(line.split()[-1]) for line in stream if "ctxt_switches" in line)
        operation = operation_of(frame) if frame is not None else None
        call = _call_of(tid)
        if operation is not None and operation.limit_s is not None:
            for _ in range(_MORE_LOOKS):
                if _read_call(call)[0] in _WAITS:
                    break
                time.sleep(_BETWEEN_LOOKS_S)
                call = _call_of(tid)
    except OSError:
        return None if not os.path.exists(f"/proc/self/task/{tid}") else Task(tid, "", "unknown", math.inf, 0)
    doing, until_s = _read_call(call)
    enders: tuple[int, ...] = ()
    if doing in _HELD:
        what, enders = _held(doing, int(call[1], 16), int(call[2], 16))
        doing = "held"
        if operation is not None and what:
            operation = replace(operation, wait=replace(operation.wait, words=f"{what} in {operation.wait.words}"))
    if told is not None:
        operation = _as_told(operation, told)
    sliced = doing == "sleep" or until_s < time.monotonic() + _SLICE_S or (operation is not None and operation.sliced)
    return Task(tid, name, doing, until_s, switches, operation, sliced, enders)


def _call_of(tid: int) -> list[str]:
    with open(f"/proc/self/task/{tid}/syscall") as stream:
        return stream.read().split()


def _held(doing: str, descriptor: int, how: int) -> tuple[str, tuple[int, ...]]:
    """Return what a call with these arguments waits for, in words, and the processes that alone can end it: nobody if
    that is not known, and no words if it is no such wait.
    """
    if doing == "read" and holders.is_pipe(descriptor):
        return "a read of a pipe", holders.writers_of_pipe(descriptor)
    if doing == "flock":
        return "flock()", holders.holders_of_lock(descriptor, exclusive=bool(how & _LOCK_EX))
    if doing == "fcntl" and how == _F_SETLKW:
        return "lockf()", holders.holders_of_record_lock()
    return "", ()


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
    command = operation & _FUTEX_COMMAND
    if command not in (_FUTEX_WAIT, _FUTEX_WAIT_BITSET):
        return "unknown", math.inf
    # One that is not private lies in shared memory: another process may end the wait. In an operation, that is a peer.
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
        return time.monotonic() + at
    return at if not operation & _FUTEX_REALTIME else at - time.time() + time.monotonic()
