"""Small programs that must not pass, run from outside, and what their runs said.

A program is a file of tests. It is run by ``run_test.py`` (or in any other way) in a session of its own, so that what
it does to its process group does not reach the tests that judge it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from test.torch_ext.world.faults import marked_processes
from test.torch_ext.world.suites import CHECKOUT, Run, Suite

__all__ = [
    "PATIENCE",
    "PREAMBLE",
    "SLOWER",
    "Programs",
    "check_rows",
    "class_of",
    "first_line",
    "named_first",
    "programs",
    "tells_of_a_hang",
]

# In the environment: how much longer than on a quiet machine a run may take.
PATIENCE = "VERDICT_PATIENCE"
SLOWER = float(os.environ.get(PATIENCE, "1"))
# Far above what any run takes, and below the limits that a run must not wait for.
DEADLINE_S = 60 * SLOWER

PREAMBLE = '''
import atexit, contextlib, ctypes, json, multiprocessing, multiprocessing.util, os, signal, subprocess, sys
import threading, time, unittest
from datetime import timedelta
import torch
import torch.distributed as dist
from torch_ext.testing._internal.common_distributed import (
    DistributedTestBase, MultiProcContinuousTest, MultiProcessTestCase, MultiThreadedTestCase, run_subtests,
    spawn_threads_and_init_comms, with_timeout,
)
from torch_ext.testing._internal.common_utils import TestCase, run_tests

HERE = os.path.dirname(os.path.abspath(__file__))


def note(name, text=""):
    """Leave a note that another process awaits. The note is there as a whole or not at all."""
    path = os.path.join(HERE, name)
    with open(f"{path}.{os.getpid()}", "w") as stream:
        stream.write(str(text))
    os.rename(f"{path}.{os.getpid()}", path)


def await_note(name):
    path, end = os.path.join(HERE, name), time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < end, f"nobody left the note {name}"
        time.sleep(0.01)
    with open(path) as stream:
        return stream.read()


def forever():
    while True:
        time.sleep(1)


class Ranks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        os.environ["PARENT_HALF"] = str(os.getpid())
        self._spawn_processes()

    def join_group(self, seconds=300):
        store = dist.FileStore(self.file_name, self.world_size)
        store.set_timeout(timedelta(seconds=seconds))
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timedelta(seconds=seconds)
        )
        return store

    def check(self):
        """Passes only if every rank is well."""
        self.join_group()
        ones = torch.ones(3)
        dist.all_reduce(ones)
        self.assertEqual(ones, torch.full((3,), float(self.world_size)))


class Standing(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def check(self):
        ones = torch.ones(3)
        dist.all_reduce(ones)
        self.assertEqual(ones, torch.full((3,), float(self.world_size)))


class Threads(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    check = Standing.check
'''


class Programs(Suite):
    """A folder of programs. A run's statuses and texts are found by the last part of a test's, class's or file's id."""

    def add(self, name: str, source: str) -> None:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(PREAMBLE + textwrap.dedent(source))

    def start(self, command: list[str], extra: Mapping[str, str] = {}, **how: Any) -> subprocess.Popen[str]:
        """Start a command in a session of its own; ``how`` goes to ``Popen``."""
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": self.folder, **how}
        return subprocess.Popen(
            [sys.executable, *command], env=self.environment(extra), text=True, errors="replace",
            stdin=subprocess.DEVNULL, start_new_session=True, **how,
        )  # fmt: skip

    def start_runner(self, *arguments: str, extra: Mapping[str, str] = {}, **how: Any) -> subprocess.Popen[str]:
        return self.start([str(CHECKOUT / "run_test.py"), "--root", str(self.folder), "-v", *arguments], extra, **how)

    def finish(
        self,
        process: subprocess.Popen[str],
        parse: Callable[[Run], None] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Run:
        """Wait for the end. A run that takes for ever is ended with all it started, and has no exit code of its own."""
        deadline_s = max(deadline_s, DEADLINE_S)
        start_s = time.monotonic()
        late = ""
        try:
            out, err = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            late = f"\nended from outside: it had not ended by itself after {deadline_s} seconds"
            process.kill()
            self.end_survivors()
            out, err = process.communicate()
        run = Run(process.returncode, out or "", (err or "") + late, time.monotonic() - start_s)
        (parse or _parse)(run)
        return run

    def run(self, *arguments: str, extra: Mapping[str, str] = {}, **how: Any) -> Run:
        """Run the folder by ``run_test.py --root``."""
        return self.finish(self.start_runner(*arguments, extra=extra, **how))

    def await_note(self, name: str, process: subprocess.Popen[str]) -> str:
        """Return the note that a program left, once it is there."""
        end = time.monotonic() + DEADLINE_S
        while not (self.folder / name).exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end, f"nobody left the note {name}"
            time.sleep(0.01)
        return (self.folder / name).read_text()

    def end_survivors(self) -> None:
        while found := marked_processes(self.mark):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def assert_nothing_left(self) -> None:
        assert self.survivors() == {}
        assert self.files_left() == []


@contextlib.contextmanager
def programs(folder: Path, source: str, name: str = "test_suite.py") -> Iterator[Programs]:
    """A folder of programs, whose processes end with the block."""
    suite = Programs(folder, source, name)
    try:
        yield suite
    finally:
        suite.end_survivors()


_WORDS = "passed|failed|skipped|expected failure|unexpected success"


def _endings(run: Run) -> dict[str, tuple[str, str]]:
    """Return the status and the report of each test, class and file, by its id."""
    texts = dict(re.findall(r"^FAILED (\S+)  [\d.]+ s\n(.*?)^rerun: ", run.out, re.MULTILINE | re.DOTALL))
    found = re.findall(rf"^(\S+\.py(?:::\w+)*)  ({_WORDS})  [\d.]+ s", run.out, re.MULTILINE)
    return {name: (status, texts.get(name, "")) for name, status in found}


def _parse(run: Run) -> None:
    """Fill in status and text, by the last part of each id."""
    for name, (status, text) in _endings(run).items():
        run.status[name.rpartition("::")[2]] = status
        if text:
            run.text[name.rpartition("::")[2]] = text


def class_of(
    name: str, base: str, table: Mapping[str, tuple[str, str]], on: str = "self.rank == 1", end: str = ""
) -> str:
    """Return the source of a class that ends so, with a test for each row of ``table``: how that ends, and what its
    rank 1 does, or every rank ``on`` which a condition holds.
    """
    tests = [
        f"    def test_{row}(self):  # {end}\n        if {on}:\n{textwrap.indent(statement, ' ' * 12)}\n"
        for row, (end, statement) in table.items()
    ]
    return "\n".join([f"\n\nclass {name}({base}):{end and '  # '}{end}", *tests])


def _rows_of(name: str, source: str) -> Iterator[tuple[str, str]]:
    """Yield the id of each test, class and file of ``source`` that is to have a result, and how it is to end."""
    cls = ""
    if source.startswith("# "):
        yield name, source.partition("\n")[0][2:]
    for line in source.splitlines():
        head, _, end = line.partition(":  # ")
        if found := re.match(r"class (\w+)\(", head):
            cls = f"{name}::{found[1]}"
            if end:
                yield cls, end
        elif (found := re.match(r"    (?:async )?def (test_\w+)\(self\)", head)) and end != "none":
            yield f"{cls}::{found[1]}", end or "passed"


def _wrong_in(expected: str, status: str, text: str) -> str:
    """Return what is wrong with the end of a row; empty if it is as ``expected``."""
    wanted = re.fullmatch(rf"({_WORDS}|hangs)(?: by ([\d, ]+))?(?:: (.+))?", expected)
    assert wanted, f"no way to end: {expected}"
    ranks = {int(rank) for rank in re.findall(r"\d+", wanted[2] or "")}
    first = re.search(r"^  rank (\d+) .*<- first$", text, re.MULTILINE)
    if status != wanted[1].replace("hangs", "failed"):
        return f"it {status}"
    if wanted[1] == "hangs" and not tells_of_a_hang(text):
        return "it tells of no hang"
    if ranks and (named_first(text) != ranks or (first and int(first[1]) not in ranks)):
        return "it blames other ranks"
    words = wanted[3] or ""
    text = first_line(text) if words.startswith("^") else text
    found = any(all(part in text for part in way.split("...")) for way in words.removeprefix("^").split("|"))
    return "" if found else "the words are missing"


# Else the process of each class would import it for its first test, which takes seconds where many start at once.
_LOADED = "import torch._dynamo\n"


def check_rows(
    folder: Path,
    source: str | Mapping[str, str],
    *arguments: str,
    deadline_s: float = 0.0,
    **how: Any,
) -> Run:
    """Run one file, or several by name, by ``run_test.py``; assert that all ends as the comments in it say.

    Such a comment stands behind the line of a test or class, or is the first line of a file: ``# failed by 1: words``.
    ``# hangs`` is a failure that tells of a hang and not of a time limit.
    The ranks are those that the report begins with. The words stand in the report, in its first line behind ``^``.
    ``|`` means "or", and ``...`` means "and". A test without a comment passes; a class or file has no error of its own;
    ``# none`` stands behind a test that has no result.
    """
    files = {"test_suite.py": source} if isinstance(source, str) else source
    (name, first), *others = files.items()
    with programs(folder, _LOADED + first, name) as suite:
        for other, text in others:
            suite.add(other, _LOADED + text)
        run = suite.finish(suite.start_runner(*arguments, **how), deadline_s=deadline_s)
        expected = dict(row for name, text in files.items() for row in _rows_of(name, text))
        ended = _endings(run)
        wrong = [
            f"{row}: {why}; expected: {end}\n{text}"
            for row, end in expected.items()
            for status, text in [ended.get(row, ("never ran", ""))]
            if (why := _wrong_in(end, status, text))
        ]
        assert not wrong, "\n\n".join([*wrong, run.out[-2000:], run.err[-5000:]])
        assert ended.keys() == expected.keys(), f"{ended.keys() - expected.keys()}\n{run}"
        number = [status for status, _ in ended.values()]
        passed = number.count("passed") + number.count("expected failure")
        counts = f"{passed} passed, {number.count('failed')} failed, {number.count('skipped')} skipped"
        assert run.out.splitlines()[-1].startswith(counts), run
        assert run.code == (1 if "failed" in number else 0), run
        assert not [text for _, text in ended.values() if "receipt" in first_line(text)], "this is a word of ours"
        suite.assert_nothing_left()
    return run


def first_line(text: str) -> str:
    """The line of a report that says what happened."""
    return text.strip().partition("\n")[0]


def named_first(text: str) -> set[int]:
    """Return the ranks that a report blames: those that it begins with.

    >>> named_first("rank 1 never called barrier, which ranks 0, 2 waited in (test_a.py:7)")
    {1}
    >>> named_first("ranks 0-2, 4 raised ValueError; rank 3 failed in another way") == {0, 1, 2, 4}
    True
    """
    line = first_line(text)
    number = r"(\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)"
    found = re.match(rf"ranks? {number}", line)
    ranks: set[int] = set()
    for part in found[1].split(", ") if found else []:
        low, _, high = part.partition("-")
        ranks |= set(range(int(low), int(high or low) + 1))
    return ranks


def tells_of_a_hang(text: str) -> bool:
    """Whether a report says that the ranks hang, and not that a time limit passed."""
    return bool(re.search(r"\bhang|\bhung\b|deadlock", text)) and "timed out" not in first_line(text)
