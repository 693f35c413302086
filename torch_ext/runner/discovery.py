"""The test files below a root, and the name under which each one is imported. Reads folders, imports nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

__all__ = ["TestFile", "describe", "find_test_files", "holds_tests"]

_OURS = ("test_*.py",)


@dataclass(frozen=True, slots=True)
class TestFile:
    """One test file.

    Attributes:
        name: path below the root with forward slashes, such as ``distributed/fsdp/test_a.py``; the first part of an id.
        path: absolute path.
        module: the dotted name that unittest and pytest give it, such as ``test.distributed.fsdp.test_a``.
        import_root: the folder that must be on ``sys.path`` for ``module`` to be importable.
    """

    __test__ = False

    name: str
    path: Path
    module: str
    import_root: Path


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
