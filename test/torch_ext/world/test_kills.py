"""Killing any process that a run depends on gives the right report, leaves nothing behind, and spares the next test."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from test.torch_ext.servers import eventually
from test.torch_ext.world.faults import marked_processes
from test.torch_ext.world.suites import parse_unittest, suite_of
from torch_ext.world import _os

# In the order of faults.ancestors() in the parent half.
TARGETS = ("case", "copy", "zygote", "root", "supervisor")
# The thread, started at import, keeps the test program from forking its zygote.
SOURCE = f"""
import json
from test.torch_ext.world.faults import ancestors

if os.environ.get("THREADS") and "unittest" in sys.argv[0]:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


class TestKilled(Ranks):
    timeout = 100

    def setUp(self):
        super().setUp()
        target = self._testMethodName.removeprefix("test_").rpartition("_")
        if target[2] == "killed":
            note(target[0], json.dumps([*ancestors(), self.processes[0].pid]))


def hang(self):
    if self.rank == 0:
        forever()


def following(self):
    self.check()


for target in {TARGETS!r}:
    setattr(TestKilled, f"test_{{target}}_killed", hang)
    setattr(TestKilled, f"test_{{target}}_killed_next", following)


class TestStanding(Standing):
    def test_1_zygote_killed(self):
        if self.rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    def test_2_following(self):
        self.check()
"""


def await_pids(suite, target, process):
    """Wait for the test in which ``target`` is to be killed; return its ancestors' pids, from the parent half up."""
    return json.loads(suite.await_note(target, process))


@pytest.mark.long
def test_killed_helper_fails_one_test_and_the_next_passes(tmp_path):
    """One run in which each process above the ranks is killed, in the order of the tests' names."""
    with suite_of(tmp_path, SOURCE) as suite:
        process = suite.start_runner("-i", "TestKilled", "-k", "not supervisor")
        for target in ("case", "copy", "root", "zygote"):
            os.kill(await_pids(suite, target, process)[TARGETS.index(target)], signal.SIGKILL)
        run = suite.finish(process)
        assert run.out.splitlines()[-1] == "4 passed, 4 failed, 0 skipped" and run.code == 1, run
        # The parent half and its ranks die at once, so either is seen first.
        lost = (
            "The parent half of the test ended because its zygote was killed.",
            "The ranks were lost: the process that had started the ranks was killed",
        )
        for target in ("case", "copy", "root", "zygote"):
            starts = ("The parent half of the test was killed by SIGKILL.",) if target == "case" else lost
            assert run.text[f"test_{target}_killed"].lstrip().startswith(starts), run
            assert run.status[f"test_{target}_killed_next"] == "passed", run


@pytest.mark.long
@pytest.mark.parametrize("how", ["the runner", "unittest"])
def test_killed_supervisor_leaves_no_process(tmp_path, how):
    with suite_of(tmp_path, SOURCE) as suite:
        if how == "unittest":
            process, target = suite.start(["-m", "unittest", "-k", "case_killed", "test_suite"]), "case"
        else:
            process, target = suite.start_runner("-k", "supervisor"), "supervisor"
        assert await_pids(suite, target, process)[TARGETS.index(target)] == process.pid
        process.kill()
        process.communicate(timeout=100)


@pytest.mark.long
def test_supervisor_killed_while_its_first_process_imports_torch_leaves_nothing(tmp_path):
    def imports(pid):
        with contextlib.suppress(OSError):
            return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()

    with suite_of(tmp_path, "") as suite:
        process = suite.start_runner()
        assert eventually(lambda: any(imports(pid) for pid in marked_processes(suite.mark) if pid != process.pid))
        process.kill()
        process.communicate(timeout=100)
        assert eventually(lambda: not marked_processes(suite.mark))


@pytest.mark.long
@pytest.mark.parametrize("threads", ["", "1"], ids=["forked zygote", "zygote of its own interpreter"])
def test_killed_zygote_of_a_test_program_fails_one_test_of_each_class(tmp_path, threads):
    with suite_of(tmp_path, SOURCE) as suite:
        names = ["TestKilled.test_zygote_killed", "TestKilled.test_zygote_killed_next", "TestStanding"]
        names = [f"test_suite.{name}" for name in names]
        process = suite.start(["-m", "unittest", "-v", *names], {"THREADS": threads})
        *_, rank = await_pids(suite, "zygote", process)
        os.kill(int(_os.stat_of(rank)[1]), signal.SIGKILL)
        run = suite.finish(process, parse_unittest)
        message = "the process that had started the ranks was killed while they ran, and they ended with it"
        assert message in run.text["test_zygote_killed"], run
        ended = {"test_zygote_killed": "failed", "test_1_zygote_killed": "failed"}
        assert run.status == {**ended, "test_zygote_killed_next": "passed", "test_2_following": "passed"}, run


@pytest.fixture
def small_cgroup():
    """A cgroup whose processes may hold 500 MB together."""
    root = Path("/sys/fs/cgroup")
    old = (root / "memory").is_dir()
    group = (root / "memory" if old else root) / f"torch_ext_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a memory cgroup ({error}): run as root where {root} is writable")
    try:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text("500000000")
        yield group
    except OSError as error:
        pytest.skip(f"cannot limit a cgroup's memory ({error}): enable the memory controller in {root}")
    finally:
        end = time.monotonic() + 10
        while group.exists() and time.monotonic() < end:  # until the kernel has reaped the killed process
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.05)


@pytest.mark.costly
def test_kill_by_the_kernel_for_lack_of_memory_is_named(tmp_path, small_cgroup):
    source = f"""
class TestMemory(Ranks):
    def test_exhausts(self):
        if self.rank == 1:
            with open({str(small_cgroup / "cgroup.procs")!r}, "w") as stream:
                stream.write(str(os.getpid()))
            kept = [bytearray(b"x" * (1 << 24)) for _ in range(100)]

    def test_next(self):
        self.check()
"""
    with suite_of(tmp_path, source) as suite:
        run = suite.run()
    assert (run.status["test_exhausts"], run.status["test_next"]) == ("failed", "passed"), run
    first, *rest = run.text["test_exhausts"].splitlines()
    assert first == "rank 1 was killed by SIGKILL, most likely by the kernel's out-of-memory killer"
    assert "use fewer ranks at once" in "\n".join(rest)
