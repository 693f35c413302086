"""One file, run by our runner, by itself, by unittest in both spellings and by pytest, says the same each time."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from test.torch_ext.house.suites import RUN_TEST, Done, run, write_suite

WAYS = {
    "run_test.py": (RUN_TEST, "--root", ".", "-v"),
    "python file.py": ("test_suite.py", "-v"),
    "unittest module": ("-m", "unittest", "-v", "test_suite"),
    "unittest path": ("-m", "unittest", "-v", "./test_suite.py"),
    "pytest": ("-m", "pytest", "-v", "test_suite.py"),
}
NARROWED = {
    "run_test.py, one test": (RUN_TEST, "--root", ".", "-v", "-i", "TestRanks.test_functions_travel"),
    "python file.py, one test": ("test_suite.py", "-v", "TestRanks.test_functions_travel"),
}
MISTYPED = {
    "run_test.py, mistyped": (RUN_TEST, "--root", ".", "-i", "test_suiet"),
    "python file.py, mistyped": ("test_suite.py", "TestRank.test_functions_travel"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Done]:
    """Every way, run once, two at a time: most of the time goes into importing torch."""
    folder = tmp_path_factory.mktemp("ways")

    def one(way: str, arguments: tuple[str, ...], place: Path) -> tuple[str, Done]:
        write_suite(place)
        return way, run(place, *arguments)

    with ThreadPoolExecutor(2) as pool:
        started = [
            pool.submit(one, way, arguments, folder / str(number))
            for number, (way, arguments) in enumerate((WAYS | NARROWED | MISTYPED).items())
        ]
        return dict(each.result() for each in started)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tests_pass_fail_and_skip(runs: Mapping[str, Done], way: str) -> None:
    done = runs[way]
    endings = {"test_functions_travel": "passed", "test_one_rank_fails": "failed", "test_wants_devices": "skipped"}
    assert done.endings == endings, done.output
    assert done.code == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_says_which_rank_raised_what(runs: Mapping[str, Done], way: str) -> None:
    assert "rank 1 of 2 failed with ValueError: this is rank 1" in runs[way].output
    assert "rank 0 passed" in runs[way].output
    assert "Needs 8 accelerator devices." in runs[way].output or way == "pytest"


@pytest.mark.parametrize("way", WAYS)
def test_the_module_keeps_its_name_in_the_ranks(runs: Mapping[str, Done], way: str) -> None:
    """Functions that travel by reference, pickled or in an RPC, resolve only then."""
    assert runs[way].names == {"__main__" if way == "python file.py" else "test_suite"}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_are_forked(runs: Mapping[str, Done], way: str) -> None:
    """A fresh interpreter a rank would pass as well, seconds later, and be announced."""
    assert "fresh interpreter" not in runs[way].output


@pytest.mark.parametrize("way", NARROWED)
def test_what_passes_is_exit_code_0(runs: Mapping[str, Done], way: str) -> None:
    assert runs[way].endings == {"test_functions_travel": "passed"}, runs[way].output
    assert runs[way].code == 0


@pytest.mark.parametrize("way", MISTYPED)
def test_a_mistyped_name_is_exit_code_2_with_the_nearest(runs: Mapping[str, Done], way: str) -> None:
    assert runs[way].code == 2
    assert "nearest: " in runs[way].output
    assert runs[way].endings == {}
