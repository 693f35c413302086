"""Property-based tests across ranks: what runs, what they find and report, and how examples are isolated.

The suite below runs in another process. Its ranks record every example that they run, so that the tests here know which
ranks ran what.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis import Phase

from test.torch_ext.world.suites import Run, Suite
from torch_ext.testing._internal import hypothesis_utils
from torch_ext.testing._internal._distributed.example_report import Example
from torch_ext.testing._internal._distributed.examples import settings_for_ranks
from torch_ext.testing._internal.hypothesis_utils import across_ranks

SOURCE = """
import json, unittest
from hypothesis import assume, example, given, reproduce_failure, settings, strategies as st
from hypothesis.database import InMemoryExampleDatabase
from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, FSDPTestContinuous
from torch_ext.testing._internal.hypothesis_utils import across_ranks

FOLDER = os.path.dirname(os.path.abspath(__file__))


def write(file, **what):
    with open(os.path.join(FOLDER, file), "a") as stream:
        print(json.dumps(what), file=stream)


class Database(InMemoryExampleDatabase):
    def save(self, key, value):
        write("database", pid=os.getpid())
        super().save(key, value)


class Case(FSDPTest):
    world_size = 2

    def see(self, **drawn):
        write("seen", test=self._testMethodName, rank=self.rank, pid=os.getpid(), **drawn)


numbers = st.integers(0, 10_000)
# For what fails by taking too long: shrinking to 40 takes a handful of examples. Those that pass are fast, and with the
# ten that torch's profile asks for, one run in seventy would draw none that fails.
few = st.integers(0, 63)
many = settings(max_examples=60)


class TestFound(Case):
    @across_ranks()
    @settings(max_examples=40)
    @given(numbers, st.sampled_from(["a", "b"]))
    def test_all_pass(this, x, kind):
        this.see(x=x, kind=kind)
        total = torch.tensor([x])
        dist.all_reduce(total)
        this.assertEqual(total.item(), 2 * x)

    @across_ranks()
    @given(xs=st.lists(numbers), kind=st.sampled_from(["a", "b"]))
    def test_rank_1_fails(self, xs, kind):
        self.see(xs=xs)
        dist.barrier()
        if self.rank == 1:
            self.assertLess(sum(xs), 137)

    @across_ranks()
    @given(x=numbers)
    def test_rank_0_dies(self, x):
        if x >= 137:
            inject("sigkill", rank=self.rank, at=0)

    @across_ranks(example_timeout_s=1)
    @settings(many, database=Database(), derandomize=False)
    @given(x=few)
    def test_rank_1_hangs(self, x):
        self.see(x=x)
        if x >= 40:
            inject("hang", rank=self.rank, at=1)

    @across_ranks()
    @given(x=numbers)
    def test_odd_ones(self, x):
        assume(x % 2)
        if x > 500:
            raise ValueError(f"rank {self.rank} does not like {x}")

    @across_ranks()
    @settings(max_examples=5)
    @given(x=numbers)
    def test_never_meant(self, x):
        assume(False)

    @across_ranks()
    @given(x=numbers)
    def test_disagreement(self, x):
        assume(x < 137 or self.rank == 0)

    @across_ranks(example_timeout_s=1)
    @many
    @given(x=few)
    def test_collective_left_over(self, x):
        # The barrier after the example finds it.
        if x >= 40 and self.rank == 0:
            dist.all_reduce(torch.ones(3), async_op=True)

    @across_ranks()
    @settings(max_examples=25, database=None)
    @given(x=numbers)
    def test_state_left_over(self, x):
        # A failed rank leaves its peer in a collective that nobody else will join.
        self.see(x=x)
        ones = torch.ones(3)
        if x >= 137 and self.rank == 1:
            raise ValueError("left a collective")
        dist.all_reduce(ones)
        if ones[0] != 2:
            raise RuntimeError("met something else")

    @across_ranks()
    @settings(database=Database(), derandomize=False)
    @given(x=numbers)
    def test_database(self, x):
        self.assertLess(x, 137)

    @across_ranks()
    @given(x=numbers)
    def test_not_drawn(self, x):
        # Fails the first time only, whatever is drawn.
        path = os.path.join(FOLDER, f"flag-{self.rank}")
        if not os.path.exists(path):
            open(path, "w").close()
            self.fail("the first time")


class TestSkipped(Case):
    @across_ranks()
    @given(x=numbers)
    def test_in_body(self, x):
        self.skipTest("no such thing")

    @skip_if_lt_x_gpu(8)
    @across_ranks()
    @given(x=numbers)
    def test_above(self, x):
        self.fail("ran")

    @across_ranks()
    @given(x=numbers)
    @skip_if_lt_x_gpu(8)
    def test_below(self, x):
        self.fail("ran")


class TestWishes(Case):
    @example(x=7)
    @across_ranks()
    @settings(max_examples=3, database=None)
    @example(x=9)
    @given(x=numbers)
    def test_examples(self, x):
        self.see(x=x)

    @settings(max_examples=3, database=None)
    @across_ranks()
    @given(x=numbers)
    def test_settings_above(self, x):
        self.see(x=x)

    @example(x=400)
    @across_ranks()
    @given(x=numbers)
    def test_fails_by_example(self, x):
        self.assertNotEqual(x, 400)

    @with_timeout(2)
    @across_ranks(example_timeout_s=1)
    @settings(max_examples=10_000)
    @given(x=numbers)
    def test_too_many(self, x):
        time.sleep(0.01)

    @with_timeout(4)
    @across_ranks(example_timeout_s=1)
    @settings(database=None)
    @given(x=st.integers(0, 2**60))
    def test_shrinks_in_time(self, x):
        self.see(x=x)
        if x >= 137:
            inject("hang", rank=self.rank, at=1)

    @across_ranks()
    @settings(max_examples=5, database=None)
    @given(x=numbers)
    def test_group_broken(self, x):
        self.see(x=x)
        if self.rank == 0:
            dist.destroy_process_group()  # the barrier of the end will find one rank alone


class TestMisused(Case):
    @across_ranks()
    @given(data=st.data())
    def test_interactive(self, data):
        data.draw(numbers)

    @across_ranks()
    @given(function=st.just(lambda: 0))
    def test_unpicklable(self, function):
        self.fail("ran")


class TestContinuous(FSDPTestContinuous):
    world_size = 2

    @across_ranks()
    @given(x=numbers)
    def test_wrong_class(self, x):
        self.fail("ran")


class TestZygote(Case):
    @across_ranks()
    @given(x=numbers)
    def test_zygote_dies(self, x):
        if x >= 137 and self.rank == 0 and "KILL_ZYGOTE" in os.environ:
            os.kill(os.getppid(), signal.SIGKILL)


class TestNotReady(Case):
    @classmethod
    def _run(cls, rank, *args, **kwargs):
        inject("raise", rank=rank, at=1)
        super()._run(rank, *args, **kwargs)

    @across_ranks()
    @given(x=numbers)
    def test_start(self, x):
        self.fail("ran")


if __name__ == "__main__":
    run_tests()
"""


@dataclass
class Told:
    """A run of the suite, with what its ranks recorded."""

    run: Run
    seen: Mapping[str, list[dict[str, Any]]]
    database: list[int]

    def by_rank(self, test: str, key: str) -> list[list[Any]]:
        """What each rank recorded under ``key``, in order."""
        return [[each[key] for each in self.seen[test] if each["rank"] == rank] for rank in (0, 1)]

    def text(self, test: str) -> str:
        assert self.run.status[test] == "failed", self.run
        return self.run.text[test]


def told(suite: Suite, run: Run) -> Told:
    seen = defaultdict(list)
    for line in lines(suite.folder / "seen"):
        seen[line["test"]].append(line)
    return Told(run, seen, [line["pid"] for line in lines(suite.folder / "database")])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    suite = Suite(tmp_path_factory.mktemp("examples"), SOURCE)
    yield suite
    suite.end_survivors()


@pytest.fixture(scope="module")
def whole(suite: Suite) -> Told:
    with mock.patch.dict(os.environ):
        os.environ.pop("CI", None)
        return told(suite, suite.run())


# Which examples run


def test_all_ranks_run_the_same_examples_in_one_set_of_processes(whole: Told) -> None:
    assert whole.run.status["test_all_pass"] == "passed", whole.run
    for key in ("x", "kind"):
        first, second = whole.by_rank("test_all_pass", key)
        assert len(first) == 40
        assert first == second
    assert [len(set(pids)) for pids in whole.by_rank("test_all_pass", "pid")] == [1, 1]


def test_settings_and_explicit_examples_count_wherever_they_stand(whole: Told) -> None:
    for seen in whole.by_rank("test_examples", "x"):
        assert sorted(seen[:2]) == [7, 9]
        assert len(seen) == 5
    assert [len(seen) for seen in whole.by_rank("test_settings_above", "x")] == [3, 3]


# Failures


def test_a_failure_of_one_rank_shrinks_to_one_example_for_all(whole: Told) -> None:
    text = whole.text("test_rank_1_fails")
    assert re.match(r"rank 1 raised AssertionError at \S+: 137 not less than 137", text), text
    assert "test_rank_1_fails(xs=[137], kind='a')" in text
    assert text.count("minimal example") == 1
    assert "rank 0 raised RuntimeError" in text
    assert "(because of that)" in text


def test_shrinking_stays_in_step(whole: Told) -> None:
    """Ranks record the same examples up to the failure, which ends them."""
    first, second = whole.by_rank("test_rank_1_fails", "xs")
    assert first == second
    assert first[-1] == [137]


@pytest.mark.parametrize(
    ("test", "summary", "example"),
    [
        ("test_rank_0_dies", "^rank 0 was killed by SIGKILL at", "x=137"),
        ("test_rank_1_hangs", "^rank 1 never called barrier, which rank 0 waited in", "x=40"),
        ("test_odd_ones", "^(ranks 0, 1|rank .) raised ValueError", "x=501"),
        ("test_disagreement", "^rank 1 skipped .the example does not sat", "x=137"),
        ("test_collective_left_over", r"^ranks 0, 1 called different collectives: rank 0 called all_reduce\(", "x=40"),
        ("test_state_left_over", "^rank 1 raised ValueError at .*: left a collective", "x=137"),
        ("test_group_broken", "^rank 1 raised RuntimeError", "x=0"),
        ("test_database", "rank.* 137 not less than 137", "x=137"),
    ],
)
def test_the_minimal_example_is_found_and_the_culprit_named(whole: Told, test: str, summary: str, example: str) -> None:
    text = whole.text(test)
    assert re.match(summary, text), text
    assert f"    {test}({example})\n" in text
    assert f"    @example({example})\n" in text


def test_ranks_are_fresh_after_a_failure_and_kept_otherwise(whole: Told) -> None:
    failed = [x >= 137 for x in whole.by_rank("test_state_left_over", "x")[0]]
    assert any(failed)
    for pids in whole.by_rank("test_state_left_over", "pid"):
        changed = [before != after for before, after in itertools.pairwise(pids)]
        assert changed == failed[:-1]


def test_what_a_failed_example_left_meets_no_other(whole: Told) -> None:
    assert "met something else" not in whole.text("test_state_left_over")


def test_stacks_of_a_hang_begin_in_the_body(whole: Told) -> None:
    stacks = whole.text("test_rank_1_hangs").partition("Stacks of rank 1:")[2]
    assert re.search(r"in _hang\n.* in inject\n.* in test_rank_1_hangs\n(?!\s+File)", stacks), stacks


def test_the_database_has_one_writer_which_is_no_rank(whole: Told) -> None:
    assert len(set(whole.database)) == 1
    ranks = {line["pid"] for seen in whole.seen.values() for line in seen}
    assert not ranks & set(whole.database)


def test_a_failure_that_does_not_come_again_is_shown_as_such(whole: Told) -> None:
    text = whole.text("test_not_drawn")
    assert re.search("raised AssertionError at .*: the first time", text)
    assert "passed when it ran again" in text


def test_nothing_that_satisfies_the_assumptions_is_an_error(whole: Told) -> None:
    assert re.search("filtering out a lot of inputs|FailedHealthCheck", whole.text("test_never_meant"))


@pytest.mark.parametrize("test", ["test_in_body", "test_above", "test_below"])
def test_skips_skip(whole: Told, test: str) -> None:
    assert whole.run.status[test] == "skipped", whole.run


# Errors


def test_examples_that_do_not_fit_into_the_time_of_the_test_fail_it(whole: Told) -> None:
    text = whole.text("test_too_many")
    assert re.search(r"\d+ examples passed, but the test's time limit of 2 s left no time for the rest", text)
    assert "@settings(max_examples=...)" in text


def test_shrinking_ends_in_time_with_the_smallest_that_was_found(whole: Told) -> None:
    text = whole.text("test_shrinks_in_time")
    shown = re.search(r"test_shrinks_in_time\(x=([\d_]+)\)", text)
    assert shown, text
    hung = [x for x in whole.by_rank("test_shrinks_in_time", "x")[0] if x >= 137]
    assert len(hung) <= 4
    assert int(shown[1]) == min(hung)
    assert "passed when it was run again" not in text


def test_ranks_that_cannot_start_are_no_fault_of_an_example(whole: Told) -> None:
    text = whole.text("test_start")
    assert re.match(r"rank 1 raised ValueError at \S+: injected", text), text
    assert "the same on every rank" not in text


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("test_interactive", r"InvalidArgument: the drawn example\(data=data\(...\)\) cannot be sent to the ranks"),
        ("test_unpicklable", r"InvalidArgument: the drawn example\(function=.*\) cannot be sent .* Draw a description"),
        ("test_wrong_class", r"TypeError: across_ranks\(\) needs a test class .* got TestContinuous"),
    ],
)
def test_misuse_is_told(whole: Told, test: str, words: str) -> None:
    assert re.search(words, whole.text(test)), whole.text(test)


def test_nothing_outlives_the_run(whole: Told, suite: Suite) -> None:
    assert suite.survivors() == {}
    assert suite.files_left() == []


# Running an example again


def blob(text: str) -> str:
    found = re.search(r"^    TORCH_EXT_EXAMPLE=(\S+)$", text, re.MULTILINE)
    assert found, text
    return found[1]


def test_the_reproduction_lines_reproduce(whole: Told, suite: Suite, tmp_path: Path) -> None:
    text = whole.text("test_rank_1_fails")
    (line,) = re.findall(r"^    (@example\(.*\))$", text, re.MULTILINE)
    again = Suite(
        tmp_path,
        SOURCE.replace("    @across_ranks()\n    @given(xs=", f"    {line}\n    @across_ranks()\n    @given(xs="),
    )
    by_line = told(again, again.run("-i", "test_rank_1_fails"))
    assert by_line.by_rank("test_rank_1_fails", "xs") == [[[137]], [[137]]]
    assert "The example, the same on every rank:\n    test_rank_1_fails(xs=[137], kind='a')" in by_line.text(
        "test_rank_1_fails"
    )

    (again.folder / "seen").unlink()
    by_variable = told(again, again.run("-i", "test_rank_1_fails", extra={"TORCH_EXT_EXAMPLE": blob(text)}))
    assert by_variable.by_rank("test_rank_1_fails", "xs") == [[[137]], [[137]]]
    assert re.match(r"rank 1 raised AssertionError at \S+: 137 not less", by_variable.text("test_rank_1_fails"))


def test_an_example_that_is_mended_passes_alone(whole: Told, tmp_path: Path) -> None:
    mended = Suite(tmp_path, SOURCE.replace("self.assertLess(x, 137)", "self.see(x=x)"))
    extra = {"TORCH_EXT_EXAMPLE": blob(whole.text("test_database"))}
    alone = told(mended, mended.run("-i", "test_database", extra=extra))
    assert alone.run.code == 0, alone.run
    assert alone.by_rank("test_database", "x") == [[137], [137]]


@pytest.mark.parametrize("way", ["run_unittest", "run_pytest"])
def test_other_runners_find_and_show_the_same(tmp_path: Path, way: str) -> None:
    suite = Suite(tmp_path, SOURCE)
    name = "TestFound.test_rank_1_fails" if way == "run_unittest" else "-k=test_rank_1_fails or test_settings_above"
    run = getattr(suite, way)(name)
    assert run.status.pop("test_rank_1_fails") == "failed", run
    assert set(run.status.values()) <= {"passed"}, run
    assert "test_rank_1_fails(xs=[137], kind='a')" in run.out + run.err


def test_a_lost_zygote_is_no_fault_of_an_example(tmp_path: Path) -> None:
    suite = Suite(tmp_path, SOURCE)
    run = suite.run_unittest("TestZygote.test_zygote_dies", extra={"KILL_ZYGOTE": "1"})
    assert run.status == {"test_zygote_dies": "failed"}, run
    assert "ZygoteLostError" in run.err
    assert "minimal example" not in run.err


def test_examples_are_the_same_in_every_run_in_ci_and_leave_no_database(tmp_path: Path) -> None:
    drawn = []
    for number in range(2):
        suite = Suite(tmp_path / str(number), SOURCE)
        drawn.append(told(suite, suite.run("-i", "test_all_pass", "test_database", extra={"CI": "1"})))
        assert not (suite.folder / "database").exists()
    first, second = (each.by_rank("test_all_pass", "x") for each in drawn)
    assert first == second
    assert len(first[0]) == 40


# Without ranks


def test_settings_keep_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    asked = hypothesis.settings(
        max_examples=7, deadline=200, derandomize=False, database=hypothesis.database.InMemoryExampleDatabase()
    )
    ours = settings_for_ranks(asked)
    assert (ours.max_examples, ours.derandomize, ours.database) == (7, False, asked.database)
    assert ours.deadline is None
    assert Phase.explain not in ours.phases
    assert Phase.shrink in ours.phases
    monkeypatch.setenv("CI", "true")
    ours = settings_for_ranks(asked)
    assert (ours.max_examples, ours.derandomize, ours.database) == (7, True, None)


def given_test() -> Callable[..., None]:
    @hypothesis.given(x=st.integers())
    def test_it(self: object, x: int) -> None:
        """A docstring."""

    return test_it


def test_the_method_looks_like_the_one_that_was_decorated() -> None:
    test = given_test()
    method = across_ranks()(test)
    assert (method.__name__, method.__qualname__, method.__doc__) == (test.__name__, test.__qualname__, test.__doc__)
    assert hypothesis.is_hypothesis_test(method)


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(TypeError, match="goes directly above @given"):
        across_ranks()(lambda self: None)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        across_ranks(example_timeout_s=0)


def test_an_example_is_written_as_a_call() -> None:
    assert Example((1,), {"mode": Phase.shrink}).as_call("f") == "f(1, mode=Phase.shrink)"


def test_other_names_are_torchs() -> None:
    from torch.testing._internal import hypothesis_utils as upstream

    assert hypothesis_utils.assert_deadline_disabled is upstream.assert_deadline_disabled
    with pytest.raises(AttributeError, match="no_such_name"):
        hypothesis_utils.no_such_name  # noqa: B018
