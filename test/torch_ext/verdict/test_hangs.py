"""The engine reports a provable hang long before the time limit, and a slow program is no hang.

`test_live_programs` draws waits inside a process, and `test_right_rank` ranks that leave out a collective. The hangs
here are not drawn by either. No clock is read: a report that came by a time limit says that it did.
"""

import pytest

from test.torch_ext.world.programs import check_rows, class_of
from test.torch_ext.world.suites import suite_of

SOURCE = """
import socket
from unittest import mock
from torch.distributed import rpc
from torch_ext.testing._internal.common_fsdp import FSDPTest, FSDPTestContinuous

REAL_TIME = time.time


class TestCollectives(Ranks):
    def test_groups_in_opposite_order(self):  # hangs: cycle...(one)...(other)
        self.join_group()
        groups = [dist.new_group([0, 1], group_desc=name) for name in ("one", "other")]
        for group in groups if self.rank == 0 else reversed(groups):
            dist.all_reduce(torch.ones(3), group=group)

    def test_both_receive(self):  # hangs
        self.join_group()
        dist.recv(torch.ones(3), src=1 - self.rank)


    def test_one_passes_and_its_peer_waits(self):  # hangs by 1
        store = self.join_group()
        if self.rank == 0:
            store.wait(["nobody sets this"])


class TestStanding(Standing):
    def test_one_does_not_come(self):  # hangs by 1
        if self.rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            threading.Event().wait()

    def test_starts_again(self):
        self.check()


class TestClock(Ranks):
    # The parent half waits by a clock too.
    def setUp(self):
        for name in ("time.monotonic", "time.time"):
            patch = mock.patch(name, return_value=5.0)
            patch.start()
            self.addCleanup(patch.stop)
        super().setUp()

    def test_that_stands_still(self):  # hangs by 1
        self.join_group()
        if self.rank == 1:
            threading.Event().wait()
        dist.barrier()


class ReplacesInParentHalf(Ranks):
    def setUp(self):
        super().setUp()
        pid = self.processes[1].pid
        child = subprocess.Popen(["sh", "-c", f"sleep 7; kill -USR1 {pid}"])
        self.addCleanup(child.wait)
        patch = mock.patch("builtins.open", mock.mock_open(read_data=""))
        patch.start()
        self.addCleanup(patch.stop)


def wait_by_the_wall_clock(seconds):
    libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    with mock.patch("time.time", return_value=5.0):
        libc.sem_timedwait(semaphore, (ctypes.c_long * 2)(int(REAL_TIME() + seconds), 0))


class RanksWithAddress(Ranks):
    def setUp(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free.getsockname()[1])
        super().setUp()


class TestLong(Ranks):
    world_size = 3

    def test_is_no_hang(self):
        store = self.join_group()
        end = time.monotonic() + 6
        if self.rank == 0:
            while time.monotonic() < end:
                sum(range(100_000))
        elif self.rank == 1:
            with self.assertRaises(Exception):
                store.wait(["nobody sets this"], timedelta(seconds=6))
        dist.barrier()
        # The others wait in a collective or for a key, and one of them will set it.
        if self.rank == 2:
            time.sleep(6)
            store.set("key", "set")
        elif self.rank:
            store.wait(["key"])
        dist.barrier()


def never_returns():
    threading.Event().wait()


class TestServes(RanksWithAddress):
    world_size = 3

    def test_rpc_that_waits(self):  # hangs by 1: ^kept ranks 0, 2 waiting...an RPC had called was at
        rpc.init_rpc(f"worker{self.rank}", rank=self.rank, world_size=3)
        if self.rank == 0:
            rpc.rpc_sync("worker1", never_returns, timeout=0)
        rpc.shutdown()


class TestLate(RanksWithAddress):
    def test_client_sleeps_and_tries_again(self):
        if self.rank == 0:
            time.sleep(7)
        dist.init_process_group("gloo", init_method="env://", rank=self.rank, world_size=2)
        dist.barrier()
"""


# Rank 0's wait for a rank whose body is over.
OVER = {
    "body": ("hangs by 1: ...was in the barrier after its body, which is over", "dist.all_reduce(torch.ones(3))"),
    "sender": ("hangs by 1", "dist.recv(torch.ones(3), src=1)"),
}
MEETING = {
    "server_has_no_client": (
        "hangs by 1: init_process_group() in...which needs every rank; rank 1 never came",
        'dist.init_process_group("gloo", init_method="env://", rank=0, world_size=2)',
    ),
    "server_waits": ("hangs by 1", 'dist.TCPStore("127.0.0.1", 0, 2, True, timeout=timedelta(seconds=300))'),
    "workers_of_rpc_do_not_come": ("hangs by 1", 'rpc.init_rpc("worker0", rank=0, world_size=2)'),
    "worker_waits_elsewhere": (
        "hangs by 1",
        'options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{self.file_name}")\n'
        'rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)',
    ),
}

# Each class replaces functions that an observer of a rank uses to read its threads. All go on after a while.
REPLACES = {
    "listdir": ("Ranks", "with mock.patch('os.listdir', return_value=['1']): time.sleep(7)"),
    "wall_clock": ("Ranks", "wait_by_the_wall_clock(7)"),
    "in_parent_half": (
        "ReplacesInParentHalf",
        "told = threading.Event()\nsignal.signal(signal.SIGUSR1, lambda *_: told.set())\ntold.wait()",
    ),
}


def test_each_wait_ends_as_its_row_states(tmp_path):
    source = SOURCE + class_of("TestMeeting", "RanksWithAddress", MEETING, on="self.rank == 0")
    for name, (base, act) in REPLACES.items():
        source += class_of(f"TestReplaces_{name}", base, {name: ("passed", act)})
    for base in ("FSDPTest", "FSDPTestContinuous"):
        source += class_of(f"TestOver_{base}", base, OVER, on="self.rank == 0") + "\n    world_size = 2\n"
    options = ("--timeout", "60", "--slots", "32")
    check_rows(tmp_path, source, *options, extra={"TORCH_EXT_HANG_AFTER": "4"}, deadline_s=200)


# A file whose import starts a daemon that ends a rank's wait, later than a hang is proven.
DAEMON = """
def act():
    pid = int(await_note("waits"))
    time.sleep(3)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)


def start_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            act()
        os._exit(0)
    os.wait()


start_daemon()


class TestDaemon(Ranks):
    def test_waits(self):
        told = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: told.set())
        if self.rank == 1:
            note("waits", os.getpid())
            told.wait()
        self.check()


if __name__ == "__main__":
    run_tests()
"""


@pytest.mark.parametrize("way", ["runner", "program", "pytest", "unittest"])
def test_a_daemon_that_the_import_of_the_file_has_started_may_act(tmp_path, way):
    extra = {"TORCH_EXT_HANG_AFTER": "1"}
    with suite_of(tmp_path, DAEMON) as suite:
        run = {
            "runner": lambda: suite.run(extra=extra),
            "program": lambda: suite.finish(suite.start([str(suite.file), "-v"], extra)),
            "pytest": lambda: suite.run_pytest(extra=extra),
            "unittest": lambda: suite.run_unittest(extra=extra),
        }[way]()
        assert (run.status, run.code) == ({"test_waits": "passed"}, 0), run
