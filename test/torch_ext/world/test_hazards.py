"""Modules and classes that would break a plain fork still pass, and one message says why they get interpreters."""

import re

import pytest

from test.torch_ext.world.programs import check_rows
from test.torch_ext.world.suites import suite_of

pytestmark = pytest.mark.long  # .ci/nightly kills

FILES = {
    "test_matmul.py": """
LARGE = torch.ones(2000, 2000)
torch.set_num_threads(2)
PRODUCT = torch.mm(LARGE, LARGE)


class TestMatmul(Ranks):
    def test_matmul(self):
        self.check()
        torch.mm(LARGE, LARGE)
""",
    "test_thread.py": """
threading.Thread(target=time.sleep, args=(1000,), name="hazard", daemon=True).start()
os.environ["SET_ON_IMPORT"] = "by the file"


class TestThread(Ranks):
    def setUp(self):
        self.assertEqual(os.environ.get("SET_ON_IMPORT"), "by the file")
        super().setUp()

    def test_thread(self):
        self.check()

    def test_thread_again(self):
        self.check()
""",
    "test_backward.py": """
class TestBackward(Ranks):
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
""",
}


def test_each_file_passes_and_names_its_obstacle_once(tmp_path):
    run = check_rows(tmp_path, FILES, deadline_s=600)
    why = "cannot fork: it runs other threads: {}; every rank gets a fresh interpreter"
    for name, threads in (("matmul", r"\d+ native threads? \([^)]*\)"), ("thread", "Python thread 'hazard'")):
        assert len(re.findall(f"the zygote of test_{name} {why.format(threads)}", run.out)) == 1, run
    assert "the zygote of test_backward" not in run.out, "the parent half ran that, and not the zygote"


ALONE = """
class TestAlone(Ranks):
    def test_alone(self):
        pass
"""
WITH_A_THREAD = """
import threading, time, unittest
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
import test_suite
unittest.main(test_suite, argv=["alone"])
"""


def test_process_that_could_not_fork_closes_its_channels_at_its_end(tmp_path):
    with suite_of(tmp_path, ALONE) as suite:
        run = suite.finish(suite.start(["-W", "always::ResourceWarning", "-c", WITH_A_THREAD]))
        assert run.code == 0, run
        assert "a fresh interpreter loads test_suite" in run.err and "unclosed" not in run.err, run
