"""Hangs that can be proven are told long before the time limit, and what only takes long is no hang.

No clock is read here: the limit of these tests is 25 seconds, and a report that came by it says that it did.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from test.torch_ext.verdict.programs import first_line, named_first, programs, tells_of_a_hang
from test.torch_ext.world.suites import Run

LIMIT = "25"

COLLECTIVES = """
class TestCollectives(Ranks):
    def test_all_reduce_against_broadcast(self):
        self.join_group()
        if self.rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.broadcast(torch.ones(3), src=0)
        dist.barrier()

    def test_groups_in_opposite_order(self):
        self.join_group()
        groups = [dist.new_group([0, 1], group_desc=name) for name in ("one", "other")]
        for group in groups if self.rank == 0 else reversed(groups):
            dist.all_reduce(torch.ones(3), group=group)

    def test_both_receive(self):
        self.join_group()
        dist.recv(torch.ones(3), src=1 - self.rank)
"""
WAITS = """
class TestWaits(Ranks):
    def test_key_that_nobody_sets(self):
        store = self.join_group()
        store.wait(["nobody sets this"])

    def test_store_without_a_name(self):
        self.join_group()
        dist.distributed_c10d._get_default_store().get("nobody sets this")

    def test_lock_held_by_itself(self):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def test_one_passes_and_its_peer_waits(self):
        store = self.join_group()
        if self.rank == 0:
            store.wait(["nobody sets this"])
"""
THREADS = """
import queue


class TestJoins(Ranks):
    def test_joins_a_thread_that_waits(self):
        thread = threading.Thread(target=queue.Queue().get, daemon=True)
        thread.start()
        thread.join()

    def test_event_that_nobody_sets(self):
        threading.Event().wait()


class TestThreaded(Threads):
    def test_threads_lock_each_other_out(self):
        if self.rank == 1:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        self.check()
"""
OTHERS = """
import torch.distributed.rpc as rpc


def wait_for_ever():
    threading.Event().wait()


class TestStands(Standing):
    def test_class_one_does_not_come(self):
        if self.rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            threading.Event().wait()

    def test_class_next(self):
        self.check()


class TestRpc(Ranks):
    def test_waits_for_an_answer(self):
        rpc.init_rpc(
            f"worker{self.rank}", rank=self.rank, world_size=2,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                init_method=f"file://{self.file_name}", rpc_timeout=0),
        )
        if self.rank == 0:
            rpc.rpc_sync("worker1", wait_for_ever)
        rpc.shutdown()
"""
OVER = """
from torch_ext.testing._internal.common_fsdp import FSDPTest, FSDPTestContinuous


class TestOver(FSDPTest):
    world_size = 2

    def test_body_of_one_is_over(self):
        if self.rank == 0:
            dist.all_reduce(torch.ones(3))

    def test_body_of_the_sender_is_over(self):
        if self.rank == 0:
            dist.recv(torch.ones(3), src=1)


class TestOverOfStanding(FSDPTestContinuous):
    world_size = 2

    def test_standing_body_of_one_is_over(self):
        if self.rank == 0:
            dist.all_reduce(torch.ones(3))
"""
# Where the ranks of a test meet by `env://`.
ADDRESS = """
import socket


class RanksWithAddress(Ranks):
    def setUp(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free.getsockname()[1])
        super().setUp()
"""
MEETING = """
from torch.distributed import rpc


class TestMeeting(RanksWithAddress):
    def test_server_of_a_group_has_no_client(self):
        if self.rank == 0:
            dist.init_process_group("gloo", init_method="env://", rank=self.rank, world_size=2)

    def test_server_waits_for_its_clients(self):
        if self.rank == 0:
            dist.TCPStore("127.0.0.1", 0, 2, True, timeout=timedelta(seconds=300))

    def test_workers_of_rpc_do_not_come(self):
        if self.rank == 0:
            rpc.init_rpc("worker0", rank=0, world_size=2)

    def test_worker_of_rpc_waits_elsewhere(self):
        if self.rank == 0:
            options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{self.file_name}")
            rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
        else:
            threading.Event().wait()
"""
LONG = """
class TestLong(Ranks):
    world_size = 7

    def test_only_takes_long(self):
        store = self.join_group()
        end = time.monotonic() + 14
        if self.rank == 0:
            time.sleep(14)
        elif self.rank == 1:
            while time.monotonic() < end:
                sum(range(100_000))
        elif self.rank == 2:
            self.assertFalse(threading.Event().wait(14))
        elif self.rank == 3:
            lock = threading.Lock()
            lock.acquire()
            threading.Timer(14, lock.release).start()
            lock.acquire()
        elif self.rank == 4:
            with self.assertRaises(Exception):
                store.wait(["nobody sets this"], timedelta(seconds=14))
        elif self.rank == 5:
            subprocess.run(["sleep", "14"])
        dist.barrier()
        # All others wait in a collective or for a key, and one of them will set it.
        if self.rank == 6:
            time.sleep(13)
            store.set("key", "set")
        elif self.rank % 2:
            store.wait(["key"])
        dist.barrier()


class TestLate(RanksWithAddress):
    def test_client_sleeps_and_tries_again(self):
        if self.rank == 0:
            time.sleep(9)
        dist.init_process_group("gloo", init_method="env://", rank=self.rank, world_size=2)
        dist.barrier()
"""
KINDS = {
    "collectives": COLLECTIVES,
    "waits": WAITS,
    "threads": THREADS,
    "others": OTHERS,
    "over": OVER,
    "meeting": ADDRESS + MEETING,
    "long": ADDRESS + LONG,
}
HANGS = [
    name
    for source in KINDS.values()
    for name in re.findall(r"def test_(\w+)", source)
    if name not in ("only_takes_long", "client_sleeps_and_tries_again", "class_next")
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The runs side by side, since their ranks mostly wait; their results in one."""

    folder = tmp_path_factory.mktemp("hangs")

    def run(kind: str) -> Run:
        limit = "60" if kind == "long" else LIMIT
        with programs(folder / kind, KINDS[kind]) as suite:
            return suite.finish(suite.start_runner("--timeout", limit), deadline_s=200)

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(run, KINDS))
    whole = Run(max(each.code for each in found), "".join(map(str, found)), "", 0.0)
    for each in found:
        whole.status |= each.status
        whole.text |= each.text
    yield whole


@pytest.mark.parametrize("name", HANGS)
def test_hang_is_told_as_one(runs: Run, name: str) -> None:
    assert runs.status.get(f"test_{name}") == "failed", runs
    assert tells_of_a_hang(runs.text[f"test_{name}"]), runs.text[f"test_{name}"]


@pytest.mark.parametrize("name", ["only_takes_long", "client_sleeps_and_tries_again"])
def test_what_only_takes_long_is_no_hang(runs: Run, name: str) -> None:
    assert runs.status.get(f"test_{name}") == "passed", runs


def test_ranks_of_a_class_start_again_after_a_hang(runs: Run) -> None:
    assert runs.status.get("test_class_next") == "passed", runs


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("one_passes_and_its_peer_waits", {1}),
        ("threads_lock_each_other_out", {1}),
        ("class_one_does_not_come", {1}),
        ("server_of_a_group_has_no_client", {1}),
        ("server_waits_for_its_clients", {1}),
        ("workers_of_rpc_do_not_come", {1}),
        ("worker_of_rpc_waits_elsewhere", {1}),
        ("body_of_one_is_over", {1}),
        ("body_of_the_sender_is_over", {1}),
        ("standing_body_of_one_is_over", {1}),
    ],
)
def test_hang_names_the_rank_that_keeps_the_others(runs: Run, name: str, ranks: set[int]) -> None:
    assert named_first(runs.text[f"test_{name}"]) == ranks, first_line(runs.text[f"test_{name}"])


def test_hang_in_what_only_all_can_finish_names_the_call_of_the_test(runs: Run) -> None:
    text = runs.text["test_server_of_a_group_has_no_client"]
    assert "rank 0 waited in init_process_group() in test_server_of_a_group_has_no_client (test_suite.py" in text, text
    assert "needs every rank; rank 1 never came" in text, text


def test_rank_whose_body_is_over_is_told(runs: Run) -> None:
    text = runs.text["test_body_of_one_is_over"]
    assert "rank 1 was over and waited for its peers" in text, text
    assert "was in the barrier after its body, which is over" in text, text


def test_deadlock_over_groups_is_shown_as_its_cycle(runs: Run) -> None:
    text = runs.text["test_groups_in_opposite_order"]
    assert "cycle" in text, text
    assert "(one)" in text and "(other)" in text, text


def test_hang_names_what_is_waited_for(runs: Run) -> None:
    text = runs.text["test_all_reduce_against_broadcast"]
    assert "all_reduce" in text and "broadcast" in text, text
    assert "nobody sets this" in runs.text["test_key_that_nobody_sets"] or "store" in first_line(
        runs.text["test_key_that_nobody_sets"]
    )
