"""``torch_ext export``: the arguments, the change, the check on plain torch, the message and the patch."""

from __future__ import annotations

import argparse
import ast
import platform
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from torch_ext.upstream.export import check, lint, tables
from torch_ext.upstream.export.git import CheckoutError, check_author, commit_of, file_at, mailbox
from torch_ext.upstream.export.link import Linker
from torch_ext.upstream.export.modules import our_tree, path_of, project_root, upstream_at
from torch_ext.upstream.export.targets import Target, text_of


@dataclass
class Result:
    """The files and the mail of an export. With problems, there is no mail."""

    problems: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    mail: str = ""


def main(arguments: Sequence[str]) -> int:
    """Export what ``arguments`` name.

    Returns:
        0; 1 if a change cannot go or fails its check; 2 for a usage error.
    """
    options = _parser().parse_args(arguments)
    try:
        result = export(options.items, options.onto, checked=options.check)
    except CheckoutError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for problem in result.problems:
        print(f"error: {problem}", file=sys.stderr)
    if options.output and result.mail:
        options.output.write_bytes(result.mail.encode())
    else:
        sys.stdout.buffer.write(result.mail.encode())  # UTF-8, in any terminal
    return 1 if result.problems else 0


def _parser() -> argparse.ArgumentParser:
    summary = "Write tests and helpers of this tree as a patch for a PyTorch checkout."
    parser = argparse.ArgumentParser("torch_ext export", description=summary)
    add = parser.add_argument
    items = "files, folders, or names in files"
    add("items", nargs="+", metavar="PATH|FILE::NAME", help=items)
    add("--onto", required=True, type=Path, metavar="CHECKOUT", help="a git checkout of PyTorch; its HEAD counts")
    add("--output", type=_new_file, metavar="FILE", help="write the mail there; default: to standard output")
    add("--check", action="store_true", help="apply it to a scratch copy and run it there, on cpu and on sim")
    return parser


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}; give a file in a folder that exists")
    return path


def export(items: Sequence[str], onto: Path, *, checked: bool = False) -> Result:
    """Make a patch of ``items`` (see :func:`add`) for the PyTorch checkout ``onto``; ``checked``: run it in a copy.

    Raises:
        CheckoutError: the checkout or a path is missing, git knows no author, or there is no ruff.
    """
    root = project_root()
    theirs = upstream_at(onto)
    check_author(onto)
    ours = our_tree(theirs, root)
    linker = Linker(ours, theirs)
    for item in items:
        add(linker, item, root)
    result = Result(problems=list(dict.fromkeys(linker.problems)))
    targets = [each for each in linker.targets.values() if each.whole or each.pieces]
    if not targets and not result.problems:
        result.problems.append("upstream already has everything: nothing to export")
    if result.problems:
        return result
    result.files = {target.path: text_of(target, ours) for target in targets}
    before = {target.path: target.existing.text for target in targets if target.existing}
    settings = file_at(onto, "pyproject.toml", commit_of(onto))
    result.problems = lint.problems(result.files, before, None if settings is None else settings.decode())
    runs: list[check.Run] = []
    if checked and not result.problems:
        runs, result.problems = _check(onto, targets, result.files)
    if not result.problems:
        result.mail = mailbox(onto, result.files, _message(targets, runs))
    return result


def _check(onto: Path, targets: Sequence[Target], files: dict[str, str]) -> tuple[list[check.Run], list[str]]:
    """Apply the change to a scratch copy, import every file there, and run the test files."""
    mail = mailbox(onto, files, "check\n")
    with tempfile.TemporaryDirectory() as folder:
        copy = check.apply_to_copy(onto, mail, Path(folder))
        tests = [target.path for target in targets if target.path.startswith("test/")]
        helpers = [target.module for target in targets if not target.path.startswith("test/")]
        if errors := check.import_in_copy(copy, [*helpers, *(str(copy / each) for each in tests)]):
            return [], [f"the changed files do not import on plain torch: {errors}"]
        runs = []
        for file in tests:
            for device in ("cpu", "sim"):
                runs.append(check.run_in_copy(copy, file, device))
                print(runs[-1], file=sys.stderr, flush=True)
    return runs, [f"{run}\n{run.output}" for run in runs if not run.good]


def _message(targets: Sequence[Target], runs: Sequence[check.Run]) -> str:
    """Return the commit message: the files and tests of the change, its runs, and the tools."""
    parts = [[_subject(targets)]]
    parts += [textwrap.wrap(_describe(each), 72, break_long_words=False, break_on_hyphens=False) for each in targets]
    tests = [f"  {each.module.rpartition('.')[2]}: {name}" for each in targets for name in _tests(each)]
    parts += [["Tests:", *tests]] if tests else []
    parts += [["Run:", *(f"  {run}" for run in runs)] if runs else ["Not run on the tree that it applies to."]]
    own = f"  written and tested in torch_ext {metadata.version('torch_ext')}, converted by its exporter"
    tools = f"  torch {metadata.version('torch')}, Python {platform.python_version()}, {lint.version()}"
    parts += [["Tools:", own, tools]]
    return "\n\n".join(map("\n".join, parts)) + "\n"


def _subject(targets: Sequence[Target]) -> str:
    pieces = [piece.name for target in targets for piece in target.pieces.values()]
    names = [target.module.rpartition(".")[2] for target in targets if target.whole is not None]
    names = names or [name for name in pieces if not name.startswith("_")] or pieces
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"Add {', '.join(names[:3])}{more}"


def _describe(target: Target) -> str:
    if target.whole is None:
        names = [f"{piece.into}.{piece.name}" if piece.into else piece.name for piece in target.pieces.values()]
        return f"{target.path} gets {', '.join(names)}."
    summary = (ast.get_docstring(target.whole.module.tree) or "It is new.").partition("\n\n")[0]
    return f"{target.path}: {' '.join(summary.split())}"


def _tests(target: Target) -> list[str]:
    """Return the tests that a change adds, as ``Class.test``."""
    if target.whole is None:
        named = [(each.into, each.name) for each in target.pieces.values()]
    else:
        classes = target.whole.module.definitions.values()
        named = [(each.name, member) for each in classes for member in each.members()]
    return [f"{owner}.{name}" for owner, name in named if name.startswith("test_")]


_EXPORTABLE = ("testing", "test/distributed")


def add(linker: Linker, item: str, root: Path) -> None:
    """Add ``item`` to ``linker``: a file or folder below the project's ``root``, or ``FILE::NAME`` for a definition.

    An item that cannot be exported becomes one of the linker's problems.

    Raises:
        CheckoutError: there is no such file or folder.
    """
    root = root.resolve()
    path, _, name = item.partition("::")
    places = ((root / path).resolve(), Path(path).resolve())
    place = next((each for each in places if each.exists() and each.is_relative_to(root)), None)
    if place is None:
        raise CheckoutError(f"{path!r} is no file or folder of {root}")
    in_folder = place.is_dir()
    if not any(place.is_relative_to(root / each) for each in _EXPORTABLE) or not (in_folder or place.suffix == ".py"):
        raise CheckoutError(f"{place}: only Python files below {' and '.join(_EXPORTABLE)} go upstream")
    if name:
        _add_name(linker, module_at(place, root), name)
        return
    for file in sorted(place.rglob("*.py")) if in_folder else [place]:
        module = module_at(file, root)
        if not in_folder or not (tables.advice_for(module) or file.name == "__init__.py"):
            linker.add_file(module)


def module_at(path: Path, root: Path) -> str:
    """Return the dotted name of a file of this project."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(("torch_ext", *parts) if parts[0] == "testing" else parts)


def _add_name(linker: Linker, module: str, name: str) -> None:
    found = linker.ours.find(module, name)
    if found is None:
        linker.problems.append(f"{path_of(module)}.py defines no {name}")
    elif advice := tables.advice_for(found[0].name):
        linker.problems.append(f"{name}: {advice}")
    elif linker.theirs.find(place := linker.place(found[0].name), name) is None:
        linker.add_name(module, name)
    else:
        linker.problems.append(f"{place} has {name}: port your change by hand")
