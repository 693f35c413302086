"""Interrupts, deaths and hangs of a class's process, or of an importing process, are no pass; other classes run on."""

import os
import re
import signal

from test.torch_ext.world.programs import check_rows, class_of
from test.torch_ext.world.suites import SLOWER, suite_of

INTERRUPTS = """
import _thread


class Tells(Standing):
    def setUp(self):
        os.environ["PARENT_HALF"] = str(os.getpid())
        super().setUp()


class TestClosesItsStreams(Ranks):
    def setUp(self):
        for number in (0, 1, 2):
            os.close(number)
        super().setUp()
        for number in (0, 1, 2):
            with contextlib.suppress(OSError):
                os.write(number, b"into whatever has this number now")

    def test_passes(self):
        self.check()
"""
# The act of rank 1, by its base class. `test_class_process` interrupts tests that have no ranks.
SIGNALS = "os.kill(int(os.environ['PARENT_HALF']), signal.SIGINT)\ntime.sleep(5)"
INTERRUPTED = {
    "Ranks": {"in_a_rank": "raise KeyboardInterrupt", "signals": SIGNALS},
    "Tells": {"signals": SIGNALS},
    "Threads": {"interrupts": "_thread.interrupt_main()\ntime.sleep(3)"},
}
# The act of the class's process in tearDownClass(), its base class, and the words of the report.
ENDS = {
    "sigkill": ("unittest.TestCase", "os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "exit_0": ("Ranks", "os._exit(0)", "code 0"),
    "system_exit": ("Threads", "sys.exit(0)", "SystemExit"),
    "class_cleanup": ("Standing", "cls.addClassCleanup(os.kill, os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "hangs": ("unittest.TestCase", "forever()", "in tearDownClass"),
    "stops": ("unittest.TestCase", "os.kill(os.getpid(), signal.SIGSTOP)", "hung"),
    "after_all": ("unittest.TestCase", "sys.stdout = Dies()", "SIGKILL after its last test"),
}
CLASSES = """
class Dies:
    # The process has told by then that its class is over.
    def flush(self):
        os.kill(os.getpid(), signal.SIGKILL)


class TestBeginning(unittest.TestCase):  # failed: in setUpClass
    @classmethod
    def setUpClass(cls):
        forever()

    def test_never_begun(self):  # none
        pass


class TestDeadlock(Ranks):
    def setUp(self):
        super().setUp()
        threading.Event().wait()

    def test_deadlock(self):  # failed: in setUp
        pass


class TestAgain(Ranks):
    def run(self, result=None):
        super().run(result)
        super().run(result)
        if self._testMethodName == "test_z_dies_late":
            os.kill(os.getpid(), signal.SIGKILL)

    def test_again(self):
        self.check()

    def test_z_dies_late(self):  # failed: SIGKILL
        pass


# Only the supervisor knows a limit for such a test.
class TestWithoutRanks(unittest.TestCase):
    def test_sleeps(self):  # failed: hung until it was killed...in test_sleeps
        time.sleep(float(os.environ["SLEEP"]))
        note("slept")
""" + "".join(
    f"""

class TestEnd_{name}({base}):  # failed: {words}
    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        {statement}

    def test_{name}(self):
        pass
"""
    for name, (base, statement, words) in ENDS.items()
)
MODULE = """
def {fixture}():
    {statement}


class TestOf_{name}(unittest.TestCase):  # failed: {words}
    def test_of_module(self):{end}
        pass
"""
# The code of a file around its tests, the words of the report, and the ending of its test.
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
MODULES = {
    "cleanup": ("setUpModule", "unittest.addModuleCleanup(os.kill, os.getpid(), signal.SIGKILL)", "SIGKILL", ""),
    "set_up_dies": ("setUpModule", KILL, "SIGKILL", "  # none"),
    "set_up_hangs": ("setUpModule", "forever()", "in forever", "  # none"),
    "tear_down_dies": ("tearDownModule", KILL, "SIGKILL", ""),
    "tear_down_hangs": ("tearDownModule", "forever()", "in tearDownModule", ""),
}
IMPORTS = {
    "test_hangs.py": "# failed: in forever...the import of test_hangs took longer than its limit\nforever()",
    "test_stops.py": "# failed: import\nos.kill(os.getpid(), signal.SIGSTOP)",
    "test_dies.py": "# failed: import\nos._exit(0)",
}
# The act of a child that a file forks while it is imported, and the exit status that its parent sees.
CHILDREN = {
    "leaves_with_a_code": ("sys.exit(7)", 7),
    "skips": ("raise unittest.SkipTest('the child')", 1),
    "goes_on": ("pass", 0),
}
FORKS = """
child = os.fork()
if child == 0:
    {}
else:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == {}, status


class TestForks_{}(Ranks):
    def test_of_parent(self):
        self.check()
"""


def module(name):
    fixture, statement, words, end = MODULES[name]
    return MODULE.format(fixture=fixture, statement=statement, words=words, end=end, name=name)


def test_each_class_and_file_ends_as_its_row_states(tmp_path):
    interrupts = INTERRUPTS
    for base, acts in INTERRUPTED.items():
        rows = {name: ("failed: KeyboardInterrupt|SIGINT", act) for name, act in acts.items()}
        interrupts += class_of(f"Test_{base}", base, {**rows, "zz_next": ("passed", "pass")})
    files = {"test_interrupts.py": interrupts, "test_classes.py": CLASSES, **IMPORTS}
    files |= {f"test_{name}.py": module(name) for name in MODULES}
    files |= {f"test_forks_{name}.py": FORKS.format(*what, name) for name, what in CHILDREN.items()}
    limit = round(3 * SLOWER)
    sleep = str(limit + 22)  # the process of a class may take 30 s more than the limit
    run = check_rows(tmp_path, files, "--timeout", str(limit), extra={"SLEEP": sleep}, deadline_s=200)
    assert not (tmp_path / "slept").exists()
    (took,) = re.findall(r"test_deadlock  failed  ([\d.]+) s$", run.out, re.MULTILINE)
    assert limit <= float(took) < limit + 25, "the process was ended at its limit, and not a margin later"


def test_list_of_a_file_that_hangs_ends(tmp_path):
    with suite_of(tmp_path, CLASSES) as suite:
        suite.add("test_hangs.py", IMPORTS["test_hangs.py"])
        run = suite.run("--list", "--timeout", "3")
        assert "test_suite.py::TestWithoutRanks::test_sleeps" in run.out.splitlines(), run
        assert run.code == 1


def test_death_after_the_last_test_is_reported_by_the_file(tmp_path):
    with suite_of(tmp_path, module("tear_down_dies") + "\nrun_tests()\n") as suite:
        run = suite.finish(suite.start([str(suite.file)]))
        assert run.code == 1 and "SIGKILL" in run.out, run


LATE = """
class TestLate(unittest.TestCase):
    def test_1_passes(self):
        print("printed by the first")
        note("begun", os.getpid())
        await_note("runner stopped")

    def test_2_dies(self):
        print("printed by the second")
        note("dying")
        os.kill(os.getpid(), signal.SIGKILL)

    def test_3_fails(self):
        print("printed by the third", end="")
        self.fail()

    def test_4_fails(self):
        self.fail()
"""


def test_output_belongs_to_the_test_that_printed_it_however_late_the_runner_looks(tmp_path):
    with suite_of(tmp_path, LATE) as suite:
        process = suite.start_runner(extra={"PYTHONUNBUFFERED": ""})
        suite.await_note("begun", process)
        os.kill(process.pid, signal.SIGSTOP)
        (suite.folder / "runner stopped").touch()
        suite.await_note("dying", process)
        os.kill(process.pid, signal.SIGCONT)
        run = suite.finish(process)
        printed = {name: re.findall(r"printed by the (\w+)", text) for name, text in run.text.items()}
        assert printed == {"test_2_dies": ["second"], "test_3_fails": ["third"], "test_4_fails": []}, run
