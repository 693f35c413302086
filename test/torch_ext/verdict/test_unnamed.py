"""Ways to pass, or to end a run, of which no list tells: other ways in, other ways to die, other orders of events."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext.verdict.programs import Programs, first_line, named_first, programs
from test.torch_ext.world.suites import Run

SOURCE = """
class TestExpected(Ranks):
    @unittest.expectedFailure
    def test_expects_a_failure(self):
        self.fail("as expected")

    @unittest.expectedFailure
    def test_expects_a_failure_and_is_killed(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    @unittest.expectedFailure
    def test_expects_a_failure_and_hangs(self):
        if self.rank == 1:
            forever()

    @unittest.expectedFailure
    def test_expects_a_failure_and_leaves(self):
        if self.rank == 1:
            os._exit(0)

    @unittest.expectedFailure
    def test_expects_a_failure_and_disagrees(self):
        if self.rank == 1:
            self.skipTest("alone")

    @unittest.expectedFailure
    def test_expects_a_failure_and_skips_alone(self):
        if self.rank == 1:
            self.skipTest("alone")
        self.fail("as expected")

    @unittest.expectedFailure
    def test_expects_a_failure_and_has_one_of_a_thread(self):
        start_a_thread_that_fails()

    @unittest.expectedFailure
    def test_expects_a_failure_and_has_one_at_exit(self):
        atexit.register(self.fail)


def start_a_thread_that_fails():
    def fail():
        raise ValueError("in a thread")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


class TestThreadsOfThreads(Threads):
    def test_a_thread_of_a_rank_fails(self):
        if self.rank == 1:
            start_a_thread_that_fails()

    def test_b_thread_that_its_test_answers_for(self):
        hook, threading.excepthook = threading.excepthook, lambda raised: None
        if self.rank == 1:
            start_a_thread_that_fails()
        dist.barrier()
        threading.excepthook = hook

    def test_c_after_threads(self):
        self.check()


class TestThreadsDiffer(Threads):
    def test_threads_call_different_collectives(self):
        if self.rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.broadcast(torch.ones(3), 0)

    def test_threads_name_different_roots(self):
        dist.broadcast(torch.ones(3), self.rank)

    def test_zz_after_differences(self):
        self.check()


class TestHook(Standing):
    def test_a_leaves_a_hook(self):
        before = threading.excepthook
        threading.excepthook = lambda raised: before(raised)

    def test_b_thread_fails_under_the_hook(self):
        if self.rank == 1:
            start_a_thread_that_fails()


class TestChannels(Ranks):
    def test_writes_into_every_descriptor(self):
        if self.rank == 1:
            for descriptor in range(3, 256):
                with contextlib.suppress(OSError):
                    os.set_blocking(descriptor, False)
                    os.write(descriptor, bytes([255]) * 64)

    def test_sends_what_is_no_message(self):
        if self.rank == 1:
            for descriptor in range(3, 256):
                with contextlib.suppress(OSError):
                    os.set_blocking(descriptor, False)
                    os.write(descriptor, bytes([0, 0, 0, 4, 0, 0, 0, 0]) + b"none")

    def test_replaces_what_packs_messages(self):
        if self.rank == 1:
            import pickle

            pickle.dumps = lambda *args, **kwargs: b""
            raise ValueError("packs nothing")

    def test_closes_every_descriptor(self):
        if self.rank == 1:
            os.closerange(3, 4096)

    def test_becomes_another_program(self):
        if self.rank == 1:
            os.execvp("true", ["true"])

    def test_zz_after_channels(self):
        self.check()


class TestParent(Ranks):
    def setUp(self):
        if "closes" in self._testMethodName:
            for number in (0, 1, 2):
                os.close(number)
        super().setUp()
        if "closes" in self._testMethodName:
            for number in (0, 1, 2):
                with contextlib.suppress(OSError):
                    os.write(number, b"into whatever has this number now")

    def test_a_parent_closes_its_streams(self):
        self.check()

    def test_b_after_closing(self):
        self.check()


class TestForks(unittest.TestCase):
    def test_a_plain_child_passes(self):
        if os.fork() == 0:
            return
        os.wait()
        self.fail("the parent")

    def test_b_after_the_child(self):
        pass

    def test_c_plain_child_fails(self):
        if os.fork() == 0:
            self.fail("the child")
        self.assertEqual(os.wait()[1], 0)

    def test_d_plain_child_exits(self):
        if os.fork() == 0:
            sys.exit(3)
        self.assertEqual(os.waitstatus_to_exitcode(os.wait()[1]), 3)

    def test_e_plain_child_after_a_failure(self):
        if os.fork() != 0:
            self.assertEqual(os.wait()[1], 0)


def make(good):
    class TestTwin(unittest.TestCase):
        def test_twin(self):
            self.assertTrue(good)
    return TestTwin


Bad, Good = make(False), make(True)


class TestSpawned(TestCase):
    @spawn_threads_and_init_comms(world_size=2)
    def test_spawned_threads_hang(self):
        if dist.get_rank() == 1:
            forever()
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("unnamed"), SOURCE) as suite:
        yield suite


# A class at a time, since some of them end the run.
CLASSES = (
    "TestExpected",
    "TestThreadsOfThreads",
    "TestThreadsDiffer",
    "TestHook",
    "TestChannels",
    "TestParent",
    "TestForks",
    "Bad",
    "Good",
    "TestSpawned",
)


@pytest.fixture(scope="module")
def runs(suite: Programs) -> dict[str, Run]:
    return {cls: suite.run("-i", f"test_suite.py::{cls}", "--timeout", "4") for cls in CLASSES}


def test_expected_failure_is_one(runs: dict[str, Run]) -> None:
    assert runs["TestExpected"].status["test_expects_a_failure"] == "expected failure", runs["TestExpected"]


WAYS_NOT_EXPECTED = (
    "is_killed",
    "hangs",
    "leaves",
    "disagrees",
    "skips_alone",
    "has_one_of_a_thread",
    "has_one_at_exit",
)


@pytest.mark.parametrize("what", WAYS_NOT_EXPECTED)
def test_expected_failure_does_not_excuse_a_rank_that_did_not_fail(runs: dict[str, Run], what: str) -> None:
    assert runs["TestExpected"].status[f"test_expects_a_failure_and_{what}"] == "failed", runs["TestExpected"]


def test_exception_in_a_thread_fails_the_rank_that_started_it(runs: dict[str, Run]) -> None:
    run = runs["TestThreadsOfThreads"]
    assert list(run.status.values()) == ["failed", "passed", "passed"], run
    assert named_first(run.text["test_a_thread_of_a_rank_fails"]) == {1}, run
    assert "ValueError: in a thread" in run.text["test_a_thread_of_a_rank_fails"], run


@pytest.mark.parametrize(
    ("what", "calls"),
    [
        ("call_different_collectives", {"all_reduce()", "broadcast(src=0)"}),
        ("name_different_roots", {"broadcast(src=0)", "broadcast(src=1)"}),
    ],
)
def test_threads_whose_collectives_differ_fail(runs: dict[str, Run], what: str, calls: set[str]) -> None:
    run = runs["TestThreadsDiffer"]
    assert run.status[f"test_threads_{what}"] == "failed", run
    line = first_line(run.text[f"test_threads_{what}"])
    assert "called different collectives" in line and all(call in line for call in calls), run
    assert run.status["test_zz_after_differences"] == "passed", run


def test_hook_of_an_earlier_test_hides_no_exception_in_a_thread(runs: dict[str, Run]) -> None:
    run = runs["TestHook"]
    assert list(run.status.values()) == ["passed", "failed"], run
    assert named_first(run.text["test_b_thread_fails_under_the_hook"]) == {1}, run


@pytest.mark.parametrize(
    "what",
    [
        "writes_into_every_descriptor",
        "sends_what_is_no_message",
        "replaces_what_packs_messages",
        "closes_every_descriptor",
        "becomes_another_program",
    ],
)
def test_rank_that_breaks_its_line_fails_alone(runs: dict[str, Run], what: str) -> None:
    run = runs["TestChannels"]
    assert run.status.get(f"test_{what}") == "failed", run
    assert named_first(run.text[f"test_{what}"]) == {1}, run
    assert run.status.get("test_zz_after_channels") == "passed", run


def test_parent_half_that_closes_its_streams_breaks_no_channel(runs: dict[str, Run]) -> None:
    run = runs["TestParent"]
    assert run.status == {"test_a_parent_closes_its_streams": "passed", "test_b_after_closing": "passed"}, run


def test_forked_child_of_a_plain_test_has_no_results(runs: dict[str, Run]) -> None:
    run = runs["TestForks"]
    assert run.status["test_a_plain_child_passes"] == "failed", run
    assert run.status["test_b_after_the_child"] == "passed", run
    assert "the parent" in run.text["test_a_plain_child_passes"]
    assert run.out.splitlines()[-1] == "3 passed, 2 failed, 0 skipped", run


def test_plain_test_that_judges_its_forked_child_learns_how_it_ended(runs: dict[str, Run]) -> None:
    run = runs["TestForks"]
    assert run.status["test_c_plain_child_fails"] == "failed", run
    assert "AssertionError: 256 != 0" in run.text["test_c_plain_child_fails"]
    assert "AssertionError: the child" in run.text["test_c_plain_child_fails"]
    assert "class_process.py" not in run.text["test_c_plain_child_fails"]
    assert run.status["test_d_plain_child_exits"] == "passed", run
    assert run.status["test_e_plain_child_after_a_failure"] == "passed", run


def test_two_classes_of_one_name_both_run(runs: dict[str, Run]) -> None:
    """Each goes by the name that its file knows it by."""
    assert runs["Bad"].status == {"test_twin": "failed"}, runs["Bad"]
    assert "False is not true" in runs["Bad"].out
    assert runs["Good"].status == {"test_twin": "passed"}, runs["Good"]


def test_limit_of_the_command_ends_spawned_threads(runs: dict[str, Run]) -> None:
    run = runs["TestSpawned"]
    assert run.status == {"test_spawned_threads_hang": "failed"}, run
    assert named_first(run.text["test_spawned_threads_hang"]) == {1}, run


def test_nothing_outlives_these_runs(runs: dict[str, Run], suite: Programs) -> None:
    suite.assert_nothing_left()


TWO_FOLDERS = """
class TestHere(unittest.TestCase):
    def test_here(self):
        self.assertEqual({number}, 1)
"""


def test_files_of_one_name_in_two_folders_are_not_taken_for_each_other(tmp_path: Path) -> None:
    with programs(tmp_path, "", "test_empty.py") as suite:
        for number in (1, 2):
            (suite.folder / f"folder{number}").mkdir()
            suite.add(f"folder{number}/test_same.py", TWO_FOLDERS.format(number=number))
        # As for whoever starts the runner in the second folder.
        path = os.pathsep.join([str(suite.folder / "folder2"), suite.environment()["PYTHONPATH"]])
        run = suite.run("-i", "folder1", "folder2", extra={"PYTHONPATH": path})
        assert run.out.splitlines()[-1] == "1 passed, 1 failed, 0 skipped", run
        assert "FAILED folder2/test_same.py::TestHere::test_here" in run.out


MODULE = """
def setUpModule():
    {statement}


class TestOfModule(unittest.TestCase):
    def test_of_module(self):
        pass
"""


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("unittest.addModuleCleanup(os.kill, os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("forever()", "in forever"),
    ],
)
def test_death_or_hang_around_a_module_is_told(tmp_path: Path, statement: str, words: str) -> None:
    with programs(tmp_path, MODULE.format(statement=statement)) as suite:
        run = suite.run("--timeout", "3")
        assert run.code == 1, run
        assert words in run.out, run
        suite.assert_nothing_left()


PROPERTY = """
from hypothesis import given, settings, strategies as st
from torch_ext.testing._internal.common_fsdp import FSDPTest
from torch_ext.testing._internal.hypothesis_utils import across_ranks


class TestProperty(FSDPTest):
    world_size = 2

    @across_ranks()
    @settings(max_examples=3, database=None)
    @given(number=st.integers(0, 9))
    def test_property(self, number):
        pass

    @across_ranks()
    @settings(max_examples=3, database=None)
    @given(number=st.integers(0, 9))
    def test_property_that_hangs(self, number):
        if self.rank == 1:
            forever()
"""


def test_limit_of_the_command_is_that_of_examples_too(tmp_path: Path) -> None:
    with programs(tmp_path, PROPERTY) as suite:
        run = suite.run("--timeout", "6")
        assert run.status["test_property"] == "passed", run
        assert run.status["test_property_that_hangs"] == "failed", run
        assert named_first(run.text["test_property_that_hangs"]) == {1}, run
