"""Who is to blame: the rank that did not come, also where its victims fail first, and whoever said what went wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from test.torch_ext.verdict.programs import SLOWER, first_line, named_first, programs, tells_of_a_hang
from test.torch_ext.world.suites import Run
from torch_ext import cache

# Rank 1 is to blame in each of these. Its victims' own limits are two seconds.
VICTIMS = """
class TestVictims(Ranks):
    def test_collective_ends_first(self):
        self.join_group(2)
        if self.rank == 1:
            forever()
        dist.all_reduce(torch.ones(3))

    def test_store_ends_first(self):
        store = self.join_group(2)
        if self.rank == 1:
            forever()
        store.wait(["a key that rank 1 sets"])

    def test_monitored_barrier_ends_first(self):
        self.join_group()
        if self.rank == 1:
            forever()
        dist.monitored_barrier(timeout=timedelta(seconds=2))

    def test_point_to_point_ends_first(self):
        self.join_group(2)
        if self.rank == 1:
            forever()
        dist.recv(torch.ones(3), src=1)

    def test_rendezvous_ends_first(self):
        if self.rank == 1:
            forever()
        self.join_group(2)

    def test_destroyed_its_group_and_passed(self):
        self.join_group()
        if self.rank == 1:
            dist.destroy_process_group()
            return
        dist.all_reduce(torch.ones(3))

    def test_passed_without_coming(self):
        self.join_group()
        if self.rank == 0:
            dist.all_reduce(torch.ones(3))


class TestVictimsOfThree(Ranks):
    world_size = 3

    def test_subgroup_ends_first(self):
        self.join_group(2)
        group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        if self.rank == 1:
            forever()
        if self.rank == 0:
            dist.all_reduce(torch.ones(3), group=group)

    def test_root_of_a_scatter_and_its_peers_differ_in_nothing(self):
        self.join_group(2)
        if self.rank == 1:
            forever()
        parts = [torch.ones(3) for _ in range(3)] if self.rank == 0 else None
        dist.scatter(torch.ones(3), parts, src=0)
        dist.barrier()
"""

# The time limit of the test ends these: nobody can be heard from, or nobody waits with a limit of its own.
SILENT = """
libc_with_gil = ctypes.PyDLL(None)


class TestSilent(Ranks):
    def test_holds_the_gil(self):
        self.join_group()
        if self.rank == 1:
            libc_with_gil.sleep(1000)
        dist.all_reduce(torch.ones(3))

    def test_is_stopped(self):
        self.join_group()
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(3))


    def test_skipped_new_group(self):
        self.join_group()
        if self.rank == 1:
            forever()
        dist.new_group([0, 1])


class TestSilentOfThree(Ranks):
    world_size = 3

    def test_skipped_new_group_for_a_collective(self):
        self.join_group()
        if self.rank == 1:
            dist.barrier()
        dist.new_group([0, 1, 2])

    def test_skips_a_subgroup(self):
        self.join_group()
        group = dist.new_group([1, 2])
        if self.rank == 1:
            forever()
        if self.rank == 2:
            dist.all_reduce(torch.ones(3), group=group)
        dist.barrier()

    def test_sends_nothing(self):
        self.join_group()
        if self.rank == 1:
            forever()
        dist.recv(torch.ones(3), src={0: 1, 2: 0}[self.rank])

    def test_scatters_without_it(self):
        self.join_group()
        if self.rank == 1:
            forever()
        parts = [torch.ones(3) for _ in range(3)] if self.rank == 0 else None
        dist.scatter(torch.ones(3), parts, src=0)
        dist.barrier()


class TestSilentThreads(Threads):
    def test_thread_does_not_come(self):
        if self.rank == 1:
            forever()
        self.check()

    def test_thread_fails_while_its_peer_waits(self):
        if self.rank == 1:
            await_note("rank 0 waits")
            raise ValueError("rank 1 alone")
        note("rank 0 waits")
        self.check()
"""

# Several ranks fail; which is to blame stands behind each.
WORDS = {"eof_in_a_message": 0, "broken_pipe_of_its_own": 0, "words_of_gloo_in_a_message": 0, "victim_fails_first": 1}
MESSAGES = """
# Not in a line of a traceback, which would show the words on both ranks.
FIRST = {
    "test_eof_in_a_message": ValueError("unexpected EOF in the configuration"),
    "test_broken_pipe_of_its_own": BrokenPipeError("Broken pipe: the pager is gone"),
    "test_words_of_gloo_in_a_message": AssertionError("'connection closed' != 'socket closed'"),
}


class TestMessages(Ranks):
    def fail_in_turn(self):
        self.join_group()
        if self.rank == 0:
            raise FIRST[self._testMethodName]
        time.sleep(0.4)
        raise KeyError("later")

    def test_eof_in_a_message(self):
        self.fail_in_turn()

    def test_broken_pipe_of_its_own(self):
        self.fail_in_turn()

    def test_words_of_gloo_in_a_message(self):
        self.fail_in_turn()

    def test_victim_fails_first(self):
        self.join_group()
        if self.rank == 0:
            dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()
        time.sleep(0.4)
        raise ValueError("the cause")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The runs side by side, since their ranks mostly wait; their results in one."""
    kinds = {"victims": (VICTIMS, 8), "silent": (SILENT, 4), "messages": (MESSAGES, 12)}

    def run(kind: str) -> Run:
        source, limit = kinds[kind]
        with programs(tmp_path_factory.mktemp(kind), source) as suite:
            return suite.run("--timeout", str(round(limit * (1 + SLOWER) / 2)))  # some rows take all of it

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(run, kinds))
    whole = Run(max(each.code for each in found), "".join(map(str, found)), "", 0.0)
    for each in found:
        whole.status |= each.status
        whole.text |= each.text
    yield whole


TO_BLAME = sorted(re.findall(r"def test_(\w+)", VICTIMS + SILENT))


@pytest.mark.parametrize("name", TO_BLAME)
def test_the_rank_that_did_not_come_is_to_blame(runs: Run, name: str) -> None:
    assert runs.status[f"test_{name}"] == "failed", runs
    assert named_first(runs.text[f"test_{name}"]) == {1}, runs.text[f"test_{name}"]


def test_thread_whose_wait_ends_because_a_peer_failed_has_no_failure_of_its_own(runs: Run) -> None:
    text = runs.text["test_thread_fails_while_its_peer_waits"]
    assert first_line(text) == "rank 1 of 2 failed with ValueError: rank 1 alone", text


@pytest.mark.parametrize("name", ["root_of_a_scatter_and_its_peers_differ_in_nothing", "scatters_without_it"])
def test_inputs_that_only_the_root_has_are_no_difference(runs: Run, name: str) -> None:
    assert "differ in collective" not in runs.text[f"test_{name}"]


@pytest.mark.parametrize("name", WORDS)
def test_words_in_a_message_make_no_failure_a_consequence(runs: Run, name: str) -> None:
    text = runs.text[f"test_{name}"]
    assert WORDS[name] in named_first(text), text
    assert f"rank {WORDS[name]} failed" in next(line for line in text.splitlines() if "<- first" in line)


def test_stopped_rank_is_told(runs: Run) -> None:
    assert re.search("SIGSTOP|stopped", runs.text["test_is_stopped"].replace("stopped by the harness", ""))
    assert first_line(runs.text["test_is_stopped"])


SKIPS_A_GROUP = """
class TestSkipsAGroup(Ranks):
    def test_new_group(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        if self.rank == 1:
            threading.Event().wait()
        dist.new_group([0, 1])
"""


def test_rank_that_makes_no_group_is_named_on_the_simulated_device_too(tmp_path: Path) -> None:
    """There the group's device half is made with it, by other functions than torch's own."""
    with programs(tmp_path, SKIPS_A_GROUP) as suite:
        run = suite.run("--device", "sim", "--timeout", "60", extra={"TORCH_EXT_CACHE": str(cache.folder())})
    text = run.text["test_new_group"]
    assert tells_of_a_hang(text) and named_first(text) == {1} and "waited in new_group() in test_new_group" in text, (
        text
    )
