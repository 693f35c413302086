"""What is to go upstream: files, names in them, or whatever changed since a revision."""

from __future__ import annotations

import ast
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch_ext.upstream.export import spelled
from torch_ext.upstream.export.link import Linker
from torch_ext.upstream.export.modules import Definition, Module, Tree
from torch_ext.upstream.export.trees import CheckoutError, our_tree_at, path_of
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
    for each in asked:
        if each.endswith(".."):
            _add_since(linker, each.removesuffix(".."), root)
            continue
        path, _, name = each.partition("::")
        place = (root / path) if (root / path).exists() else Path(path).resolve()
        if not place.exists() or not place.is_relative_to(root):
            raise CheckoutError(f"{path} is no file, folder or REV.. of {root}")
        if name:
            _add_one(linker, module_at(place, root), name)
        elif place.is_dir():
            for file in sorted(place.rglob("*.py")):
                module = module_at(file, root)
                if file.name != "__init__.py" and not _stays(linker, module):
                    linker.add_file(module)
        else:
            linker.add_file(module_at(place, root))


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
    for path in _changed_files(root, revision):
        name = module_at(root / path, root)
        now, before = linker.ours.module(name), old.module(name)
        if now is None or path.endswith("__init__.py"):
            continue
        if advice := spelled.advice_for(name):
            linker.problems.append(f"{path}: {advice}")
        elif before is None or linker.theirs.module(linker.places.place(name)) is None:
            linker.add_file(name)
        else:
            _add_changes(linker, old, before, now)


def _changed_files(root: Path, revision: str) -> list[str]:
    def git(*command: str) -> list[str]:
        done = subprocess.run(["git", "-C", str(root), *command, "--", *_GO], capture_output=True, text=True)
        if done.returncode:
            raise CheckoutError(f"git {command[0]} {revision}: {done.stderr.strip()}")
        return [line for line in done.stdout.splitlines() if line.endswith(".py")]

    new = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", "--diff-filter=d", revision), *new})


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
