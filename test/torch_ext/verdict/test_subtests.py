"""Grids of sub-cases: an empty one tests nothing, and ranks that disagree on a sub-case do not pass."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from test.torch_ext.verdict.programs import Programs, first_line, named_first, programs
from test.torch_ext.world.suites import Run

SOURCE = """
from torch_ext.testing._internal.common_fsdp import FSDPTest, FSDPTestMultiThread


class Cases:
    world_size = 2

    def one(self, x, skip_on=()):
        if x == 2 and self.rank in skip_on:
            raise unittest.SkipTest("not here")

    def boom(self, x):
        if x == 2 and self.rank == 1:
            raise ValueError("in one sub-case")


class TestPlain(Cases, Ranks):
    def test_plain_empty_grid(self):
        self.join_group()
        run_subtests(self, {"x": []}, self.one)

    def test_plain_no_axis(self):
        self.join_group()
        run_subtests(self, {}, lambda: self.fail("an axis is missing"))

    def test_plain_one_rank_skips(self):
        self.join_group()
        run_subtests(self, {"x": [1, 2, 3]}, self.one, skip_on=(1,))

    def test_plain_generator_for_an_axis(self):
        self.join_group()
        seen, axis = [], (x for x in (1, 2))
        run_subtests(self, {"x": axis}, lambda x: seen.append(x))
        self.assertEqual(seen, [1, 2])

    def test_plain_all_run(self):
        self.join_group()
        run_subtests(self, {"x": [1, 2, 3]}, self.one)


class TestFSDP(Cases, FSDPTest):
    def test_fsdp_empty_grid(self):
        self.run_subtests({"x": [], "y": [1, 2]}, self.one)

    def test_fsdp_one_rank_skips(self):
        self.run_subtests({"x": [1, 2, 3]}, self.one, skip_on=(1,))

    def test_fsdp_ranks_skip_different_ones(self):
        def one(x):
            if x == self.rank:
                raise unittest.SkipTest("not here")
        self.run_subtests({"x": [0, 1, 2]}, one)

    def test_fsdp_one_rank_skips_all(self):
        def one(x):
            if self.rank == 1:
                raise unittest.SkipTest("not here")
        self.run_subtests({"x": [0, 1]}, one)

    def test_fsdp_one_fails(self):
        self.run_subtests({"x": [1, 2, 3]}, self.boom)

    def test_fsdp_all_skip_one(self):
        self.run_subtests({"x": [1, 2, 3]}, self.one, skip_on=(0, 1))


class TestFSDPThreads(Cases, FSDPTestMultiThread):
    def test_threads_empty_grid(self):
        self.run_subtests({"x": []}, self.one)

    def test_threads_one_rank_skips(self):
        self.run_subtests({"x": [1, 2, 3]}, self.one, skip_on=(1,))
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("subtests"), SOURCE) as suite:
        yield suite


@pytest.fixture(scope="module")
def run(suite: Programs) -> Run:
    return suite.run("--timeout", "20")


@pytest.mark.parametrize("name", ["plain_empty_grid", "fsdp_empty_grid", "threads_empty_grid"])
def test_an_empty_grid_fails_in_words(run: Run, name: str) -> None:
    assert run.status[f"test_{name}"] == "failed", run
    assert re.search(r"empty|no sub-case|no combination|'x'", run.text[f"test_{name}"])


@pytest.mark.parametrize(
    "name",
    [
        "plain_one_rank_skips",
        "fsdp_one_rank_skips",
        "fsdp_ranks_skip_different_ones",
        "fsdp_one_rank_skips_all",
        "threads_one_rank_skips",
    ],
)
def test_ranks_that_disagree_on_a_sub_case_fail(run: Run, name: str) -> None:
    assert run.status[f"test_{name}"] == "failed", run
    assert "skip" in run.text[f"test_{name}"]
    assert "not here" in run.text[f"test_{name}"]


@pytest.mark.parametrize("name", ["plain_one_rank_skips", "fsdp_one_rank_skips", "threads_one_rank_skips"])
def test_the_rank_that_skipped_alone_is_named(run: Run, name: str) -> None:
    text = run.text[f"test_{name}"]
    assert 1 in named_first(text) or "rank 1 skipped" in first_line(text), text


@pytest.mark.parametrize("name", ["plain_generator_for_an_axis", "plain_all_run", "fsdp_all_skip_one"])
def test_grids_on_which_ranks_agree_pass(run: Run, name: str) -> None:
    assert run.status[f"test_{name}"] == "passed", run


def test_a_sub_case_that_fails_is_named(run: Run, suite: Programs) -> None:
    assert re.search(r"rank 1 raised ValueError at \S+: in one sub-case", run.text["test_fsdp_one_fails"])
    assert run.text["test_fsdp_one_fails"].count("in the subtest with x=2") == 1
    suite.assert_nothing_left()
