"""Races in tests on our harness: wherever in a rank they are, they fail the test that has them, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from test.torch_ext.world.suites import Run, suite_of
from torch_ext import cache

RACE = """
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

RANKS = (
    RACE
    + """
LEFT = []


class One(Ranks):
    world_size = 1


class TestBodies(One):
    def test_race(self):
        race()

    def test_fixed(self):
        race(fixed=True)

    def test_race_then_error(self):
        race()
        raise RuntimeError("the numbers are wrong")

    def test_race_then_skip(self):
        race()
        self.skipTest("not now")

    def test_race_then_exit(self):
        race()
        sys.exit(86)  # which means a skip

    def test_fixed_skip(self):
        race(fixed=True)
        self.skipTest("not now")

    def test_race_in_cleanup(self):
        self.addCleanup(race)

    def test_fixed_cleanup(self):
        self.addCleanup(race, fixed=True)


class TestOneOfTwo(Ranks):
    def test_race(self):
        race(fixed=self.rank == 0)


class TestAround(One):
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

    def test_race_before(self):
        pass

    def test_race_before_then_error(self):
        raise RuntimeError("the numbers are wrong")

    def test_race_across(self):
        LEFT[0].mul(3)

    def test_fixed_across(self):
        SIM.current_stream().wait_stream(LEFT[1])
        LEFT[0].mul(3)

    def test_race_after(self):
        pass

    def test_race_in_set_up(self):
        pass

    def test_race_in_tear_down(self):
        pass

    def test_fixed_before_set_up_tear_down_after(self):
        pass


class TestExamples(One):
    @across_ranks()
    @hypothesis.settings(max_examples=3, database=None)
    @hypothesis.given(st.integers(0, 1))
    def test_race(self, value):
        race(fixed=value == 0)

    def run_test(self, test_name, pipe):
        race(fixed="around" not in test_name)
        super().run_test(test_name, pipe)

    @across_ranks()
    @hypothesis.settings(max_examples=3, database=None)
    @hypothesis.given(st.integers(0, 1))
    def test_race_around(self, value):
        race(fixed=True)

    @across_ranks()
    @hypothesis.settings(max_examples=3, database=None)
    @hypothesis.given(st.integers(0, 1))
    def test_fixed(self, value):
        race(fixed=True)


class TestStanding(Standing):
    def test_1_fixed(self):
        LEFT[:] = [torch.ones(64, device="sim"), SIM.Stream()]
        race(fixed=True)
        SIM.synchronize()
        with SIM.stream(LEFT[1]):
            LEFT[0].fill_(2)

    def test_2_fixed(self):
        LEFT[0].mul(3)  # what a test leaves behind is not the next one's race

    def test_3_race(self):
        race(fixed=self.rank == 1)

    def test_4_fixed(self):
        race(fixed=True)
"""
)
IMPORTS = """
import hypothesis
from hypothesis import strategies as st
from torch_ext.testing._internal.hypothesis_utils import across_ranks
"""
SIM = {"TORCH_EXT_DEVICE": "sim", "TORCH_EXT_CACHE": str(cache.folder())}  # which holds the built simulator


def told(run: Run) -> dict[str, list[str]]:
    """Return for each test of a run, named with its class, its status and the races that its report counts."""
    found = re.findall(r"^\S+\.py::(\w+::\w+)  (\w+)  [\d.]+ s", run.out, re.MULTILINE)
    texts = dict(re.findall(r"^FAILED \S+\.py::(\w+::\w+)  [\d.]+ s\n(.*?)^rerun: ", run.out, re.M | re.S))

    def counts(name: str) -> list[str]:
        return sorted(set(re.findall(r"(\d+ races?)(?: on rank \d+)?: accesses", texts.get(name, ""))))

    return {name: [status, *counts(name)] for name, status in found}


def check(run: Run, tests: int) -> None:
    """Hold each test's result against its name."""
    results = told(run)
    assert len(results) == tests, run
    for name, result in results.items():
        racy = "race" in name.partition("::")[2]
        fine = ["skipped" if "skip" in name else "passed"]
        assert result == (["failed", "1 race"] if racy else fine), f"{name}: {result}\n{run}"


def test_a_race_fails_the_test_that_has_it_wherever_it_is(tmp_path: Path) -> None:
    with suite_of(tmp_path, IMPORTS + RANKS) as suite:
        run = suite.run(extra=SIM)
        check(run, tests=24)
        assert "the numbers are wrong" in run.text["test_race_then_error"]
        suite.assert_nothing_left()


def test_races_that_are_only_reported_fail_nothing(tmp_path: Path) -> None:
    with suite_of(tmp_path, IMPORTS + RANKS) as suite:
        run = suite.run("--races", "report", "--show-output", "-k", "TestBodies and race and not error", extra=SIM)
        statuses = {name: result[0] for name, result in told(run).items()}
        assert statuses == {
            "TestBodies::test_race": "passed",
            "TestBodies::test_race_then_skip": "skipped",
            "TestBodies::test_race_then_exit": "skipped",
            "TestBodies::test_race_in_cleanup": "passed",
        }, run
        assert run.out.count("1 race: accesses") + run.err.count("1 race: accesses") == 4, run
