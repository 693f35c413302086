"""Hundreds of tests and thousands of worlds in a row leak no process, descriptor or file, and none stalls."""

import pytest

from test.torch_ext.world.suites import suite_of

pytestmark = pytest.mark.long  # .ci/nightly kills

TESTS, WORLDS, EVERY = 500, 2000, 100  # worlds between two counts of open resources
# Seconds. An empty test takes about 20 ms, so one that takes this long has stalled, even on a busy machine.
STALL_S = 10
CENSUS = "from test.torch_ext.world.faults import Census\nCENSUS = Census(os.environ['CENSUS'])\n"

EMPTY_TESTS = f"""
{CENSUS}

class TestEmpty(Ranks):
    timeout = {STALL_S}

    def setUp(self):
        self.addCleanup(CENSUS.note, self._testMethodName)  # the first to be added runs last
        super().setUp()


def empty(self):
    pass


for number in range({TESTS}):
    setattr(TestEmpty, f"test_{{number:03}}", empty)
"""

EMPTY_WORLDS = f"""
from torch_ext.world import provider
from torch_ext.world.outcome import Ending
from torch_ext.world.follow import start_world
from torch_ext.world.start import RankTask
from torch_ext.world.settings import Limits
{CENSUS}

if __name__ == "__main__":
    zygote = provider.zygote_for("__main__")
    for number in range({WORLDS}):
        with start_world(zygote, [RankTask(os.getpid), RankTask(os.getpid)], spares=2) as world:
            outcomes = world.wait(Limits(test_s={STALL_S}))
        endings = [outcome.ending for outcome in outcomes]
        if endings != [Ending.PASSED, Ending.PASSED]:
            sys.exit(f"world {{number}} ended with {{endings}}")
        if number % {EVERY} == 0:
            CENSUS.note(str(number))
    CENSUS.note("last")
"""


def assert_steady(run, warm):
    """Check that all counts after the first ``warm`` are equal."""
    counts = [{**entry, "test": ""} for entry in run.census[warm:]]
    assert len(counts) > 10
    assert [entry for entry in counts if entry != counts[0]] == [], counts[0]


def test_empty_tests_in_a_row_leave_nothing(tmp_path):
    with suite_of(tmp_path, EMPTY_TESTS) as suite:
        run = suite.run()
    assert run.out.splitlines()[-1] == f"{TESTS} passed, 0 failed, 0 skipped", run
    assert_steady(run, warm=12)


def test_worlds_in_a_row_leave_nothing(tmp_path):
    with suite_of(tmp_path, EMPTY_WORLDS) as suite:
        run = suite.finish(suite.start([str(suite.file)]))
    assert run.code == 0, run
    assert len(run.census) == WORLDS // EVERY + 1
    assert_steady(run, warm=1)
