"""What is to go upstream: files, names in them, or whatever changed since a revision."""

from __future__ import annotations

import ast
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch_ext.upstream.export import spelled
from torch_ext.upstream.export.git import CheckoutError, git
from torch_ext.upstream.export.link import Linker
from torch_ext.upstream.export.modules import Definition, Module, Tree
from torch_ext.upstream.export.trees import our_tree_at, path_of
from torch_ext.upstream.export.write import formatted_piece

__all__ = ["add", "module_at"]

_GO = ("testing", "test/distributed")


def add(linker: Linker, asked: Sequence[str], root: Path) -> None:
    """Add to ``linker`` what ``asked`` names; what cannot go becomes one of its problems.

    Args:
        asked: each a file or folder below the project's root, ``FILE::NAME`` for a definition or class, or ``REV..``
            for all that changed since REV, uncommitted changes included.
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
        place = _place(path, root) if path else None
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


def _place(path: str, root: Path) -> Path | None:
    """Return the file or folder of ``root`` that ``path`` names, from there or from where the command runs."""
    for place in ((root / path).resolve(), Path(path).resolve()):
        if place.exists() and place.is_relative_to(root):
            return place
    return None


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
        if not file.is_file():
            linker.problems.append(f"{file.relative_to(root)} is no file, or a link to nothing; delete it")
        elif not _stays(linker, module_at(file, root)):
            _add_file(linker, file, root)


def _goes(place: Path, root: Path) -> bool:
    return any(place.is_relative_to(root / folder) for folder in _GO)


def _stays(linker: Linker, name: str) -> bool:
    module = linker.ours.module(name)
    stand_ins = any(f"{name}.{each}" in spelled.STAND_INS for each in (module.all or () if module else ()))
    return bool(spelled.advice_for(name)) and not stand_ins


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
    else:
        place = linker.places.place(found[0].name)
        if linker.theirs.find(place, name) is None:
            linker.add_name(module, name)
        else:
            linker.problems.append(f"{place} has {name}: give REV.. to send what changed in it since REV")


def _add_since(linker: Linker, revision: str, root: Path) -> None:
    old = our_tree_at(revision, linker.theirs, root)
    changed, deleted = _changed_files(root, revision), _deleted_files(root, revision)
    if not changed and not deleted:
        linker.problems.append(f"nothing below {' and '.join(_GO)} changed since {revision}")
    for path in deleted:
        name = module_at(root / path, root)
        place = linker.places.place(name)
        # What was in a room behind upstream's front door may have moved to another one.
        alone = place.endswith(name.removeprefix("torch_ext."))
        if alone and not spelled.advice_for(name) and linker.theirs.module(place) is not None:
            linker.problems.append(
                f"{path} is gone since {revision}, and upstream has {path_of(place)}.py. A deletion does not "
                f"go by itself: name the files that are to go in the place of {revision}.., and delete it there by hand"
            )
    for path in changed:
        name = module_at(root / path, root)
        if path.endswith("__init__.py"):
            continue
        now, before = linker.ours.module(name), old.module(name)
        if now is None:
            linker.problems.append(f"{path} is no file, or a link to nothing; delete it")
        elif advice := spelled.advice_for(name):
            linker.problems.append(f"{path}: {advice}")
        elif before is None or linker.theirs.module(linker.places.place(name)) is None:
            linker.add_file(name)
        else:
            _add_changes(linker, old, before, now)


def _changed_files(root: Path, revision: str) -> list[str]:
    new = _files(root, "ls-files", "-z", "--others", "--exclude-standard")
    return sorted({*_files(root, *_DIFF, "--diff-filter=d", revision), *new})


def _deleted_files(root: Path, revision: str) -> list[str]:
    gone = _files(root, *_DIFF, "--diff-filter=D", revision)
    return sorted(path for path in set(gone) if not path.endswith("__init__.py"))


def _files(root: Path, *command: str) -> list[str]:
    return [path for path in git(root, *command, "--", *_GO).split("\0") if path.endswith(".py")]


# Names as they are: git quotes those that are not ASCII unless it ends them with a zero.
_DIFF = ("diff", "--no-ext-diff", "--no-renames", "--name-only", "--relative", "-z")


def _add_changes(linker: Linker, old: Tree, before: Module, now: Module) -> None:
    for name, definition in now.definitions.items():
        earlier = before.definitions.get(name)
        if name == "__all__" or (earlier is not None and _same(earlier, definition)):
            continue
        place = linker.places.place(now.name)
        theirs = linker.theirs.find(place, name)
        if theirs is None or earlier is None:
            if theirs is None:
                linker.add_name(now.name, name)
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


def _same(one: Definition, other: Definition) -> bool:
    return [ast.dump(each) for each in (one.node, *one.trailers)] == [
        ast.dump(each) for each in (other.node, *other.trailers)
    ]


def _merge(
    linker: Linker,
    old: Tree,
    before: tuple[Module, Definition],
    now: tuple[Module, Definition],
    theirs: tuple[Module, Definition],
    member: str = "",
) -> None:
    """Bring a change of ours into upstream's definition, or tell the three sides where they cannot be told apart."""

    def part(definition: Definition) -> ast.stmt | None:
        return definition.members()[member] if member else None

    was = Linker(old, linker.theirs).changed(*before, part(before[1]))[1]
    target, piece = linker.changed(*now, part(now[1]))
    statement = part(theirs[1]) or theirs[1].node
    first, last = theirs[0].first_line(statement), statement.end_lineno or statement.lineno
    upstream = "".join(theirs[0].lines[first - 1 : last])
    merged, clean = _three_way(upstream, formatted_piece(was), formatted_piece(piece))
    if clean:
        target.replaced.append((statement, merged))
    else:
        name = f"{theirs[1].name}.{member}" if member else theirs[1].name
        linker.problems.append(
            f"{target.path}: {name} changed here and differs upstream. Bring this into upstream's by hand:\n{merged}"
        )


def _three_way(upstream: str, before: str, now: str) -> tuple[str, bool]:
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name, text in (("upstream", upstream), ("before", before), ("now", now)):
            file = Path(folder, name)
            file.write_text(text, encoding="utf-8")
            files += ["-L", f"{name}"]
        paths = [str(Path(folder, name)) for name in ("upstream", "before", "now")]
        done = subprocess.run(["git", "merge-file", "-p", "--diff3", *files, *paths], capture_output=True, text=True)
    return done.stdout, done.returncode == 0
