"""What to say where a selection is empty, or means tests that others run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch_ext.runner.discovery import TestFile
from torch_ext.runner.keywords import nearest, parts, spellings, words_without_match
from torch_ext.runner.names import Collected
from torch_ext.runner.options import RunOptions
from torch_ext.runner.results import TestName
from torch_ext.runner.selection import Selected, Selection, SelectionError

__all__ = ["left_out", "refuse_own_tests", "why_nothing"]


def refuse_own_tests(options: RunOptions, folder: str) -> None:
    """Raise SelectionError if a pattern means a test in ``folder`` below the root, which is left to pytest."""
    own = options.root / folder
    for pattern in options.include:
        path = pattern.partition("::")[0]
        for place in (Path(path), options.root / path):
            if place.exists() and place.resolve().is_relative_to(own):
                shown = os.path.relpath(place.resolve())
                raise SelectionError(
                    f"{pattern!r} holds tests of torch_ext itself, which pytest runs: python -m pytest {shown}"
                )


def why_nothing(options: RunOptions, files: Sequence[TestFile], tests: Sequence[TestName]) -> str:
    """Say why nothing is selected of ``tests``, those that patterns select of ``files``."""
    if not files:
        return "-x excludes every file that -i selects"
    if not tests:
        told = f"no test in {', '.join(file.name for file in files[:5])}{', ...' * (len(files) > 5)}"
        return told + (_written_for_pytest(files[0]) if len(files) == 1 else "")
    typed = " ".join(options.keywords)
    names = [*spellings((), tests), *parts(tests)]
    near = [name for word in words_without_match(options.keywords, tests) for name in nearest(word, names)]
    advice = f"; nearest: {', '.join(dict.fromkeys(near))}" if near else ""
    return f"none of {len(tests)} tests fits -k {typed!r}{advice}"


def left_out(selection: Selection, selected: Selected, collected: Iterable[Collected]) -> list[str]:
    """Say what was asked for and does not run though other tests do: patterns that fit no test that is known, files of
    pytest's, and files that a pattern names alone and that hold no test.
    """
    known = "no test that is known fits it, and some files cannot be imported"
    said = [f"{text!r}: {known}{'; ' * bool(advice)}{advice}" for text, advice in selected.unseen]
    folders = [target.files for target in selection.include if not target.names]
    asked = {file for files in folders for file in files}
    alone = {file for files in folders if len(files) == 1 for file in files}
    theirs = []
    for one in collected:
        if one.tests or one.error or (selection.include and one.file.name not in asked):
            continue
        if why := _written_for_pytest(one.file):
            theirs.append(f"no test in {one.file.name}{why}")
        elif one.file.name in alone:
            said.append(f"no test in {one.file.name}")
    others = f" ({len(theirs) - 1} more files are like it)" if len(theirs) > 1 else ""
    return said + [f"{told}{others}" for told in theirs[:1]]


def _written_for_pytest(file: TestFile) -> str:
    """Say so if the file has tests in a style that is pytest's alone."""
    from ast import AsyncFunctionDef, ClassDef, FunctionDef, parse

    try:
        body = parse(file.path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    functions = [each.name for each in body if isinstance(each, (FunctionDef, AsyncFunctionDef))]
    classes = [each.name for each in body if isinstance(each, ClassDef) and not each.bases]
    for what, names in (("functions", functions), ("classes without a base", classes)):
        if found := [name for name in names if name.lower().startswith("test")]:
            return (
                f": its tests are {what} such as {found[0]}, which pytest runs and unittest does not; "
                f"run python -m pytest {os.path.relpath(file.path)}"
            )
    return ""
