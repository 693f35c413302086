"""Interrupts and deaths of the parent half of a test: it did not pass, and the tests that follow run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext.verdict.programs import Programs, named_first, programs, tells_of_a_hang
from test.torch_ext.world.suites import Run

# How a test is interrupted, and the base class of the test.
INTERRUPTED = {
    "raised_in_set_up": "Ranks",
    "raised_in_tear_down": "Ranks",
    "raised_in_cleanup": "TestCase",
    "raised_in_plain_body": "unittest.TestCase",
    "raised_in_torch_body": "TestCase",
    "raised_in_subtest": "unittest.TestCase",
    "interrupt_main": "unittest.TestCase",
    "rank_signals_its_parent": "Ranks",
    "rank_of_a_class_signals_its_parent": "Standing",
    "raised_on_rank": "Ranks",
    "thread_of_ranks_interrupted": "Threads",
}

SOURCE = """
import _thread


class Interrupts:
    def interrupt(self):
        raise KeyboardInterrupt

    def setUp(self):
        os.environ["PARENT_HALF"] = str(os.getpid())
        super().setUp()
        if self._testMethodName == "test_raised_in_set_up":
            self.interrupt()

    def tearDown(self):
        super().tearDown()
        if self._testMethodName == "test_raised_in_tear_down":
            self.interrupt()

    def raised_in_set_up(self):
        pass

    def raised_in_tear_down(self):
        pass

    def raised_in_cleanup(self):
        self.addCleanup(self.interrupt)

    def raised_in_plain_body(self):
        self.interrupt()

    def raised_in_torch_body(self):
        self.interrupt()

    def raised_in_subtest(self):
        with self.subTest(part=1):
            self.interrupt()

    def interrupt_main(self):
        threading.Thread(target=_thread.interrupt_main).start()
        time.sleep(5)

    def rank_signals_its_parent(self):
        if self.rank == 1:
            os.kill(int(os.environ["PARENT_HALF"]), signal.SIGINT)
            time.sleep(5)

    def rank_of_a_class_signals_its_parent(self):
        self.rank_signals_its_parent()

    def raised_on_rank(self):
        if self.rank == 1:
            self.interrupt()

    def thread_of_ranks_interrupted(self):
        if self.rank == 1:
            _thread.interrupt_main()
            time.sleep(3)

    def following(self):
        if hasattr(self, "check"):
            self.check()

""" + "".join(
    f"""
class Test_{name}(Interrupts, {base}):
    test_{name} = Interrupts.{name}
    test_zz_after_{name} = Interrupts.following
"""
    for name, base in INTERRUPTED.items()
)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("parent_half"), SOURCE) as suite:
        yield suite


@pytest.fixture(scope="module")
def run(suite: Programs) -> Run:
    return suite.run()


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupted_test_fails_and_says_so(run: Run, name: str) -> None:
    assert run.status.get(f"test_{name}") == "failed", run
    assert "KeyboardInterrupt" in run.text[f"test_{name}"] or "SIGINT" in run.text[f"test_{name}"]


@pytest.mark.parametrize("name", INTERRUPTED)
def test_the_test_that_follows_an_interrupted_one_passes(run: Run, name: str) -> None:
    assert run.status.get(f"test_zz_after_{name}") == "passed", run


def test_interrupts_inside_are_no_interrupt_of_the_run(run: Run, suite: Programs) -> None:
    assert run.code == 1
    number = len(INTERRUPTED)
    assert run.out.splitlines()[-1] == f"{number} passed, {number} failed, 0 skipped", run
    suite.assert_nothing_left()


IGNORED = """
class TestIgnored(unittest.TestCase):
    def test_plain(self):
        note("runs")
        time.sleep(3)
        note("ended")


class TestIgnoredRanks(Ranks):
    def test_ranks(self):
        note(f"runs{self.rank}")
        time.sleep(3)
        note(f"ended{self.rank}")
"""


@pytest.mark.parametrize(("test", "bodies"), [("test_plain", [""]), ("test_ranks", ["0", "1"])])
def test_interrupt_of_the_group_that_the_supervisor_ignores_is_no_pass(
    tmp_path: Path, test: str, bodies: list[str]
) -> None:
    with programs(tmp_path, IGNORED) as suite:
        # As a shell does for what it starts in the background.
        process = suite.start_runner("-k", test, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        for body in bodies:
            suite.await_note(f"runs{body}", process)
        os.killpg(process.pid, signal.SIGINT)
        run = suite.finish(process)
        ended = all((suite.folder / f"ended{body}").exists() for body in bodies)
        # Whoever was interrupted or not: a body that was cut short is no pass, and one that was not is one.
        assert (run.status.get(test) == "passed") == ended, run
        assert run.code == (0 if ended else 1), run
        suite.assert_nothing_left()


CLOCKS = """
from unittest import mock


class TestClock(Ranks):
    # As freezegun does. The parent half waits by a clock too.
    def setUp(self):
        for name in ("time.monotonic", "time.time"):
            patch = mock.patch(name, return_value=5.0)
            patch.start()
            self.addCleanup(patch.stop)
        super().setUp()

    def test_hangs_under_a_clock_that_stands_still(self):
        self.join_group()
        if self.rank == 1:
            threading.Event().wait()
        dist.barrier()
"""


def test_clock_that_the_parent_half_has_replaced_does_not_keep_a_hang_from_being_told(tmp_path: Path) -> None:
    with programs(tmp_path, CLOCKS) as suite:
        found = suite.run("--timeout", "30", extra={"TORCH_EXT_HANG_AFTER": "3"})
        text = found.text["test_hangs_under_a_clock_that_stands_still"]
        assert tells_of_a_hang(text) and named_first(text) == {1}, text
        suite.assert_nothing_left()
