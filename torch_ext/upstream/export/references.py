"""Which global names a piece of source uses, and where: Python's scopes, read from the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Use", "annotations_of", "bound_anywhere", "evaluated_at_once", "nested_imports", "own_attributes", "uses"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Use:
    """A global name where it is read. ``parents`` are the expressions around it, the innermost first."""

    node: ast.Name
    parents: tuple[ast.AST, ...]

    @property
    def name(self) -> str:
        return self.node.id

    def attribute(self) -> ast.Attribute | None:
        """Return ``name.x`` if that is what is read."""
        parent = self.parents[0] if self.parents else None
        return parent if isinstance(parent, ast.Attribute) and parent.value is self.node else None

    def call_of(self, node: ast.AST) -> ast.Call | None:
        """Return the call of ``node``, which is this name or an attribute of it, if it is called."""
        around = [self.node, *self.parents]
        parent = around[around.index(node) + 1] if around.index(node) + 1 < len(around) else None
        return parent if isinstance(parent, ast.Call) and parent.func is node else None


def uses(node: ast.AST) -> list[Use]:
    """Return the uses of names that are not bound in a function or class inside ``node``, in order."""
    return list(_uses(node, frozenset(), frozenset(), ()))


def _uses(
    node: ast.AST, bound: frozenset[str], in_class: frozenset[str], parents: tuple[ast.AST, ...]
) -> Iterator[Use]:
    """``bound`` are names of enclosing functions; ``in_class`` those of the class body, which functions do not see."""
    if isinstance(node, ast.Name):
        if node.id not in bound and node.id not in in_class:
            yield Use(node, parents)
        return
    inner = (node, *parents)
    if isinstance(node, _FUNCTIONS):
        outside: list[ast.AST] = [*getattr(node, "decorator_list", []), *_outside(node.args)]
        if not isinstance(node, ast.Lambda) and node.returns is not None:
            outside.append(node.returns)
        for each in outside:
            yield from _uses(each, bound, in_class, inner)
        local = bound | _locals(node)
        for each in node.body if isinstance(node.body, list) else [node.body]:
            yield from _uses(each, local, frozenset(), inner)
    elif isinstance(node, ast.ClassDef):
        for each in [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]:
            yield from _uses(each, bound, in_class, inner)
        own = frozenset(name for statement in node.body for name in _stored(statement))
        for each in node.body:
            yield from _uses(each, bound, own, inner)
    elif isinstance(node, _COMPREHENSIONS):
        targets = frozenset(
            each.id
            for generator in node.generators
            for each in ast.walk(generator.target)
            if isinstance(each, ast.Name)
        )
        for child in ast.iter_child_nodes(node):
            yield from _uses(child, bound | targets, in_class, inner)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _uses(child, bound, in_class, inner)


def _outside(arguments: ast.arguments) -> list[ast.AST]:
    """Return what is evaluated where the function is defined: defaults and annotations."""
    defaults = [each for each in [*arguments.defaults, *arguments.kw_defaults] if each is not None]
    return [*defaults, *(each.annotation for each in _all_arguments(arguments) if each.annotation is not None)]


def _all_arguments(arguments: ast.arguments) -> list[ast.arg]:
    return [
        *arguments.posonlyargs,
        *arguments.args,
        *([arguments.vararg] if arguments.vararg else []),
        *arguments.kwonlyargs,
        *([arguments.kwarg] if arguments.kwarg else []),
    ]


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> frozenset[str]:
    names = {each.arg for each in _all_arguments(function.args)}
    if not isinstance(function, ast.Lambda):
        for statement in function.body:
            names.update(_stored(statement))
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                names.difference_update(node.names)
    return frozenset(names)


def _stored(node: ast.AST) -> Iterator[str]:
    """Yield the names that ``node`` binds in the scope that it stands in."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, (ast.Lambda, *_COMPREHENSIONS)):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        yield node.id
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    elif (isinstance(node, ast.ExceptHandler) and node.name) or (
        isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name
    ):
        yield node.name
    for child in ast.iter_child_nodes(node):
        yield from _stored(child)


def bound_anywhere(nodes: Iterable[ast.AST]) -> set[str]:
    """Return every name that is bound in ``nodes``, in whatever scope."""
    found: set[str] = set()
    for top in nodes:
        for node in ast.walk(top):
            if isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def nested_imports(node: ast.AST) -> list[ast.ImportFrom]:
    """Return the ``from ... import`` statements inside ``node``."""
    return [each for each in ast.walk(node) if isinstance(each, ast.ImportFrom) and each is not node]


def own_attributes(node: ast.AST) -> set[str]:
    """Return the names ``x`` of every ``self.x`` and ``cls.x`` in ``node``, and of ``super().x``."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load) and _is_own(each.value):
            found.add(each.attr)
    return found


def _is_own(base: ast.expr) -> bool:
    if isinstance(base, ast.Call):
        return isinstance(base.func, ast.Name) and base.func.id == "super"
    return isinstance(base, ast.Name) and base.id in ("self", "cls")


def evaluated_at_once(statement: ast.stmt) -> list[ast.AST]:
    """Return what runs when a class's body reaches ``statement``: of a function, only what is around it."""
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [statement]
    arguments = statement.args
    return [
        *statement.decorator_list,
        *arguments.defaults,
        *(each for each in arguments.kw_defaults if each is not None),
    ]


def annotations_of(node: ast.AST) -> list[ast.expr]:
    """Return the annotations in ``node`` that Python evaluates: those of functions, classes and modules."""
    found: list[ast.expr] = []
    for each in ast.walk(node):
        if isinstance(each, ast.arg) and each.annotation is not None:
            found.append(each.annotation)
        elif isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and each.returns is not None:
            found.append(each.returns)
        elif isinstance(each, ast.AnnAssign):
            found.append(each.annotation)
    return found
