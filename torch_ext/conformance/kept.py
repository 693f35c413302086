"""Findings that are kept between runs, so that an interrupted run goes on, and the page has every tier's last numbers.

A tier's findings on a device are one file of JSON Lines in the cache, under a key of what may change them: torch, the
device's package and build, the code that makes findings and the tier's options.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Container, Iterator
from pathlib import Path

import torch

from torch_ext import accelerator, cache
from torch_ext.conformance.forks import Finding, Status

# How many keys a tier's findings on a device are kept for.
_MOST_KEYS = 8
# Modules of this room that make no findings.
_ONLY_REPORT = ("command.py", "page.py", "kept.py")


def fingerprint(device: str, *more: object) -> str:
    """Return the key of findings on ``device``: of the package that provides it, Python files by their content and
    loaded native ones by path, size and time.
    """
    found = hashlib.sha256(repr((torch.__version__, platform.python_version(), device, *more)).encode())
    package = accelerator.provider()
    home = getattr(sys.modules.get(package), "__file__", None)
    for folder in (Path(__file__).parent, *([Path(home).parent] if home else [])):
        for path in sorted(folder.rglob("*.py")):
            if path.name not in _ONLY_REPORT:
                found.update(path.read_bytes())
    loaded = [module for name, module in sys.modules.items() if package and name.startswith(package)]
    files = {getattr(module, "__file__", None) or "" for module in loaded}
    for name in sorted(each for each in files if each.endswith(".so")):
        state = os.stat(name)
        found.update(f"{name} {state.st_size} {state.st_mtime_ns}".encode())
    return found.hexdigest()[:16]


class Kept:
    """The kept findings of ``tier`` on ``device`` under ``key``; empty if the cache cannot be used."""

    def __init__(self, tier: str, device: str, key: str) -> None:
        folder = cache.folder()
        usable = folder is not None and not cache.why_not_trusted(folder)
        self._path = folder / "conformance" / f"{tier}-{device}-{key}.jsonl" if folder and usable else None
        try:
            if self._path is not None:
                cache.make(self._path.parent)
                self._path.touch()
                found = self._path.parent.glob(f"{tier}-{device}-*.jsonl")
                files = sorted(found, key=lambda path: path.stat().st_mtime)
                for path in files[:-_MOST_KEYS]:
                    path.unlink(missing_ok=True)
        except OSError:  # a cache that cannot be written
            self._path = None

    def __iter__(self) -> Iterator[Finding]:
        if self._path is None or not self._path.exists():
            return
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                group, case, status, *rest = json.loads(line)
                yield Finding(group, case, Status(status), *rest)
            except (ValueError, TypeError):  # the last line of a run that was killed
                continue

    def drop(self, groups: Container[str]) -> None:
        """Forget the findings of ``groups``."""
        left = [finding for finding in self if finding.group not in groups]
        if self._path is not None:
            self._path.write_text("")
        for finding in left:
            self.add(finding)

    def add(self, finding: Finding) -> None:
        """Keep one more finding."""
        if self._path is None:
            return
        values = [finding.group, finding.case, finding.status.value, finding.text, finding.duration_s, finding.known]
        with open(self._path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(values) + "\n")
