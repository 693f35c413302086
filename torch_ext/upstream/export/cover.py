"""The words that go with a patch: what it tests, how it was run, and with what tools."""

from __future__ import annotations

import ast
import platform
import textwrap
from collections.abc import Iterable, Sequence
from importlib import metadata

from torch_ext.upstream.export import ruff
from torch_ext.upstream.export.pieces import Target

__all__ = ["cover", "tests_of"]

_WIDTH = 72


def cover(targets: Sequence[Target], runs: Sequence[str], tools: Sequence[str] = (), subject: str = "") -> str:
    """Return the commit message of a change.

    Args:
        targets: what changes.
        runs: how it was run, a line each; empty if it was not.
        tools: what else helped to make it, in the words of whoever sends it.
        subject: the first line; made of what changes if empty.
    """
    added = {target.module: tests_of(target) for target in targets}
    parts = [subject or _subject(targets)]
    about = [text for target in targets if (text := _about(target))]
    parts += [_filled(text) for text in about]
    listed = [f"{module.rpartition('.')[2]}: {name}" for module, names in added.items() for name in names]
    if listed:
        parts.append("Tests:\n" + "\n".join(f"  {name}" for name in listed))
    parts.append(
        "Run:\n" + "\n".join(f"  {line}" for line in runs) if runs else "Not run on the tree that it applies to."
    )
    parts.append("Tools:\n" + "\n".join(f"  {each}" for each in [*_tools(), *tools]))
    return "\n\n".join(parts) + "\n"


def _subject(targets: Sequence[Target]) -> str:
    files = [target.module.rpartition(".")[2] for target in targets if target.whole is not None]
    pieces = [piece.name for target in targets for piece in target.pieces.values()]
    pieces = [name for name in pieces if not name.startswith("_")] or pieces
    if files:
        return f"Add {_some(files)}"
    return f"Add {_some(pieces)} to {targets[0].module.rpartition('.')[2]}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _about(target: Target) -> str:
    if target.whole is not None:
        told = ast.get_docstring(target.whole.tree) or ""
        return f"{target.path}: {' '.join(told.split(chr(10) * 2)[0].split())}" if told else f"{target.path} is new."
    names = [f"{piece.into}.{piece.name}" if piece.into else piece.name for piece in target.pieces.values()]
    return f"{target.path} gets {', '.join(names)}." if names else ""


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def tests_of(target: Target) -> list[str]:
    """Return the tests that a change adds, as ``Class.test``."""
    if target.whole is None:
        return [f"{each.into}.{each.name}" for each in target.pieces.values() if each.name.startswith("test_")]
    return [
        f"{name}.{member}"
        for name, definition in target.whole.definitions.items()
        if definition.is_class
        for member in definition.members()
        if member.startswith("test_")
    ]


def _tools() -> Iterable[str]:
    yield f"written and tested in torch_ext {_version('torch_ext')}, brought into this form by its exporter"
    yield f"torch {_version('torch')}, Python {platform.python_version()}" + (
        f", {ruff.version()}" if ruff.program() else ""
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
