"""The tests of each file, remembered between runs so that a list needs neither torch nor a test module.

Note [Remembered names]
~~~~~~~~~~~~~~~~~~~~~~~
Only importing a file tells its tests. The answer depends on the file and on the project files that it imports (by
content), on torch, Python and torch_ext (by version), on the device, and on what else the import read: data files,
folders, environment variables. A remembered answer is used when all of these are as they were. It lies in one JSON file
for each test file and device, written aside and renamed, so that a reader sees all of it or none. A cache that cannot
be read or written costs time, never an error; a file that failed to import is never remembered. Nor are names used
that somebody else could have written; see Note [Trusted folders].

An import may do what nobody can repeat, such as start a process. Its answer is kept for comparison only, and the file
imported again each time. Whatever was not seen, a run finds out before a file's first test: what it then has is what
runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch_ext
from torch_ext import cache
from torch_ext.runner.discovery import TestFile
from torch_ext.runner.results import Needs, TestName

__all__ = ["Collected", "Collector", "NameCache", "Remembered", "collect_names", "describe_difference", "surroundings"]

_NAMES = "names"  # the folder below the cache's
# Devices that a file may count while it is imported.
_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")

# Prefixes of what torch's test utilities ask for, which are imported before any test file is.
_TEST_VARIABLES = ("PYTORCH_TEST", "TEST_WITH_", "DISTRIBUTED_TESTS_")
# Data files above this size are told apart by size and time, not by content.
_LARGE_BYTES = 4 << 20


@dataclass(frozen=True)
class Collected:
    """What importing one file told.

    Attributes:
        file: the file.
        tests: its tests, in the order in which they should run.
        imported: absolute paths of the project files that it imported, directly or not; its own path may be missing.
        paths: absolute paths of other files that it read and of folders that it listed meanwhile.
        variables: environment variables that it asked for meanwhile.
        unsure: what else its tests may depend on, in words; empty if nothing.
        remembered: whether the answer was not told by an import but remembered.
        before: the tests that were remembered of the same code, where they are no longer sure to be right.
        error: the traceback if it could not be imported, else empty. Then ``tests`` means nothing.
        needs: what each of ``tests`` asks for, in their order; empty if that is not known.
        device: the device type that they test, as far as it is known.
        left: why the file asked not to be run while it was imported, and ``error`` says the same; else empty.
    """

    file: TestFile
    tests: tuple[TestName, ...] = ()
    imported: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    unsure: str = ""
    remembered: bool = False
    before: tuple[TestName, ...] | None = None
    error: str = ""
    needs: tuple[Needs, ...] = ()
    left: str = ""
    device: str = ""


class Collector(Protocol):
    """Imports test files, in a process of its own, and tells their tests."""

    def collect(self, files: Sequence[TestFile]) -> Iterator[Collected]:
        """Yield one answer for each of ``files``, in any order.

        Called at most once a run, on the main thread, and only with files whose names are not remembered. May block
        as long as imports take. A file that cannot be imported is an answer, not an exception.
        """
        ...


def surroundings(device: str) -> dict[str, str] | None:
    """Return what the names of every file depend on, for the device type ``device`` (empty: the machine decides).

    None if the version of torch cannot be told without importing it; names are then not remembered.
    """
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    asked = {name for name in os.environ if name.startswith(_TEST_VARIABLES)}.union(_VISIBLE_DEVICES)
    visible = {name: os.environ[name] for name in sorted(asked) if name in os.environ}
    versions = {"torch": torch_version, "python": platform.python_version(), "torch_ext": torch_ext.__version__}
    return {**versions, "device": device, **visible}


@dataclass(frozen=True)
class Remembered:
    """The tests of a file as an earlier run found them; ``sure`` if all that they depend on is as it was.

    ``needs`` and ``imported`` are as in :class:`Collected`.
    """

    tests: tuple[TestName, ...]
    sure: bool
    needs: tuple[Needs, ...] = ()
    imported: tuple[str, ...] = ()


class NameCache:
    """Reads and writes remembered names. See Note [Remembered names].

    Args:
        folder: where they lie; created when first written to. None: nothing is remembered.
        surroundings: what the names of every file depend on; None as well: nothing is remembered.
        environment: the environment in which files are imported.

    Attributes:
        refused: why the folder is not used, in a sentence with the remedy; empty if it is.
    """

    def __init__(
        self,
        folder: Path | None,
        surroundings: Mapping[str, str] | None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.refused = cache.why_not_trusted(folder / _NAMES) if folder is not None and surroundings is not None else ""
        self._folder = folder if surroundings is not None and not self.refused else None
        self._surroundings = dict(surroundings or {})
        self._environment = environment
        self._digests: dict[str, str | None] = {}

    def load(self, file: TestFile) -> Remembered | None:
        """Return the tests of ``file``; None unless they are remembered of the code that now lies there."""
        if self._folder is None:
            return None
        try:
            entry = json.loads(_read_own(self._entry_path(self._folder, file)))
            if entry["surroundings"] != self._surroundings or str(file.path) not in entry["digests"]:
                return None
            if any(self._digest(path) != digest for path, digest in entry["digests"].items()):
                return None
            tests = tuple(_test_name(file, pair) for pair in entry["tests"])
            needs = tuple(_needs(counts) for counts in entry["needs"])
            return Remembered(tests, self._is_sure(entry), needs, tuple(entry["digests"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def _is_sure(self, entry: Any) -> bool:
        return (
            not entry["unsure"]
            and all(self._fingerprint(path) == digest for path, digest in entry["paths"].items())
            and all(self._value(name) == digest for name, digest in entry["variables"].items())
        )

    def store(self, collected: Collected, since_ns: int) -> None:
        """Remember ``collected``, unless it failed or one of its files changed after ``since_ns`` (``time_ns``)."""
        if self._folder is None or collected.error:
            return
        code = {str(collected.file.path), *collected.imported}
        # A file that changed while it was imported: what was imported is not what lies there now.
        with suppress(OSError):
            if any(os.stat(path).st_mtime_ns >= since_ns for path in code):
                return
            entry = {
                "surroundings": self._surroundings,
                "digests": {path: self._digest(path) for path in sorted(code)},
                "paths": {path: self._fingerprint(path) for path in collected.paths},
                "variables": {name: self._value(name) for name in collected.variables},
                "unsure": collected.unsure or _changed_since(collected.paths, since_ns),
                "tests": [(test.cls, test.method) for test in collected.tests],
                "needs": [_counts(each) for each in collected.needs],
            }
            _write_aside(self._entry_path(self._folder, collected.file), json.dumps(entry))

    def forget(self, file: TestFile) -> None:
        """Forget the tests of ``file``, which has turned out to have others."""
        if self._folder is not None:
            with suppress(OSError):
                os.unlink(self._entry_path(self._folder, file))

    def _entry_path(self, folder: Path, file: TestFile) -> Path:
        place = f"{file.path}\0{file.name}\0{self._surroundings.get('device', '')}"
        digest = hashlib.sha256(os.fsencode(place)).hexdigest()
        return folder / _NAMES / f"{file.path.stem}-{digest[:16]}.json"

    def _digest(self, path: str) -> str | None:
        """Hash of the content, read once a run since many files import the same helpers; None if it is not there."""
        if path not in self._digests:
            self._digests[path] = None
            with suppress(OSError):
                self._digests[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        return self._digests[path]

    def _fingerprint(self, path: str) -> str | None:
        """What tells the content of a data file or a folder's list of entries apart; None if it is not there."""
        if os.path.isdir(path):
            return _hash("\0".join(sorted(name for name in os.listdir(path) if name != "__pycache__")))
        with suppress(OSError):
            found = os.stat(path)
            if found.st_size > _LARGE_BYTES or not stat.S_ISREG(found.st_mode):
                return f"{found.st_size} bytes at {found.st_mtime_ns}"
        return self._digest(path)

    def _value(self, name: str) -> str | None:
        value = self._environment.get(name)
        return None if value is None else _hash(value)  # it may be a secret


def _hash(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def _changed_since(paths: Sequence[str], since_ns: int) -> str:
    for path in paths:
        with suppress(FileNotFoundError):
            if os.stat(path).st_mtime_ns >= since_ns:
                return f"{path} changed meanwhile"
    return ""


def _read_own(path: Path) -> bytes:
    """Return the content of a file of the user's.

    Raises:
        OSError: it cannot be read, or somebody else could have written it.
    """
    found = os.stat(path)
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write {path}")
    return path.read_bytes()


def _test_name(file: TestFile, pair: Any) -> TestName:
    cls, method = pair
    if not (isinstance(cls, str) and isinstance(method, str)):
        raise TypeError(f"got {pair!r}, expected the names of a class and a method")
    return TestName(file.name, cls, method)


def _needs(counts: Any) -> Needs:
    if not all(type(count) is int for count in counts):
        raise TypeError(f"got {counts!r}, expected numbers")
    world_size, processes, devices, alone, hosts = counts
    return Needs(world_size, processes, devices, bool(alone), hosts)


def _counts(needs: Needs) -> tuple[int, ...]:
    """The form in which needs are stored."""
    return needs.world_size, needs.processes, needs.devices, int(needs.alone), needs.hosts


def _write_aside(path: Path, text: str) -> None:
    cache.make(path.parent)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise


def collect_names(
    files: Sequence[TestFile],
    names: NameCache,
    collector: Callable[[], Collector],
    tell: Callable[[int], None] = lambda number: None,
) -> list[Collected]:
    """Return the tests of every one of ``files``, in their order. ``tell`` is told how many are imported for that.

    Files whose names are not remembered for sure go to one collector, which is only made if there are any; its answers
    are remembered. A file to which it gives no answer counts as one that cannot be imported.
    """
    known = {file: found for file in files if (found := names.load(file)) is not None}
    answers = {
        file: Collected(file, found.tests, found.imported, remembered=True, needs=found.needs)
        for file, found in known.items()
        if found.sure
    }
    unknown = [file for file in files if file not in answers]
    if unknown:
        tell(len(unknown))
        since_ns = time.time_ns()
        for collected in collector().collect(unknown):
            before = known.get(collected.file)
            answers[collected.file] = replace(collected, before=before.tests if before else None)
            names.store(collected, since_ns)
    return [answers.get(file) or Collected(file, error=_no_answer(file)) for file in files]


def describe_difference(file: TestFile, before: Sequence[TestName], now: Sequence[TestName]) -> str:
    """Say, in one sentence, that ``file`` has other tests than were remembered; empty if it has the same.

    >>> file = TestFile("test_a.py", Path("/x/test_a.py"), "test_a", Path("/x"))
    >>> one, two = TestName("test_a.py", "TestA", "test_1"), TestName("test_a.py", "TestA", "test_2")
    >>> describe_difference(file, [one], [two])
    'test_a.py has other tests than were remembered (1 new, 1 gone), though its code is the same; the new ones count'
    >>> describe_difference(file, [one], [one])
    ''
    """
    new, gone = len(set(now) - set(before)), len(set(before) - set(now))
    if not new and not gone:
        return ""
    counts = ", ".join(f"{number} {word}" for number, word in ((new, "new"), (gone, "gone")) if number)
    return (
        f"{file.name} has other tests than were remembered ({counts}), though its code is the same; the new ones count"
    )


def _no_answer(file: TestFile) -> str:
    return f"{file.name}: the process that imports test files ended without naming the tests of this one"
