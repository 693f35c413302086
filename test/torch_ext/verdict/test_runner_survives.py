"""Whatever a test does to the processes around it, the runner ends in order: a result for each test, nothing left."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from test.torch_ext.verdict.programs import Programs, named_first, programs
from test.torch_ext.world.suites import CHECKOUT, Run

NEXT = """
class TestZNext(Ranks):
    def test_next(self):
        self.check()
"""


# Imports

IMPORTS = {"hangs": "forever()", "stops": "os.kill(os.getpid(), signal.SIGSTOP)", "dies": "os._exit(0)"}


@pytest.fixture(scope="module")
def importing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("importing"), NEXT, "test_z.py") as suite:
        for name, statement in IMPORTS.items():
            suite.add(f"test_{name}.py", statement)
        yield suite


def test_import_that_hangs_has_a_limit_and_blocks_no_other_file(importing: Programs) -> None:
    run = importing.run("--timeout", "3")
    for name in IMPORTS:
        assert run.status.get(f"test_{name}.py") == "failed", run
        assert "import" in run.text[f"test_{name}.py"]
    assert "in forever" in run.text["test_hangs.py"], run
    assert run.status.get("test_next") == "passed", run
    assert run.code == 1
    importing.assert_nothing_left()


FORKS = """
class TestOfParent(Ranks):
    def test_of_parent(self):
        self.check()
"""
# What a child does that a file has forked while it was imported, and the status with which its parent sees it end.
CHILDREN = {
    "leaves": ("sys.exit(0)", 0),
    "leaves_in_words": ("sys.exit('the child goes')", 1),
    "leaves_with_a_code": ("sys.exit(7)", 7),
    "raises": ("raise ValueError('in the child')", 1),
    "skips": ("raise unittest.SkipTest('the child')", 1),
    "goes_on": ("pass", 0),
}


def test_process_that_a_file_forks_while_it_is_imported_does_not_answer_for_it(tmp_path: Path) -> None:
    statement = """
child = os.fork()
if child == 0:
    {}
else:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == {}, status
"""
    name, *names = CHILDREN
    source = {name: statement.format(*what) + FORKS.replace("of_parent", name) for name, what in CHILDREN.items()}
    with programs(tmp_path, source[name], f"test_{name}.py") as suite:
        for other in names:
            suite.add(f"test_{other}.py", source[other])
        run = suite.run("--timeout", "20")
        assert run.status == {f"test_{name}": "passed" for name in CHILDREN}, run
        assert run.code == 0
        suite.assert_nothing_left()


def test_list_of_a_file_that_hangs_ends(importing: Programs) -> None:
    run = importing.run("--list", "--timeout", "3")
    assert run.out.splitlines() == ["test_z.py::TestZNext::test_next"], run
    assert run.code == 1


# What a class or a rank starts, and who is charged for it

STARTED = """
from multiprocessing import shared_memory


def start_daemon(seconds):
    # Its parent ends at once, so it belongs to whoever adopts orphans.
    shell = f"sleep {seconds} >/dev/null 2>&1 & echo $!"
    return int(subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE, text=True).stdout)


class TestServer(Ranks):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        os.environ["SERVER"] = str(start_daemon(6001))

    def look(self):
        os.kill(int(os.environ["SERVER"]), 0)

    def test_server_1(self):
        self.look()

    def test_server_2(self):
        self.look()


class TestServerOfSetUp(Ranks):
    def setUp(self):
        self.server = start_daemon(6002)
        super().setUp()

    def tearDown(self):
        super().tearDown()
        os.kill(self.server, 0)

    def test_server_of_set_up(self):
        pass


class TestOwners(Ranks):
    def test_owners(self):
        start_daemon(7000 + self.rank)
        self.join_group()
        dist.barrier()
        self.fail("to see the processes")


class TestSharedMemory(Ranks):
    def setUp(self):
        super().setUp()
        self.memory = shared_memory.SharedMemory(create=True, size=100, name=os.environ["SEGMENT"] + "parent")

    def test_segments(self):
        shared_memory.SharedMemory(create=True, size=100, name=f"{os.environ['SEGMENT']}{self.rank}")
"""


@pytest.fixture(scope="module")
def started_suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("started"), STARTED) as suite:
        yield suite


@pytest.fixture(scope="module")
def segment() -> Iterator[str]:
    name = f"te{uuid.uuid4().hex[:8]}"
    yield name
    for left in Path("/dev/shm").glob(f"{name}*"):
        left.unlink()


@pytest.fixture(scope="module")
def started(started_suite: Programs, segment: str) -> Run:
    return started_suite.run(extra={"SEGMENT": segment})


@pytest.mark.parametrize("name", ["server_1", "server_2", "server_of_set_up"])
def test_process_that_the_class_started_lives_until_the_class_ends(started: Run, name: str) -> None:
    assert started.status[f"test_{name}"] == "passed", started
    assert not re.search(r"rank \d left a process behind, which was ended: sleep 600", started.out), started


def test_leftovers_of_two_ranks_are_charged_to_their_owners(started: Run) -> None:
    text = started.text["test_owners"]
    for rank in (0, 1):
        own = text.partition(f"  rank {rank} raised")[2].partition("\n  rank ")[0]
        assert f"sleep 700{rank}" in own, text
        assert f"sleep 700{1 - rank}" not in own, text


def test_shared_memory_that_plain_python_cleans_is_cleaned(started: Run, segment: str) -> None:
    assert started.status["test_segments"] == "passed", started
    assert sorted(path.name for path in Path("/dev/shm").glob(f"{segment}*")) == []


def test_nothing_that_was_started_outlives_the_run(started: Run, started_suite: Programs) -> None:
    started_suite.assert_nothing_left()


# Signals to others

SIGNALS = (
    """
class TestSignals(Ranks):
    def test_terminates_its_process_group(self):
        if self.rank == 1:
            os.kill(0, signal.SIGTERM)
        forever()

    def test_interrupts_its_process_group(self):
        if self.rank == 1:
            os.killpg(0, signal.SIGINT)
        forever()

    def test_stops_itself(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    def test_stops_its_parent_half(self):
        if self.rank == 1:
            os.kill(int(os.environ["PARENT_HALF"]), signal.SIGSTOP)


class TestPlain(unittest.TestCase):
    def test_plain_terminates_its_process_group(self):
        os.kill(0, signal.SIGTERM)
        forever()
"""
    + NEXT
)
SIGNALLED = [name for name in re.findall(r"def test_(\w+)", SIGNALS) if name != "next"]


@pytest.fixture(scope="module")
def signalled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """A run for each, since some of them end the whole run; two at a time."""

    def run(name: str) -> Run:
        with programs(tmp_path_factory.mktemp(name[:20]), SIGNALS) as suite:
            found = suite.run("-i", f"test_{name}", "test_next", "--timeout", "4")
            found.text["left"] = f"{suite.survivors()} {suite.files_left()}"
            return found

    with ThreadPoolExecutor(2) as pool:
        yield dict(zip(SIGNALLED, pool.map(run, SIGNALLED), strict=True))


@pytest.mark.parametrize("name", SIGNALLED)
def test_signal_of_a_rank_costs_its_own_test_alone(signalled: dict[str, Run], name: str) -> None:
    run = signalled[name]
    assert run.status.get(f"test_{name}") == "failed", run
    assert run.status.get("test_next") == "passed", run
    assert run.code == 1
    assert run.text["left"] == "{} []"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("terminates_its_process_group", "SIGTERM"),
        ("interrupts_its_process_group", "SIGINT|KeyboardInterrupt"),
        ("stops_itself", "SIGSTOP|stopped"),
        ("stops_its_parent_half", "SIGSTOP|stopped"),
        ("plain_terminates_its_process_group", "SIGTERM"),
    ],
)
def test_signal_is_told(signalled: dict[str, Run], name: str, words: str) -> None:
    text = signalled[name].text.get(f"test_{name}", "").replace("was stopped", "")
    assert re.search(words, text), signalled[name]


def test_stopped_rank_is_the_one_that_is_named(signalled: dict[str, Run]) -> None:
    assert named_first(signalled["stops_itself"].text["test_stops_itself"]) == {1}


@pytest.mark.parametrize("runner", ["unittest", "pytest"])
def test_signal_to_the_group_ends_no_other_runner(tmp_path: Path, runner: str) -> None:
    with programs(tmp_path, SIGNALS) as suite:
        extra = {"TORCH_EXT_TIMEOUT": "4"}
        if runner == "unittest":
            run = suite.run_unittest("TestSignals.test_terminates_its_process_group", "TestZNext", extra=extra)
        else:
            command = ["-m", "pytest", "-q", str(suite.file), "-k", "test_next or (Signals and terminates_its_process)"]
            run = suite.finish(suite.start(command, extra))
            assert "1 failed, 1 passed" in run.out, run
        assert run.code == 1, run
        suite.assert_nothing_left()


# A zygote that dies between two tests

BETWEEN = """
def zygote_of(case):
    return int(open(f"/proc/{case.processes[0].pid}/stat").read().rpartition(")")[2].split()[1])


class Kills:
    def run(self, result=None):
        if "test_2" in self._testMethodName and type(self).__name__ in KILLED:
            # Between two tests: the first has its result, and this one has not begun.
            os.kill(KILLED[type(self).__name__], signal.SIGKILL)
            time.sleep(0.3)
        return super().run(result)


KILLED = {}


class TestFresh(Kills, Ranks):
    def setUp(self):
        super().setUp()
        KILLED["TestFresh"] = zygote_of(self)

    def test_1_fresh(self):
        pass

    def test_2_fresh(self):
        self.check()


class TestStands(Kills, Standing):
    def setUp(self):
        super().setUp()
        KILLED["TestStands"] = zygote_of(self)

    def test_1_stands(self):
        pass

    def test_2_stands(self):
        self.check()
"""


@pytest.mark.parametrize("runner", ["run_test.py", "unittest"])
def test_ranks_start_again_after_the_death_of_their_zygote_between_two_tests(tmp_path: Path, runner: str) -> None:
    with programs(tmp_path, BETWEEN) as suite:
        run = suite.run("--timeout", "10") if runner == "run_test.py" else suite.run_unittest()
        tests = ("test_1_fresh", "test_2_fresh", "test_1_stands", "test_2_stands")
        assert {name: run.status.get(name) for name in tests} == dict.fromkeys(tests, "passed"), run
        suite.assert_nothing_left()


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
"""


@pytest.mark.parametrize(("moment", "times"), [("imported", 3), ("runs1", 1), ("ends", 2)])
def test_ctrl_c_ends_the_run_in_order(tmp_path: Path, moment: str, times: int) -> None:
    with programs(tmp_path, SLOW) as suite:
        process = suite.start_runner(extra={"MOMENT": moment})
        suite.await_note(moment, process)
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            time.sleep(0.05)
        run = suite.finish(process)
        assert run.code == 130, run
        assert "Traceback" not in run.out + run.err, run
        suite.assert_nothing_left()


SLOW_IMPORT = """
note("importing")
time.sleep(30)


class TestNever(TestCase):
    def test_never(self):
        pass


if __name__ == "__main__":
    run_tests()
"""


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_while_a_file_imports_itself_is_told_in_a_word(tmp_path: Path, times: int) -> None:
    with programs(tmp_path, SLOW_IMPORT) as suite:
        process = suite.start([str(suite.file)])
        suite.await_note("importing", process)
        for _ in range(times):
            os.killpg(process.pid, signal.SIGINT)
        run = suite.finish(process)
        assert (run.code, run.out, run.err) == (130, "", "interrupted\n"), run
        suite.assert_nothing_left()


# Surroundings

PLAIN = """
class TestPlain(unittest.TestCase):
    def test_plain(self):
        pass

    def test_fails(self):
        self.fail("as it should")
"""


def one_sentence(run: Run) -> None:
    assert run.code in (1, 2, 130), run
    assert "Traceback" not in run.err, run
    told = [line for line in run.err.splitlines() if line.strip()]
    told = [re.sub(r"/\S+", "PATH", line) for line in told]
    assert len(told) == 1 and len(told[0]) < 400, run


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Programs]:
    with programs(tmp_path, PLAIN) as suite:
        yield suite


def test_closed_stdout_is_told_in_a_sentence(plain: Programs) -> None:
    process = plain.start_runner(stdout=subprocess.DEVNULL, preexec_fn=lambda: os.close(1))
    one_sentence(plain.finish(process))
    plain.assert_nothing_left()


def test_full_disk_behind_stdout_is_told_in_a_sentence(plain: Programs) -> None:
    with open("/dev/full", "w") as full:
        one_sentence(plain.finish(plain.start_runner(stdout=full)))
    plain.assert_nothing_left()


@pytest.mark.parametrize("number", [8, 14])
def test_limit_of_open_files_is_told_in_a_sentence(plain: Programs, number: int) -> None:
    """Too few for the runner itself; what a test gets too few of is that test's failure."""
    few = (number, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    run = plain.finish(plain.start_runner(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, few)))
    assert run.code == 2, run
    assert "Traceback" not in run.err, run
    assert "Too many open files" in run.err and "ulimit -n" in run.err, run
    plain.assert_nothing_left()


def test_working_directory_that_is_gone_is_told_in_a_sentence(plain: Programs) -> None:
    folder = plain.folder / "gone"
    folder.mkdir()
    # The shell removes the folder in which it starts the runner.
    script = 'rmdir "$PWD" && exec "$@"'
    python = str(CHECKOUT / "run_test.py")
    process = plain.start(
        ["-c", "import os, sys; os.execvp('sh', ['sh', '-c', *sys.argv[1:]])", script, "sh", "python3", python,
         "--root", str(plain.folder)], {"PATH": f"{Path(os.sys.executable).parent}:{os.environ['PATH']}"}, cwd=folder,
    )  # fmt: skip
    one_sentence(plain.finish(process))
    plain.assert_nothing_left()


def test_cache_that_cannot_be_written_costs_nothing(plain: Programs) -> None:
    (plain.folder / "file").touch()
    run = plain.run("-k", "test_plain", extra={"TORCH_EXT_CACHE": str(plain.folder / "file" / "cache")})
    assert run.code == 0, run
    assert "Traceback" not in run.out + run.err


def test_cache_that_cannot_be_written_is_told_where_a_library_must_be_compiled(plain: Programs) -> None:
    (plain.folder / "file").touch()
    run = plain.run("--device", "sim", extra={"TORCH_EXT_CACHE": str(plain.folder / "file" / "cache")})
    one_sentence(run)


def test_names_that_somebody_else_could_have_written_are_refused(plain: Programs) -> None:
    assert plain.run().status == {"test_fails": "failed", "test_plain": "passed"}
    cache = plain.folder / "cache"
    for entry in cache.rglob("*.json"):
        entry.write_text(entry.read_text().replace("test_fails", "test_plain"))
    for folder in [cache, *(path for path in cache.rglob("*") if path.is_dir())]:
        folder.chmod(0o777)
    run = plain.run()
    assert run.status.get("test_fails") == "failed", run
    told = [line for line in (run.err + run.out).splitlines() if str(cache) in line]
    assert len(told) == 1, run


def test_library_that_somebody_else_could_have_written_is_refused(plain: Programs) -> None:
    cache = plain.folder / "cache"
    (cache / "sim").mkdir(parents=True)
    for folder in (cache, cache / "sim"):
        folder.chmod(0o777)
    # A compiler that fails at once: the folder must be refused before anything is built in it.
    compiler = plain.folder / "cc"
    compiler.write_text("#!/bin/sh\necho fake; case $1 in --version) exit 0;; esac\nexit 1\n")
    compiler.chmod(0o755)
    run = plain.run("--device", "sim", extra={"CXX": str(compiler)})
    one_sentence(run)
    assert str(cache) in run.err, run


PRIVATE = """
import stat


class TestPrivate(Ranks):
    def test_private(self):
        for path in (self.file_name, os.path.dirname(self.file_name)):
            found = os.stat(path)
            self.assertEqual(found.st_uid, os.getuid())
            self.assertEqual(stat.S_IMODE(found.st_mode) & 0o077, 0, path)
"""


def test_scratch_files_are_the_users_alone(tmp_path: Path) -> None:
    with programs(tmp_path, PRIVATE) as suite:
        run = suite.run(preexec_fn=lambda: os.umask(0))
        assert run.status == {"test_private": "passed"}, run
