"""Upstream's style: formats with ruff as PyTorch does, and finds the complaints that a change would bring."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torch_ext.upstream.export.git import CheckoutError

_WIDTH = 88
_ISORT = 'lint.isort={known-first-party=["torch"], order-by-type=false, combine-as-imports=true, lines-after-imports=2}'
# Undefined names and white space, whatever the checkout selects; and the rules for a checkout without settings.
_ALWAYS = "--extend-select=F821,W191,W291,W292,W293"
_ISOLATED = ("--isolated", "--select=E4,E7,E9,F,W,B002,B006,B008,PIE790,PLE,UP006,UP007")
_PROJECT = re.compile(r"(?<![a-z])torch_ext(?![a-z])", re.IGNORECASE)
_OWNERS = re.compile(r'^# Owner\(s\): \[".+"\]$', re.MULTILINE)


def _ruff(*command: str, text: str = "", folder: str | None = None) -> subprocess.CompletedProcess[str]:
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    path = shutil.which("ruff", path=os.pathsep.join(folders))
    if path is None:
        raise CheckoutError("ruff, PyTorch's formatter, is not installed: pip install ruff")
    return subprocess.run([path, *command], input=text, capture_output=True, text=True, cwd=folder)


def version() -> str:
    return _ruff("--version").stdout.strip()


def formatted(text: str) -> str:
    """Return ``text`` as upstream formats it.

    Raises:
        ValueError: the text is no Python.
    """
    return _ruff_filter("format", "--line-length", str(_WIDTH), text=text)


def sorted_imports(text: str, rules: str = "I") -> str:
    """Return ``text`` with its imports in upstream's order; with ``rules="I,F401"``, also without unused ones."""
    settings = ("--config", f"line-length={_WIDTH}", "--config", _ISORT, "--stdin-filename", "x.py")
    return _ruff_filter("check", "--select", rules, "--fix", "--exit-zero", *settings, text=text)


def _ruff_filter(*command: str, text: str) -> str:
    done = _ruff(*command, "--isolated", "--quiet", "-", text=text)
    if done.returncode:
        raise ValueError(f"ruff cannot read the exported text:\n{done.stderr}\n{text}")
    return done.stdout


def problems(files: Mapping[str, str], before: Mapping[str, str], config: str | None = None) -> list[str]:
    """Return a line for each fault of ``files``, texts by path, that the files did not have ``before`` the change.
    ``config`` is the checkout's ``pyproject.toml``, for ruff; None for a few of upstream's rules.
    """
    old = Counter((path, diagnostic) for path, _, diagnostic in _diagnostics(before, config))
    found = []
    for path, line, diagnostic in _diagnostics(files, config):
        old[path, diagnostic] -= 1
        if old[path, diagnostic] < 0:
            found.append(f"{path}:{line}: {diagnostic}")
    return found


def _diagnostics(files: Mapping[str, str], config: str | None) -> list[tuple[str, int, str]]:
    found = []
    for path, text in files.items():
        if re.search(r"(^|/)test_\w+\.py$", path) and not _OWNERS.search(text):
            found.append((path, 1, "no line # Owner(s)"))
        lines = enumerate(text.split("\n"), 1)
        found += [
            (path, number, f"names this project: {line.strip()}") for number, line in lines if _PROJECT.search(line)
        ]
    if not files:
        return found
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {**files, **({} if config is None else {"pyproject.toml": config})}.items():
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text(text, encoding="utf-8")
        command = ("check", "--quiet", "--no-cache", "--exit-zero", "--output-format=json", _ALWAYS, *sorted(files))
        done = _ruff(*command, *(_ISOLATED if config is None else ("--config", "pyproject.toml")), folder=folder)
        if done.returncode and config is not None:  # the settings of another release of ruff
            done = _ruff(*command, *_ISOLATED, folder=folder)
        if done.returncode:
            raise ValueError(f"ruff failed: {done.stderr}")
        for each in json.loads(done.stdout or "[]"):
            path = str(Path(each["filename"]).resolve().relative_to(Path(folder).resolve()))
            found.append((path, each["location"]["row"], f"{each['code']} {each['message']}"))
    return found
