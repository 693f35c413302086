"""Hundreds of tests and thousands of worlds in a row leave no process, descriptor or file behind, and none stalls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext.world.suites import Run, Suite

# An empty test takes some 20 ms; what takes this many seconds has stalled, and fails.
STALL_S = 2

EMPTY_TESTS = f"""
class TestEmpty(Case):
    timeout = {STALL_S}


def empty(self):
    pass


for number in range(500):
    setattr(TestEmpty, f"test_{{number:03}}", empty)
"""

EMPTY_WORLDS = f"""
from torch_ext.world import provider
from torch_ext.world.outcome import Ending
from torch_ext.world.start import RankTask, start_world
from torch_ext.world.watch import Limits

if __name__ == "__main__":
    zygote = provider.zygote_for("__main__")
    for number in range(2000):
        with start_world(zygote, [RankTask(os.getpid), RankTask(os.getpid)], spares=2) as world:
            outcomes = world.wait(Limits(test_s={STALL_S}))
        endings = [outcome.ending for outcome in outcomes]
        if endings != [Ending.PASSED, Ending.PASSED]:
            sys.exit(f"world {{number}} ended with {{endings}}")
        if number % 100 == 0:
            CENSUS.note(str(number))
    CENSUS.note("last")
"""


@pytest.fixture
def suite(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Suite]:
    suite = Suite(tmp_path, request.param)
    yield suite
    suite.end_survivors()


def assert_steady(run: Run, warm: int) -> None:
    """Every count after the first ``warm`` ones is the same."""
    counts = [{**entry, "test": ""} for entry in run.census[warm:]]
    assert len(counts) > 10
    assert [entry for entry in counts if entry != counts[0]] == [], counts[0]


@pytest.mark.parametrize("suite", [EMPTY_TESTS], ids=[""], indirect=True)
def test_500_empty_tests_leave_nothing(suite: Suite) -> None:
    run = suite.run()
    assert run.out.splitlines()[-1] == "500 passed, 0 failed, 0 skipped", run
    assert_steady(run, warm=12)  # from the ninth fork on, zygotes may have gathered their memory
    assert suite.survivors() == {}
    assert suite.files_left() == []


@pytest.mark.parametrize("suite", [EMPTY_WORLDS], ids=[""], indirect=True)
def test_2000_worlds_leave_nothing(suite: Suite) -> None:
    run = suite.finish(suite.start([str(suite.file)]), lambda run: None)
    assert run.code == 0, run
    assert_steady(run, warm=1)
    assert suite.survivors() == {}
    assert suite.files_left() == []
