"""Python files as data: what a module defines, what it imports, and which of its lines say so. Runs nothing of them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeGuard

from torch_ext.upstream.export.git import CheckoutError

__all__ = ["Definition", "Import", "Module", "Tree", "bound_names", "is_typing_block", "members_of", "signature"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Import:
    """A name that a module takes from another one: ``attribute`` of ``module``, or ``module`` itself if that is empty.

    Attributes:
        typing_only: it stands under ``if TYPE_CHECKING``, so that it is there for annotations alone.
    """

    module: str
    attribute: str
    typing_only: bool = False

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.attribute}" if self.attribute else self.module


@dataclass(frozen=True)
class Definition:
    """A top-level name and the statements that make it: usually one, and more if its attributes are set later."""

    name: str
    node: ast.stmt
    trailers: tuple[ast.stmt, ...] = ()

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    def members(self) -> dict[str, ast.stmt]:
        """Return the statements of a class's body that bind a name, by name."""
        found: dict[str, ast.stmt] = {}
        if isinstance(self.node, ast.ClassDef):
            for statement in self.node.body:
                for name in () if is_typing_block(statement) else bound_names(statement):
                    found.setdefault(name, statement)
        return found


@dataclass
class Module:
    """The source of one module.

    Attributes:
        name: dotted.
        text: its source.
        package: whether it is a package's ``__init__``.
    """

    name: str
    text: str
    package: bool = False
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, Import] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        attached: dict[str, list[ast.stmt]] = {}
        for statement in self.tree.body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self._add_import(statement, typing_only=False)
            elif is_typing_block(statement) and not statement.orelse:
                for inner in statement.body:
                    if isinstance(inner, (ast.Import, ast.ImportFrom)):
                        self._add_import(inner, typing_only=True)
                    else:
                        self._define(inner)
            elif owner := _attribute_owner(statement):
                attached.setdefault(owner, []).append(statement)
            else:
                self._define(statement)
        for owner, statements in attached.items():
            if owner in self.definitions:
                known = self.definitions[owner]
                self.definitions[owner] = Definition(owner, known.node, (*known.trailers, *statements))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    @cached_property
    def all(self) -> list[str] | None:
        """What ``__all__`` lists, or None."""
        listed = self.definitions.get("__all__")
        value = getattr(listed.node, "value", None) if listed else None
        if not isinstance(value, (ast.List, ast.Tuple)):
            return None
        try:
            return list(ast.literal_eval(value))
        except ValueError:  # put together out of other lists
            return None

    def _define(self, statement: ast.stmt) -> None:
        for name in bound_names(statement):
            self.definitions[name] = Definition(name, statement)

    def _add_import(self, statement: ast.Import | ast.ImportFrom, typing_only: bool) -> None:
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                self.imports[alias.asname or whole] = Import(whole, "", typing_only)
            elif alias.name == "*":
                self.stars.append(self.absolute(statement))
            else:
                self.imports[alias.asname or alias.name] = Import(self.absolute(statement), alias.name, typing_only)

    def absolute(self, statement: ast.ImportFrom) -> str:
        """Return the module that ``statement`` imports from, dotted and absolute."""
        if not statement.level:
            return statement.module or ""
        parents = self.name.split(".")
        kept = parents[: len(parents) - statement.level + self.package]
        return ".".join([*kept, *([statement.module] if statement.module else [])])

    def first_line(self, statement: ast.stmt) -> int:
        """Return the number (from 1) of the first line that belongs to ``statement``: decorators and the comment."""
        first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
        while first > 1 and self.lines[first - 2].strip().startswith("#"):
            first -= 1
        return first


class Tree:
    """Modules by their names, read when they are asked for.

    Args:
        read: returns the text of a module and whether it is a package, or None if there is no such module.
        called: returns what a module's file is called in a message.
    """

    def __init__(
        self, read: Callable[[str], tuple[str, bool] | None], called: Callable[[str], str] = lambda name: name
    ) -> None:
        self.read = read
        self.called = called
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """Return the module ``name``, or None if it is not in this tree.

        Raises:
            CheckoutError: its file is no Python.
        """
        if name not in self._modules:
            found = self.read(name)
            try:
                self._modules[name] = Module(name, *found) if found else None
            except (SyntaxError, ValueError) as error:
                raise CheckoutError(f"{self.called(name)}{_what_is_wrong(error)}") from None
        return self._modules[name]

    def find(self, module: str, name: str) -> tuple[Module, Definition] | None:
        """Return where ``module.name`` is defined, through re-exports, or None if that is not in this tree."""
        here = self.module(module)
        if here is None:
            return None
        if name in here.definitions:
            return here, here.definitions[name]
        if (origin := here.imports.get(name)) and origin.attribute:
            return self.find(origin.module, origin.attribute)
        for star in here.stars:
            there = self.module(star)
            if there is not None and (there.all is None or name in there.all) and (found := self.find(star, name)):
                return found
        return None

    def public_names(self, module: str) -> list[str]:
        """Return what importing ``*`` of ``module`` gives, if it says so; else the names that it defines."""
        here = self.module(module)
        if here is None:
            return []
        if here.all is not None:
            return list(here.all)
        starred = [name for star in here.stars for name in self.public_names(star)]
        return [*here.definitions, *starred]


def _what_is_wrong(error: SyntaxError | ValueError) -> str:
    if not isinstance(error, SyntaxError):
        return f" is no Python ({error}); mend it first"
    line = f", line {error.lineno}" if error.lineno else ""
    if (error.text or "").startswith(("<<<<<<< ", "||||||| ", "=======", ">>>>>>> ")):
        return f"{line}: a merge left a conflict here; resolve it first"
    return f"{line}: this is no Python ({error.msg}); mend it first"


def bound_names(statement: ast.stmt) -> list[str]:
    """Return the names that a statement binds where it stands, in order, without those of imports."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return [statement.name]
    found: list[str] = []
    for node in _own_scope(statement):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
    return list(dict.fromkeys(found))


def _own_scope(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp)):
            yield from _own_scope(child)


def is_typing_block(statement: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _attribute_owner(statement: ast.stmt) -> str:
    """Return ``x`` for ``x.attribute = ...``, else an empty string."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            return target.value.id
    return ""


def members_of(tree: Tree, module: Module, definition: Definition) -> dict[str, tuple[Module, ast.stmt]]:
    """Return the members of a class, inherited ones included as far as its bases are in ``tree``."""
    found: dict[str, tuple[Module, ast.stmt]] = {}
    if isinstance(definition.node, ast.ClassDef):
        for base in reversed(definition.node.bases):
            if isinstance(base, ast.Name) and (home := tree.find(module.name, base.id)) and home[1] != definition:
                found.update(members_of(tree, *home))
    found.update({name: (module, statement) for name, statement in definition.members().items()})
    return found


def signature(node: ast.AST, method: bool = False) -> str:
    """Return how a function is called: parameter names, kinds and whether they have defaults. Annotations do not count.

    Args:
        node: what is not a function has no signature.
        method: leave out the parameter that the call itself fills, if there is one.

    >>> signature(ast.parse("def f(a: int, *, b=1, **c) -> None: ...").body[0])
    'a, *, b=, **c'
    """
    if not isinstance(node, _FUNCTIONS):
        return ""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    optional = len(plain) - len(arguments.defaults)
    parts = [each.arg + "=" * (place >= optional) for place, each in enumerate(plain)]
    if method and parts and not any(ast.unparse(each) == "staticmethod" for each in node.decorator_list):
        del parts[0]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg or arguments.kwonlyargs:
        parts.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    parts += [
        each.arg + "=" * (default is not None)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return ", ".join([*parts, *([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])])
