"""Faults injected into real ranks give the right status and report, leave nothing behind, and spare the next test.

One run of one suite injects them all; each test below checks one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from test.torch_ext.world.suites import Run, Suite

# fault -> ranks to inject it on. Each of these tests is followed by one that must pass.
PLACES = {
    "raise": (0, 1),
    "skip": (0, 1),
    "exit_3": (0, 1),
    "leave_silently": (0, 1),
    "sigkill": (0, 1),
    "sigsegv": (0, 1),
    "hang": (0, 1),
    "print_50_mb": (0, 1),
    "leave_child": (0, 1),
}

SOURCE = f"""
PLACES = {PLACES!r}


class TestFaults(Case):
    # Torch keeps open what the first tests open in the parent half.
    def test_0_warm(self):
        self.check()

    def test_1_warm(self):
        self.check()

    @with_timeout(20)
    def test_collective_without_peer(self):
        self.join_group()
        if self.rank == 0:
            dist.all_reduce(torch.ones(3))

    def test_collective_without_peer_next(self):
        self.check()

    @with_timeout(3)
    def test_hang_in_collective(self):
        self.join_group()
        if self.rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            inject("hang", rank=self.rank, at=1)

    def test_hang_in_collective_next(self):
        self.check()

    def test_death_in_collective(self):
        self.join_group()
        inject("sigkill", rank=self.rank, at=1)
        dist.all_reduce(torch.ones(3))

    def test_death_in_collective_next(self):
        self.check()

    def test_print_50_mb_and_raise(self):
        inject("print_50_mb", rank=self.rank, at=1)
        inject("raise", rank=self.rank, at=1)

    def test_leave_child_and_die(self):
        inject("leave_child", rank=self.rank, at=1)
        inject("sigkill", rank=self.rank, at=1)

    def test_leave_child_and_die_next(self):
        self.check()

    def test_skip_everywhere(self):
        inject("skip", rank=self.rank, at=self.rank)

    def test_die_everywhere(self):
        inject("sigkill", rank=self.rank, at=self.rank)

    def test_die_everywhere_next(self):
        self.check()


def at(fault, rank):
    def test(self):
        inject(fault, rank=self.rank, at=rank)
    return with_timeout(3)(test) if fault == "hang" else test


def following(self):
    self.check()


for fault, ranks in PLACES.items():
    for rank in ranks:
        setattr(TestFaults, f"test_{{fault}}_on_{{rank}}", at(fault, rank))
        setattr(TestFaults, f"test_{{fault}}_on_{{rank}}_next", following)

if __name__ == "__main__":
    run_tests()
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    suite = Suite(tmp_path_factory.mktemp("faults"), SOURCE)
    yield suite
    suite.end_survivors()


@pytest.fixture(scope="module")
def run(suite: Suite) -> Run:
    return suite.run()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", ["rank {rank} raised ValueError at faults.py:", "Traceback of rank {rank}:", "in _raise\n"]),
        ("skip", ["rank {rank} skipped (injected reason), and rank {other} did not: make the condition"]),
        ("exit_3", ["rank {rank} exited with code 3 at faults.py:"]),
        ("leave_silently", ["rank {rank} exited with code 0 at faults.py:"]),
        ("sigkill", ["rank {rank} was killed by SIGKILL at faults.py:"]),
        ("sigsegv", ["rank {rank} was killed by SIGSEGV at faults.py:", "Segmentation fault", "in _sigsegv\n"]),
        ("hang", ["rank {rank} timed out at faults.py:", "Stacks of rank {rank}:", "in _hang\n"]),
    ],
)
def test_fault_fails_the_test_in_words_that_name_the_rank(run: Run, fault: str, words: list[str], rank: int) -> None:
    name = f"test_{fault}_on_{rank}"
    assert run.status[name] == "failed", run
    for word in words:
        assert word.format(rank=rank, other=1 - rank) in run.text[name]
    assert f"  rank {1 - rank} passed" in run.text[name]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["print_50_mb", "leave_child"])
def test_untidy_rank_passes(run: Run, fault: str, rank: int) -> None:
    assert run.status[f"test_{fault}_on_{rank}"] == "passed", run


def test_process_left_behind_is_told(run: Run) -> None:
    # Both ranks end at once and orphan their children at once, so either may be named.
    told = re.findall(r"^ *(\d+)  rank [01] left a process behind, which was ended: sleep 6543$", run.out, re.MULTILINE)
    assert sum(int(number) for number in told) == 2
    assert "    left a process behind, which was ended: sleep 6543" in run.text["test_leave_child_and_die"]


def test_end_of_a_flood_of_output_is_shown(run: Run) -> None:
    text = run.text["test_print_50_mb_and_raise"]
    assert "Output of rank 1:\n" in text
    assert "the last line" in text
    assert len(text) < 40_000


def test_skip_on_every_rank_is_a_skip_with_its_reason(run: Run) -> None:
    assert run.status["test_skip_everywhere"] == "skipped"
    assert "test_skip_everywhere  skipped" in run.out and "  injected reason\n" in run.out


def test_death_of_all_is_told_once(run: Run) -> None:
    assert run.text["test_die_everywhere"].lstrip().startswith("ranks 0, 1 were killed by SIGKILL at faults.py:")


def test_death_is_told_apart_from_what_it_caused(run: Run) -> None:
    text = run.text["test_death_in_collective"]
    assert text.lstrip().startswith("rank 1 was killed by SIGKILL at faults.py:")
    assert re.search(r"^  rank 1 was killed by SIGKILL at \S+  <- first$", text, re.MULTILINE)
    assert "(because of that)" in next(line for line in text.splitlines() if line.strip().startswith("rank 0 raised"))


def test_collective_whose_peer_has_left_is_named(run: Run) -> None:
    text = run.text["test_collective_without_peer"]
    assert "Collectives: rank 0 called #1 gloo:all_reduce([3] Float)" in text
    assert "which rank 1 never called." in text


def test_hang_in_a_collective_blames_the_rank_that_did_not_come(run: Run) -> None:
    text = run.text["test_hang_in_collective"]
    assert text.lstrip().startswith("rank 1 never called all_reduce, which rank 0 waited in (test_suite.py:")
    assert "    was in #1 gloo:all_reduce([3] Float)" in text
    assert "in all_reduce\n" in text and "in _hang\n" in text


def test_next_test_passes_after_every_fault(run: Run) -> None:
    following = {name: status for name, status in run.status.items() if name.endswith("_next")}
    assert len(following) == 2 * len(PLACES) + 5
    assert set(following.values()) == {"passed"}, run


def test_every_test_has_one_result_and_the_exit_code_tells(run: Run) -> None:
    assert run.code == 1
    counts = [list(run.status.values()).count(one) for one in ("passed", "failed", "skipped")]
    assert run.out.splitlines()[-1] == "{} passed, {} failed, {} skipped".format(*counts)
    assert sum(counts) == 2 * 2 * len(PLACES) + 14


def test_counts_are_the_same_after_every_fault(run: Run) -> None:
    assert len(run.census) == len(run.status)
    warm, *others = [{**counts, "test": ""} for counts in run.census[1:]]
    changed = [run.census[number + 2]["test"] for number, counts in enumerate(others) if counts != warm]
    assert changed == [], run.census


def test_nothing_outlives_the_run(run: Run, suite: Suite) -> None:
    assert suite.survivors() == {}
    assert suite.files_left() == []
