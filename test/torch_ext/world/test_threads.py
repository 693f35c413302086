"""Which threads may go on: the judgement over scripted threads, and samples of real ones."""

import _thread
import math
import platform
import select
import signal
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from torch_ext.world import operations, threads
from torch_ext.world.operations import Operation, ThreadWait
from torch_ext.world.protocol import Wait
from torch_ext.world.threads import ThreadState, judge_threads

# Zygotes and parent halves do the same.
threads.prepare()

INF = math.inf
IN_TEST = Operation(Wait("test_a (test_a.py:3)"), None, "1:2")
IN_BARRIER = Operation(Wait("barrier() in test_a (test_a.py:3)", transport=True), 1800.0, "1:4")


@pytest.mark.parametrize(
    ("task", "until_s"),
    [
        (ThreadState(1, "python", "lock", INF, 5, IN_TEST), INF),
        (ThreadState(1, "python", "lock", 30.0, 5, IN_TEST), 30.0),
        (ThreadState(1, "pt_gloo_runloop", "lock", 1800.0, 5), 1800.0),
        (ThreadState(1, "python", "lock", 60.0, 5, IN_BARRIER), 60.0),
        (ThreadState(1, "python", "sleep", INF, 5, IN_BARRIER, sliced=True), 1800.0),
        (ThreadState(1, "python", "poll", INF, 5, IN_BARRIER), 1800.0),
        (ThreadState(1, "python", "shared", 0.2, 5, IN_BARRIER, sliced=True), 1800.0),
        (ThreadState(1, "pt_gloo_runloop", "lock", 60.0, 5, of_transport=True), 60.0),
    ],
)
def test_wait_without_a_limit_is_blocked(task, until_s):
    progress = judge_threads([task], "")
    limits = (INF, until_s) if task.operation is IN_BARRIER or task.of_transport else (until_s, INF)
    assert (progress.blocked, progress.until_s, progress.raises_s) == (True, *limits)


@pytest.mark.parametrize(
    "task",
    [
        ThreadState(1, "python", "running", INF, 5, IN_TEST),
        ThreadState(1, "python", "sleep", INF, 5, IN_TEST),
        ThreadState(1, "python", "poll", INF, 5, IN_TEST),
        ThreadState(1, "python", "shared", INF, 5, IN_TEST),
        ThreadState(1, "python", "unknown", INF, 5, IN_TEST),
        ThreadState(1, "python", "unknown", INF, 5, IN_BARRIER),
        ThreadState(1, "native", "sleep", INF, 5),
        ThreadState(1, "native", "poll", INF, 5),
        ThreadState(1, "gloo_tcp_loop", "poll", INF, 5),
        ThreadState(1, "gloo_tcp_loop", "sleep", INF, 5, serves=True),
        ThreadState(1, "native", "running", INF, 5),
    ],
)
def test_one_runnable_thread_is_enough(task):
    blocked = ThreadState(2, "python", "lock", INF, 5, IN_TEST)
    assert judge_threads([blocked], "").blocked
    assert not judge_threads([blocked, task], "").blocked


def test_a_thread_that_has_run_shows_unless_it_is_a_transports():
    blocked = ThreadState(2, "python", "lock", INF, 5, IN_TEST)
    polls = [ThreadState(1, "gloo_tcp_loop", "poll", INF, number, serves=True) for number in (1, 2)]
    first, second = (judge_threads([blocked, poll], "") for poll in polls)
    assert first.blocked and first == second
    looks = [judge_threads([ThreadState(1, "python", "lock", INF, switches, IN_BARRIER)], "") for switches in (5, 6)]
    assert looks[0].fingerprint != looks[1].fingerprint
    sliced = [ThreadState(1, "python", "sleep", INF, switches, IN_BARRIER, sliced=True) for switches in (5, 6)]
    assert judge_threads([sliced[0]], "").fingerprint == judge_threads([sliced[1]], "").fingerprint


@pytest.mark.parametrize(
    ("operation", "until_s"),
    [(None, 90.0), (IN_TEST, 90.0), (Operation(IN_BARRIER.wait, 40.0, "1:4"), 40.0), (IN_BARRIER, 90.0)],
    ids=["no Python code", "a kernel", "a nearer limit", "an operation"],
)
def test_a_wait_on_the_page_counts_whatever_the_thread_called(operation, until_s):
    own_entry = ThreadWait(5, Wait("#9 all_reduce in group 2", (1,), transport=True), 7, 90.0)
    of_page = threads._on_page(operation, own_entry)
    progress = judge_threads([ThreadState(7, "python", "shared", 0.2, 5, of_page, sliced=True)], "")
    assert (progress.blocked, progress.until_s, progress.raises_s) == (True, INF, until_s)
    assert progress.waits == (operation.wait if operation is not None else own_entry.wait,)
    again = threads._on_page(operation, own_entry._replace(since_ns=6))
    assert again.position != of_page.position


def task_of(tid):
    return next(task for task in threads._threads(0) if task.tid == tid)


def test_thread_that_threading_does_not_know_is_judged_by_the_kernel_alone():
    """The kernel may cut the name within a letter."""
    lock, epoll = threading.Lock(), select.epoll()
    lock.acquire()
    tids = []

    def wait(how):
        with open("/proc/thread-self/comm", "wb") as stream:
            stream.write("процессы".encode()[:15])
        tids.append(threading.get_native_id())
        how()

    end = time.monotonic() + 60
    for number, how in enumerate((lock.acquire, lambda: epoll.poll(100)), 1):
        _thread.start_new_thread(wait, (how,))
        while len(tids) < number and time.monotonic() < end:
            time.sleep(0.01)
    while [task_of(tid).doing for tid in tids] != ["lock", "poll"] and time.monotonic() < end:
        time.sleep(0.01)
    blocked, polls = map(task_of, tids)
    assert blocked.operation is None and "процесс" in blocked.name
    assert judge_threads([blocked], "").blocked
    (word,) = judge_threads([polls], "").may_act
    assert word.startswith("native thread 'процесс") and word.endswith("waits for a file or socket")
    lock.release()


def test_threads_of_a_transport_are_those_that_appear_during_its_construction(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = []

    def serve():
        with open("/proc/thread-self/comm", "w") as stream:
            stream.write("pt_tcpstore_uv")
        made.append(threading.get_native_id())
        select.epoll().poll(100)

    _thread.start_new_thread(serve, ())
    end = time.monotonic() + 60
    while not (made and task_of(made[0]).doing == "poll") and time.monotonic() < end:
        time.sleep(0.01)
    named = [task for task in threads._threads(0) if "pt_tcpstore" in task.name]
    assert len(named) > 1
    assert [task.tid for task in named if not task.serves] == made
    del store


@pytest.mark.parametrize("operation", [IN_BARRIER, IN_TEST])
def test_polling_operation_is_found_at_its_wait(monkeypatch, operation):
    nanosleep, calls = "35" if platform.machine() == "x86_64" else "101", ["running"] * 3
    monkeypatch.setattr(threads, "operation_of", lambda frame: operation)
    monkeypatch.setattr(threads, "_call_of", lambda tid: [calls.pop(), "0x0"] if calls else [nanosleep, "0x0"])
    task = threads._thread(threading.get_native_id(), "", sys._getframe(), None)
    assert task.doing == ("sleep" if operation is IN_BARRIER else "running")
    calls += ["running"] * 1000
    task = threads._thread(threading.get_native_id(), "", sys._getframe(), None)
    assert task.doing == "running"  # the thread computes


def test_store_wait_has_the_same_description_at_every_frame(tmp_path):
    seen = []
    make = operations._watched(lambda *_, **__: seen.append(operations.operation_of(sys._getframe(1))))
    make(object(), "host", 0, 2, True)
    polls = [ThreadState(1, "python", "poll", INF, switches, seen[0], seen[0].sliced) for switches in (5, 6)]
    assert judge_threads([polls[0]], "").fingerprint == judge_threads([polls[1]], "").fingerprint


def test_process_that_has_set_an_alarm_is_not_blocked(monkeypatch):
    monkeypatch.setattr(
        threads, "_threads", lambda between_tests: iter([ThreadState(2, "python", "lock", INF, 5, IN_TEST)])
    )
    assert threads.observe().blocked
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert not threads.observe().blocked
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert threads.observe().blocked


def test_partly_constructed_operator_is_recognized():
    """``__init__`` of an operator is in the same file as waits for collectives, too."""
    names = {}
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


class _Work:
    """Its ``wait`` is not a Python function, so the frame of its caller is the innermost."""

    __module__ = "torch.distributed"
    wait = sys._getframe


class _Other:
    wait = sys._getframe


def _waits(work):
    return work.wait()


def _waits_for_a_while(work):
    return work.wait(int(0.5))


def _waits_in_an_attribute(work):
    holder = SimpleNamespace(work=work)
    return holder.work.wait()


def _waits_among_others(work):
    return work.wait() if str(work) else None


@pytest.mark.parametrize(
    ("function", "call", "limit_s"),
    [
        (_waits, "work.wait()", INF),
        (_waits_in_an_attribute, "holder.work.wait()", INF),
        (_waits_for_a_while, "work.wait(int(0.5))", None),
        (_waits_among_others, "work.wait()", None),
    ],
)
def test_a_wait_for_an_object_of_torch_is_one_for_peers(function, call, limit_s):
    """A limit among the arguments of the call is not read; with two calls in a line, either may be the waiting one."""
    found = operations.operation_of(function(_Work()))
    assert (found.wait.transport, found.limit_s) == (True, limit_s)
    assert found.wait.description.startswith(f"{call} in {function.__name__} (test_threads.py:")
    assert not operations.operation_of(function(_Other())).wait.transport


@pytest.mark.parametrize("between", ["", "sim/races/_threads.py", "compat/testing.py", "compat/c10d.py"])
def test_frames_between_test_and_torch_hide_no_operation(between):
    """Functions of ours between the test and torch, in either direction, are left out."""
    names = {"sys": sys}

    def function(name, calls, file):
        exec(compile(f"def {name}(): return {calls}()", file, "exec"), names)

    inner = "wait" if between else "sys._getframe"
    function("wait", "sys._getframe", f"/x/torch_ext/{between}")
    function("join", inner, "/x/torch/testing/_internal/distributed/multi_threaded_pg.py")
    function("outer_join", "join", f"/x/torch_ext/{'compat/testing.py' if between else 'compat/c10d.py'}")
    function("all_reduce", "outer_join", "/x/torch/distributed/distributed_c10d.py")
    function("test_body", "all_reduce", "/x/test_a.py")
    wait = operations.operation_of(names["test_body"]()).wait
    assert (wait.description, wait.transport) == ("all_reduce() in test_body (test_a.py:1)", True)


def test_a_folder_of_the_users_may_be_called_torch():
    names = {"sys": sys}
    exec(compile("def all_reduce(): return sys._getframe()", "/x/torch/distributed/distributed_c10d.py", "exec"), names)
    exec(compile("def helper(timeout=3): return all_reduce()", "/x/torch/tests/test_a.py", "exec"), names)
    found = operations.operation_of(names["helper"]())
    assert (found.wait.description, found.limit_s) == ("all_reduce() in helper (test_a.py:1)", INF)


def test_a_barrier_that_repeats_a_short_wait_ends_at_its_own_limit():
    found = []
    wait = operations._watched(lambda *_, **__: found.append(operations.operation_of(sys._getframe(1))))
    names = {"wait": wait, "short": timedelta(seconds=10)}
    barrier = "def _store_based_barrier(store, timeout):\n for _ in range(2): wait(store, ['key'], short)\n"
    exec(compile(barrier, "/x/torch/distributed/distributed_c10d.py", "exec"), names)
    began_s = time.monotonic()
    names["_store_based_barrier"](object(), timedelta(seconds=900))
    first, second = found
    assert first.position == second.position and first.sliced
    assert first.limit_s == pytest.approx(began_s + 900, abs=600)


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
def test_only_a_server_waits_for_its_clients_without_going_on_by_itself(args, kwargs, seconds):
    """A client sleeps between two attempts to connect, longer and longer."""
    found = []
    make = operations._watched(lambda *_, **__: found.append(operations.operation_of(sys._getframe(1))))
    began_s = time.monotonic()
    make(object(), *args, **kwargs)
    limit_s = found[0].limit_s
    assert limit_s is not None and found[0].wait.transport
    assert "TCPStore() in test_only_a_server" in found[0].wait.description
    assert limit_s == (0.0 if seconds is None else pytest.approx(began_s + seconds, abs=5))


@pytest.mark.parametrize(
    ("value", "seconds"), [(None, INF), (0, INF), (-1, 60.0), (7.5, 7.5), (timedelta(minutes=2), 120.0), (True, INF)]
)
def test_limits_of_torchs_functions_are_read_as_torch_means_them(value, seconds):
    assert operations._seconds(value) == seconds


def test_a_thread_may_be_marked_while_another_asks(monkeypatch):
    class Marks(int):
        def __eq__(self, known):
            threads._harness.add((-len(threads._harness), "as another thread does"))
            return False

        __hash__ = int.__hash__

    monkeypatch.setattr(threads, "_harness", {(1, ""), (2, "")})
    assert not threads.is_left_out(Marks(3))
