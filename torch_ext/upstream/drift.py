"""``torch_ext drift``: how our helpers differ from upstream's, name by name. Imports neither side.

A name is ``same`` if both sides define it with one signature, ``changed`` if signatures differ, ``through`` if ours is
upstream's own by way of a module ``__getattr__``, ``missing`` if only upstream has it, and ``new`` if only we have it.
Members of a class are compared in the same way, inherited ones included.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from torch_ext.upstream.export.git import CheckoutError
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

SAME, CHANGED, THROUGH, MISSING, NEW = "same", "changed", "through", "missing", "new"


@dataclass(frozen=True)
class Entry:
    """A name, or ``Class.member``, of module ``torch.testing._internal.<module>``, its status and both signatures."""

    module: str
    name: str
    status: str
    ours: str = ""
    theirs: str = ""


def main(arguments: Sequence[str]) -> int:
    """Print the differences; return 0, or 2 without such a checkout."""
    summary = "List the names of our helpers that differ from upstream's."
    parser = argparse.ArgumentParser("torch_ext drift", description=summary)
    parser.add_argument("--against", default="installed", metavar="CHECKOUT", help="default: the installed torch")
    parser.add_argument("--json", action="store_true", help="print every name, the same ones included, as JSON")
    options = parser.parse_args(arguments)
    try:
        entries = drift(options.against)
    except CheckoutError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps([asdict(entry) for entry in entries], indent=1) if options.json else as_text(entries))
    return 0


def drift(against: str = "installed") -> list[Entry]:
    """Compare every helper module with its counterpart in ``against``: a PyTorch checkout at its ``HEAD``, or the
    ``installed`` torch.

    Raises:
        CheckoutError: there is no such checkout.
    """
    theirs = installed_tree() if against == "installed" else upstream_at(Path(against))
    ours, below = our_tree(theirs), project_root() / "testing" / "_internal"
    found = (".".join(path.relative_to(below).with_suffix("").parts) for path in sorted(below.rglob("*.py")))
    names = [name for name in found if not name.endswith("__init__") and theirs.module(f"{THEIRS}.{name}")]
    return [entry for name in names for entry in compare(name, ours, theirs)]


def compare(name: str, ours: Tree, theirs: Tree) -> list[Entry]:
    """Compare one module, ``name`` below ``testing._internal``."""
    our_name, their_name = f"{OURS}.{name}", f"{THEIRS}.{name}"
    mine, upstream = ours.module(our_name), theirs.module(their_name)
    if mine is None or upstream is None:
        raise ValueError(f"only one side has {name}")
    missing = THROUGH if _resolves_through(mine) else MISSING
    public = _public_names(ours, our_name)
    entries: list[Entry] = []
    for each in dict.fromkeys([*public, *upstream.definitions]):
        here, there = ours.find(our_name, each), theirs.find(their_name, each)
        if each.startswith("__"):
            continue
        if here is not None and there is not None:
            entries += _compare_definitions(name, each, (ours, *here), (theirs, *there))
        else:  # ours alone, re-exported from torch itself, or upstream's alone
            entries.append(Entry(name, each, NEW if there is None else SAME if each in public else missing))
    return entries


def _compare_definitions(
    module: str, name: str, here: tuple[Tree, Module, Definition], there: tuple[Tree, Module, Definition]
) -> Iterator[Entry]:
    mine, upstream = here[2], there[2]
    yield _entry(module, name, mine.node, upstream.node)
    if mine.is_class and upstream.is_class:
        my_members, their_members = members_of(*here), members_of(*there)
        for member in dict.fromkeys([*their_members, *my_members]):
            full = f"{name}.{member}"
            if member.startswith("__") and member != "__init__":
                continue
            if member not in my_members or member not in their_members:
                yield Entry(module, full, NEW if member in my_members else MISSING)
            elif my_members[member][0].name != their_members[member][0].name:  # else both inherit it from one class
                yield _entry(module, full, my_members[member][1], their_members[member][1], method=True)


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
    ``method``: leave out ``self`` or ``cls``.

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


def as_text(entries: Iterable[Entry]) -> str:
    """Return the differences, by module, with a count of each kind."""
    blocks = []
    for module, group in groupby(entries, lambda entry: entry.module):
        members = list(group)
        counts = Counter(entry.status for entry in members)
        kinds = (SAME, CHANGED, THROUGH, MISSING, NEW)
        lines = [f"{module}: " + ", ".join(f"{counts[kind]} {kind}" for kind in kinds if counts[kind])]
        for kind in (CHANGED, MISSING, NEW):
            for entry in members:
                if entry.status == kind:
                    change = f"  ours ({entry.ours})  theirs ({entry.theirs})" if kind == CHANGED else ""
                    lines.append(f"  {kind:8}{entry.name}{change}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
