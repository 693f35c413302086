"""Modules and classes that would break a plain fork still pass, and one message says why they get interpreters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext.world.suites import Run, Suite

pytestmark = pytest.mark.long  # .ci/nightly kills

MATMUL = """
LARGE = torch.ones(2000, 2000)
torch.set_num_threads(2)
PRODUCT = torch.mm(LARGE, LARGE)


class TestMatmul(Case):
    def test_matmul(self):
        self.check()
        torch.mm(LARGE, LARGE)
"""

THREAD = """
import threading


def start():
    threading.Thread(target=time.sleep, args=(1000,), name="hazard", daemon=True).start()


start()
os.environ["SET_ON_IMPORT"] = "by the file"


class TestThread(Case):
    def setUp(self):
        self.assertEqual(os.environ.get("SET_ON_IMPORT"), "by the file")
        super().setUp()

    def test_thread(self):
        self.check()

    def test_thread_again(self):
        self.check()
"""

BACKWARD = """
class TestBackward(Case):
    def setUp(self):
        weight = torch.ones(1000, 1000, requires_grad=True)
        (weight @ weight).sum().backward()
        torch.set_num_threads(2)
        torch.mm(weight, weight)
        super().setUp()

    def test_backward(self):
        self.check()
        weight = torch.ones(1000, 1000, requires_grad=True)
        (weight @ weight).sum().backward()
        self.assertEqual(weight.grad[0, 0].item(), 2000.0)
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    suite = Suite(tmp_path_factory.mktemp("hazards"), MATMUL, "test_matmul.py")
    suite.add("test_thread.py", THREAD)
    suite.add("test_backward.py", BACKWARD)
    yield suite
    suite.end_survivors()


@pytest.fixture(scope="module")
def run(suite: Suite) -> Run:
    return suite.run()


def test_all_pass(run: Run) -> None:
    assert run.out.splitlines()[-1] == "4 passed, 0 failed, 0 skipped", run


def test_native_threads_are_named_once(run: Run) -> None:
    message = (
        r"the zygote of test_matmul cannot fork: it runs other threads: \d+ native threads? \([^)]*\); "
        r"every rank gets a fresh interpreter"
    )
    assert len(re.findall(message, run.out)) == 1, run


def test_a_python_thread_is_named(run: Run) -> None:
    message = (
        r"the zygote of test_thread cannot fork: it runs other threads: Python thread 'hazard'; "
        r"every rank gets a fresh interpreter"
    )
    assert len(re.findall(message, run.out)) == 1, run


def test_what_the_parent_half_ran_is_no_hazard(run: Run) -> None:
    assert "the zygote of test_backward" not in run.out


def test_nothing_outlives_the_run(run: Run, suite: Suite) -> None:
    assert suite.survivors() == {}
    assert suite.files_left() == []


ALONE = """
class TestAlone(Case):
    def test_alone(self):
        pass
"""
WITH_A_THREAD = """
import threading, time, unittest
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
import test_suite
unittest.main(test_suite, argv=["alone"])
"""


def test_process_that_could_not_fork_closes_its_lines_when_it_ends(tmp_path: Path) -> None:
    suite = Suite(tmp_path, ALONE)
    try:
        command = ["-W", "always::ResourceWarning", "-c", WITH_A_THREAD]
        run = suite.finish(suite.start(command), lambda run: None)
        assert run.code == 0, run
        assert "a fresh interpreter loads test_suite" in run.err, run
        assert "unclosed" not in run.err, run
        assert suite.survivors() == {}
    finally:
        suite.end_survivors()
