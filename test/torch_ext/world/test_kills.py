"""Killing any process that a run depends on gives the right report, leaves nothing behind, and spares the next test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext.world.suites import DEADLINE_S, Run, Suite, parse_runner, parse_unittest
from torch_ext.world import _os

pytestmark = pytest.mark.long  # .ci/nightly kills

# In the order of faults.ancestors() in the parent half.
TARGETS = ("case", "zygote", "root", "supervisor")

SOURCE = f"""
import json


class TestKilled(Case):
    def setUp(self):
        super().setUp()
        target = self._testMethodName.removeprefix("test_").rpartition("_")
        if target[2] == "killed":
            path = os.path.join(os.path.dirname(__file__), target[0])
            with open(path + ".new", "w") as stream:
                json.dump([*ancestors(), self.processes[0].pid], stream)
            os.rename(path + ".new", path)


def hang(self):
    inject("hang", rank=0, at=0)


def following(self):
    self.check()


for target in {TARGETS!r}:
    setattr(TestKilled, f"test_{{target}}_killed", with_timeout(100)(hang))
    setattr(TestKilled, f"test_{{target}}_killed_next", following)
"""


def await_pids(suite: Suite, target: str, process: subprocess.Popen[str]) -> list[int]:
    """Wait for the test in which ``target`` is to be killed; return its ancestors' pids, from the parent half up."""
    file: Path = suite.folder / target
    end = time.monotonic() + DEADLINE_S
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"the test of {target} never starts"
        time.sleep(0.01)
    pids: list[int] = json.loads(file.read_text())
    return pids


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    suite = Suite(tmp_path_factory.mktemp("kills"), SOURCE)
    yield suite
    suite.end_survivors()


@pytest.fixture(scope="module")
def run(suite: Suite) -> Run:
    """One run in which case process, root and zygote are killed, in the order of the tests' names."""
    process = suite.start_runner("-k", "not supervisor")
    for target in ("case", "root", "zygote"):
        os.kill(await_pids(suite, target, process)[TARGETS.index(target)], signal.SIGKILL)
    return suite.finish(process, parse_runner)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("case", "The parent half of the test was killed by SIGKILL."),
        ("zygote", "The parent half of the test ended because its zygote was killed."),
        ("root", "The parent half of the test ended because its zygote was killed."),
    ],
)
def test_killed_helper_fails_one_test_and_the_next_passes(run: Run, target: str, words: str) -> None:
    assert run.status[f"test_{target}_killed"] == "failed", run
    assert run.text[f"test_{target}_killed"].lstrip().startswith(words)
    assert run.status[f"test_{target}_killed_next"] == "passed", run


def test_every_test_has_its_result(run: Run) -> None:
    assert run.out.splitlines()[-1] == "3 passed, 3 failed, 0 skipped", run
    assert run.code == 1


def test_nothing_outlives_the_run(run: Run, suite: Suite) -> None:
    assert suite.survivors() == {}
    assert suite.files_left() == []


def test_killed_supervisor_takes_everything_along(suite: Suite, run: Run) -> None:
    process = suite.start_runner("-k", "supervisor")
    pids = await_pids(suite, "supervisor", process)
    assert pids[3] == process.pid
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    assert suite.survivors() == {}
    assert suite.files_left() == []


# A thread started at import keeps the test program from forking its zygote.
STARTS_A_THREAD = """
import threading
if os.environ.get('THREADS') and 'unittest' in sys.argv[0]:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""
BOTH_ZYGOTES = pytest.mark.parametrize("threads", ["", "1"], ids=["forked zygote", "zygote of its own interpreter"])


@BOTH_ZYGOTES
def test_killed_zygote_of_standing_ranks_fails_one_test(tmp_path: Path, threads: str) -> None:
    source = """
    class TestStanding(MultiProcContinuousTest):
        world_size = 2

        def test_1_zygote_killed(self):
            if self.rank == 0:
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)

        def test_2_following(self):
            ones = torch.ones(3)
            dist.all_reduce(ones)
            self.assertEqual(ones, torch.full((3,), 2.0))
    """
    suite = Suite(tmp_path, STARTS_A_THREAD + textwrap.dedent(source))
    run = suite.finish(suite.start(["-m", "unittest", "-v", "test_suite"], {"THREADS": threads}), parse_unittest)
    assert run.status == {"test_1_zygote_killed": "failed", "test_2_following": "passed"}, run
    assert suite.survivors() == {}
    assert suite.files_left() == []


@BOTH_ZYGOTES
def test_killed_zygote_of_a_test_program_fails_one_test(tmp_path: Path, threads: str) -> None:
    suite = Suite(tmp_path, STARTS_A_THREAD + SOURCE)
    command = ["-m", "unittest", "-v", "-k", "zygote_killed"]
    process = suite.start([*command, "test_suite"], {"THREADS": threads})
    *_, rank = await_pids(suite, "zygote", process)
    os.kill(int(_os.stat_of(rank)[1]), signal.SIGKILL)
    run = suite.finish(process, parse_unittest)
    assert (
        "the process that had started the ranks was killed while they ran, and they ended with it"
        in run.text["test_zygote_killed"]
    ), run
    assert run.status == {"test_zygote_killed": "failed", "test_zygote_killed_next": "passed"}, run
    assert suite.survivors() == {}
    assert suite.files_left() == []


def test_killed_test_program_takes_everything_along(tmp_path: Path) -> None:
    suite = Suite(tmp_path, SOURCE)
    process = suite.start(["-m", "unittest", "-k", "case_killed", "test_suite"])
    assert await_pids(suite, "case", process)[0] == process.pid
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    assert suite.survivors() == {}
    assert suite.files_left() == []
