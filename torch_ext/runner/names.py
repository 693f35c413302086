"""Finds the test files below a root, and caches the tests of each, so that a list loads neither torch nor test modules.

Note [Cached names]
~~~~~~~~~~~~~~~~~~~
Only an import shows the tests of a file. The cache key consists of the content of the file and of each project file
that it imported, the versions of torch, Python and torch_ext, the device, and the variables that torch's test utilities
read. Tests that a file makes from other data may change under the same key. So a list mentions that its names are
cached, and a run uses them only to leave out files without a selected test: it imports the rest, and plans by the names
that the import shows.

Each test file and device has one JSON file, renamed into place. A cache that cannot be read or written raises no error;
a file that failed to import has no entry. Names that others could have written are ignored: see Note [Trusted folders].
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

import torch_ext
from torch_ext import cache
from torch_ext.results import Needs, TestName


@dataclass(frozen=True, slots=True)
class TestFile:
    """One test file."""

    __test__ = False

    name: str  # path below the root with forward slashes, such as `distributed/fsdp/test_a.py`; the first part of an id
    path: Path  # absolute path
    module: str  # its dotted name in unittest and pytest, such as `test.distributed.fsdp.test_a`
    import_root: Path  # the folder on `sys.path` from which `module` is importable


def find_test_files(root: Path, leave_out: str = "", *, like: Sequence[str] = ("test_*.py",)) -> tuple[TestFile, ...]:
    """Return every file below ``root`` whose name matches a pattern of ``like``, sorted by name, without hidden folders
    and the folder ``leave_out`` directly below the root.
    """
    root, found = root.resolve(), list[Path]()
    for folder, subfolders, names in os.walk(root):
        left_out = ("__pycache__", leave_out if folder == str(root) else "")
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in left_out]
        found += (Path(folder, name) for name in names if any(fnmatchcase(name, pattern) for pattern in like))
    return tuple(describe(path, root) for path in sorted(found, key=lambda path: path.parts))


def describe(path: Path, root: Path) -> TestFile:
    """Describe the file ``path`` below ``root``; both are resolved. The import root is the nearest folder above that is
    no package, so the module's name includes a root that is one.
    """
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        parts.append(folder.name)
        folder = folder.parent
    return TestFile(path.relative_to(root).as_posix(), path, ".".join(reversed(parts)), folder)


# A file may count devices during its import; these variables change the number.
_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")

# Prefixes of the variables that torch's test utilities read; they are imported before any test file.
_TEST_VARIABLES = ("PYTORCH_TEST", "TEST_WITH_", "DISTRIBUTED_TESTS_")


@dataclass(frozen=True)
class Collected:
    """The result of importing one file."""

    file: TestFile
    tests: tuple[TestName, ...] = ()  # in the order in which they should run; undefined if `error` is set
    # Absolute paths of the project files that it imported, directly or not; its own path may be missing
    imported: tuple[str, ...] = ()
    cached: bool = False  # from an earlier import
    error: str = ""  # the traceback if the import failed, else empty
    needs: tuple[Needs, ...] = ()  # of each of `tests`, in their order; empty if unknown
    left: str = ""  # the reason if the file skipped itself during its import (then also in `error`), else empty
    device: str = ""  # the device type of the tests, if known


def environment_key(device: str) -> dict[str, str] | None:
    """Return the part of the cache key that all files share, for device type ``device`` (empty: the machine decides).
    None, for no cache, if only an import of torch would show its version.
    """
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    variables = {name for name in os.environ if name.startswith(_TEST_VARIABLES)}.union(_VISIBLE_DEVICES)
    visible = {name: os.environ[name] for name in sorted(variables) if name in os.environ}
    versions = {"torch": torch_version, "python": platform.python_version(), "torch_ext": torch_ext.__version__}
    return {**versions, "device": device, **visible}


class NameCache:
    """Reads and writes names below ``folder``, created on the first write, under the shared part of the key; caches
    nothing if one of them is None. See Note [Cached names].
    """

    def __init__(self, folder: Path | None, shared_key: Mapping[str, str] | None) -> None:
        # A sentence about why the folder is not trusted, with the remedy; empty if it is in use
        self.refused = cache.why_not_trusted(folder / "names") if folder is not None and shared_key is not None else ""
        self._folder = folder if shared_key is not None and not self.refused else None
        self._shared_key = dict(shared_key or {})
        self._digests: dict[str, str | None] = {}

    def load(self, file: TestFile) -> Collected | None:
        """Return the cached entry for ``file``; None if there is none for the current code."""
        if self._folder is None:
            return None
        path = self._entry_path(self._folder, file)
        if cache.why_not_trusted(path):
            return None
        try:
            entry = json.loads(path.read_bytes())
            if entry["environment_key"] != self._shared_key or str(file.path) not in entry["digests"]:
                return None
            if any(self._digest(path) != digest for path, digest in entry["digests"].items()):
                return None
            tests = tuple(TestName(file.name, cls, method) for cls, method in entry["tests"])
            needs = tuple(Needs(*counts) for counts in entry["needs"])
            return Collected(file, tests, tuple(entry["digests"]), cached=True, needs=needs)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def store(self, collected: Collected, since_ns: int) -> None:
        """Cache ``collected``, unless the import failed or a file of it changed after ``since_ns`` (``time_ns``)."""
        if self._folder is None or collected.error:
            return
        code = {str(collected.file.path), *collected.imported}
        # If a file changed during the import, the import may have read another text than the current one.
        with suppress(OSError):
            if any(os.stat(path).st_mtime_ns >= since_ns for path in code):
                return
            entry = {
                "environment_key": self._shared_key,
                "digests": {path: self._digest(path) for path in sorted(code)},
                "tests": [(test.cls, test.method) for test in collected.tests],
                "needs": [astuple(each) for each in collected.needs],
            }
            cache.write(self._entry_path(self._folder, collected.file), json.dumps(entry))

    def cache_note(self, number: int) -> str:
        """Return the end of a sentence about a list of tests, for which ``number`` files were not imported."""
        if not number or self._folder is None:
            return ""
        return f"; names of {number} file{'s' * (number != 1)} from the cache in {self._folder / 'names'}"

    def _entry_path(self, folder: Path, file: TestFile) -> Path:
        place = f"{file.path}\0{file.name}\0{self._shared_key.get('device', '')}"
        digest = hashlib.sha256(os.fsencode(place)).hexdigest()
        return folder / "names" / f"{file.path.stem}-{digest[:16]}.json"

    def _digest(self, path: str) -> str | None:
        """Return the hash of the content; None if there is no file. Reads each file once: many import the same ones."""
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
    """Return the tests of all ``files``, in their order. Has ``collect`` import those without cached names, or all if
    not ``cached``, and caches the results.
    """
    answers = {file: found for file in files if cached and (found := names.load(file)) is not None}
    unknown = [file for file in files if file not in answers]
    since_ns = time.time_ns()
    for collected in collect(unknown) if unknown else ():
        answers[collected.file] = collected
        names.store(collected, since_ns)
    return [answers[file] for file in files]
