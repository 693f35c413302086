"""Remembers which tests passed without a mistake, for as long as all that they depend on stays as it was."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Record", "Store", "fingerprint"]

# Variables that torch, its libraries and the compiler behind Inductor read.
_READ_BY_LIBRARIES = ("TORCH", "PYTORCH", "OMP_", "MKL_", "KMP_", "GLOO_", "TP_", "CC", "CXX", "LD_", "PYTHON")


class Store(Protocol):
    """What pytest's cache provides."""

    def get(self, key: str, default: Any) -> Any: ...

    def set(self, key: str, value: object) -> None: ...


class Record:
    """The tests that passed in a state of the machine that ``fingerprint`` names; those of any other state are
    forgotten.

    Without a store nothing is remembered.
    """

    def __init__(self, store: Store | None, name: str, fingerprint: str) -> None:
        self._store, self._key, self._fingerprint = store, f"torch_ext/sound/{name}", fingerprint

    def passed(self) -> set[str]:
        kept = self._store.get(self._key, {}) if self._store is not None else {}
        fits = isinstance(kept, dict) and kept.get("fingerprint") == self._fingerprint
        return set(kept["passed"]) if fits else set()

    def add(self, endings: Mapping[str, str], tests: Iterable[str]) -> None:
        """Remember those of ``tests`` that passed."""
        if self._store is not None:
            passed = self.passed() | {test for test in tests if endings.get(test) == "passed"}
            self._store.set(self._key, {"fingerprint": self._fingerprint, "passed": sorted(passed)})


def fingerprint(ours: Iterable[Path], installed: Iterable[Path], environment: Mapping[str, str]) -> str:
    """Return a digest of what a test's result can depend on.

    Args:
        ours: files and folders whose every byte counts.
        installed: files and folders too large to read: paths, sizes and times of change count.
        environment: variables that libraries read count.
    """
    digest = hashlib.sha256()

    def add(*what: object) -> None:
        digest.update(repr(what).encode())

    for path in _files(ours):
        add(str(path), path.read_bytes())
    for path in _files(installed):
        about = path.stat()
        add(str(path), about.st_size, about.st_mtime_ns)
    add(sys.version, platform.uname(), os.cpu_count(), shutil.which(environment.get("CXX", "c++")))
    add(sorted(f"{each.metadata['Name']}=={each.version}" for each in metadata.distributions()))
    add(sorted(each for each in environment.items() if each[0].startswith(_READ_BY_LIBRARIES)))
    return digest.hexdigest()


def _files(roots: Iterable[Path]) -> Iterator[Path]:
    for root in roots:
        if root.is_file():
            yield root
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            yield from (Path(folder, name) for name in sorted(names))
