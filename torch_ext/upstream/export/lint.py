"""What upstream's offline linters would say about a change, and whether it stands without this project."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping

from torch_ext.upstream.export import ruff
from torch_ext.upstream.export.modules import Module, bound_names
from torch_ext.upstream.export.references import uses

__all__ = ["problems"]


def problems(files: Mapping[str, str], before: Mapping[str, str], config: str | None = None) -> list[str]:
    """Return a line for each thing that is wrong with ``files`` and was not so ``before`` the change.

    Args:
        files: the changed files' texts, by path.
        before: what upstream has of them.
        config: the checkout's ``pyproject.toml``, for ruff.
    """
    found = []
    for path, text in files.items():
        old = set(_of_one(path, before[path])) if path in before else set()
        found += [f"{path}:{line}: {what}" for line, what in _of_one(path, text) if not _known(what, line, old)]
    return [*found, *ruff.complaints(files, before, config)]


def _known(what: str, line: int, old: set[tuple[int, str]]) -> bool:
    return any(what == each for _, each in old)


def _of_one(path: str, text: str) -> list[tuple[int, str]]:
    lines = text.split("\n")
    found = [(number, "trailing white space") for number, line in enumerate(lines, 1) if line != line.rstrip()]
    found += [(number, "a tab") for number, line in enumerate(lines, 1) if "\t" in line]
    found += [(number, "a Windows line end") for number, line in enumerate(lines, 1) if line.endswith("\r")]
    if not text.endswith("\n") or text.endswith("\n\n"):
        found.append((len(lines), "the file does not end with one newline"))
    if re.search(r"(^|/)test_\w+\.py$", path) and not re.search(r'^# Owner\(s\): \[".+"\]$', text, re.MULTILINE):
        found.append((1, "no line # Owner(s)"))
    found += [
        (number, f"names this project: {line.strip()}") for number, line in enumerate(lines, 1) if _OURS.search(line)
    ]
    try:
        module = Module(path, text)
    except SyntaxError as error:
        return [*found, (error.lineno or 1, f"no Python: {error.msg}")]
    return found + _undefined(module)


_OURS = re.compile(r"(?<![a-z])torch_ext(?![a-z])", re.IGNORECASE)


def _undefined(module: Module) -> list[tuple[int, str]]:
    """Return names that nothing defines. A file with ``import *`` may have any name."""
    if module.stars:
        return []
    known = {*module.definitions, *module.imports, *vars(builtins), "__file__", "__name__", "__doc__", "__class__"}
    for statement in module.tree.body:
        known.update(bound_names(statement))
        for node in ast.walk(statement):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                known.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.Global):
                known.update(node.names)
    return [
        (use.node.lineno, f"undefined name {use.name}")
        for statement in module.tree.body
        for use in uses(statement)
        if use.name not in known and isinstance(use.node.ctx, ast.Load)
    ]
