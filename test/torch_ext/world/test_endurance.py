"""Hundreds of tests and worlds in a row, more with ``--long``, leak no process, descriptor or file, and none stalls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from test.torch_ext.world.suites import Run, Suite, suite_of

pytestmark = pytest.mark.long  # .ci/nightly kills

# Seconds. An empty test takes about 20 ms, so one that takes this long has stalled, even on a busy machine.
STALL_S = 10

EMPTY_TESTS = """
class TestEmpty(Ranks):
    timeout = STALL_S

    def setUp(self):
        self.addCleanup(CENSUS.note, self._testMethodName)  # the first to be added runs last
        super().setUp()


def empty(self):
    pass


for number in range(TESTS):
    setattr(TestEmpty, f"test_{number:03}", empty)
"""

EMPTY_WORLDS = """
from torch_ext.world import provider
from torch_ext.world.outcome import Ending
from torch_ext.world.follow import RankTask, start_world
from torch_ext.world.settings import Limits

if __name__ == "__main__":
    zygote = provider.zygote_for("__main__")
    for number in range(WORLDS):
        with start_world(zygote, [RankTask(os.getpid), RankTask(os.getpid)], spares=2) as world:
            outcomes = world.wait(Limits(test_s=STALL_S))
        endings = [outcome.ending for outcome in outcomes]
        if endings != [Ending.PASSED, Ending.PASSED]:
            sys.exit(f"world {number} ended with {endings}")
        if number % EVERY == 0:
            CENSUS.note(str(number))
    CENSUS.note("last")
"""


class Scale(NamedTuple):
    """The number of tests, of worlds, and of worlds between two counts of open resources."""

    tests: int
    worlds: int
    every: int


SHORT, LONG = Scale(tests=100, worlds=300, every=20), Scale(tests=500, worlds=2000, every=100)


@pytest.fixture
def scale(request: pytest.FixtureRequest) -> Scale:
    return LONG if request.config.getoption("--long", default=False) else SHORT


@pytest.fixture
def suite(tmp_path: Path, request: pytest.FixtureRequest, scale: Scale) -> Iterator[Suite]:
    constants = "from test.torch_ext.world.faults import Census\nCENSUS = Census(os.environ['CENSUS'])\n"
    constants += f"STALL_S = {STALL_S}\nTESTS, WORLDS, EVERY = {tuple(scale)}\n"
    with suite_of(tmp_path, constants + request.param) as suite:
        yield suite


def assert_steady(run: Run, warm: int) -> None:
    """Check that all counts after the first ``warm`` are equal."""
    counts = [{**entry, "test": ""} for entry in run.census[warm:]]
    assert len(counts) > 10
    assert [entry for entry in counts if entry != counts[0]] == [], counts[0]


@pytest.mark.parametrize("suite", [EMPTY_TESTS], ids=[""], indirect=True)
def test_empty_tests_in_a_row_leave_nothing(suite: Suite, scale: Scale) -> None:
    run = suite.run()
    assert run.out.splitlines()[-1] == f"{scale.tests} passed, 0 failed, 0 skipped", run
    assert_steady(run, warm=12)


@pytest.mark.parametrize("suite", [EMPTY_WORLDS], ids=[""], indirect=True)
def test_worlds_in_a_row_leave_nothing(suite: Suite, scale: Scale) -> None:
    run = suite.finish(suite.start([str(suite.file)]))
    assert run.code == 0, run
    assert len(run.census) == scale.worlds // scale.every + 1
    assert_steady(run, warm=1)
