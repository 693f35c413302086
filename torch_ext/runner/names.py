"""The test files below a root, and the tests of each, in a cache so that a list needs neither torch nor a test module.

Note [Cached names]
~~~~~~~~~~~~~~~~~~~
Only an import shows the tests of a file. The key of a cached answer is content: the file's own and that of each project
file that it imported, with the versions of torch, Python and torch_ext, the device, and the variables that torch's test
utilities read. Tests that a file makes from anything else, such as a data file, may have changed under the same key. So
a list says that its names are cached, and a run uses them only to leave out files without a selected test: it imports
the others, and plans by what they hold then.

Each test file and device has one JSON file, written aside and renamed, so that a reader sees all of it or none. A cache
that cannot be read or written costs time, never an error; a file that failed to import has no entry. Names that
another user could have written are not used; see Note [Trusted folders].
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

import torch_ext
from torch_ext import cache
from torch_ext.results import Needs, TestName

__all__ = [
    "Collected",
    "NameCache",
    "TestFile",
    "collect_names",
    "describe",
    "find_test_files",
    "holds_tests",
    "surroundings",
]

_OURS = ("test_*.py",)


@dataclass(frozen=True, slots=True)
class TestFile:
    """One test file."""

    __test__ = False

    name: str  # path below the root with forward slashes, such as `distributed/fsdp/test_a.py`; the first part of an id
    path: Path  # absolute path
    module: str  # the dotted name that unittest and pytest give it, such as `test.distributed.fsdp.test_a`
    import_root: Path  # the folder that must be on `sys.path` for `module` to be importable


def find_test_files(root: Path, leave_out: str = "", *, like: Sequence[str] = _OURS) -> tuple[TestFile, ...]:
    """Return every file below ``root`` whose name is ``like`` one of these, sorted by name.

    Hidden folders and ``__pycache__`` are left out, and so is the folder ``leave_out`` right below the root.
    """
    root = root.resolve()
    found = (path for path in _walk(root, like) if not leave_out or path.relative_to(root).parts[0] != leave_out)
    return tuple(describe(path, root) for path in sorted(found, key=lambda path: path.parts))


def holds_tests(folder: Path) -> bool:
    """Whether a ``test_*.py`` lies anywhere below ``folder``."""
    return next(_walk(folder, _OURS), None) is not None


def _walk(root: Path, like: Sequence[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(folder, name) for name in names if any(fnmatchcase(name, pattern) for pattern in like))


def describe(path: Path, root: Path) -> TestFile:
    """Describe the file ``path``, which lies below ``root``; both are absolute and resolved.

    The import root is the nearest folder above the file that is no package, so a root that is itself a package
    (``test/`` with an ``__init__.py``) is part of the module's name.
    """
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        parts.append(folder.name)
        folder = folder.parent
    return TestFile(path.relative_to(root).as_posix(), path, ".".join(reversed(parts)), folder)


_NAMES = "names"  # the folder below the cache's
# Devices that a file may count while it is imported.
_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")

# Prefixes of what torch's test utilities ask for, which are imported before any test file is.
_TEST_VARIABLES = ("PYTORCH_TEST", "TEST_WITH_", "DISTRIBUTED_TESTS_")


@dataclass(frozen=True)
class Collected:
    """What importing one file told."""

    file: TestFile
    tests: tuple[TestName, ...] = ()  # its tests, in the order in which they should run
    # Absolute paths of the project files that it imported, directly or not; its own path may be missing
    imported: tuple[str, ...] = ()
    cached: bool = False  # whether the answer is an earlier import's
    error: str = ""  # the traceback if it could not be imported, else empty. Then `tests` means nothing.
    needs: tuple[Needs, ...] = ()  # what each of `tests` asks for, in their order; empty if that is not known
    left: str = ""  # why the file asked not to be run while it was imported, and `error` says the same; else empty
    device: str = ""  # the device type that they test, as far as it is known


def surroundings(device: str) -> dict[str, str] | None:
    """Return what the names of every file depend on, for the device type ``device`` (empty: the machine decides).

    None if the version of torch cannot be told without importing it; names are then not cached.
    """
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    asked = {name for name in os.environ if name.startswith(_TEST_VARIABLES)}.union(_VISIBLE_DEVICES)
    visible = {name: os.environ[name] for name in sorted(asked) if name in os.environ}
    versions = {"torch": torch_version, "python": platform.python_version(), "torch_ext": torch_ext.__version__}
    return {**versions, "device": device, **visible}


class NameCache:
    """Reads and writes cached names. See Note [Cached names].

    Args:
        folder: where they lie; created when first written to. None: nothing is cached.
        surroundings: what the names of every file depend on; None as well: nothing is cached.
    """

    def __init__(self, folder: Path | None, surroundings: Mapping[str, str] | None) -> None:
        # Why the folder is not used, in a sentence with the remedy; empty if it is
        self.refused = cache.why_not_trusted(folder / _NAMES) if folder is not None and surroundings is not None else ""
        self._folder = folder if surroundings is not None and not self.refused else None
        self._surroundings = dict(surroundings or {})
        self._digests: dict[str, str | None] = {}

    def load(self, file: TestFile) -> Collected | None:
        """Return the cached answer for ``file``; None unless it is keyed by the code that now lies there."""
        if self._folder is None:
            return None
        path = self._entry_path(self._folder, file)
        if cache.why_not_trusted(path):
            return None
        try:
            entry = json.loads(path.read_bytes())
            if entry["surroundings"] != self._surroundings or str(file.path) not in entry["digests"]:
                return None
            if any(self._digest(path) != digest for path, digest in entry["digests"].items()):
                return None
            tests = tuple(TestName(file.name, cls, method) for cls, method in entry["tests"])
            needs = tuple(Needs(*counts) for counts in entry["needs"])
            return Collected(file, tests, tuple(entry["digests"]), cached=True, needs=needs)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def store(self, collected: Collected, since_ns: int) -> None:
        """Cache ``collected``, unless it failed or one of its files changed after ``since_ns`` (``time_ns``)."""
        if self._folder is None or collected.error:
            return
        code = {str(collected.file.path), *collected.imported}
        # A file that changed while it was imported: the import read another text than the one there now.
        with suppress(OSError):
            if any(os.stat(path).st_mtime_ns >= since_ns for path in code):
                return
            entry = {
                "surroundings": self._surroundings,
                "digests": {path: self._digest(path) for path in sorted(code)},
                "tests": [(test.cls, test.method) for test in collected.tests],
                "needs": [astuple(each) for each in collected.needs],
            }
            cache.write(self._entry_path(self._folder, collected.file), json.dumps(entry))

    def told(self, number: int) -> str:
        """Return the end of a sentence about a list of tests of which ``number`` files were not imported for it."""
        if not number or self._folder is None:
            return ""
        return f"; names of {number} file{'s' * (number != 1)} from the cache in {self._folder / _NAMES}"

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


def collect_names(
    files: Sequence[TestFile],
    names: NameCache,
    collect: Callable[[Sequence[TestFile]], Iterable[Collected]],
    *,
    cached: bool = True,
) -> list[Collected]:
    """Return the tests of every one of ``files``, in their order.

    Files whose names are not cached, or all if ``cached`` is not to count, go to ``collect``, whose answers are cached.
    """
    answers = {file: found for file in files if cached and (found := names.load(file)) is not None}
    unknown = [file for file in files if file not in answers]
    since_ns = time.time_ns()
    for collected in collect(unknown) if unknown else ():
        answers[collected.file] = collected
        names.store(collected, since_ns)
    return [answers[file] for file in files]
