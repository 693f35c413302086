"""What a report says of a failure: all that its reader needs, of any length, and nothing that is not true."""

from __future__ import annotations

import os
import pty
import re
import threading
from collections.abc import Iterator

import pytest

from test.torch_ext.verdict.programs import SLOWER, Programs, first_line, named_first, programs
from test.torch_ext.world.suites import Run

SOURCE = """
libc = ctypes.CDLL(None)


def chain(length):
    error = ValueError("the innermost")
    for number in range(length):
        try:
            raise ValueError(f"link {number}") from error
        except ValueError as caught:
            error = caught
    raise ValueError("the outermost") from error


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
def deeper(depth):
    return deeper(depth + 1)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(one)
        self.lock = threading.Lock()


class TestReports(Ranks):
    def test_a_megabyte(self):
        if self.rank == 1:
            raise ValueError("word " * 200_000)

    def test_a_megabyte_on_each_rank(self):
        raise ValueError("word " * 200_000 + str(self.rank))

    def test_deep_chain(self):
        if self.rank == 1:
            chain(2000)

    def test_overflow_of_the_c_stack(self):
        if self.rank == 1:
            for number in range(8):
                threading.Thread(target=forever, daemon=True).start()
            sys.setrecursionlimit(10**9)
            deeper(0)

    def test_numbers_in_output(self):
        print("hello from rank", self.rank)
        self.fail("to see the output")

    def test_long_command_line_left(self):
        if self.rank == 1:
            subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(6543)", "x" * 5000], start_new_session=True
            )
            self.fail("to see the process")

    def test_hangs_after_its_receipt(self):
        if self.rank == 1:
            multiprocessing.util.Finalize(None, forever, exitpriority=1)

    def test_thread_outlives_the_receipt(self):
        if self.rank == 1:
            threading.Thread(target=forever).start()

    def test_system_call_is_not_cut_short(self):
        if self.rank == 1:
            libc.pause()
            os.write(2, b"the system call came back\\n")
            raise ValueError("the system call was cut short")

    def test_abort_of_gloo(self):
        self.join_group()
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3 if self.rank == 0 else 5000))

    def test_abort_of_the_allocator(self):
        self.join_group()
        if self.rank == 1:
            libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
            memory = libc.malloc(5000)
            libc.free(memory)
            libc.free(memory)
        dist.barrier()

    def test_unprintable(self):
        if self.rank == 1:
            raise Unprintable

    def test_unpicklable(self):
        if self.rank == 1:
            raise Unpicklable(1, 2)

    def test_surrogates(self):
        if self.rank == 1:
            raise ValueError("half a pair: \\ud800")

    def test_group_of_exceptions(self):
        if self.rank == 1:
            raise ExceptionGroup("several", [ValueError("one of them"), KeyError("another")])

    def test_zz_next(self):
        self.check()
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with programs(tmp_path_factory.mktemp("reports"), SOURCE) as suite:
        yield suite


@pytest.fixture(scope="module")
def run(suite: Programs) -> Run:
    return suite.run("--timeout", "4")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a_megabyte", r"ValueError at test_suite.py:\d+: word word"),
        ("deep_chain", r"ValueError at test_suite.py:\d+: the outermost"),
        ("overflow_of_the_c_stack", "was killed by SIGSEGV"),
        ("long_command_line_left", r"AssertionError at test_suite.py:\d+: to see the process"),
        ("unprintable", r"Unprintable at test_suite.py:\d+: <exc"),
        ("unpicklable", r"Unpicklable at test_suite.py:\d+: 1"),
        ("surrogates", r"ValueError at test_suite.py:\d+: half a pair: \\ud800"),
        ("group_of_exceptions", r"ExceptionGroup at test_suite.py:\d+: several"),
    ],
)
def test_the_first_line_names_rank_and_failure(run: Run, name: str, words: str) -> None:
    assert run.status[f"test_{name}"] == "failed", run
    line = first_line(run.text[f"test_{name}"])
    assert named_first(line) == {1}, line
    assert re.search(words, line), line


def test_a_megabyte_on_each_rank_is_a_failure_of_both(run: Run) -> None:
    line = first_line(run.text["test_a_megabyte_on_each_rank"])
    assert named_first(line) == {0, 1} and "word word" in line, line


def test_a_deep_chain_is_cut(run: Run) -> None:
    text = run.text["test_deep_chain"]
    assert "the innermost" in text or "link 0" in text or "more" in text or "left out" in text
    assert "RecursionError" not in text
    assert len(text) < 200_000


def test_the_first_line_of_a_crash_is_kept(run: Run) -> None:
    assert "Fatal Python error: Segmentation fault" in run.text["test_overflow_of_the_c_stack"]


def test_output_of_ranks_that_differs_in_a_number_is_shown_for_each(run: Run) -> None:
    text = run.text["test_numbers_in_output"]
    assert "hello from rank 0" in text and "hello from rank 1" in text, text


def test_command_line_of_a_process_left_behind_is_cut(run: Run) -> None:
    text = run.text["test_long_command_line_left"]
    assert "left a process behind" in text
    assert "x" * 101 not in text


@pytest.mark.parametrize("name", ["hangs_after_its_receipt", "thread_outlives_the_receipt"])
def test_rank_that_hangs_after_its_receipt_is_told_so(run: Run, name: str) -> None:
    text = run.text[f"test_{name}"]
    assert named_first(text) == {1}, text
    assert re.search(r"after (its|the) (test|body|receipt)", first_line(text)), text
    assert "in forever" in text


def test_collecting_stacks_cuts_no_system_call_short(run: Run) -> None:
    text = run.text["test_system_call_is_not_cut_short"]
    assert "cut short" not in text
    assert "came back" not in text
    assert "test_system_call_is_not_cut_short" in text.partition("Stacks")[2], text


def test_abort_inside_gloo_is_told_with_what_the_rank_printed_and_what_its_peer_called(run: Run) -> None:
    text = run.text["test_abort_of_gloo"]
    assert "SIGABRT" in first_line(text), text
    (aborted,) = re.findall(r"^  rank (\d) was killed by SIGABRT", text, re.MULTILINE)
    assert named_first(text) == {int(aborted)}, text
    assert "terminate called after throwing" in text, text
    assert "#2 gloo:all_reduce([" in text, text


def test_abort_where_nothing_can_be_said_ends_the_rank_all_the_same(run: Run) -> None:
    text = run.text["test_abort_of_the_allocator"]
    assert re.fullmatch(r"rank 1 was killed by SIGABRT at test_suite.py:\d+", first_line(text)), text


def test_the_test_after_all_these_passes(run: Run, suite: Programs) -> None:
    assert run.status["test_zz_next"] == "passed", run
    suite.assert_nothing_left()


IMPORTS = """
if os.environ.get("PARENT_HALF"):
    forever()  # in a rank that imports this file


class TestImports(Ranks):
    def test_still_importing(self):
        pass
"""


def test_ranks_that_still_import_at_the_limit_are_told_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    with programs(tmp_path_factory.mktemp("imports"), IMPORTS) as suite:
        run = suite.run("--start-method", "interpreter", "--timeout", "8")
        text = run.text["test_still_importing"]
        assert named_first(text) == {0, 1}, text
        assert "import" in first_line(text), text
        suite.assert_nothing_left()


CROWD = """
SPINS = "import os; parent = os.getppid()\\nwhile os.getppid() == parent: pass"


class TestCrowd(Ranks):
    def test_computes_in_a_crowd(self):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for _ in range(2):
            subprocess.Popen([sys.executable, "-S", "-E", "-c", SPINS])
        while True:
            pass

    def test_sleeps(self):
        time.sleep(1000)
"""


def test_ranks_that_wait_for_a_core_until_the_limit_are_told_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    with programs(tmp_path_factory.mktemp("crowd"), CROWD) as suite:
        run = suite.run("--timeout", "4")
        text, other = run.text["test_computes_in_a_crowd"], run.text["test_sleeps"]
        assert named_first(text) == {0, 1} and "timed out" in first_line(text), text
        assert len(re.findall(r"^    waited for a core for [\d.]+ s of these$", text, re.MULTILINE)) == 2, text
        assert "run fewer tests at once (-j, --slots), or raise --timeout" in text, text
        assert "timed out" in first_line(other) and (SLOWER > 1 or "for a core" not in other), other
        suite.assert_nothing_left()


ESCAPES = r"""
BAD = "\x1b]0;owned\x07 \x1b[2J\0 \x9b5m \r overwritten \x08\x08"


class TestEscapes(Ranks):
    def test_message(self):
        raise ValueError(BAD)

    def test_output(self):
        print(BAD)
        self.fail("to see the output")

    def test_skip(self):
        self.skipTest(BAD)

    def test_parent_half(self):
        pass

    def test_left(self):
        subprocess.Popen(["sh", "-c", "sleep 6543; : \x1b]0;owned\x07"], start_new_session=True)

    def tearDown(self):
        super().tearDown()
        print(BAD)
        if "parent_half" in self._testMethodName:
            raise ValueError(BAD)
"""


@pytest.mark.parametrize("option", ["-v", "--show-output"])
def test_escape_sequences_do_not_reach_the_terminal(tmp_path_factory: pytest.TempPathFactory, option: str) -> None:
    with programs(tmp_path_factory.mktemp("escapes"), ESCAPES) as suite:
        ours, theirs = pty.openpty()
        shown = bytearray()

        def read() -> None:
            try:
                while part := os.read(ours, 1 << 16):
                    shown.extend(part)
            except OSError:  # the terminal is closed
                return

        reader = threading.Thread(target=read)
        process = suite.start_runner(option, extra={"TERM": "xterm"}, stdout=theirs, stderr=theirs)
        os.close(theirs)
        reader.start()
        run = suite.finish(process)
        reader.join()
        os.close(ours)
        assert run.code == 1, shown
        assert b"owned" in shown
        for raw in (b"\x1b]0;", b"\x1b[2J", b"\0", b"\x9b5m", b"\x08"):
            assert raw not in shown, raw
