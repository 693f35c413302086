"""What happens around a body: its cleanups after a skip, overrides that never call it, functions called at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from test.torch_ext.verdict.programs import Programs, first_line, named_first, programs
from test.torch_ext.world.suites import Run

SOURCE = """
import tempfile, weakref


def fail():
    raise ValueError("it failed")


class TestRanks(Ranks):
    def test_temporary_folder_stays(self):
        type(self).folder = tempfile.TemporaryDirectory(dir=HERE, prefix="left")

    def test_finalizer_runs(self):
        type(self).watched = weakref.finalize(self.test_next, print)
        self.watched.detach()
        weakref.finalize(type(self), note, f"finalized{self.rank}")

    def test_thread_joins_the_main_thread(self):
        threading.Thread(target=threading.main_thread().join).start()

    def test_finalizer_fails(self):
        if self.rank == 1:
            weakref.finalize(type(self), fail)

    def test_next(self):
        self.check()


class TestNoTearDown(Standing):
    @classmethod
    def tearDownClass(cls):
        pass

    def test_rank_exits_at_the_end(self):
        if self.rank == 1:
            atexit.register(os._exit, 3)


class Overrides(Ranks):
    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **kwargs):
        self = cls(test_name)
        self.rank, self.file_name = rank, file_name
        if rank == 0 or "returns" not in test_name:
            with contextlib.suppress(AssertionError):
                getattr(self, test_name)()


class TestOverrides(Overrides):
    def test_override_calls_the_body(self):
        pass

    def test_override_returns(self):
        pass

    def test_override_swallows(self):
        if self.rank == 1:
            self.fail("no")


class TestStandingOverrides(Standing):
    @classmethod
    def _run_test_given_id(cls, test_id, **kwargs):
        name = test_id.rpartition(".")[2]
        if cls.rank == 0 or "returns" not in name:
            with contextlib.suppress(AssertionError):
                getattr(cls(name), name)()

    def test_standing_1_calls_the_body(self):
        pass

    def test_standing_2_returns(self):
        pass

    def test_standing_3_swallows(self):
        if type(self).rank == 1:
            self.fail("no")


class TestHandler(TestCase):
    def test_handler(self):
        atexit.register(note, "handled")
        type(self).folder = tempfile.TemporaryDirectory(dir=HERE, prefix="left")


class TestHandlerExits(TestCase):
    def test_handler_exits(self):
        atexit.register(os._exit, 0)


class TestHandlerRaises(TestCase):
    def test_handler_raises(self):
        atexit.register(fail)
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("around"), SOURCE) as suite:
        yield suite


@pytest.fixture(scope="module")
def run(suite: Programs) -> Run:
    return suite.run()


@pytest.mark.parametrize(
    ("name", "words", "ranks"),
    [
        ("finalizer_fails", "a finalizer registered with weakref raised: ValueError: it failed", {1}),
        ("override_returns", "the test method has not run to its end", {1}),
        ("override_swallows", "the test method has not run to its end", {1}),
        ("standing_2_returns", "the test method has not run to its end", {1}),
        ("standing_3_swallows", "the test method has not run to its end", {1}),
    ],
)
def test_what_goes_wrong_around_a_body_fails_the_test(run: Run, name: str, words: str, ranks: set[int]) -> None:
    assert run.status[f"test_{name}"] == "failed", run
    assert words in first_line(run.text[f"test_{name}"]), run
    assert named_first(run.text[f"test_{name}"]) == ranks, run


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        ("TestNoTearDown", "rank 1 exited with code 3"),
        ("TestHandlerExits", "exited with code 0"),
        ("TestHandlerRaises", "a function registered with atexit raised: ValueError: it failed"),
    ],
)
def test_what_goes_wrong_at_the_end_of_a_class_is_an_error_of_the_class(run: Run, cls: str, words: str) -> None:
    assert run.status[cls] == "failed", run
    assert words in run.text[cls], run


def test_the_rest_passes_and_what_was_registered_is_called(run: Run, suite: Programs) -> None:
    for name in (
        "temporary_folder_stays",
        "finalizer_runs",
        "thread_joins_the_main_thread",
        "next",
        "override_calls_the_body",
        "standing_1_calls_the_body",
        "handler",
    ):
        assert run.status[f"test_{name}"] == "passed", run
    assert {path.name for path in suite.folder.glob("*nal*")} == {"finalized0", "finalized1"}
    assert (suite.folder / "handled").exists()
    assert list(suite.folder.glob("left*")) == []
