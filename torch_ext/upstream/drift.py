"""How our helpers differ from upstream's: every name beside its counterpart. Imports neither side.

A name is ``same`` if both sides define it and call it alike, ``changed`` if signatures differ, ``through`` if ours is
upstream's own by way of a module ``__getattr__``, ``missing`` if only upstream has it, and ``new`` if only we have it.
For a class, the same is said of each member, inherited ones included.

Of a module that ``--upstream`` takes whole from the installed torch, ours is that one: its names are ``through`` unless
a checkout has changed them.
"""

from __future__ import annotations

import ast
import copy
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch_ext.upstream.export.modules import (
    OURS,
    THEIRS,
    Definition,
    Module,
    Tree,
    installed_tree,
    members_of,
    our_tree,
    project_root,
    upstream_at,
)

__all__ = ["Entry", "as_json", "as_text", "compare", "compare_whole", "counterparts", "drift"]

# Modules of torch's helpers that are not ours, and that build on modules that are.
_TAKEN_WHOLE = ("distributed._tensor.common_dtensor",)

SAME, CHANGED, THROUGH, MISSING, NEW = "same", "changed", "through", "missing", "new"


@dataclass(frozen=True)
class Entry:
    """A name, or ``Class.member``, of module ``torch.testing._internal.<module>``, and how the two sides have it."""

    module: str
    name: str
    status: str
    ours: str = ""
    theirs: str = ""


def counterparts(root: Path, theirs: Tree) -> list[str]:
    """Return the modules below ``testing/_internal`` that both sides have, as dotted names below it."""
    below = root / "testing" / "_internal"
    found = (".".join(path.relative_to(below).with_suffix("").parts) for path in sorted(below.rglob("*.py")))
    return [name for name in found if not name.endswith("__init__") and theirs.module(f"{THEIRS}.{name}") is not None]


def drift(against: str = "installed") -> list[Entry]:
    """Compare every helper module with its counterpart.

    Args:
        against: the folder of a PyTorch checkout, read at its ``HEAD``, or ``installed``.

    Raises:
        CheckoutError: there is no such checkout.
    """
    theirs = installed_tree() if against == "installed" else upstream_at(Path(against))
    ours, names = our_tree(theirs), counterparts(project_root(), theirs)
    found = [entry for name in names for entry in compare(name, ours, theirs)]
    installed = installed_tree()
    gone = [name for name in counterparts(project_root(), installed) if name not in names]
    found += [Entry(name, "(the module)", NEW) for name in gone]
    return found + [entry for name in _TAKEN_WHOLE for entry in compare_whole(name, installed, theirs)]


def compare_whole(name: str, installed: Tree, theirs: Tree) -> list[Entry]:
    """Compare module ``name`` of the installed torch, which we take whole, with a checkout's; empty if one lacks it."""
    full_name = f"{THEIRS}.{name}"
    mine, upstream = installed.module(full_name), theirs.module(full_name)
    if mine is None or upstream is None:
        return []
    entries: list[Entry] = []
    for each in dict.fromkeys([*upstream.definitions, *mine.definitions]):
        here, there = mine.definitions.get(each), upstream.definitions.get(each)
        if each.startswith("__"):
            continue
        if here is None or there is None:
            entries.append(Entry(name, each, MISSING if here is None else NEW))
        else:
            entries += _both(name, each, installed, (mine, here), theirs, (upstream, there), inherited=False)
    return [replace(entry, status=THROUGH) if entry.status == SAME else entry for entry in entries]


def compare(name: str, ours: Tree, theirs: Tree) -> list[Entry]:
    """Compare one module, ``name`` below ``testing._internal``."""
    our_name, their_name = f"{OURS}.{name}", f"{THEIRS}.{name}"
    mine, upstream = ours.module(our_name), theirs.module(their_name)
    if mine is None or upstream is None:
        raise ValueError(f"only one side has {name}")
    missing = THROUGH if _resolves_through(mine) else MISSING
    listed = [each for each in _public_names(ours, our_name) if not each.startswith("__")]
    listed += [each for each in upstream.definitions if each not in listed and ours.find(our_name, each)]
    entries: list[Entry] = []
    for each in listed:
        here, there = ours.find(our_name, each), theirs.find(their_name, each)
        entries += [Entry(name, each, NEW)] if there is None else _both(name, each, ours, here, theirs, there)
    # A module that looks names up on use defines them although no statement does.
    found_on_use = _names_looked_up(mine, ours)
    known = {entry.name for entry in entries}
    for each in upstream.definitions:
        if each not in known and not each.startswith("__"):
            entries.append(Entry(name, each, SAME if each in found_on_use else missing))
    return entries


def _both(
    module: str,
    name: str,
    ours: Tree,
    here: tuple[Module, Definition] | None,
    theirs: Tree,
    there: tuple[Module, Definition],
    inherited: bool = True,
) -> Iterator[Entry]:
    if here is None:  # re-exported from torch itself
        yield Entry(module, name, SAME)
        return
    (_, mine), (_, upstream) = here, there
    if not (mine.is_class and upstream.is_class):
        yield _entry(module, name, mine.node, upstream.node)
        return
    yield Entry(module, name, SAME)
    if inherited:
        my_members, their_members = members_of(ours, *here), members_of(theirs, *there)
    else:
        my_members, their_members = (
            {member: (module, node) for member, node in definition.members().items()}
            for module, definition in (here, there)
        )
    for member in dict.fromkeys([*their_members, *my_members]):
        if member.startswith("__") and member != "__init__":
            continue
        full = f"{name}.{member}"
        if member in my_members and member in their_members:
            # Both inherit it from one class of torch: nothing to tell.
            if not inherited or my_members[member][0].name != their_members[member][0].name:
                yield _entry(module, full, my_members[member][1], their_members[member][1], method=True)
        else:
            yield Entry(module, full, NEW if member in my_members else MISSING)


def _public_names(tree: Tree, module: str) -> list[str]:
    """Return the names that an import of ``*`` from ``module`` gives."""
    here = tree.module(module)
    if here is None:
        return []
    starred = [name for star in here.stars for name in _public_names(tree, star)]
    return [*here.definitions, *starred] if here.all is None else here.all


def _entry(module: str, name: str, mine: ast.stmt, upstream: ast.stmt, method: bool = False) -> Entry:
    here, there = _signature(mine, method), _signature(upstream, method)
    if here == there:
        return Entry(module, name, SAME)
    return Entry(module, name, CHANGED, here, there)


def _signature(node: ast.stmt, method: bool) -> str:
    """Return the parameters of a function, without annotations and the values of defaults; empty for other statements.

    Args:
        node: the definition.
        method: leave out ``self`` or ``cls``.

    >>> _signature(ast.parse("def f(a: int, *, b=1, **c) -> None: ...").body[0], method=False)
    'a, *, b=..., **c'
    """
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    arguments = copy.deepcopy(node.args)
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [each and ast.Constant(...) for each in arguments.kw_defaults]
    if method and not any(ast.unparse(each) == "staticmethod" for each in node.decorator_list):
        del (arguments.posonlyargs or arguments.args)[:1]
    return ast.unparse(arguments)


def _resolves_through(module: Module) -> bool:
    """Whether the module's ``__getattr__`` ends at upstream's module."""
    lookup = module.definitions.get("__getattr__")
    return lookup is not None and "upstream" in ast.unparse(lookup.node)


def _names_looked_up(module: Module, ours: Tree) -> set[str]:
    """Return the names that a module's ``__getattr__`` answers itself: the keys of the tables that it reads."""
    lookup = module.definitions.get("__getattr__")
    found: set[str] = set()
    for node in ast.walk(lookup.node) if lookup else ():
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            origin = module.imports.get(node.value.id)
            table = ours.find(origin.dotted, node.attr) if origin else None
            value = getattr(table[1].node, "value", None) if table else None
            if isinstance(value, ast.Dict):
                found |= {key.value for key in value.keys if isinstance(key, ast.Constant) and type(key.value) is str}
    return found


def as_json(entries: Iterable[Entry]) -> str:
    return json.dumps([asdict(entry) for entry in entries], indent=1)


def as_text(entries: Iterable[Entry]) -> str:
    """Return the differences, by module, with a count of each kind."""
    by_module: dict[str, list[Entry]] = {}
    for entry in entries:
        by_module.setdefault(entry.module, []).append(entry)
    blocks = []
    for module, members in by_module.items():
        counts = Counter(entry.status for entry in members)
        lines = [f"{module}: " + ", ".join(f"{counts[kind]} {kind}" for kind in _KINDS if counts[kind])]
        for kind in (CHANGED, MISSING, NEW):
            for entry in members:
                if entry.status == kind:
                    change = f"  ours ({entry.ours})  theirs ({entry.theirs})" if kind == CHANGED else ""
                    lines.append(f"  {kind:8}{entry.name}{change}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


_KINDS = (SAME, CHANGED, THROUGH, MISSING, NEW)
