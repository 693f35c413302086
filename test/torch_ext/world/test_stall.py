"""What the threads of a process wait for: the judgement over scripted threads, and a look at real ones."""

from __future__ import annotations

import fcntl
import gc
import math
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_ext.world import _os, holders, operations, stall, stores
from torch_ext.world.operations import Operation
from torch_ext.world.protocol import Progress, Wait
from torch_ext.world.stall import Task, judge_tasks
from torch_ext.world.wait_page import ThreadWait

INF = math.inf
IN_TEST = Operation(Wait("test_a (test_a.py:3)"), None, "1:2")
IN_BARRIER = Operation(Wait("barrier() in test_a (test_a.py:3)", transport=True), 1800.0, "1:4")


@pytest.mark.parametrize(
    ("task", "until_s"),
    [
        (Task(1, "python", "lock", INF, 5, IN_TEST), INF),
        (Task(1, "python", "lock", 30.0, 5, IN_TEST), 30.0),
        (Task(1, "pt_gloo_runloop", "lock", 1800.0, 5), 1800.0),
        (Task(1, "python", "lock", 60.0, 5, IN_BARRIER), 60.0),
        (Task(1, "python", "sleep", INF, 5, IN_BARRIER, sliced=True), 1800.0),
        (Task(1, "python", "poll", INF, 5, IN_BARRIER), 1800.0),
        (Task(1, "python", "shared", 0.2, 5, IN_BARRIER, sliced=True), 1800.0),
        (Task(1, "python", "held", INF, 5, IN_TEST, enders=(7,)), INF),
        (Task(1, "python", "held", INF, 5, IN_BARRIER, enders=(7,)), 1800.0),
    ],
    ids=[
        "lock",
        "with a limit",
        "native lock",
        "operation's own",
        "operation that polls",
        "on a socket",
        "shared",
        "held",
        "held in an operation",
    ],
)
def test_what_nobody_can_end_is_blocked(task: Task, until_s: float) -> None:
    progress = judge_tasks([task], "")
    assert (progress.blocked, progress.until_s) == (True, until_s)


@pytest.mark.parametrize(
    "task",
    [
        Task(1, "python", "running", INF, 5, IN_TEST),
        Task(1, "python", "sleep", INF, 5, IN_TEST),
        Task(1, "python", "poll", INF, 5, IN_TEST),
        Task(1, "python", "shared", INF, 5, IN_TEST),
        Task(1, "python", "held", INF, 5, IN_TEST),
        Task(1, "python", "unknown", INF, 5, IN_TEST),
        Task(1, "python", "unknown", INF, 5, IN_BARRIER),
        Task(1, "native", "sleep", INF, 5),
        Task(1, "native", "running", INF, 5),
    ],
    ids=[
        "runs",
        "sleeps",
        "reads",
        "waits for another process",
        "held by nobody knows whom",
        "unknown",
        "in an operation",
        "native sleep",
        "native",
    ],
)
def test_one_thread_that_may_go_on_is_enough(task: Task) -> None:
    blocked = Task(2, "python", "lock", INF, 5, IN_TEST)
    assert judge_tasks([blocked], "").blocked
    assert not judge_tasks([blocked, task], "").blocked


def test_threads_of_a_transport_are_left_out() -> None:
    blocked = Task(2, "python", "lock", INF, 5, IN_TEST)
    polls = [Task(1, "gloo_tcp_loop", "poll", INF, number) for number in (1, 2)]
    first, second = (judge_tasks([blocked, poll], "") for poll in polls)
    assert first.blocked and first == second
    assert not judge_tasks([polls[0]], "").blocked


def test_a_thread_that_has_run_shows() -> None:
    looks = [judge_tasks([Task(1, "python", "lock", INF, switches, IN_BARRIER)], "") for switches in (5, 6)]
    assert looks[0].fingerprint != looks[1].fingerprint
    sliced = [Task(1, "python", "sleep", INF, switches, IN_BARRIER, sliced=True) for switches in (5, 6)]
    assert judge_tasks([sliced[0]], "").fingerprint == judge_tasks([sliced[1]], "").fingerprint
    assert judge_tasks([sliced[0]], "a").fingerprint != judge_tasks([sliced[0]], "b").fingerprint


@pytest.mark.parametrize(
    ("operation", "until_s"),
    [(None, 90.0), (IN_TEST, 90.0), (Operation(IN_BARRIER.wait, 40.0, "1:4"), 40.0), (IN_BARRIER, 90.0)],
    ids=["no Python code", "a kernel", "a nearer limit", "an operation"],
)
def test_a_wait_on_the_page_counts_whatever_the_thread_called(operation: Operation | None, until_s: float) -> None:
    told = ThreadWait(5, Wait("#9 all_reduce in group 2", (1,), transport=True), 7, 90.0)
    of_page = stall._as_told(operation, told)
    progress = judge_tasks([Task(7, "python", "shared", 0.2, 5, of_page, sliced=True)], "")
    assert (progress.blocked, progress.until_s) == (True, until_s)
    assert progress.waits == (operation.wait if operation is not None else told.wait,)
    again = stall._as_told(operation, told._replace(since_ns=6))
    assert again.position != of_page.position


@pytest.fixture
def daemon() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Starts functions in threads that end with the process; returns the kernel's number of each once it is in it."""

    def start(function: Callable[[], object]) -> int:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        time.sleep(0.2)
        return thread.native_id or 0

    yield start


def task_of(tid: int) -> Task:
    return next(task for task in stall._tasks() if task.tid == tid)


def held_task_of(tid: int) -> Task:
    """Return it once it is known who can end its wait: not while tests beside this one send descriptors around."""
    end = time.monotonic() + 60
    while not (task := task_of(tid)).enders and time.monotonic() < end:
        time.sleep(0.01)
    return task


def test_real_threads_are_seen_as_they_are(daemon: Callable[[Callable[[], object]], int], tmp_path: Path) -> None:
    lock, store = threading.Lock(), dist.FileStore(str(tmp_path / "store"), 2)
    store.set_timeout(timedelta(seconds=5000))
    lock.acquire()
    operations.test_began()
    held = task_of(daemon(lock.acquire))
    assert (held.doing, held.until_s) == ("lock", INF)
    timed = task_of(daemon(lambda: lock.acquire(timeout=40)))
    assert timed.doing == "lock" and timed.until_s == pytest.approx(time.monotonic() + 40, abs=5)
    assert task_of(daemon(lambda: time.sleep(40))).doing == "sleep"
    empty: queue.Queue[int] = queue.Queue()
    assert task_of(daemon(empty.get)).until_s == INF

    def waits_for_a_key() -> None:
        store.get("nobody sets this")

    keyed = task_of(daemon(waits_for_a_key))
    assert keyed.operation is not None and keyed.operation.wait.transport
    assert "store.get('nobody sets this')" in keyed.operation.wait.words
    assert keyed.operation.limit_s == pytest.approx(time.monotonic() + 5000, abs=5)

    def waits_a_little() -> None:
        store.wait(["key"], timedelta(seconds=4000))

    short = task_of(daemon(waits_a_little))
    assert short.operation is not None and short.operation.limit_s == 0.0


def test_all_that_hold_what_threads_wait_for_are_told() -> None:
    waits = [Task(number, "python", "held", INF, 5, IN_TEST, enders=(5 + number, 5)) for number in (1, 2)]
    progress = judge_tasks(waits, "")
    assert progress.blocked and progress.enders == (5, 6, 7)
    assert [wait.enders for wait in progress.waits] == [(6, 5), (7, 5)]
    others = judge_tasks([Task(1, "python", "held", INF, 5, IN_TEST, enders=(5,)), waits[1]], "")
    assert others.fingerprint != progress.fingerprint


def test_holders_of_pipes_and_locks_are_found(daemon: Callable[[Callable[[], object]], int], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    (tmp_path / "file").touch()
    locks, waits, looks_on = (os.open(tmp_path / "file", os.O_RDWR) for _ in range(3))
    child = subprocess.Popen(["sleep", "100"], pass_fds=[writer, looks_on])
    fcntl.flock(locks, fcntl.LOCK_SH)
    try:
        read = held_task_of(daemon(lambda: os.read(reader, 1)))
        assert (read.doing, read.enders) == ("held", tuple(sorted((os.getpid(), child.pid))))
        assert read.operation is not None and read.operation.wait.words.startswith("a read of a pipe in <lambda> (")
        locked = held_task_of(daemon(lambda: fcntl.flock(waits, fcntl.LOCK_EX)))
        assert (locked.doing, locked.enders) == ("held", (os.getpid(),))
        assert holders.holders_of_lock(waits, exclusive=False) == ()
        part = (
            "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
        )
        command = [sys.executable, "-c", part, str(tmp_path / "parts")]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert other.stdin is not None and other.stdout is not None and other.stdout.readline()
        assert holders.holders_of_record_lock() == ()
        parts = os.open(tmp_path / "parts", os.O_RDWR)
        record = held_task_of(daemon(lambda: fcntl.lockf(parts, fcntl.LOCK_EX)))
        assert (record.doing, record.enders) == ("held", (other.pid,))
        other.communicate()
        assert holders.writers_of_pipe(locks) == ()
        os.mkfifo(tmp_path / "named")
        assert holders.writers_of_pipe(os.open(tmp_path / "named", os.O_RDWR)) == ()
    finally:
        child.kill()
        child.wait()
        for each in (writer, locks):
            os.close(each)


@pytest.fixture
def piped() -> Iterator[tuple[int, int]]:
    """The reading end of a pipe, and a child that holds the other; this process does not."""
    reader, writer = os.pipe()
    child = subprocess.Popen(["sleep", "100"], pass_fds=[writer])
    os.close(writer)
    yield reader, child.pid
    child.kill()
    child.wait()
    os.close(reader)


def writers(reader: int) -> tuple[int, ...]:
    end = time.monotonic() + 60
    while not (found := holders.writers_of_pipe(reader)) and time.monotonic() < end:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("refuse", ["fd", "stat"])
def test_nobody_is_found_while_a_process_hides_what_it_holds(
    piped: tuple[int, int], monkeypatch: pytest.MonkeyPatch, refuse: str
) -> None:
    reader, child = piped
    assert writers(reader) == (child,)
    hidden, read, read_link, stat_of = child, holders._read, os.readlink, _os.stat_of

    def check(path: str) -> str:
        if path.startswith(f"/proc/{hidden}/{refuse}"):
            raise PermissionError
        return path

    with monkeypatch.context() as patch:
        patch.setattr(holders, "_read", lambda path: read(check(path)))
        patch.setattr(_os, "stat_of", lambda pid: check(f"/proc/{pid}/stat") and stat_of(pid))
        patch.setattr(holders.os, "readlink", lambda path: read_link(check(path)))
        assert holders.writers_of_pipe(reader) == ()
        patch.setattr(holders, "_is_of_another_user", lambda process: True)
        assert holders.writers_of_pipe(reader) == ()  # younger than this process: it may have inherited anything
        if refuse == "fd":
            hidden = 1
            assert writers(reader) == (child,)  # older, and no relative
    assert writers(reader) == (child,)


def test_nobody_is_found_by_an_old_kernel_or_in_too_long_a_time(
    piped: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(holders, "_LOOK_S", -1.0)
        assert holders.writers_of_pipe(piped[0]) == ()
    with monkeypatch.context() as patch:
        patch.setattr(holders, "_TELLS_OF_SOCKETS", (99, 0))
        assert holders.writers_of_pipe(piped[0]) == ()


def test_names_of_processes_may_be_cut_within_a_letter(daemon: Callable[[Callable[[], object]], int]) -> None:
    release = threading.Event()

    def named() -> None:
        with open("/proc/thread-self/comm", "wb") as stream:
            stream.write("процессы".encode()[:15])
        release.wait(100)

    tid = daemon(named)
    end = time.monotonic() + 60
    while task_of(tid).name.isascii() and time.monotonic() < end:
        time.sleep(0.01)
    assert task_of(tid).name.startswith("процесс")
    release.set()


@pytest.mark.parametrize("operation", [IN_BARRIER, IN_TEST])
def test_operation_that_looks_again_and_again_is_seen_where_it_waits(
    monkeypatch: pytest.MonkeyPatch, operation: Operation
) -> None:
    nanosleep, calls = "35" if platform.machine() == "x86_64" else "101", ["running"] * 3
    monkeypatch.setattr(stall, "operation_of", lambda frame: operation)
    monkeypatch.setattr(stall, "_call_of", lambda tid: [calls.pop(), "0x0"] if calls else [nanosleep, "0x0"])
    task = stall._task(threading.get_native_id(), sys._getframe(), None)
    assert task is not None and task.doing == ("sleep" if operation is IN_BARRIER else "running")
    calls += ["running"] * 1000
    task = stall._task(threading.get_native_id(), sys._getframe(), None)
    assert task is not None and task.doing == "running"  # it computes


def test_wait_for_a_store_stays_the_same_wherever_it_is_seen(tmp_path: Path) -> None:
    seen: list[Operation] = []
    make = stores._watched_server(lambda self, *args, **kwargs: seen.append(operations.operation_of(sys._getframe(1))))
    make(object(), "host", 0, 2, True)
    polls = [Task(1, "python", "poll", INF, switches, seen[0], seen[0].sliced) for switches in (5, 6)]
    assert judge_tasks([polls[0]], "").fingerprint == judge_tasks([polls[1]], "").fingerprint


def test_process_that_has_set_an_alarm_is_not_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_tasks", lambda: iter([Task(2, "python", "lock", INF, 5, IN_TEST)]))
    assert stall.observe().blocked
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert not stall.observe().blocked
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert stall.observe().blocked


def test_process_that_handles_the_end_of_a_child_is_not_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_tasks", lambda: iter([Task(2, "python", "lock", INF, 5, IN_TEST)]))
    before = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        child = subprocess.Popen(["sleep", "100"])
        assert not stall.observe().blocked
        child.kill()
        child.wait()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert stall.observe().blocked


def test_this_process_is_not_blocked_while_a_thread_sleeps(daemon: Callable[[Callable[[], object]], int]) -> None:
    daemon(lambda: time.sleep(40))
    progress = stall.observe()
    assert isinstance(progress, Progress) and not progress.blocked


def test_an_operator_is_known_by_what_it_has_of_its_name_so_far() -> None:
    """``__init__`` of an operator is in the file of what waits in collectives, too."""
    names: dict[str, Any] = {}
    exec(compile("def call(self): return sys._getframe()", "/x/torch/_ops.py", "exec"), {"sys": sys}, names)
    half_made = object.__new__(torch._ops.OpOverload)
    with pytest.raises(AttributeError):
        str(half_made)
    collective = torch.ops.c10d.barrier
    functional = torch.ops._c10d_functional.wait_tensor.default
    for operator, transport in (
        (half_made, False),
        (torch.ops.aten.add, False),
        (collective, True),
        (functional, True),
    ):
        assert operations.operation_of(names["call"](operator)).wait.transport == transport


@pytest.mark.parametrize("between", ["", "sim/races/_threads.py", "compat/testing.py", "compat/c10d.py"])
def test_what_lies_between_a_test_and_torch_hides_no_operation(between: str) -> None:
    """Functions of ours that torch's call, or that call torch's, are left out."""
    names: dict[str, Any] = {"sys": sys}

    def function(name: str, calls: str, file: str) -> None:
        exec(compile(f"def {name}(): return {calls}()", file, "exec"), names)

    inner = "wait" if between else "sys._getframe"
    function("wait", "sys._getframe", f"/x/torch_ext/{between}")
    function("join", inner, "/x/torch/testing/_internal/distributed/multi_threaded_pg.py")
    function("outer_join", "join", f"/x/torch_ext/{'compat/testing.py' if between else 'compat/c10d.py'}")
    function("all_reduce", "outer_join", "/x/torch/distributed/distributed_c10d.py")
    function("test_body", "all_reduce", "/x/test_a.py")
    wait = operations.operation_of(names["test_body"]()).wait
    assert (wait.words, wait.transport) == ("all_reduce() in test_body (test_a.py:1)", True)


@pytest.mark.parametrize(
    ("args", "kwargs", "seconds"),
    [
        (("host", 0, 2, True, timedelta(seconds=40)), {}, 40.0),
        (("host", 0), {"world_size": 2, "is_master": True, "timeout": timedelta(seconds=40)}, 40.0),
        (("host", 0, 2, True), {"timeout": timedelta(0)}, INF),
        (("host", 0, 2, True), {}, 300.0),
        (("host", 0, 2, True), {"wait_for_workers": False}, None),
        (("host", 0, 2, False, timedelta(seconds=40)), {}, None),
        (("host", 0), {}, None),
    ],
)
def test_only_a_server_waits_for_its_clients_without_going_on_by_itself(
    monkeypatch: pytest.MonkeyPatch, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float | None
) -> None:
    """A client sleeps between two tries to connect, longer and longer."""
    found: list[operations.Operation] = []
    make = stores._watched_server(lambda self, *args, **kwargs: found.append(operations.operation_of(sys._getframe(1))))
    children: list[int] = []
    monkeypatch.setattr(operations._os, "own_children", lambda: children)  # other tests of this process have some
    began_s = time.monotonic()
    make(object(), *args, **kwargs)
    limit_s = found[0].limit_s
    assert limit_s is not None and found[0].wait.transport
    assert "TCPStore() in test_only_a_server" in found[0].wait.words
    assert limit_s == (0.0 if seconds is None else pytest.approx(began_s + seconds, abs=5))
    children.append(1)  # it may be what the server waits for
    make(object(), *args, **kwargs)
    assert found[1].limit_s is None


@pytest.mark.parametrize(
    ("value", "seconds"), [(None, INF), (0, INF), (-1, 60.0), (7.5, 7.5), (timedelta(minutes=2), 120.0), (True, INF)]
)
def test_limits_of_torchs_functions_are_read_as_torch_means_them(value: object, seconds: float) -> None:
    assert operations._seconds(value) == seconds


class _Kept:
    """What a test has in a variable."""


def test_a_look_keeps_nothing_of_the_test_alive() -> None:
    inside, over = threading.Event(), threading.Event()
    kept: list[weakref.ref[_Kept]] = []

    def test_body() -> None:
        local = _Kept()
        kept.append(weakref.ref(local))
        inside.set()
        over.wait()

    body = threading.Thread(target=test_body)
    gc.disable()
    try:
        body.start()
        inside.wait()
        looks = threading.Thread(target=stall.observe)  # as a rank's listener looks, from a thread of its own
        looks.start()
        looks.join()
        over.set()
        body.join()
        assert kept[0]() is None
    finally:
        gc.enable()
