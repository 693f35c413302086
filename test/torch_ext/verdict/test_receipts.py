"""What counts as a receipt: that of this test, from this process, of a body that ran to its end with all it owes.

Each program below passes if one receipt is believed too easily, or if what a rank does after its receipt is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext.verdict.programs import Programs, first_line, named_first, programs
from test.torch_ext.world.suites import Run

SOURCE = """
class Dropped:
    def __init__(self, note):
        self.note = note

    def __del__(self):
        note(self.note)


def die_at_exit(how, *args):
    # Runs when multiprocessing ends the rank, which is after its receipt.
    multiprocessing.util.Finalize(None, how, args=args, exitpriority=1)


def raise_(text):
    raise ValueError(text)


class TestForked(Ranks):
    def test_forked_child_passes_for_its_parent(self):
        if self.rank == 1:
            if os.fork() == 0:
                return
            os.wait()
            os._exit(0)

    def test_forked_child_fails_alone(self):
        if self.rank == 1:
            if os.fork() == 0:
                raise ValueError("only in the child")
            os.wait()
        self.check()

    def test_forked_child_skips_alone(self):
        if self.rank == 1:
            if os.fork() == 0:
                raise unittest.SkipTest("only in the child")
            os.wait()
        self.check()

    def test_forked_child_fails_and_its_parent_judges_it(self):
        self.judge_child(ValueError("only in the child"))

    def test_forked_child_exits_and_its_parent_judges_it(self):
        self.judge_child(SystemExit(3))

    def test_forked_child_passes_and_its_parent_judges_it(self):
        if self.rank == 0 or os.fork() != 0:
            if self.rank == 1:
                self.assertEqual(os.wait()[1], 0)
            self.check()

    def judge_child(self, error):
        if self.rank == 1:
            if os.fork() == 0:
                raise error
            self.assertEqual(os.wait()[1], 0)
        self.check()

    def test_forked_child_outlives_its_parent(self):
        if self.rank == 1:
            if os.fork() != 0:
                os._exit(0)
            time.sleep(0.5)


class TestThreadsBefore(Threads):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        alone = "alone" in self._testMethodName
        if threading.current_thread().name in (("rank 1",) if alone else ("rank 0", "rank 1")):
            raise ValueError("before the body")

    def test_threads_die_before_their_bodies(self):
        pass

    def test_thread_dies_alone_before_its_body(self):
        pass


class TestThreadsRun(Threads):
    @classmethod
    def _run(cls, test_name, rank, world_size, **kwargs):
        pass

    def test_threads_never_call_their_bodies(self):
        self.fail("it ran")


class TestThreadsAfter(Threads):
    def perThreadTearDown(self):
        if self.rank == 1:
            dist.destroy_process_group()
            raise SystemExit(0)

    def test_thread_exits_in_its_tear_down(self):
        pass


class TestThreadsSpawned(TestCase):
    @spawn_threads_and_init_comms(world_size=2)
    def test_spawned_thread_leaves_silently(self):
        if dist.get_rank() == 1:
            sys.exit(0)

    @spawn_threads_and_init_comms(world_size=2, timeout=10)
    def test_spawned_threads_never_begin(self):
        self.fail("it ran")

    def setUp(self):
        super().setUp()
        if self._testMethodName == "test_spawned_threads_never_begin":
            begin = dist.init_process_group
            dist.init_process_group = lambda *args, **kwargs: raise_("before the body")
            self.addCleanup(setattr, dist, "init_process_group", begin)


class TestCleanups(Ranks):
    def test_cleanup_dies(self):
        if self.rank == 1:
            self.addCleanup(os.kill, os.getpid(), signal.SIGSEGV)

class TestAtExit(Ranks):
    def test_handler_runs(self):
        atexit.register(note, f"atexit{self.rank}")

    def test_handler_dies(self):
        if self.rank == 1:
            atexit.register(os.kill, os.getpid(), signal.SIGSEGV)

    def test_module_global_is_dropped(self):
        global DROPPED
        DROPPED = Dropped(f"dropped{self.rank}")


class TestThreadsOfARank(Ranks):
    def test_thread_of_a_rank_raises(self):
        if self.rank == 1:
            thread = threading.Thread(target=raise_, args=("in a thread of a rank",))
            thread.start()
            thread.join()

    def test_thread_of_a_rank_raises_later(self):
        if self.rank == 1:
            def later():
                time.sleep(0.3)
                raise ValueError("in a later thread")
            threading.Thread(target=later).start()

    def test_thread_that_is_expected_to_raise(self):
        seen, before = [], threading.excepthook
        threading.excepthook = seen.append
        self.addCleanup(setattr, threading, "excepthook", before)
        thread = threading.Thread(target=raise_, args=("as expected",))
        thread.start()
        thread.join()
        self.assertEqual(len(seen), 1)


class TestExits(Ranks):
    def test_exit_5_after_the_receipt(self):
        if self.rank == 1:
            die_at_exit(os._exit, 5)

    def test_exit_0_after_the_receipt(self):
        if self.rank == 1:
            die_at_exit(note, "finalized")
            die_at_exit(os._exit, 0)

    def test_thread_exits_0_after_the_receipt(self):
        if self.rank == 1:
            threading.Thread(target=lambda: (time.sleep(0.3), os._exit(0)), daemon=True).start()
        else:
            time.sleep(0.8)

    def test_killed_after_the_receipt(self):
        if self.rank == 1:
            die_at_exit(os.kill, os.getpid(), signal.SIGSEGV)

    def test_skip_and_exit_5(self):
        if self.rank == 1:
            die_at_exit(os._exit, 5)
        self.skipTest("on every rank")

    def test_finalizer_raises(self):
        if self.rank == 1:
            die_at_exit(raise_, "in a finalizer")


class TestZNext(Ranks):
    def test_next(self):
        self.check()
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("receipts"), SOURCE) as suite:
        yield suite


@pytest.fixture(scope="module")
def run(suite: Programs) -> Run:
    return suite.run("--timeout", "15")


def fails(run: Run, name: str, words: str) -> None:
    """Assert that rank 1 failed the test, in these words."""
    assert run.status[f"test_{name}"] == "failed", run
    text = run.text[f"test_{name}"]
    assert named_first(text) == {1}, text
    assert words in text


# Whose receipt, and of which test


def test_receipt_of_a_forked_child_is_not_its_parents(run: Run) -> None:
    fails(run, "forked_child_passes_for_its_parent", "before its test was over")


def test_receipt_of_a_forked_child_that_outlives_its_rank_counts_for_nothing(run: Run) -> None:
    fails(run, "forked_child_outlives_its_parent", "before its test was over")


@pytest.mark.parametrize("name", ["fails", "skips"])
def test_what_a_forked_child_says_does_not_spoil_its_parents_pass(run: Run, name: str) -> None:
    assert run.status[f"test_forked_child_{name}_alone"] == "passed", run


@pytest.mark.parametrize("name", ["fails", "exits"])
def test_rank_that_judges_its_forked_child_learns_how_it_ended(run: Run, name: str) -> None:
    """A child is often how a test runs what may crash; what it asserts must not be lost with it."""
    fails(run, f"forked_child_{name}_and_its_parent_judges_it", "Scalars are not equal")


def test_rank_that_judges_its_forked_child_learns_that_it_passed(run: Run) -> None:
    assert run.status["test_forked_child_passes_and_its_parent_judges_it"] == "passed", run


LATE = """
class TestLate(Standing):
    def test_1_leaves_a_child(self):
        if self.rank == 0 and os.fork() == 0:
            await_note("second test began")

    def test_2_fails_while_the_child_says_passed(self):
        if self.rank == 0:
            note("second test began")
            time.sleep(1)
            raise ValueError("the truth")

    def test_3_next(self):
        self.check()
"""


def test_late_receipt_counts_for_no_other_test(tmp_path_factory: pytest.TempPathFactory) -> None:
    with programs(tmp_path_factory.mktemp("late"), LATE) as suite:
        run = suite.run("--timeout", "15")
        assert run.status["test_1_leaves_a_child"] == "passed", run
        assert run.status["test_2_fails_while_the_child_says_passed"] == "failed", run
        assert "the truth" in run.text["test_2_fails_while_the_child_says_passed"]
        assert run.status["test_3_next"] == "passed", run
        suite.assert_nothing_left()


# Threads


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("threads_die_before_their_bodies", "before the body"),
        ("thread_dies_alone_before_its_body", "before the body"),
        ("threads_never_call_their_bodies", "before its test was over"),
        ("thread_exits_in_its_tear_down", "SystemExit"),
        ("spawned_thread_leaves_silently", "SystemExit"),
        ("spawned_threads_never_begin", "before the body"),
    ],
)
def test_thread_without_a_receipt_fails(run: Run, name: str, words: str) -> None:
    assert run.status[f"test_{name}"] == "failed", run
    text = run.text[f"test_{name}"]
    assert 1 in named_first(text), text
    assert words in text


# What a rank owes after its body


def test_rank_that_dies_in_a_cleanup_has_no_receipt(run: Run) -> None:
    fails(run, "cleanup_dies", "SIGSEGV")


def told(run: Run, words: str) -> bool:
    """Whether the run says that something was not done, wherever."""
    return words in run.out + run.err


def test_handlers_of_atexit_run_or_are_told(run: Run, suite: Programs) -> None:
    assert all((suite.folder / f"atexit{rank}").exists() for rank in (0, 1)) or told(run, "atexit"), run


def test_handler_of_atexit_that_kills_the_rank_fails_it(run: Run) -> None:
    assert run.status["test_handler_dies"] == "failed" or told(run, "atexit"), run


def test_global_of_a_module_is_dropped_or_that_is_told(run: Run, suite: Programs) -> None:
    assert all((suite.folder / f"dropped{rank}").exists() for rank in (0, 1)) or told(run, "__del__"), run


@pytest.mark.parametrize(
    ("name", "words"),
    [("thread_of_a_rank_raises", "in a thread of a rank"), ("thread_of_a_rank_raises_later", "in a later thread")],
)
def test_exception_of_a_thread_is_no_silent_pass(run: Run, name: str, words: str) -> None:
    assert told(run, words), run


def test_exception_of_a_thread_that_the_test_takes_care_of_is_none(run: Run) -> None:
    assert run.status["test_thread_that_is_expected_to_raise"] == "passed", run


# How a rank ends after its receipt


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exit_5_after_the_receipt", "code 5"),
        ("exit_0_after_the_receipt", "code 0"),
        ("thread_exits_0_after_the_receipt", "code 0"),
        ("killed_after_the_receipt", "SIGSEGV"),
        ("skip_and_exit_5", "code 5"),
    ],
)
def test_rank_that_ends_by_itself_after_its_receipt_fails(run: Run, name: str, words: str) -> None:
    fails(run, name, words)
    # What runs after the body, a finalizer as here, runs before the receipt.
    assert re.search("after its (test had|body was)", first_line(run.text[f"test_{name}"]))


def test_finalizer_that_raises_is_told(run: Run) -> None:
    assert told(run, "in a finalizer"), run


def test_the_test_after_all_these_passes(run: Run, suite: Programs) -> None:
    assert run.status["test_next"] == "passed", run
    suite.assert_nothing_left()


# Ranks that serve a class

ENDS_OF_A_CLASS = {
    "killed": ("die_at_exit(os.kill, os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    "exits": ("die_at_exit(os._exit, 5)", "code 5"),
    "hangs": ("die_at_exit(forever)", "rank 1"),
    "leaves": ("threading.Thread(target=lambda: (time.sleep(0.3), os._exit(0)), daemon=True).start()", "code 0"),
}
STANDING = """
def die_at_exit(how, *args):
    multiprocessing.util.Finalize(None, how, args=args, exitpriority=1)
""" + "".join(
    f"""
class TestEnds_{name}(Standing):
    def test_{name}(self):
        if self.rank == 1:
            {statement}

    @classmethod
    def tearDownClass(cls):
        time.sleep({0.6 if name == "leaves" else 0})
        super().tearDownClass()
"""
    for name, (statement, _) in ENDS_OF_A_CLASS.items()
)


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with programs(tmp_path_factory.mktemp("standing"), STANDING) as suite:
        yield suite.run("--timeout", "3")
        suite.assert_nothing_left()


@pytest.mark.parametrize("name", ENDS_OF_A_CLASS)
def test_rank_of_a_class_that_dies_at_its_end_fails_the_class(standing: Run, name: str) -> None:
    assert standing.status[f"test_{name}"] == "passed", standing
    assert standing.status.get(f"TestEnds_{name}") == "failed", standing
    text = standing.text[f"TestEnds_{name}"]
    assert ENDS_OF_A_CLASS[name][1] in text
    assert "rank 1" in text


OVERRIDES = """
class TestOverride(Ranks):
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        self.run_test(test_name, pipe)
        sys.exit({"test_code_3": 3, "test_in_words": "words"}.get(test_name, 0))

    def test_code_0(self):
        pass

    def test_code_3(self):
        pass

    def test_in_words(self):
        pass

    def test_fails(self):
        self.fail("no")

    def test_exits_inside(self):
        if self.rank == 1:
            sys.exit(0)

"""


def test_exit_0_after_the_body_is_no_missing_receipt(tmp_path: Path) -> None:
    with programs(tmp_path, OVERRIDES) as suite:
        run = suite.run()
        passed = {name for name, status in run.status.items() if status == "passed"}
        assert passed == {"test_code_0"}, run
        assert "exited with code 3 " in first_line(run.text["test_code_3"])
        assert named_first(run.text["test_exits_inside"]) == {1}
