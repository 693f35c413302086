"""What the base classes promise, on real ranks: forked ones and fresh interpreters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from test.torch_ext.world.suites import Run, Suite

SOURCE = """
import json, multiprocessing.util

os.environ["SET_ON_IMPORT"] = "by the file"


class TestConformance(Case):
    def test_environment_of_the_moment(self):
        self.assertEqual(os.environ["SET_IN_SET_UP"], self._testMethodName)
        self.assertEqual(os.environ["SET_ON_IMPORT"], "by the file, then by setUp")
        self.assertEqual(os.getcwd(), os.path.dirname(os.path.abspath(__file__)))

    def setUp(self):
        os.environ["SET_IN_SET_UP"] = self._testMethodName
        os.environ["SET_ON_IMPORT"] = os.environ["SET_ON_IMPORT"].partition(",")[0] + ", then by setUp"
        os.chdir(os.path.dirname(os.path.abspath(__file__)))
        super().setUp()

    def test_collective(self):
        self.check()

    def test_failure(self):
        inject("raise", rank=self.rank, at=1)


class TestProcesses(Case):
    def setUp(self):
        super().setUp()
        # As upstream's suites write it; only the test that runs is wrapped.
        self.special_return_code_checks = {getattr(self.test_expected_kill, "__wrapped__", None): -9}
        self.skip_return_code_checks = [getattr(self.test_any_exit, "__wrapped__", None)]

    def test_expected_kill(self):
        inject("sigkill", rank=self.rank, at=self.rank)

    def test_any_exit(self):
        inject("exit_3", rank=self.rank, at=0)
        inject("sigkill", rank=self.rank, at=1)

    def test_output(self):
        print("hello from", self.rank)

    def test_no_imports(self):
        if self.rank:
            return
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "imported")

        def tell():
            with open(path, "w") as stream:
                json.dump(sorted(set(sys.modules) - LOADED), stream)

        multiprocessing.util.Finalize(None, tell, exitpriority=-100)


class TestLikeProcesses(Case):
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


class TestRunWithKwargs(Case):
    @classmethod
    def _run(cls, rank, test_name, file_name, parent_pipe, **kwargs):
        assert set(kwargs) == {"fake_pg"}, kwargs
        os.environ["CAME_BY"] = "kwargs"
        super()._run(rank, test_name, file_name, parent_pipe, **kwargs)

    def test_run(self):
        self.assertEqual(os.environ["CAME_BY"], "kwargs")


class TestRunWithoutKwargs(Case):
    @classmethod
    def _run(cls, rank, test_name, file_name, parent_pipe):
        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        os.environ["CAME_BY"] = "no kwargs"
        self.run_test(test_name, parent_pipe)

    def test_run(self):
        self.assertEqual(os.environ["CAME_BY"], "no kwargs")


class TestContinuous(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def check(self):
        ones = torch.ones(3)
        dist.all_reduce(ones)
        self.assertEqual(ones, torch.full((3,), 2.0))

    def test_a_good(self):
        self.check()

    def test_b_failure(self):
        inject("raise", rank=self.rank, at=1)

    def test_c_good(self):
        self.check()

    def test_d_death(self):
        inject("sigkill", rank=self.rank, at=1)
        self.check()

    def test_e_good(self):
        self.check()

    @with_timeout(3)
    def test_f_hang(self):
        inject("hang", rank=self.rank, at=0)

    def test_g_good(self):
        self.check()


class TestThreaded(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def check(self):
        ones = torch.ones(3)
        dist.all_reduce(ones)
        self.assertEqual(ones, torch.full((3,), 2.0))

    def test_a_good(self):
        self.check()

    def test_b_failure(self):
        inject("raise", rank=self.rank, at=1)
        self.check()

    def test_c_good(self):
        self.check()

    def test_d_death(self):
        inject("sigsegv", rank=self.rank, at=1)
        self.check()

    @with_timeout(3)
    def test_f_hang(self):
        inject("hang", rank=self.rank, at=0)

    def test_g_good(self):
        self.check()


# The modules that a forked rank starts with.
LOADED = set()
os.register_at_fork(after_in_child=lambda: LOADED.update(sys.modules))
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    suite = Suite(tmp_path_factory.mktemp("classes"), SOURCE)
    yield suite
    suite.end_survivors()


@pytest.fixture(scope="module")
def run(suite: Suite) -> Run:
    return suite.run()


def of(run: Run, cls: str) -> list[tuple[str, str]]:
    """Return the name and status of each test of a class, in order."""
    return re.findall(rf"^test_suite\.py::{cls}::(\w+)  (\w+)", run.out, re.MULTILINE)


@pytest.mark.parametrize("cls", ["TestLikeProcesses", "TestRunWithKwargs", "TestRunWithoutKwargs", "TestProcesses"])
def test_class_behaves_as_upstreams(run: Run, cls: str) -> None:
    assert of(run, cls), run
    assert {status for _, status in of(run, cls)} == {"passed"}, run


def test_empty_rank_imports_nothing(run: Run, suite: Suite) -> None:
    assert json.loads((suite.folder / "imported").read_text()) == []


@pytest.mark.parametrize("cls", ["TestContinuous", "TestThreaded"])
def test_shared_ranks_survive_a_failure_a_death_and_a_hang(run: Run, cls: str) -> None:
    endings = dict(of(run, cls))
    assert {name for name, status in endings.items() if status == "passed"} == {n for n in endings if "good" in n}, run
    assert len(endings) == {"TestContinuous": 7, "TestThreaded": 6}[cls]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("TestContinuous::test_b_failure", "rank 1 raised ValueError at faults.py:"),
        ("TestContinuous::test_d_death", "rank 1 was killed by SIGKILL at faults.py:"),
        ("TestContinuous::test_f_hang", "rank 0 timed out at faults.py:"),
        ("TestThreaded::test_b_failure", "rank 1 raised ValueError at faults.py:"),
        ("TestThreaded::test_d_death", "The parent half of the test was killed by SIGSEGV."),
        ("TestThreaded::test_f_hang", "rank 0 timed out at faults.py:"),
    ],
)
def test_shared_ranks_name_the_culprit(run: Run, name: str, words: str) -> None:
    block = run.out.partition(f"FAILED test_suite.py::{name}")[2]
    assert block.partition("\n")[2].lstrip().startswith(words), run


def test_crash_of_the_parent_half_shows_where_and_nothing_of_the_harness(run: Run) -> None:
    block = run.out.partition("FAILED test_suite.py::TestThreaded::test_d_death")[2].partition("\nrerun: ")[0]
    assert "    Fatal Python error: Segmentation fault\n" in block
    assert "in _sigsegv\n" in block
    assert not re.search("Extension modules|/runner/case|/world/zygote", block), block


@pytest.fixture(scope="module")
def by_interpreter(suite: Suite) -> Run:
    return suite.run("-i", "test_suite.py::TestConformance", extra={"TORCH_EXT_START_METHOD": "interpreter"})


@pytest.mark.parametrize("start", ["run", "by_interpreter"])
def test_ranks_conform_however_they_start(start: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(start)
    assert dict(of(run, "TestConformance")) == {
        "test_collective": "passed",
        "test_environment_of_the_moment": "passed",
        "test_failure": "failed",
    }, run
    assert re.search(r"rank 1 raised ValueError at faults.py:\d+: injected", run.out)


def test_output_is_passed_through_with_the_rank_in_front(suite: Suite) -> None:
    run = suite.run("-i", "test_suite.py::TestProcesses::test_output", "--show-output")
    assert run.code == 0, run
    for rank in (0, 1):
        assert f"[rank {rank}] hello from {rank}\n" in run.out + run.err, run


def test_nothing_outlives_the_runs(run: Run, by_interpreter: Run, suite: Suite) -> None:
    assert suite.survivors() == {}
    assert suite.files_left() == []


# Time limits


class _Named:
    def test_it(self) -> None: ...

    def id(self) -> str:
        return "module.Class.test_it"


def limit(monkeypatch: pytest.MonkeyPatch, *, test: Any = None, cls: Any = None, asked: str = "") -> float:
    from torch_ext.testing._internal._distributed.timeouts import timeout_of, with_timeout

    monkeypatch.setenv("TORCH_EXT_TIMEOUT", asked)
    case = type("Class", (_Named,), {"timeout": cls} if cls is not None else {})
    if test is not None:

        def test_it(self: object) -> None: ...

        case.test_it = with_timeout(test)(test_it)  # type: ignore[attr-defined]
    return timeout_of(case())


def test_time_limit_of_the_command_beats_test_beats_class_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_ext.testing._internal._distributed import timeouts

    assert limit(monkeypatch) == timeouts.TIMEOUT_DEFAULT
    monkeypatch.setitem(timeouts.TIMEOUT_OVERRIDE, "test_it", 77)
    assert limit(monkeypatch) == 77
    assert limit(monkeypatch, cls=timedelta(minutes=1)) == 60
    assert limit(monkeypatch, cls=5) == 5
    assert limit(monkeypatch, cls=5, test=6.5) == 6.5
    assert limit(monkeypatch, cls=5, test=6.5, asked="8") == 8
