"""Property-based tests across ranks: which examples run, failures and their reports, and isolation of examples.

The suite below runs in another process. Its ranks record every example that they run, so that the tests here know which
ranks ran which examples.
"""

import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import hypothesis
import pytest
from hypothesis import Phase

from test.torch_ext.world.programs import check_rows
from test.torch_ext.world.suites import Run, suite_of
from torch_ext.testing._internal import hypothesis_utils
from torch_ext.testing._internal._distributed.examples import settings_for_ranks
from torch_ext.testing._internal.hypothesis_utils import across_ranks

COSTLY = pytest.mark.costly  # one mark: these tests share a run
SOURCE = """
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


class Drawn(FSDPTest):
    world_size = 2

    def see(self, **drawn):
        write("seen", test=self._testMethodName, rank=self.rank, pid=os.getpid(), **drawn)


numbers = st.integers(0, 10_000)
# For what fails by taking too long: shrinking to 40 takes a handful of examples. Those that pass are fast, and with the
# ten that torch's profile asks for, one run in seventy would draw none that fails.
few = st.integers(0, 63)
many = settings(max_examples=60)


class TestFound(Drawn):
    @across_ranks()
    @settings(max_examples=40)
    @given(numbers, st.sampled_from(["a", "b"]))
    def test_all_pass(self, x, kind):
        self.see(x=x, kind=kind)
        total = torch.tensor([x])
        dist.all_reduce(total)
        self.assertEqual(total.item(), 2 * x)

    @across_ranks()
    @given(xs=st.lists(numbers), kind=st.sampled_from(["a", "b"]))
    def test_rank_1_fails(self, xs, kind):  # failed by 1: 137 not less...(xs=[137], kind='a')...(because of that)
        self.see(xs=xs)
        dist.barrier()
        if self.rank == 1:
            self.assertLess(sum(xs), 137)

    @across_ranks()
    @given(x=numbers)
    def test_rank_0_dies(self, x):  # failed by 0: was killed by SIGKILL at...@example(x=137)
        if x >= 137:
            self.rank or os.kill(os.getpid(), signal.SIGKILL)

    @across_ranks(example_timeout_s=1)
    @settings(many, database=Database(), derandomize=False)
    @given(x=few)
    def test_rank_1_hangs(self, x):  # failed by 1: never called barrier, which rank 0 waited in...@example(x=40)
        self.see(x=x)
        if x >= 40:
            self.rank and forever()

    @across_ranks()
    @given(x=numbers)
    def test_odd_ones(self, x):  # failed: raised ValueError...@example(x=501)
        assume(x % 2)
        if x > 500:
            raise ValueError(f"rank {self.rank} does not like {x}")

    @across_ranks()
    @settings(max_examples=5)
    @given(x=numbers)
    def test_never_meant(self, x):  # failed: filtering out a lot of inputs|FailedHealthCheck
        assume(False)

    @across_ranks()
    @given(x=numbers)
    def test_disagreement(self, x):  # failed: rank 1 skipped (the example does not sat...@example(x=137)
        assume(x < 137 or self.rank == 0)

    @across_ranks(example_timeout_s=1)
    @many
    @given(x=few)
    def test_collective_left_over(self, x):  # failed by 0, 1: rank 0 called all_reduce(...@example(x=40)
        # The barrier after the example finds it.
        if x >= 40 and self.rank == 0:
            dist.all_reduce(torch.ones(3), async_op=True)

    @across_ranks()
    @settings(max_examples=25, database=None)
    @given(x=numbers)
    def test_state_left_over(self, x):  # failed by 1: raised ValueError at...left a collective...@example(x=137)
        # A failed rank leaves its peer in a collective that no other rank will join.
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
    def test_database(self, x):  # failed: 137 not less than 137...@example(x=137)
        self.assertLess(x, 137)

    @across_ranks()
    @given(x=numbers)
    def test_not_drawn(self, x):  # failed: raised AssertionError at...the first time...passed when it ran again
        # Fails the first time only, whatever is drawn.
        path = os.path.join(FOLDER, f"flag-{self.rank}")
        if not os.path.exists(path):
            open(path, "w").close()
            self.fail("the first time")


class TestSkipped(Drawn):
    @across_ranks()
    @given(x=numbers)
    def test_in_body(self, x):  # skipped
        self.skipTest("no such thing")

    @skip_if_lt_x_gpu(8)
    @across_ranks()
    @given(x=numbers)
    def test_above(self, x):  # skipped
        self.fail("ran")

    @across_ranks()
    @given(x=numbers)
    @skip_if_lt_x_gpu(8)
    def test_below(self, x):  # skipped
        self.fail("ran")


class TestWishes(Drawn):
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

    @with_timeout(2)
    @across_ranks(example_timeout_s=1)
    @settings(max_examples=10_000)
    @given(x=numbers)
    def test_too_many(self, x):  # failed: examples passed, but the test's time limit of 2 s left no time...max_examples
        time.sleep(0.01)

    @with_timeout(4)
    @across_ranks(example_timeout_s=1)
    @settings(database=None)
    @given(x=st.integers(0, 2**60))
    def test_shrinks_in_time(self, x):  # failed
        self.see(x=x)
        if x >= 137:
            self.rank and forever()

    @across_ranks()
    @settings(max_examples=5, database=None)
    @given(x=numbers)
    def test_group_broken(self, x):  # failed by 1: raised RuntimeError...@example(x=0)
        self.see(x=x)
        if self.rank == 0:
            dist.destroy_process_group()  # the barrier of the end will find one rank alone


class TestMisused(Drawn):
    @across_ranks()
    @given(function=st.just(lambda: 0))
    def test_unpicklable(self, function):  # failed: the drawn example(function=...cannot be sent...Draw a description
        self.fail("ran")


class TestContinuous(FSDPTestContinuous):
    world_size = 2

    @across_ranks()
    @given(x=numbers)
    def test_wrong_class(self, x):  # failed: TypeError: across_ranks() needs a test class...got TestContinuous
        self.fail("ran")


class TestZygote(Drawn):
    @across_ranks()
    @given(x=numbers)
    def test_zygote_dies(self, x):
        if x >= 137 and self.rank == 0 and "KILL_ZYGOTE" in os.environ:
            os.kill(os.getppid(), signal.SIGKILL)


class TestNotReady(Drawn):
    @classmethod
    def _run(cls, rank, *args, **kwargs):
        if rank == 1:
            raise ValueError("injected")
        super()._run(rank, *args, **kwargs)

    @across_ranks()
    @given(x=numbers)
    def test_start(self, x):  # failed by 1: raised ValueError at...injected
        self.fail("ran")


if __name__ == "__main__":
    run_tests()
"""


@dataclass
class Record:
    """A run of the suite, with the records of its ranks."""

    run: Run
    seen: Mapping[str, list[dict[str, Any]]]
    database: list[int]

    def by_rank(self, test, key):
        """The records of each rank under ``key``, in order."""
        return [[each[key] for each in self.seen[test] if each["rank"] == rank] for rank in (0, 1)]


def record_of(folder, run):
    seen = defaultdict(list)
    for line in lines(folder / "seen"):
        seen[line["test"]].append(line)
    return Record(run, seen, [line["pid"] for line in lines(folder / "database")])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    with mock.patch.dict(os.environ):
        os.environ.pop("CI", None)
        return record_of(folder, check_rows(folder, SOURCE, deadline_s=400))


@COSTLY
def test_all_ranks_run_the_same_examples_in_one_set_of_processes(record):
    for key in ("x", "kind"):
        first, second = record.by_rank("test_all_pass", key)
        assert len(first) == 40
        assert first == second
    assert [len(set(pids)) for pids in record.by_rank("test_all_pass", "pid")] == [1, 1]


@COSTLY
def test_settings_and_explicit_examples_apply_above_and_below(record):
    for seen in record.by_rank("test_examples", "x"):
        assert sorted(seen[:2]) == [7, 9]
        assert len(seen) == 5
    assert [len(seen) for seen in record.by_rank("test_settings_above", "x")] == [3, 3]


@COSTLY
def test_shrinking_stays_in_step(record):
    """Ranks record the same examples up to the failure, which ends the ranks."""
    first, second = record.by_rank("test_rank_1_fails", "xs")
    assert first == second
    assert first[-1] == [137]
    assert record.run.text["test_rank_1_fails"].count("minimal example") == 1


@COSTLY
def test_ranks_are_fresh_after_a_failure_and_kept_otherwise(record):
    failed = [x >= 137 for x in record.by_rank("test_state_left_over", "x")[0]]
    assert any(failed)
    for pids in record.by_rank("test_state_left_over", "pid"):
        changed = [before != after for before, after in itertools.pairwise(pids)]
        assert changed == failed[:-1]
    assert "met something else" not in record.run.text["test_state_left_over"], "a failed example left something"


@COSTLY
def test_stacks_of_a_hang_begin_in_the_body(record):
    stacks = record.run.text["test_rank_1_hangs"].partition("Stacks of rank 1:")[2]
    assert re.search(r"in forever\n.* in test_rank_1_hangs\n(?!\s+File)", stacks), stacks


@COSTLY
def test_the_database_has_one_writer_which_is_no_rank(record):
    assert len(set(record.database)) == 1
    assert not {line["pid"] for seen in record.seen.values() for line in seen} & set(record.database)


@COSTLY
def test_shrinking_ends_in_time_with_the_smallest_example_found(record):
    text = record.run.text["test_shrinks_in_time"]
    shown = re.search(r"test_shrinks_in_time\(x=([\d_]+)\)", text)
    assert shown, text
    hung = [x for x in record.by_rank("test_shrinks_in_time", "x")[0] if x >= 137]
    assert len(hung) <= 4
    assert int(shown[1]) == min(hung)
    assert "passed when it was run again" not in text


# Running an example again, in other ways


def blob(text):
    found = re.search(r"^    TORCH_EXT_EXAMPLE=(\S+)$", text, re.MULTILINE)
    assert found, text
    return found[1]


@COSTLY
def test_the_reproduction_line_reproduces_and_ci_draws_the_same_in_every_run(record, tmp_path):
    text = record.run.text["test_rank_1_fails"]
    (line,) = re.findall(r"^    (@example\(.*\))$", text, re.MULTILINE)
    source = SOURCE.replace("    @across_ranks()\n    @given(xs=", f"    {line}\n    @across_ranks()\n    @given(xs=")
    names, drawn = ("test_rank_1_fails", "test_all_pass", "test_database"), []
    for way in ("runner", "unittest"):
        with suite_of(tmp_path / way, source if way == "runner" else SOURCE) as suite:
            by_class = [f"TestFound.{name}" for name in names]
            ran = suite.run("-i", *names, extra={"CI": "1"}) if way == "runner" else None
            found = record_of(suite.folder, ran or suite.run_unittest(*by_class, extra={"CI": "1"}))
            assert not (suite.folder / "database").exists()
        assert found.run.status["test_rank_1_fails"] == "failed", found.run
        assert "test_rank_1_fails(xs=[137], kind='a')" in found.run.out + found.run.err
        drawn.append(found.by_rank("test_all_pass", "x"))
        if way == "runner":
            assert found.by_rank("test_rank_1_fails", "xs") == [[[137]], [[137]]]
            assert "The example, the same on every rank:\n" in found.run.text["test_rank_1_fails"]
    assert drawn[0] == drawn[1] and len(drawn[0][0]) == 40


@COSTLY
@pytest.mark.drawn(1)
@pytest.mark.parametrize("test", ["test_rank_1_fails", "test_database"])
def test_variable_reproduces_under_pytest_and_passes_a_fixed_example(record, tmp_path, test):
    with suite_of(tmp_path, SOURCE.replace("self.assertLess(x, 137)", "self.see(x=x)")) as suite:
        extra = {"TORCH_EXT_EXAMPLE": blob(record.run.text[test])}
        again = record_of(tmp_path, suite.run_pytest("-k", test, extra=extra))
    assert again.run.code == (test == "test_rank_1_fails"), again.run
    key, values = ("xs", [[137]]) if again.run.code else ("x", [137])
    assert again.by_rank(test, key) == [values, values]


@pytest.mark.long
def test_lost_zygote_is_not_blamed_on_an_example(tmp_path):
    with suite_of(tmp_path, SOURCE) as suite:
        run = suite.run_unittest("TestZygote.test_zygote_dies", extra={"KILL_ZYGOTE": "1"})
    assert run.status == {"test_zygote_dies": "failed"}, run
    assert "ZygoteLostError" in run.err
    assert "minimal example" not in run.err


# Without ranks


def test_settings_keep_the_requested_values(monkeypatch):
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


def test_wrong_uses_are_refused():
    with pytest.raises(TypeError, match="goes directly above @given"):
        across_ranks()(lambda self: None)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        across_ranks(example_timeout_s=0)


def test_other_names_come_from_torch():
    from torch.testing._internal import hypothesis_utils as upstream

    assert hypothesis_utils.assert_deadline_disabled is upstream.assert_deadline_disabled
    with pytest.raises(AttributeError, match="no_such_name"):
        hypothesis_utils.no_such_name  # noqa: B018
