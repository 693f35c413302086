"""A test file gives the same results under our runner, by itself, under unittest in two spellings, and under pytest."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest

from test.torch_ext.house.suites import RUN_TEST, Done, run, write_suite

WAYS = {
    "run_test.py": (RUN_TEST, "--root", ".", "-v"),
    "python file.py": ("test_suite.py", "-v"),
    "unittest module": ("-m", "unittest", "-v", "test_suite"),
    "unittest path": ("-m", "unittest", "-v", "./test_suite.py"),
    "pytest": ("-m", "pytest", "-v", "-rs", "test_suite.py"),
}
NARROWED = {
    "run_test.py, one test": (RUN_TEST, "--root", ".", "-v", "-i", "TestRanks.test_functions_travel"),
    "python file.py, one test": ("test_suite.py", "-v", "TestRanks.test_functions_travel"),
}
MISTYPED = {
    "run_test.py, mistyped": (RUN_TEST, "--root", ".", "-i", "test_suiet"),
    "python file.py, mistyped": ("test_suite.py", "TestRank.test_functions_travel"),
}


DoneBy = Callable[[str], Done]


@pytest.fixture(scope="module")
def done_by(tmp_path_factory: pytest.TempPathFactory) -> DoneBy:
    """Run each way at most once, when a test first asks for it."""

    @functools.cache
    def done_by(way: str) -> Done:
        place = tmp_path_factory.mktemp("way") / "suite"
        write_suite(place)
        return run(place, *(WAYS | NARROWED | MISTYPED)[way])

    return done_by


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tests_pass_fail_and_skip(done_by: DoneBy, way: str) -> None:
    done = done_by(way)
    endings = {"test_functions_travel": "passed", "test_one_rank_fails": "failed", "test_wants_devices": "skipped"}
    assert done.endings == endings, done.output
    assert done.code == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_says_which_rank_raised_what_and_a_skip_its_reason(done_by: DoneBy, way: str) -> None:
    assert re.search(r"rank 1 raised ValueError at \S+: this is rank 1", done_by(way).output)
    assert "rank 0 passed" in done_by(way).output
    assert "Needs 8 accelerator devices." in done_by(way).output


@pytest.mark.parametrize("way", WAYS)
def test_the_module_keeps_its_name_in_the_ranks(done_by: DoneBy, way: str) -> None:
    """Otherwise functions that are pickled or sent in an RPC by reference would not resolve."""
    assert done_by(way).names == {"__main__" if way == "python file.py" else "test_suite"}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_are_forked(done_by: DoneBy, way: str) -> None:
    """With a fresh interpreter for each rank the tests would pass too, seconds later, with a message."""
    assert "fresh interpreter" not in done_by(way).output


@pytest.mark.parametrize("way", NARROWED)
def test_what_passes_is_exit_code_0(done_by: DoneBy, way: str) -> None:
    assert done_by(way).endings == {"test_functions_travel": "passed"}, done_by(way).output
    assert done_by(way).code == 0


@pytest.mark.parametrize("way", MISTYPED)
def test_a_mistyped_name_is_exit_code_2_with_the_nearest(done_by: DoneBy, way: str) -> None:
    assert done_by(way).code == 2
    assert "nearest: " in done_by(way).output
    assert done_by(way).endings == {}
