"""However a test treats the processes around it, the runner ends in order: a result for each test, no leftovers."""

import os
import re
import resource
import signal
import time
import uuid
from pathlib import Path

import pytest

from test.torch_ext.world.programs import check_rows, class_of
from test.torch_ext.world.suites import SLOWER, suite_of

STARTED = """
import stat
from multiprocessing import shared_memory


def start_daemon(seconds, **how):
    # Its parent ends at once, so the zygote or init adopts it.
    shell = f"sleep {seconds} >/dev/null 2>&1 & echo $!"
    return int(subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, text=True, **how).stdout)


OF_IMPORT = [subprocess.Popen(["sleep", "6003"]).pid, start_daemon(6004, start_new_session=True)]


class TestServers(Ranks):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        os.environ["SERVER"] = str(start_daemon(6001))

    def setUp(self):
        self.server = start_daemon(6002)
        super().setUp()

    def tearDown(self):
        super().tearDown()
        os.kill(self.server, 0)

    def check_servers(self):
        for pid in (int(os.environ["SERVER"]), *OF_IMPORT):
            os.kill(pid, 0)

    def test_1(self):
        self.check_servers()

    def test_2(self):
        self.check_servers()


class TestOwners(Ranks):
    def test_are_charged(self):  # failed: rank 0 raised...sleep 7000...rank 1 raised...sleep 7001
        # One is known by its environment alone, the other by its process group.
        how = {"start_new_session": True} if self.rank == 0 else {"env": {"PATH": os.environ["PATH"]}}
        start_daemon(7000 + self.rank, **how)
        self.join_group()
        dist.barrier()
        self.fail("to see the processes")


class TestSharedMemory(Ranks):
    def setUp(self):
        super().setUp()
        self.memory = shared_memory.SharedMemory(create=True, size=100, name=os.environ["SEGMENT"] + "parent")

    def test_is_cleaned(self):
        shared_memory.SharedMemory(create=True, size=100, name=f"{os.environ['SEGMENT']}{self.rank}")


class TestPrivate(Ranks):
    def test_scratch_files_are_the_users_alone(self):
        for path in (self.file_name, os.path.dirname(self.file_name)):
            found = os.stat(path)
            self.assertEqual(found.st_uid, os.getuid())
            self.assertEqual(stat.S_IMODE(found.st_mode) & 0o077, 0, path)
"""
NEXT = {"next": ("passed", "pass")}
# The signals that rank 1 sends, each in its own class.
SIGNALS = {
    "terminates": ("failed by 1: SIGTERM", "os.kill(0, signal.SIGTERM)\nforever()"),
    "interrupts": ("failed by 1: SIGINT|KeyboardInterrupt", "os.killpg(0, signal.SIGINT)\nforever()"),
    "stops": ("failed by 1: stopped by a signal", "os.kill(os.getpid(), signal.SIGSTOP)"),
    "stops_parent": (
        "failed: SIGSTOP|stopped by a signal",
        "os.kill(int(os.environ['PARENT_HALF']), signal.SIGSTOP)",
    ),
}
SIGNALLED = "".join(class_of(f"Test_{name}", "Ranks", {name: row, **NEXT}) for name, row in SIGNALS.items())
SIGNALLED += class_of(
    "TestPlain", "unittest.TestCase", {"terminates": SIGNALS["terminates"], **NEXT}, on="True"
).replace("failed by 1", "failed")
BETWEEN = """
KILLED = {}


class Kills:
    def setUp(self):
        super().setUp()
        rank = self.processes[0].pid
        KILLED[type(self)] = int(open(f"/proc/{rank}/stat").read().rpartition(")")[2].split()[1])

    def run(self, result=None):
        if "test_2" in self._testMethodName and type(self) in KILLED:
            # Between two tests: the first has its result, and this one has not begun.
            os.kill(KILLED[type(self)], signal.SIGKILL)
            time.sleep(60)  # the runner ends this process meanwhile
        return super().run(result)


class TestFresh(Kills, Ranks):
    def test_1_fresh(self):
        pass

    def test_2_fresh(self):
        self.check()


class TestStands(Kills, Standing):
    def test_1_stands(self):
        pass

    def test_2_stands(self):
        self.check()
"""


def test_started_processes_and_signals_of_ranks_fail_no_other_test(tmp_path):
    segment = f"te{uuid.uuid4().hex[:8]}"
    files = {"test_started.py": STARTED, "test_signals.py": SIGNALLED, "test_between.py": BETWEEN}
    limit = str(round(4 * SLOWER))
    run = check_rows(
        tmp_path, files, "--timeout", limit, extra={"SEGMENT": segment}, preexec_fn=lambda: os.umask(0), deadline_s=100
    )
    assert not re.search(r"rank \d left a process behind, which was ended: sleep 600", run.out), run
    text = run.text["test_are_charged"]
    for rank in (0, 1):
        own = text.partition(f"  rank {rank} raised")[2].partition("\n  rank ")[0]
        assert f"sleep 700{1 - rank}" not in own, text
    left = list(Path("/dev/shm").glob(f"{segment}*"))
    for path in left:
        path.unlink()
    assert left == []


def test_other_runners_survive_such_ranks(tmp_path):
    with suite_of(tmp_path, SIGNALLED) as suite:
        extra = {"TORCH_EXT_TIMEOUT": "4"}
        for run in (
            suite.run_unittest("Test_terminates", extra=extra),
            suite.run_pytest("-k", "Test_terminates and not TestPlain", extra=extra),
        ):
            assert (run.status, run.code) == ({"test_terminates": "failed", "test_next": "passed"}, 1), run


# Ctrl-C

SLOW = """
note("imported")
time.sleep(1)


class TestSlow(Ranks):
    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        if os.environ.get("MOMENT") == "ends":
            note("ends")
            time.sleep(1)

    def test_slow(self):
        note(f"runs{self.rank}")
        if os.environ.get("MOMENT") != "ends":
            time.sleep(30)


if __name__ == "__main__":
    run_tests()
"""


@pytest.mark.parametrize(
    ("way", "moment", "times"),
    [
        ("runner", "imported", 3),
        ("runner", "runs1", 1),
        ("runner", "ends", 2),
        ("", "imported", 1),
        ("", "imported", 3),
    ],
)
def test_ctrl_c_ends_the_run_in_order(tmp_path, way, moment, times):
    with suite_of(tmp_path, SLOW if way else SLOW.replace("sleep(1)", "sleep(30)", 1)) as suite:
        process = suite.start_runner(extra={"MOMENT": moment}) if way else suite.start([str(suite.file)])
        suite.await_note(moment, process)
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            time.sleep(0.05)
        run = suite.finish(process)
        assert run.code == 130 and "Traceback" not in run.out + run.err, run
        assert way or (run.out, run.err) == ("", "interrupted\n"), run


# Surroundings

PLAIN = class_of("TestPlain", "unittest.TestCase", NEXT)


@pytest.mark.parametrize("number", [8, 14])
def test_limit_of_open_files_is_reported_in_one_sentence(tmp_path, number):
    """Too few for the runner itself; a shortage that only a test meets is that test's failure."""
    few = (number, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    with suite_of(tmp_path, PLAIN) as suite:
        run = suite.run(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, few))
        assert run.code == 2 and "Traceback" not in run.err, run
        assert "Too many open files" in run.err and "ulimit -n" in run.err, run


def test_library_writable_by_others_is_refused_in_one_sentence(tmp_path):
    with suite_of(tmp_path, PLAIN) as suite:
        cache = suite.folder / "cache"
        (cache / "sim").mkdir(parents=True)
        for folder in (cache, cache / "sim"):
            folder.chmod(0o777)
        # A compiler that fails at once: the runner must refuse the folder before it builds anything there.
        compiler = suite.folder / "cc"
        compiler.write_text("#!/bin/sh\necho fake; case $1 in --version) exit 0;; esac\nexit 1\n")
        compiler.chmod(0o755)
        run = suite.run("--device", "sim", extra={"CXX": str(compiler)})
        (message,) = (line for line in run.err.splitlines() if line.strip())
        assert run.code in (1, 2) and str(cache) in message and len(re.sub(r"/\S+", "PATH", message)) < 400, run
