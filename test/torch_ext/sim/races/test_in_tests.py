"""Races in tests on our harness: wherever in a rank a race occurs, it fails the test that has it, and no other."""

import pytest

from test.torch_ext.world.programs import check_rows, class_of
from test.torch_ext.world.suites import suite_of
from torch_ext import cache

IMPORTS = """
import hypothesis
from hypothesis import strategies as st
from torch_ext.testing._internal.hypothesis_utils import across_ranks
"""
RACE = """
LEFT = []
SIM = torch.get_device_module("sim")


def race(fixed=False):
    side, x = SIM.Stream(), torch.ones(64, device="sim")
    SIM.synchronize()
    with SIM.stream(side):
        x.fill_(2)
    if fixed:
        SIM.current_stream().wait_stream(side)
    x.mul(3)
"""

AROUND = """

class One(Ranks):
    world_size = 1


class Around(One):
    @classmethod
    def _run(cls, rank, test_name, *args, **kwargs):
        if "before" in test_name:
            race(fixed="fixed" in test_name)
        if "across" in test_name:
            LEFT[:] = [torch.ones(64, device="sim"), SIM.Stream()]
            SIM.synchronize()
            with SIM.stream(LEFT[1]):
                LEFT[0].fill_(2)
        super()._run(rank, test_name, *args, **kwargs)
        if "after" in test_name:
            race(fixed="fixed" in test_name)

    def run_test(self, test_name, pipe):
        if "set_up" in test_name:
            race(fixed="fixed" in test_name)
        super().run_test(test_name, pipe)
        if "tear_down" in test_name:
            race(fixed="fixed" in test_name)


def examples(test):
    given = hypothesis.given(st.integers(0, 1))(test)
    return across_ranks()(hypothesis.settings(max_examples=3, database=None)(given))


class TestExamples(One):
    @examples
    def test_race(self, value):  # failed: 1 race
        race(fixed=value == 0)

    def run_test(self, test_name, pipe):
        race(fixed="around" not in test_name)
        super().run_test(test_name, pipe)

    @examples
    def test_race_around(self, value):  # failed: 1 race
        race(fixed=True)

    @examples
    def test_fixed(self, value):
        race(fixed=True)
"""
FAILS, FAILS_TWICE = "failed: 1 race", "failed: 1 race...the numbers are wrong"
ERROR = "raise RuntimeError('the numbers are wrong')"
# The ending of each test, and its body.
BODIES = {
    "race": (FAILS, "race()"),
    "fixed": ("passed", "race(fixed=True)"),
    "race_then_error": (FAILS_TWICE, f"race(); {ERROR}"),
    "race_then_skip": (FAILS, "race(); self.skipTest('not now')"),
    "race_then_exit": (FAILS, "race(); sys.exit(86)  # which means a skip"),
    "fixed_skip": ("skipped", "race(fixed=True); self.skipTest('not now')"),
    "race_in_cleanup": (FAILS, "self.addCleanup(race)"),
    "fixed_cleanup": ("passed", "self.addCleanup(race, fixed=True)"),
}
# The name of a test says what happens around it.
OUTSIDE = {
    "race_before": (FAILS, "pass"),
    "race_before_then_error": (FAILS_TWICE, ERROR),
    "race_across": (FAILS, "LEFT[0].mul(3)"),
    "fixed_across": ("passed", "SIM.current_stream().wait_stream(LEFT[1]); LEFT[0].mul(3)"),
    "race_after": (FAILS, "pass"),
    "race_in_set_up": (FAILS, "pass"),
    "race_in_tear_down": (FAILS, "pass"),
    "fixed_before_set_up_tear_down_after": ("passed", "pass"),
}
LEAVES = """\
LEFT[:] = [torch.ones(64, device="sim"), SIM.Stream()]
race(fixed=True)
SIM.synchronize()
with SIM.stream(LEFT[1]):
    LEFT[0].fill_(2)
"""
STANDING = {
    "1_fixed": ("passed", LEAVES),
    "2_fixed": ("passed", "LEFT[0].mul(3)  # what a test leaves behind is not the next one's race"),
    "3_race": (FAILS, "race(fixed=self.rank == 1)"),
    "4_fixed": ("passed", "race(fixed=True)"),
}
SOURCE = (
    IMPORTS
    + RACE
    + AROUND
    + "".join(
        class_of(name, base, table, on="True")
        for name, base, table in (
            ("TestBodies", "One", BODIES),
            ("TestOneOfTwo", "Ranks", {"race": (FAILS, "race(fixed=self.rank == 0)")}),
            ("TestAround", "Around", OUTSIDE),
            ("TestStanding", "Standing", STANDING),
        )
    )
)
SIM = {"TORCH_EXT_DEVICE": "sim", "TORCH_EXT_CACHE": str(cache.folder())}  # the cache holds the built simulator


@pytest.mark.costly
def test_a_race_fails_the_test_that_has_it_wherever_it_is(tmp_path):
    check_rows(tmp_path, SOURCE, extra=SIM)


@pytest.mark.costly
def test_races_that_are_only_reported_fail_nothing(tmp_path):
    with suite_of(tmp_path, SOURCE) as suite:
        run = suite.run("--races", "report", "--show-output", "-k", "TestBodies and race and not error", extra=SIM)
        assert run.status == {
            "test_race": "passed",
            "test_race_then_skip": "skipped",
            "test_race_then_exit": "skipped",
            "test_race_in_cleanup": "passed",
        }, run
        assert (run.out + run.err).count("1 race: ") == 4, run
