"""The tests of each file, remembered between runs so that a list needs neither torch nor a test module.

Note [Remembered names]
~~~~~~~~~~~~~~~~~~~~~~~
Only importing a file tells its tests. The answer depends on the file and on the project files that it imports (by
content), on torch, Python and torch_ext (by version) and on the device. A remembered answer is used when all of these
are as they were. It lies in one JSON file for each test file and device, written aside and renamed, so that a reader
sees all of it or none. A cache that cannot be read or written costs time, never an error; a file that failed to import
is never remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch_ext
from torch_ext.runner.discovery import TestFile
from torch_ext.runner.results import TestName

__all__ = ["Collected", "Collector", "NameCache", "collect_names", "surroundings"]

# Devices that a file may count while it is imported.
_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Collected:
    """What importing one file told.

    Attributes:
        file: the file.
        tests: its tests, in the order in which they should run.
        imported: absolute paths of the project files that it imported, directly or not; its own path may be missing.
        error: the traceback if it could not be imported, else empty. Then ``tests`` means nothing.
    """

    file: TestFile
    tests: tuple[TestName, ...] = ()
    imported: tuple[str, ...] = ()
    error: str = ""


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
    visible = {name: os.environ[name] for name in _VISIBLE_DEVICES if name in os.environ}
    versions = {"torch": torch_version, "python": platform.python_version(), "torch_ext": torch_ext.__version__}
    return {**versions, "device": device, **visible}


class NameCache:
    """Reads and writes remembered names. See Note [Remembered names].

    Args:
        folder: where they lie; created when first written to. None: nothing is remembered.
        surroundings: what the names of every file depend on; None as well: nothing is remembered.
    """

    def __init__(self, folder: Path | None, surroundings: Mapping[str, str] | None) -> None:
        self._folder = folder if surroundings is not None else None
        self._surroundings = dict(surroundings or {})
        self._digests: dict[str, str | None] = {}

    def load(self, file: TestFile) -> tuple[TestName, ...] | None:
        """Return the tests of ``file``; None unless they are remembered and still true."""
        if self._folder is None:
            return None
        try:
            entry = json.loads(self._entry_path(self._folder, file).read_bytes())
            if entry["surroundings"] != self._surroundings or str(file.path) not in entry["digests"]:
                return None
            if any(self._digest(path) != digest for path, digest in entry["digests"].items()):
                return None
            return tuple(_test_name(file, pair) for pair in entry["tests"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def store(self, collected: Collected, since_ns: int) -> None:
        """Remember ``collected``, unless it failed or one of its files changed after ``since_ns`` (``time_ns``)."""
        if self._folder is None or collected.error:
            return
        paths = {str(collected.file.path), *collected.imported}
        # A file that changed while it was imported: what was imported is not what lies there now.
        with suppress(OSError):
            if any(os.stat(path).st_mtime_ns >= since_ns for path in paths):
                return
            digests = {path: self._digest(path) for path in sorted(paths)}
            tests = [(test.cls, test.method) for test in collected.tests]
            entry = {"surroundings": self._surroundings, "digests": digests, "tests": tests}
            _write_aside(self._entry_path(self._folder, collected.file), json.dumps(entry))

    def _entry_path(self, folder: Path, file: TestFile) -> Path:
        place = f"{file.path}\0{file.name}\0{self._surroundings.get('device', '')}"
        digest = hashlib.sha256(os.fsencode(place)).hexdigest()
        return folder / "names" / f"{file.path.stem}-{digest[:16]}.json"

    def _digest(self, path: str) -> str | None:
        """Hash of the content, read once a run since many files import the same helpers; None if it is not there."""
        if path not in self._digests:
            self._digests[path] = None
            with suppress(OSError):
                self._digests[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        return self._digests[path]


def _test_name(file: TestFile, pair: Any) -> TestName:
    cls, method = pair
    if not (isinstance(cls, str) and isinstance(method, str)):
        raise TypeError(f"got {pair!r}, expected the names of a class and a method")
    return TestName(file.name, cls, method)


def _write_aside(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise


def collect_names(files: Sequence[TestFile], cache: NameCache, collector: Callable[[], Collector]) -> list[Collected]:
    """Return the tests of every one of ``files``, in their order.

    Files whose names are not remembered go to one collector, which is only made if there are any; its answers are
    remembered. A file to which it gives no answer counts as one that cannot be imported.
    """
    answers = {file: Collected(file, tests) for file in files if (tests := cache.load(file)) is not None}
    unknown = [file for file in files if file not in answers]
    if unknown:
        since_ns = time.time_ns()
        for collected in collector().collect(unknown):
            answers[collected.file] = collected
            cache.store(collected, since_ns)
    return [answers.get(file) or Collected(file, error=_no_answer(file)) for file in files]


def _no_answer(file: TestFile) -> str:
    return f"{file.name}: the process that imports test files ended without naming the tests of this one"
