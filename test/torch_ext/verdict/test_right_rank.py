"""The first line of a report: the rank at fault, the line, and the cause, by programs whose fault is known."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from test.torch_ext.verdict.drawn_faults import FAULTS, Program, judge_report, source_of
from test.torch_ext.verdict.programs import SLOWER, check_rows, programs
from test.torch_ext.world.suites import Run
from torch_ext import cache

# Rank 1 is to blame in each of these. They wait in what no drawn program waits in, or cannot be heard.
SILENT = """
libc_with_gil = ctypes.PyDLL(None)


class TestSilent(Ranks):
    def test_store_ends_first(self):  # failed by 1
        store = self.join_group(2)
        if self.rank == 1:
            forever()
        store.wait(["a key that rank 1 sets"])

    def test_rendezvous_ends_first(self):  # failed by 1
        if self.rank == 1:
            forever()
        self.join_group(2)

    def test_holds_the_gil(self):  # failed by 1
        self.join_group()
        if self.rank == 1:
            libc_with_gil.sleep(1000)
        dist.all_reduce(torch.ones(3))

    def test_is_stopped(self):  # failed by 1: ^stopped by a signal
        self.join_group()
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(3))


class TestSilentOfThree(Ranks):
    world_size = 3

    def test_skipped_new_group_for_a_collective(self):  # failed by 1
        self.join_group()
        if self.rank == 1:
            dist.barrier()
        dist.new_group([0, 1, 2])

    def test_skips_a_subgroup(self):  # failed by 1
        self.join_group()
        group = dist.new_group([1, 2])
        if self.rank == 1:
            forever()
        if self.rank == 2:
            dist.all_reduce(torch.ones(3), group=group)
        dist.barrier()

    def test_sends_nothing(self):  # failed by 1
        self.join_group()
        if self.rank == 1:
            forever()
        dist.recv(torch.ones(3), src={0: 1, 2: 0}[self.rank])


class TestClocks(Ranks):
    def test_the_later_one_has_a_clock_of_its_own(self):  # failed by 1
        self.join_group()
        if self.rank == 1:
            raise ValueError("the first")
        time.sleep(0.4)
        time.monotonic = time.time = lambda: 0.0
        raise ValueError("the second")


# Not in a line of a traceback, which would show the words on both ranks.
FIRST = {
    "test_eof_in_a_message": ValueError("unexpected EOF in the configuration"),
    "test_broken_pipe_of_its_own": BrokenPipeError("Broken pipe: the pager is gone"),
    "test_words_of_gloo_in_a_message": AssertionError("'connection closed' != 'socket closed'"),
}


class TestMessages(Ranks):
    def fail_in_turn(self):
        self.join_group()
        if self.rank == 1:
            raise FIRST[self._testMethodName]
        time.sleep(0.4)
        raise KeyError("later")

    def test_eof_in_a_message(self):  # failed by 1
        self.fail_in_turn()

    def test_broken_pipe_of_its_own(self):  # failed by 1
        self.fail_in_turn()

    def test_words_of_gloo_in_a_message(self):  # failed by 1
        self.fail_in_turn()
"""

# What a test leaves behind must not reach the next one.
LATE = """
class TestLateThreads(Threads):
    def test_1_leaves_a_rank_behind(self):  # failed
        if self.rank == 1:
            await_note("the next test waits")
            try:
                dist.all_reduce(torch.full((3,), 40.0))
            finally:
                note("the late rank has called")
                raise ValueError("of the test before")
        self.check()

    def test_2_next(self):
        if self.rank == 0:
            note("the next test waits")
            await_note("the late rank has called")
        self.check()

    def test_3_last(self):
        self.check()


class TestLateStanding(Standing):  # failed: rank 1 failed at...test_1_leaves_a_thread_behind, thread 'late'
    def test_1_leaves_a_thread_behind(self):
        def fail():
            await_note("a later test runs")
            try:
                raise ValueError("too late")
            finally:
                note("it has failed")

        if self.rank == 1:
            threading.Thread(target=fail, name="late").start()

    def test_2_next(self):
        note("a later test runs")
        await_note("it has failed")
        time.sleep(0.5)
        self.check()
"""


def test_the_rank_that_did_not_come_or_failed_first_is_named(tmp_path: Path) -> None:
    limit = str(round(8 * (1 + SLOWER) / 2))  # some rows take all of it
    check_rows(tmp_path, {"test_silent.py": SILENT, "test_late.py": LATE}, "--timeout", limit, deadline_s=150)


SKIPS_A_GROUP = """
class TestSkipsAGroup(Ranks):
    def test_new_group(self):  # hangs by 1: ^rank 1 never called new_group, which rank 0 waited in (test_suite.py:
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        if self.rank == 1:
            threading.Event().wait()
        dist.new_group([0, 1])
"""


def test_rank_that_makes_no_group_is_named_on_the_simulated_device_too(tmp_path: Path) -> None:
    """There the group's device half is made with it, by other functions than torch's own."""
    extra = {"TORCH_EXT_CACHE": str(cache.folder()), "TORCH_EXT_HANG_AFTER": "4"}
    check_rows(tmp_path, SKIPS_A_GROUP, "--device", "sim", "--timeout", "60", extra=extra)


# Drawn programs

# How many of each kind, by default and with --long; and how many ranks run at a time. Threads compute more than they
# wait, since each class imports what its process needs.
_EACH, _EACH_LONG, _SLOTS = 8, 67, {"gloo": 32, "sim": 24, "threads": 12}


def _run_drawn(kind: str, number: int, folder: Path, seed: str) -> tuple[list[Program], Run]:
    text, made = source_of(random.Random(seed + kind), kind, number)
    with programs(folder, text) as suite:
        extra = {"TORCH_EXT_HANG_AFTER": "4", "TORCH_EXT_CACHE": str(cache.folder())}
        limit = ("--timeout", str(round((20 if number == _EACH else 60) * SLOWER)), "--slots", str(_SLOTS[kind]))
        process = suite.start_runner(*limit, "--device", "sim" if kind == "sim" else "cpu", extra=extra)
        return made, suite.finish(process, deadline_s=60 + 12 * number * SLOWER)


def test_the_first_line_names_the_rank_the_line_and_the_cause_of_a_drawn_fault(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    long = request.config.getoption("--long")
    seed, number = ("drawn", _EACH) if not long else (str(random.SystemRandom().random()), _EACH_LONG)
    wrong, right = [], 0
    with ThreadPoolExecutor() as pool:
        for made, run in pool.map(lambda kind: _run_drawn(kind, number, tmp_path / kind, seed), FAULTS):
            for program in made:
                text = run.text.get(program.name, "")
                why = judge_report(program, text) if text else f"it {run.status.get(program.name, 'never ran')}"
                right += not why
                if why:
                    wrong.append(f"{program.kind}, rank {program.guilty} of {program.size}, {program.fault}: {why}")
                    wrong += [program.text, text or str(run)[-3000:]]
    print(f"right in the first line: {right} of {number * len(FAULTS)}, seed {seed}")
    assert not wrong, f"right: {right} of {number * len(FAULTS)}, seed {seed}\n" + "\n".join(wrong)
