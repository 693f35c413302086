"""Classes that run side by side: private places, the order of what is told, and deaths that stay where they happen."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from test.torch_ext.world.suites import DEADLINE_S, Suite

# Each test waits, at the limit of its test at most, until the other class is in the same place: this passes only if
# both run at once.
MEETING = """
import json, tempfile

HERE = os.path.dirname(__file__)


def meet(case, rank, names="AB"):
    own = type(case).__name__[-1]
    note = {"tmp": tempfile.gettempdir(), "file": case.file_name, "threads": os.environ["TORCH_EXT_THREADS"]}
    with open(os.path.join(HERE, f"met_{own}_{rank}.new"), "w") as stream:
        json.dump(note, stream)
    os.rename(stream.name, stream.name[:-4])
    for name in names:
        while not os.path.exists(os.path.join(HERE, f"met_{name}_{rank}")):
            time.sleep(0.01)


class TestA(Case):
    @with_timeout(100)
    def test_meets_the_other(self):
        meet(self, self.rank)


class TestB(TestA):
    pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., Suite]:
    return lambda source, name="test_suite.py": Suite(tmp_path, source, name)


def note(suite: Suite, cls: str, rank: int) -> dict[str, str]:
    import json

    found: dict[str, str] = json.loads((suite.folder / f"met_{cls}_{rank}").read_text())
    return found


def test_two_classes_run_at_once_and_share_no_folder(suite: Callable[..., Suite]) -> None:
    made = suite(MEETING)
    run = made.run("--slots", "4")
    assert run.code == 0, run
    one, other = note(made, "A", 0), note(made, "B", 0)
    assert one["tmp"] != other["tmp"] and one["tmp"] == note(made, "A", 1)["tmp"]
    assert Path(one["file"]).parent != Path(other["file"]).parent
    assert made.files_left() == [] and made.survivors() == {}


ALONE = """
import fcntl


class Counted(Case):
    alone = False

    def test_counts_who_is_there(self):
        # A lock that all classes share, and that the one that is alone must get at once.
        with open(os.path.join(os.path.dirname(__file__), "lock"), "a") as lock:
            how = fcntl.LOCK_EX if type(self).alone or "ONE_BY_ONE" in os.environ else fcntl.LOCK_SH
            fcntl.flock(lock, how | fcntl.LOCK_NB) if self.rank == 0 else None
            self.check()


class TestAlone(Counted):
    alone = True


class TestB(Counted):
    pass


class TestC(Counted):
    pass


del Counted
"""


def test_a_class_that_wants_to_be_alone_is(suite: Callable[..., Suite]) -> None:
    run = suite(ALONE).run("--slots", "16")
    assert run.code == 0 and len(re.findall("passed  ", run.out)) == 3, run


@pytest.mark.parametrize("arguments", [("--slots", "3"), ("--slots", "8", "-j", "1"), ("--show-output",)])
def test_classes_that_do_not_fit_run_one_after_the_other(suite: Callable[..., Suite], arguments: tuple[str]) -> None:
    run = suite(ALONE).run(*arguments, extra={"ONE_BY_ONE": "1"})
    assert run.code == 0, run


ORDER = """
class TestA(Case):
    def test_1(self):
        time.sleep(1)
        self.check()

    def test_2(self):
        self.check()


class TestB(Case):
    def test_3(self):
        raise ValueError("told after the first class")


class TestC(Case):
    def test_4(self):
        os.kill(os.getpid(), 11)


class TestD(Case):
    def test_5(self):
        self.check()
"""


def test_output_is_in_the_order_of_the_file(suite: Callable[..., Suite]) -> None:
    run = suite(ORDER).run("--slots", "16")
    assert run.code == 1
    names = re.findall(r"^\S+::\w+::(test_\d)  \w+  [\d.]+ s", run.out, re.M)
    assert names == ["test_1", "test_2", "test_3", "test_4", "test_5"], run
    assert "told after the first class" in run.text["test_3"] and "SIGSEGV" in run.text["test_4"]
    assert run.status["test_5"] == "passed"


FAILS_FAST = """
class TestA(Case):
    def test_waits(self):
        time.sleep(300)


class TestB(Case):
    def test_fails(self):
        raise ValueError("enough")
"""


def test_the_first_failure_stops_the_neighbours(suite: Callable[..., Suite]) -> None:
    made = suite(FAILS_FAST)
    run = made.run("-f", "--slots", "8")
    assert run.code == 1 and run.status == {"test_fails": "failed"} and "Not run: 1 test" in run.out, run
    assert made.survivors() == {} and made.files_left() == []


HANGS = """
class TestA(Case):
    @with_timeout(100)
    def test_hangs(self):
        inject("hang", rank=0, at=0)
        self.check()


class TestB(Case):
    def test_dies(self):
        os.kill(os.getpid(), 9)


class TestC(Case):
    def test_passes(self):
        self.check()
"""


def test_hang_death_and_pass_are_told_apart_side_by_side(suite: Callable[..., Suite]) -> None:
    made = suite(HANGS)
    run = made.run("--slots", "8", "--timeout", "8")
    assert run.code == 1
    assert run.status == {"test_hangs": "failed", "test_dies": "failed", "test_passes": "passed"}, run
    assert "SIGKILL" in run.text["test_dies"] and "inject" in run.text["test_hangs"]
    assert made.survivors() == {} and made.files_left() == []


def test_an_interrupt_ends_all_classes(suite: Callable[..., Suite]) -> None:
    made = suite(MEETING.replace('names="AB"', 'names="ABC"'))
    process = made.start_runner("--slots", "8")
    end = time.monotonic() + DEADLINE_S
    while not all((made.folder / f"met_{cls}_1").exists() for cls in "AB"):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130 and "Interrupted." in out and "Not run: 2 tests" in out, (out, err)
    assert made.survivors() == {} and made.files_left() == []


def test_two_runners_in_one_checkout_do_not_meet(suite: Callable[..., Suite]) -> None:
    made = suite(ORDER.replace("time.sleep(1)", "pass"))
    processes = [made.start_runner("--slots", "8") for _ in range(3)]
    outs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    summaries = {out.splitlines()[-1] for out in outs}
    assert summaries == {"3 passed, 2 failed, 0 skipped"}, outs
    assert made.survivors() == {} and made.files_left() == []
