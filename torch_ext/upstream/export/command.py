"""One export: the arguments, the change, the check on plain torch, the message and the patch."""

from __future__ import annotations

import ast
import platform
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from torch_ext.upstream.export import check, lint, spelled
from torch_ext.upstream.export.git import (
    CheckoutError,
    check_author,
    check_branch,
    commit_of,
    commit_on_branch,
    git,
    mailbox,
    shown,
)
from torch_ext.upstream.export.link import Linker
from torch_ext.upstream.export.modules import (
    Definition,
    Module,
    Tree,
    our_tree,
    path_of,
    project_root,
    span,
    upstream_at,
)
from torch_ext.upstream.export.targets import Target, formatted_piece, text_of

__all__ = ["Result", "add", "export"]


@dataclass
class Result:
    """The files and the mail of an export. With problems, there is no mail and no branch."""

    problems: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    mail: str = ""


def export(
    what: Sequence[str],
    onto: Path,
    *,
    branch: str = "",
    subject: str = "",
    tools: Sequence[str] = (),
    devices: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Make a patch.

    Args:
        what: see :func:`add`.
        onto: the PyTorch checkout.
        branch: commit on this new branch, too; empty for a mail only.
        subject: the first line of the message; empty for one made of the change.
        tools: further lines for the message.
        devices: where to run the change; none to not run it.
        say: prints a line of progress.

    Raises:
        CheckoutError: the checkout, a path or a revision is not there, the branch is there already, git knows no
            author, or there is no ruff.
    """
    root, theirs = project_root(), upstream_at(onto)
    check_author(onto)
    if branch:
        check_branch(onto, branch)
    ours = our_tree(theirs, root)
    linker = Linker(ours, theirs)
    add(linker, what, root)
    result = Result(problems=list(dict.fromkeys(linker.problems)))
    targets = [each for each in linker.targets.values() if each.whole or each.pieces or each.replaced]
    if not targets and not result.problems:
        result.problems.append("upstream has all of it: there is nothing to send")
    if result.problems:
        return result
    result.files = {target.path: text_of(target, ours) for target in targets}
    before = {target.path: target.existing.text for target in targets if target.existing}
    settings = shown(onto, "pyproject.toml", commit_of(onto))
    result.problems = lint.problems(result.files, before, None if settings is None else settings.decode())
    if result.problems:
        return result
    runs: list[check.Run] = []
    if devices:
        runs, result.problems = _checked(onto, devices, targets, result.files, say)
    if not result.problems:
        message = _message(subject or _subject(targets), targets, runs, tools)
        result.mail = mailbox(onto, result.files, message)
        if branch:
            say(f"{branch}: {commit_on_branch(onto, result.files, message, branch)}")
    return result


def _checked(
    onto: Path,
    devices: Sequence[str],
    targets: Sequence[Target],
    files: dict[str, str],
    say: Callable[[str], None],
) -> tuple[list[check.Run], list[str]]:
    """Apply the change to a scratch copy, import every file there, and run the test files."""
    mail = mailbox(onto, files, "check\n")
    with tempfile.TemporaryDirectory() as folder:
        copy = check.apply_to_copy(onto, mail, Path(folder))
        tests = [target.path for target in targets if target.path.startswith("test/")]
        helpers = [target.module for target in targets if not target.path.startswith("test/")]
        if wrong := check.import_in_copy(copy, [*helpers, *(str(copy / each) for each in tests)]):
            return [], [f"the changed files do not import on plain torch: {wrong}"]
        runs = []
        for file in tests:
            for device in devices:
                runs.append(check.run_in_copy(copy, file, device))
                say(str(runs[-1]))
    return runs, [f"{run}\n{run.output}" for run in runs if not run.good]


def _message(subject: str, targets: Sequence[Target], runs: Sequence[check.Run], tools: Sequence[str]) -> str:
    """Return the commit message: the files and tests of the change, its runs, and the tools."""
    parts = [subject]
    parts += [textwrap.fill(_about(each), 72, break_long_words=False, break_on_hyphens=False) for each in targets]
    tests = [f"{each.module.rpartition('.')[2]}: {name}" for each in targets for name in _tests(each)]
    own = [
        f"written and tested in torch_ext {metadata.version('torch_ext')}, brought into this form by its exporter",
        f"torch {metadata.version('torch')}, Python {platform.python_version()}, {lint.version()}",
    ]
    parts += [_listed("Tests", tests)] if tests else []
    parts += [_listed("Run", [str(run) for run in runs]) if runs else "Not run on the tree that it applies to."]
    parts += [_listed("Tools", [*own, *tools])]
    return "\n\n".join(part for part in parts if part) + "\n"


def _listed(title: str, lines: Sequence[str]) -> str:
    return "\n  ".join([f"{title}:", *lines])


def _subject(targets: Sequence[Target]) -> str:
    names = [target.module.rpartition(".")[2] for target in targets if target.whole is not None]
    end = ""
    if not names:
        pieces = [piece.name for target in targets for piece in target.pieces.values()]
        names = [name for name in pieces if not name.startswith("_")] or pieces
        end = f" to {targets[0].module.rpartition('.')[2]}"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"Add {', '.join(names[:3])}{more}{end}"


def _about(target: Target) -> str:
    if target.whole is not None:
        told = (ast.get_docstring(target.whole.module.tree) or "").partition("\n\n")[0]
        return f"{target.path}: {' '.join(told.split())}" if told else f"{target.path} is new."
    names = [f"{piece.into}.{piece.name}" if piece.into else piece.name for piece in target.pieces.values()]
    return f"{target.path} gets {', '.join(names)}." if names else ""


def _tests(target: Target) -> list[str]:
    """Return the tests that a change adds, as ``Class.test``."""
    if target.whole is None:
        named = [(each.into, each.name) for each in target.pieces.values()]
    else:
        classes = target.whole.module.definitions.values()
        named = [(each.name, member) for each in classes for member in each.members()]
    return [f"{owner}.{name}" for owner, name in named if name.startswith("test_")]


# The arguments: files, names in files, or the changes since a revision.

_GO = ("testing", "test/distributed")


def add(linker: Linker, asked: Sequence[str], root: Path) -> None:
    """Add the arguments to ``linker``; an argument that cannot go becomes one of the linker's problems.

    Args:
        linker: collects the change.
        asked: each a file or folder below the project's root, ``FILE::NAME`` for a definition or class, or ``REV..``
            for the changes since REV, uncommitted changes included.
        root: the project's checkout.

    Raises:
        CheckoutError: there is no such file, folder or revision.
    """
    root = root.resolve()
    for each in asked:
        revision, dots, end = each.partition("..")
        if dots and revision and not revision.endswith("/"):
            if end:
                raise CheckoutError(f"got {each}; give {revision}.., whose other end is what lies in {root}")
            _add_since(linker, revision, root)
            continue
        path, mark, name = each.partition("::")
        found = [place.resolve() for place in (root / path, Path(path)) if path and place.exists()]
        place = next((place for place in found if place.is_relative_to(root)), None)
        if place is None:
            raise CheckoutError(f"{path!r} is no file, folder or REV.. of {root}")
        if mark and (not name or place.is_dir()):
            raise CheckoutError(f"got {each}; FILE::NAME wants a file, and a name that it defines")
        if place.is_dir():
            _add_folder(linker, place, root)
        elif place.suffix != ".py":
            raise CheckoutError(f"{path} is no Python file; tests and helpers go upstream, and nothing else")
        elif name:
            _add_one(linker, module_at(place, root), name)
        else:
            _add_file(linker, place, root)


def _add_file(linker: Linker, place: Path, root: Path) -> None:
    name = module_at(place, root)
    if not _goes(place, root) and not spelled.advice_for(name):
        linker.problems.append(f"{place.relative_to(root)}: only what lies below {' and '.join(_GO)} goes upstream")
    elif (module := linker.ours.module(name)) is not None and not module.tree.body:
        linker.problems.append(f"{place.relative_to(root)} is empty; write a test first")
    else:
        linker.add_file(name)


def _add_folder(linker: Linker, place: Path, root: Path) -> None:
    if not _goes(place, root):
        raise CheckoutError(f"{place}: only what lies below {' and '.join(_GO)} goes upstream; give a part of it")
    files = [file for file in sorted(place.rglob("*.py")) if file.name != "__init__.py"]
    if not files:
        linker.problems.append(f"{place.relative_to(root)} holds no Python file")
    for file in files:
        name = module_at(file, root)
        if not file.is_file():
            linker.problems.append(f"{file.relative_to(root)} is no file, or a link to nothing; delete it")
        elif not spelled.advice_for(name) or any(each.startswith(f"{name}.") for each in spelled.STAND_INS):
            _add_file(linker, file, root)


def _goes(place: Path, root: Path) -> bool:
    return any(place.is_relative_to(root / folder) for folder in _GO)


def module_at(path: Path, root: Path) -> str:
    """Return the dotted name of a file of this project."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(("torch_ext", *parts) if parts[0] == "testing" else parts)


def _add_one(linker: Linker, module: str, name: str) -> None:
    found = linker.ours.find(module, name)
    if found is None:
        linker.problems.append(f"{path_of(module)}.py defines no {name}")
    elif advice := spelled.advice_for(found[0].name):
        linker.problems.append(f"{name}: {advice}")
    elif linker.theirs.find(place := linker.place(found[0].name), name) is None:
        linker.add_name(module, name)
    else:
        linker.problems.append(f"{place} has {name}: give REV.. to send what changed in it since REV")


def _add_since(linker: Linker, revision: str, root: Path) -> None:
    old = our_tree(linker.theirs, root, revision)
    untracked = _files(root, "ls-files", "-z", "--others", "--exclude-standard")
    changed = {*_files(root, *_DIFF, "--diff-filter=d", revision), *untracked}
    deleted = set(_files(root, *_DIFF, "--diff-filter=D", revision))
    if not changed and not deleted:
        linker.problems.append(f"nothing below {' and '.join(_GO)} changed since {revision}")
    for path in sorted(deleted):
        name = module_at(root / path, root)
        place = linker.place(name)
        # A name of a room behind upstream's front door may have moved to another room.
        alone = place.endswith(name.removeprefix("torch_ext."))
        if alone and not spelled.advice_for(name) and linker.theirs.module(place) is not None:
            linker.problems.append(
                f"{path} is gone since {revision}, and upstream has {path_of(place)}.py. A deletion does not "
                f"go by itself: name the files that are to go in the place of {revision}.., and delete it there by hand"
            )
    for path in sorted(changed):
        name = module_at(root / path, root)
        now, before = linker.ours.module(name), old.module(name)
        if now is None:
            linker.problems.append(f"{path} is no file, or a link to nothing; delete it")
        elif advice := spelled.advice_for(name):
            linker.problems.append(f"{path}: {advice}")
        elif before is None or linker.theirs.module(linker.place(name)) is None:
            linker.add_file(name)
        else:
            _add_changes(linker, old, before, now)


# -z: git quotes names that are not ASCII otherwise.
_DIFF = ("diff", "--no-ext-diff", "--no-renames", "--name-only", "--relative", "-z")


def _files(root: Path, *command: str) -> list[str]:
    found = git(root, *command, "--", *_GO).split("\0")
    return [path for path in found if path.endswith(".py") and not path.endswith("__init__.py")]


def _add_changes(linker: Linker, old: Tree, before: Module, now: Module) -> None:
    for name, definition in now.definitions.items():
        earlier, theirs = before.definitions.get(name), linker.theirs.find(linker.place(now.name), name)
        if name == "__all__" or (earlier is not None and _source(earlier) == _source(definition)):
            continue
        if theirs is None:
            linker.add_name(now.name, name)
        elif earlier is None:
            continue
        elif not (definition.is_class and earlier.is_class and theirs[1].is_class):
            _merge(linker, old, (before, earlier), (now, definition), theirs)
        else:
            was, has = earlier.members(), theirs[1].members()
            for member, statement in definition.members().items():
                if member in was and ast.dump(was[member]) == ast.dump(statement):
                    continue
                if member not in has:
                    linker.add_member(now, definition, member)
                elif member in was:
                    _merge(linker, old, (before, earlier), (now, definition), theirs, member)


def _source(definition: Definition) -> list[str]:
    return [ast.dump(each) for each in (definition.node, *definition.trailers)]


def _merge(
    linker: Linker,
    old: Tree,
    before: tuple[Module, Definition],
    now: tuple[Module, Definition],
    theirs: tuple[Module, Definition],
    member: str = "",
) -> None:
    """Merge a change of ours into upstream's definition, or report the three sides of a conflict."""
    was, piece = Linker(old, linker.theirs).changed(*before, member), linker.changed(*now, member)
    statement = theirs[1].members()[member] if member else theirs[1].node
    first, last = theirs[0].first_line(statement), span(statement)[1]
    upstream = "".join(theirs[0].lines[first - 1 : last])
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "merge-file", "-p", "--diff3", "-L", "upstream", "-L", "before", "-L", "now"]
        for name, text in (("upstream", upstream), ("before", formatted_piece(was)), ("now", formatted_piece(piece))):
            Path(folder, name).write_text(text, encoding="utf-8")
            command.append(name)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode == 0:
        piece.target.replaced.append((statement, done.stdout))
    else:
        name = f"{theirs[1].name}.{member}" if member else theirs[1].name
        linker.problems.append(
            f"{piece.target.path}: {name} changed here and differs upstream. Bring this into upstream's by hand:\n"
            f"{done.stdout}"
        )
