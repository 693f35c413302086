"""Python's scopes, read from the syntax tree, and changes of text at the places that the tree gives."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Use:
    """A read of a global name. ``spine``: the name, then the attributes and calls on it: ``a``, ``a.b``, ``a.b()``."""

    spine: tuple[ast.expr, ...]

    @property
    def name(self) -> str:
        return ast.unparse(self.spine[0])

    @property
    def line(self) -> int:
        return self.spine[0].lineno


def uses(
    node: ast.AST,
    bound: frozenset[str] = frozenset(),
    in_class: frozenset[str] = frozenset(),
    around: tuple[ast.expr, ...] = (),
) -> Iterator[Use]:
    """Yield the uses of names that no function or class inside ``node`` binds. ``bound`` are names of the functions
    around; ``in_class`` those of the class body around, which its functions do not see; ``around`` the attributes and
    calls on ``node``.
    """
    if isinstance(node, ast.Name):
        if node.id not in bound | in_class:
            yield Use((node, *around))
        return
    body, inside = getattr(node, "body", ()), (bound, in_class)
    if isinstance(node, _FUNCTIONS):
        inside = (bound | _locals(node), frozenset())
    elif isinstance(node, ast.ClassDef):
        inside = (bound, frozenset(name for each in node.body for name in bound_names(each, imports=True)))
    elif isinstance(node, _COMPREHENSIONS):
        targets = (each for comprehension in node.generators for each in ast.walk(comprehension.target))
        bound |= {each.id for each in targets if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    for child in ast.iter_child_nodes(node):
        scope = inside if child is body or (isinstance(body, list) and child in body) else (bound, in_class)
        on = isinstance(node, ast.Attribute) or (isinstance(node, ast.Call) and child is node.func)
        yield from uses(child, *scope, around=(node, *around) if on and isinstance(node, ast.expr) else ())


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> frozenset[str]:
    names = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    for statement in function.body if isinstance(function.body, list) else ():
        names.update(bound_names(statement, imports=True))
    return frozenset(names.difference(*(node.names for node in ast.walk(function) if isinstance(node, ast.Global))))


def bound_names(node: ast.AST, imports: bool = False) -> Iterator[str]:
    """Yield the names that ``node`` binds in its own scope, in order. ``imports``: also by imports and ``except``."""
    if isinstance(node, _DEFINITIONS):
        yield node.name
        return
    if isinstance(node, (ast.Lambda, *_COMPREHENSIONS)):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif imports and isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    elif imports and isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name
    for child in ast.iter_child_nodes(node):
        yield from bound_names(child, imports)


def own_attributes(node: ast.AST) -> set[str]:
    """Return the names ``x`` of every ``self.x``, ``cls.x`` and ``super().x`` that ``node`` reads."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Load)
        and ast.unparse(each.value).split("(")[0] in ("self", "cls", "super")
    }


@dataclass(frozen=True)
class Edit:
    """Replaces the text from ``start`` to ``end``. Places are (line from 1, column in UTF-8 bytes)."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def replace_node(node: ast.expr | ast.stmt, text: str) -> Edit:
    return Edit((node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0), text)


def replace_lines(first: int, last: int, text: str = "") -> Edit:
    """Return the edit that replaces lines ``first`` to ``last``; that inserts before ``first`` if ``last`` is less."""
    return Edit((first, 0), (last + 1, 0), text)


def apply(text: str, edits: Iterable[Edit], first: int = 1, last: int | None = None) -> str:
    """Return lines ``first`` to ``last`` of ``text`` with ``edits`` made. An edit inside another one is dropped."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(place: tuple[int, int]) -> int:
        return starts[place[0] - 1] + place[1]

    places = [(offset(each.start), offset(each.end), each.text) for each in edits]
    whole, position, end = b"".join(lines), starts[first - 1], starts[len(lines) if last is None else last]
    pieces = []
    for start, stop, new in sorted(places, key=lambda each: (each[0], each[0] != each[1], -each[1])):
        if position <= start and stop <= end:
            pieces += [whole[position:start], new.encode()]
            position = stop
    return b"".join([*pieces, whole[position:end]]).decode()
