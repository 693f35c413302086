"""Python files as data: the names that a module defines and imports, and where each file is read. Runs no file."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TypeGuard

from torch_ext.upstream.export.git import CheckoutError, commit_of, file_at
from torch_ext.upstream.export.scopes import bound_names
from torch_ext.upstream.export.tables import STAND_INS

OURS, THEIRS = "torch_ext.testing._internal", "torch.testing._internal"


@dataclass(frozen=True)
class Import:
    """An imported name: ``attribute`` of ``module``, or ``module`` itself if ``attribute`` is empty."""

    module: str
    attribute: str

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.attribute}" if self.attribute else self.module


@dataclass(frozen=True)
class Definition:
    """A top-level name, the statement that binds it, and the later statements that set its attributes."""

    name: str
    node: ast.stmt
    trailers: list[ast.stmt] = field(default_factory=list)

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    def members(self) -> dict[str, ast.stmt]:
        """Return the statements of a class's body that bind a name, by name."""
        found: dict[str, ast.stmt] = {}
        for statement in self.node.body if isinstance(self.node, ast.ClassDef) else ():
            for name in () if _is_typing_block(statement) else bound_names(statement):
                found.setdefault(name, statement)
        return found


@dataclass
class Module:
    """The source ``text`` of the module with the dotted ``name``. ``package``: the file is an ``__init__.py``."""

    name: str
    text: str
    package: bool = False
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, Import] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for statement in self.tree.body:
            for each in statement.body if _is_typing_block(statement) and not statement.orelse else [statement]:
                self._add(each)

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                self.imports[alias.asname or whole] = Import(whole, "")
        elif isinstance(statement, ast.ImportFrom):
            home = self.absolute(statement)
            for alias in statement.names:
                if alias.name == "*":
                    self.stars.append(home)
                else:
                    self.imports[alias.asname or alias.name] = Import(home, alias.name)
        elif (owner := _attribute_owner(statement)) in self.definitions:
            self.definitions[owner].trailers.append(statement)
        else:
            self.definitions.update({name: Definition(name, statement) for name in bound_names(statement)})

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    @cached_property
    def all(self) -> list[str] | None:
        """The names in ``__all__``; None if the module has no such list, or computes it."""
        listed = self.definitions.get("__all__")
        try:
            return [str(each) for each in ast.literal_eval(listed.node.value)]  # type: ignore[union-attr]
        except (AttributeError, ValueError):
            return None

    def absolute(self, statement: ast.ImportFrom) -> str:
        """Return the absolute dotted name of the module that ``statement`` imports from."""
        package = self.name if self.package else self.name.rpartition(".")[0]
        return importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)

    def first_line(self, statement: ast.stmt) -> int:
        """Return the number of the first line of ``statement`` with its decorators and the comment above."""
        first = span(statement)[0]
        while first > 1 and self.lines[first - 2].strip().startswith("#"):
            first -= 1
        return first


class Tree:
    """Modules by name. ``read`` reads each on first use, and returns None for a name that is no module."""

    def __init__(self, read: Callable[[str], Module | None]) -> None:
        self.module = cache(read)

    def find(self, module: str, name: str) -> tuple[Module, Definition] | None:
        """Return the definition of ``module.name``, through re-exports; None if the tree does not define the name."""
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

    def lineage(self, module: Module, definition: Definition) -> Iterator[tuple[Module, Definition]]:
        """Yield a class and its bases, as far as the tree has them, nearest first."""
        yield module, definition
        for base in getattr(definition.node, "bases", ()):
            if isinstance(base, ast.Name) and (home := self.find(module.name, base.id)) and home[1] is not definition:
                yield from self.lineage(*home)


def members_of(tree: Tree, module: Module, definition: Definition) -> dict[str, tuple[Module, ast.stmt]]:
    """Return the members of a class, including those inherited from classes of ``tree``."""
    found: dict[str, tuple[Module, ast.stmt]] = {}
    for home, each in reversed(list(tree.lineage(module, definition))):
        found.update({name: (home, statement) for name, statement in each.members().items()})
    return found


def span(statement: ast.stmt) -> tuple[int, int]:
    """Return the first and the last line of a statement, decorators included."""
    decorators = getattr(statement, "decorator_list", ())
    return min([statement.lineno, *(each.lineno for each in decorators)]), statement.end_lineno or statement.lineno


def _is_typing_block(statement: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _attribute_owner(statement: ast.stmt) -> str:
    """Return ``x`` for ``x.attribute = ...``, else an empty string."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return target.value.id if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) else ""


# Where files are read.


def path_of(module: str) -> str:
    """Return the path of a module inside its repository, without ``.py`` or ``/__init__.py``."""
    if f"{module}.".startswith("torch_ext.testing."):
        module = module.removeprefix("torch_ext.")
    return module.replace(".", "/")


def project_root() -> Path:
    """Return the checkout of this project that is imported.

    Raises:
        CheckoutError: the project was installed without its tests.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "testing" / "_internal").is_dir():
        raise CheckoutError(f"{root} holds no testing/_internal: run this from a clone of the project")
    return root


def our_tree(theirs: Tree, root: Path) -> Tree:
    """Return the modules of the project at ``root``, with stand-ins, and torch's from ``theirs``."""

    def source(path: str) -> bytes | None:
        file = root / STAND_INS.get(path, path)
        return file.read_bytes() if file.is_file() else None

    ours = _tree(source, lambda path: str(root / path))
    return Tree(lambda name: ours.module(name) if name.split(".")[0] != "torch" else theirs.module(name))


def upstream_at(checkout: Path) -> Tree:
    """Return the modules of a PyTorch checkout at its ``HEAD``, without uncommitted changes.

    Raises:
        CheckoutError: the folder is no checkout of PyTorch.
    """
    commit = commit_of(checkout)
    if file_at(checkout, path_of(THEIRS), commit) is None:
        raise CheckoutError(f"{checkout} has no {path_of(THEIRS)} in its HEAD; give a git checkout of PyTorch")
    return _tree(lambda path: file_at(checkout, path, commit), lambda path: f"{path} of {checkout} in HEAD")


def _tree(source: Callable[[str], bytes | None], describe: Callable[[str], str]) -> Tree:
    def read(name: str) -> Module | None:
        for path, package in ((f"{path_of(name)}.py", False), (f"{path_of(name)}/__init__.py", True)):
            text = source(path)
            if text is not None:
                try:
                    return Module(name, text.decode(), package)
                except (SyntaxError, ValueError) as error:
                    raise CheckoutError(f"{describe(path)} is no Python in UTF-8: {error}") from None
        return None

    return Tree(read)
