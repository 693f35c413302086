"""The promises of the base classes, on real ranks: forked ones and fresh interpreters."""

import re

import pytest

from test.torch_ext.world.programs import check_rows, class_of

CONFORMS = """
os.environ["SET_ON_IMPORT"] = "by the file"


class TestConformance(Ranks):
    def test_environment_of_the_moment(self):
        print("hello from", self.rank)
        self.assertEqual(os.environ["SET_IN_SET_UP"], self._testMethodName)
        self.assertEqual(os.environ["SET_ON_IMPORT"], "by the file, then by setUp")
        self.assertEqual(os.getcwd(), HERE)
        self.check()

    def setUp(self):
        os.environ["SET_IN_SET_UP"] = self._testMethodName
        os.environ["SET_ON_IMPORT"] = os.environ["SET_ON_IMPORT"].partition(",")[0] + ", then by setUp"
        os.chdir(HERE)
        super().setUp()

    def test_failure(self):  # failed by 1: ^raised ValueError at test_suite.py:
        if self.rank == 1:
            raise ValueError
"""
CLASSES = """


class TestProcesses(Ranks):
    def setUp(self):
        super().setUp()
        # As upstream's suites write it; only the test that runs is wrapped.
        self.special_return_code_checks = {getattr(self.test_expected_kill, "__wrapped__", None): -9}
        self.skip_return_code_checks = [getattr(self.test_any_exit, "__wrapped__", None)]

    def test_expected_kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def test_any_exit(self):
        if self.rank == 0:
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)


class TestLikeProcesses(Ranks):
    def test_processes(self):
        pass

    def tearDown(self):
        self.assertEqual([each.exitcode for each in self.processes], [0, 0])
        self.assertFalse(any(each.is_alive() for each in self.processes))
        self.processes[0].join(timeout=0)
        self.processes[0].terminate()
        self.assertEqual(set(self.pid_to_pipe), {each.pid for each in self.processes})
        self.assertTrue(all(pipe.fileno() >= 0 for pipe in self.pid_to_pipe.values()))
        super().tearDown()
"""
# Ranks that serve several tests: a failure, a death and a hang fail one test each.
DEATHS = {
    "Standing": (
        "failed by 1: ^rank 1 was killed by SIGKILL at test_suite.py:",
        "if self.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nself.check()",
    ),
    "Threads": (
        "failed: The parent half of the test was killed by SIGSEGV at test_...in string_at",
        "if self.rank == 1: ctypes.string_at(0)\nself.check()",
    ),
}
GOOD = ("passed", "self.check()")
SHARED = ""
for base, death in DEATHS.items():
    raised = (
        "failed by 1: ^rank 1 raised ValueError at test_suite.py:",
        "if self.rank == 1: raise ValueError\nself.check()",
    )
    hung = ("failed by 0: ^rank 0 timed out at test_suite.py:", "if self.rank == 0: forever()")
    rows = {"a_good": GOOD, "b_failure": raised, "c_good": GOOD, "d_death": death, "e_good": GOOD, "f_hang": hung}
    SHARED += class_of(f"TestShared_{base}", base, {**rows, "g_good": GOOD}, on="True")
    SHARED += "\n    test_f_hang = with_timeout(3)(test_f_hang)\n"


@pytest.mark.costly
def test_base_classes_keep_their_promises(tmp_path):
    run = check_rows(tmp_path, CONFORMS + CLASSES + SHARED)
    crash = run.text["test_d_death"] + run.out.partition("TestShared_Threads::test_d_death")[2].partition("rerun")[0]
    assert not re.search("Extension modules|/runner/case|/world/zygote", crash), "frames of the harness say nothing"
