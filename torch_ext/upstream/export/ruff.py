"""Ruff, if it is installed: upstream formats and lints with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["complaints", "formatted", "program", "version"]

# What to ask for where the checkout does not say: errors that upstream's own selection contains too.
_RULES = "E4,E7,E9,F,W,B002,B006,B008,PIE790,PLE,UP006,UP007"
_SHOWN = "--output-format=json"


def program() -> str | None:
    """Return the path of ruff: that of this environment, or one on the path."""
    beside = Path(sys.executable).parent / "ruff"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("ruff")


def version() -> str:
    """Return what ruff calls itself; empty if there is none."""
    path = program()
    return subprocess.run([path, "--version"], capture_output=True, text=True).stdout.strip() if path else ""


def formatted(text: str, width: int = 88, sort_imports: bool = False) -> str:
    """Return ``text`` as upstream formats it; as it is, if there is no ruff.

    Raises:
        ValueError: it is no Python.
    """
    path = program()
    if path is None:
        return text
    base = [path, "--isolated", "--quiet", "--config", f"line-length={width}"]
    if sort_imports:
        options = ["--select", "I,F401", "--fix", "--config", "lint.isort.order-by-type=false"]
        text = _through([*_check(base), *options, "--exit-zero", "--stdin-filename", "x.py", "-"], text)
    return _through([path, "format", "--isolated", "--quiet", "--line-length", str(width), "-"], text)


def _check(base: list[str]) -> list[str]:
    return [base[0], "check", *base[1:]]


def _through(command: list[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"ruff cannot read what was made:\n{done.stderr}\n{text}")
    return done.stdout


def complaints(files: Mapping[str, str], before: Mapping[str, str], config: str | None) -> list[str]:
    """Return what ruff says about ``files`` and did not say ``before`` the change; nothing if there is no ruff.

    Args:
        files: texts by path.
        before: the same files before the change, as far as they were there.
        config: the checkout's ``pyproject.toml``, whose rules count; None for a few that upstream has.
    """
    old = Counter((each["filename"], each["code"], each["message"]) for each in _lint(before, config))
    found = []
    for each in _lint(files, config):
        key = (each["filename"], each["code"], each["message"])
        old[key] -= 1
        if old[key] < 0:
            found.append(f"{each['filename']}:{each['location']['row']}: {each['code']} {each['message']}")
    return found


def _lint(files: Mapping[str, str], config: str | None) -> list[dict[str, Any]]:
    path = program()
    if path is None or not files:
        return []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            file = Path(folder, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        if config is not None:
            Path(folder, "pyproject.toml").write_text(config, encoding="utf-8")
        plain = ["--isolated", "--select", _RULES]
        done = _asked(path, plain if config is None else ["--config", "pyproject.toml"], files, folder)
        if done.returncode and config is not None:
            done = _asked(path, plain, files, folder)  # settings that this release of ruff does not know
        if done.returncode:
            raise ValueError(f"ruff failed: {done.stderr}")
        told = json.loads(done.stdout or "[]")
        for each in told:
            each["filename"] = str(Path(each["filename"]).resolve().relative_to(Path(folder).resolve()))
    return list(told)


def _asked(path: str, rules: list[str], files: Mapping[str, str], folder: str) -> subprocess.CompletedProcess[str]:
    command = [path, "check", "--quiet", "--no-cache", "--exit-zero", _SHOWN, *rules, *sorted(files)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)
