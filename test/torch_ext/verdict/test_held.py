"""Waits that end when certain processes let go of something: a hang if those are ranks that are blocked themselves, and
none if anything else may end them.

A hang counts as proven after three seconds in these runs, and each near miss is over after eight.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from test.torch_ext.verdict.programs import first_line, named_first, programs, tells_of_a_hang
from test.torch_ext.world.suites import Run

# The ranks that are to blame stand behind each.
HANGS = {
    "lock_of_a_rank_that_waits": {0, 1},
    "shared_lock_of_a_rank_that_is_blocked": {0},
    "lock_held_by_itself": {1},
    "part_of_a_file_locked_by_a_rank_that_waits": {0, 1},
    "pipe_that_only_it_can_write_to": {1},
    "queue_that_nobody_fills": {0, 1},
    "pipe_of_a_rank_that_waits": {0, 1},
    "threads_read_what_nobody_writes": {1},
}
PROVEN = """
import fcntl


def open_file():
    return os.open(os.path.join(HERE, "file"), os.O_RDWR | os.O_CREAT)


class TestLocks(Ranks):
    def test_lock_of_a_rank_that_waits(self):
        self.join_group()
        if self.rank == 0:
            fcntl.flock(open_file(), fcntl.LOCK_EX)
        dist.barrier()
        if self.rank == 1:
            fcntl.flock(open_file(), fcntl.LOCK_SH)
        dist.all_reduce(torch.ones(3))

    def test_shared_lock_of_a_rank_that_is_blocked(self):
        self.join_group()
        if self.rank == 0:
            fcntl.flock(open_file(), fcntl.LOCK_SH)
        dist.barrier()
        if self.rank == 1:
            fcntl.flock(open_file(), fcntl.LOCK_EX)
        threading.Event().wait()

    def test_lock_held_by_itself(self):
        self.join_group()
        if self.rank == 1:
            fcntl.flock(open_file(), fcntl.LOCK_EX)
            fcntl.flock(open_file(), fcntl.LOCK_EX)
        dist.barrier()

    def test_part_of_a_file_locked_by_a_rank_that_waits(self):
        self.join_group()
        if self.rank == 0:
            fcntl.lockf(open_file(), fcntl.LOCK_EX, 10, 5)
        dist.barrier()
        if self.rank == 1:
            fcntl.lockf(open_file(), fcntl.LOCK_EX, 1, 7)
        dist.barrier()


class TestPipes(Ranks):
    def test_pipe_that_only_it_can_write_to(self):
        self.join_group()
        if self.rank == 1:
            reader, writer = os.pipe()
            os.read(reader, 1)
        dist.barrier()

    def test_queue_that_nobody_fills(self):
        multiprocessing.Queue().get()

    def test_pipe_of_a_rank_that_waits(self):
        self.join_group()
        if self.rank == 0:
            reader, writer = os.pipe()
            note("pipe", f"/proc/{os.getpid()}/fd/{reader}")
        else:
            os.read(os.open(await_note("pipe"), os.O_RDONLY), 1)
        dist.barrier()


class TestThreads(Threads):
    def test_threads_read_what_nobody_writes(self):
        if self.rank == 1:
            reader, writer = os.pipe()
            os.read(reader, 1)
        self.check()
"""
# Rank 1 waits in a barrier for rank 0, in whose place each of these stands.
MISSES = {
    "child_has_the_pipe": """
        reader, writer = os.pipe()
        child = subprocess.Popen(["sleep", "8"], pass_fds=[writer])
        os.close(writer)
        os.read(reader, 1)
    """,
    "child_writes_into_the_pipe": """
        reader, writer = os.pipe()
        writes = f"import os, time; time.sleep(8); os.write({writer}, b'x')"
        child = subprocess.Popen([sys.executable, "-c", writes], pass_fds=[writer])
        os.read(reader, 1)
    """,
    "child_has_the_lock": """
        file = os.open(os.path.join(HERE, "file"), os.O_RDWR | os.O_CREAT)
        fcntl.flock(file, fcntl.LOCK_EX)
        child = subprocess.Popen(["sleep", "8"], pass_fds=[file])
        os.close(file)
        fcntl.flock(os.open(os.path.join(HERE, "file"), os.O_RDWR), fcntl.LOCK_EX)
    """,
    "child_has_locked_a_part_of_the_file": """
        path = os.path.join(HERE, "parts")
        locks = f"import fcntl, time; f = open({path!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True)"
        child = subprocess.Popen([sys.executable, "-c", f"{locks}; time.sleep(8)"], stdout=subprocess.PIPE)
        child.stdout.readline()
        fcntl.lockf(os.open(path, os.O_RDWR), fcntl.LOCK_EX)
    """,
    "child_sends_a_signal_whose_handler_unlocks": """
        lock = threading.Lock()
        lock.acquire()
        signal.signal(signal.SIGUSR1, lambda *_: lock.release())
        child = subprocess.Popen(["sh", "-c", f"sleep 8; kill -USR1 {os.getpid()}"])
        lock.acquire()
    """,
    "child_sets_the_key_of_a_store": """
        store = dist.FileStore(os.path.join(HERE, "keys"), 2)
        sets = (
            "import time, sys, torch.distributed as dist; time.sleep(8);"
            "dist.FileStore(sys.argv[1], 2).set('key', 'set')"
        )
        child = subprocess.Popen([sys.executable, "-c", sets, os.path.join(HERE, "keys")])
        store.set_timeout(timedelta(seconds=90))
        store.wait(["key"])
    """,
    "child_fills_a_queue": """
        queue = multiprocessing.Queue()
        child = multiprocessing.get_context("fork").Process(target=lambda: (time.sleep(8), queue.put(1)))
        child.start()
        queue.get()
    """,
    "pipe_with_a_name": """
        path = os.path.join(HERE, "named")
        os.mkfifo(path)
        reader = os.open(path, os.O_RDWR)
        child = subprocess.Popen(["sh", "-c", f"sleep 8; echo > {path}"])
        os.read(reader, 1)
    """,
    "end_of_the_pipe_is_in_a_socket": """
        import array, socket
        reader, writer = os.pipe()
        one, other = socket.socketpair()
        one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writer]))])
        os.close(writer)
        child = subprocess.Popen(["sleep", "8"], pass_fds=[one.fileno(), other.fileno()])
        one.close()
        other.close()
        os.read(reader, 1)
    """,
    "child_receives_another_end_of_the_pipe": """
        import array, socket
        reader, writer = os.pipe()
        one, other = socket.socketpair()
        one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writer]))])
        program = (
            "import os, socket, sys, time; there = socket.socket(fileno=int(sys.argv[1])); time.sleep(8); "
            "os.write(socket.recv_fds(there, 1, 1)[1][0], b'x')"
        )
        child = subprocess.Popen([sys.executable, "-c", program, str(other.fileno())], pass_fds=[other.fileno()])
        other.close()
        os.read(reader, 1)
    """,
    "child_has_set_an_alarm": """
        child = subprocess.Popen(
            [sys.executable, "-c", "import os, signal; r, w = os.pipe(); signal.alarm(8); os.read(r, 1)"]
        )
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]), -signal.SIGALRM)
    """,
    "alarm_lets_go_of_a_lock": """
        lock = threading.Lock()
        lock.acquire()
        signal.signal(signal.SIGALRM, lambda number, frame: lock.release())
        signal.alarm(8)
        lock.acquire()
    """,
    "end_of_a_child_lets_go_of_a_lock": """
        lock = threading.Lock()
        lock.acquire()
        child = subprocess.Popen(["sleep", "8"])
        signal.signal(signal.SIGCHLD, lambda number, frame: lock.release())
        lock.acquire()
    """,
    "thread_writes_into_the_pipe": """
        reader, writer = os.pipe()
        threading.Timer(8, os.write, (writer, b"x")).start()
        os.read(reader, 1)
    """,
}
NEAR_MISSES = "import fcntl, signal\nfrom datetime import timedelta\n" + "".join(
    f"""
class Test{"".join(word.title() for word in name.split("_"))}(Ranks):
    def test_{name}(self):
        self.join_group()
        if self.rank == 0:
            self.waits()
        dist.barrier()

    def waits(self):{source}"""
    for name, source in MISSES.items()
)
NEAR_MISSES += """
class TestThreadReads(Threads):
    def test_thread_reads_what_a_child_writes(self):
        if self.rank == 0:
            reader, writer = os.pipe()
            child = subprocess.Popen(["sleep", "8"], pass_fds=[writer])
            os.close(writer)
            os.read(reader, 1)
        self.check()
"""
# Each of these is done by somebody who is no rank, or in a rank that does not wait for it itself.
OUTSIDERS = [
    "thread_of_the_parent_half_sets_the_key",
    "child_of_the_parent_half_sets_the_key",
    "child_of_another_rank_sets_the_key",
    "thread_of_the_parent_half_sends_a_signal",
]
NEAR_MISSES += """
class RanksWithStore(Ranks):
    # The parent half serves a store, by threads that are not Python's.
    def setUp(self):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ["STORE_PORT"] = str(self.store.port)
        super().setUp()

    def await_key(self):
        port = int(os.environ["STORE_PORT"])
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
        store.wait(["key"])


def child_sets_the_key():
    sets = (
        "import time, sys, torch.distributed as dist; time.sleep(8);"
        "dist.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False).set('key', 'set')"
    )
    return subprocess.Popen([sys.executable, "-c", sets, os.environ["STORE_PORT"]])


class TestThreadOfParent(RanksWithStore):
    def setUp(self):
        super().setUp()
        threading.Timer(8, self.store.set, ("key", "set")).start()

    def test_thread_of_the_parent_half_sets_the_key(self):
        self.await_key()


class TestChildOfParent(RanksWithStore):
    def setUp(self):
        super().setUp()
        self.addCleanup(child_sets_the_key().wait)

    def test_child_of_the_parent_half_sets_the_key(self):
        self.await_key()


class TestChildOfAnother(RanksWithStore):
    def test_child_of_another_rank_sets_the_key(self):
        self.join_group()
        if self.rank == 0:
            child = child_sets_the_key()
            dist.barrier()
            child.wait()
        else:
            self.await_key()
            dist.barrier()


class TestNobody(RanksWithStore):
    def test_key_in_a_store_of_the_parent_half_that_nobody_sets(self):
        self.await_key()


class TestSignals(Ranks):
    def setUp(self):
        super().setUp()
        send = lambda: [os.kill(process.pid, signal.SIGUSR1) for process in self.processes]
        threading.Timer(8, send).start()

    def test_thread_of_the_parent_half_sends_a_signal(self):
        lock = threading.Lock()
        lock.acquire()
        signal.signal(signal.SIGUSR1, lambda *_: lock.release())
        lock.acquire()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Both runs side by side, since their ranks mostly wait; their results in one."""

    def run(source: str) -> Run:
        with programs(tmp_path_factory.mktemp("held"), source) as suite:
            started = suite.start_runner("--timeout", "100", extra={"TORCH_EXT_HANG_AFTER": "3"})
            found = suite.finish(started, deadline_s=400)
            suite.assert_nothing_left()
        return found

    with ThreadPoolExecutor() as pool:
        proven, near = pool.map(run, (PROVEN, NEAR_MISSES))
    yield Run(
        max(proven.code, near.code), f"{proven}{near}", "", 0.0, proven.status | near.status, proven.text | near.text
    )


@pytest.mark.parametrize("name", HANGS)
def test_what_only_blocked_ranks_hold_is_a_hang(runs: Run, name: str) -> None:
    assert runs.status.get(f"test_{name}") == "failed", runs
    text = runs.text[f"test_{name}"]
    assert tells_of_a_hang(text), text
    assert named_first(text) == HANGS[name], first_line(text)


@pytest.mark.parametrize("name", [*MISSES, *OUTSIDERS, "thread_reads_what_a_child_writes"])
def test_what_anything_else_may_end_is_no_hang(runs: Run, name: str) -> None:
    assert runs.status.get(f"test_{name}") == "passed", runs.text.get(f"test_{name}", runs)


def test_store_of_the_parent_half_does_not_make_a_hang_doubtful(runs: Run) -> None:
    text = runs.text["test_key_in_a_store_of_the_parent_half_that_nobody_sets"]
    assert tells_of_a_hang(text), text


def test_report_tells_who_holds_what(runs: Run) -> None:
    text = runs.text["test_lock_of_a_rank_that_waits"]
    assert "rank 1 waits in flock() in test_lock_of_a_rank_that_waits (test_suite.py" in text, text
    text = runs.text["test_shared_lock_of_a_rank_that_is_blocked"]
    assert "rank 1 waited in flock() in test_shared_lock" in text and ") for rank 0" in text, text
    assert (
        "was in a read of a pipe in test_queue_that_nobody_fills (test_suite.py"
        in runs.text["test_queue_that_nobody_fills"]
    )
