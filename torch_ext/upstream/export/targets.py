"""Upstream's files with our pieces in them: a file that upstream has gets as few new lines as the change allows."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_ext.upstream.export.lint import formatted, sorted_imports
from torch_ext.upstream.export.modules import Import, Module, Tree, path_of, span
from torch_ext.upstream.export.scopes import Edit, apply, replace_lines, replace_node

_OWNERS = '# Owner(s): ["oncall: distributed"]\n'


@dataclass
class Piece:
    """Statements of ours on their way upstream, with the edits that their new place needs."""

    module: Module
    target: Target
    statements: Sequence[ast.stmt]  # a definition and its trailers, one member of a class, or the whole module
    name: str = ""  # the name upstream
    into: str = ""  # upstream's class, for a member
    edits: list[Edit] = field(default_factory=list)


@dataclass
class Target:
    """A file of upstream's that a change touches."""

    module: str  # the dotted name, such as `torch.testing._internal.common_fsdp` or `test.distributed.fsdp.test_x`
    existing: Module | None  # upstream's module, if there is one
    whole: Piece | None = None  # our module as the new file, if upstream has none
    # Definitions for the file, by our module and name, in the order in which the linker found them
    pieces: dict[tuple[str, str], Piece] = field(default_factory=dict)
    imports: dict[str, Import] = field(default_factory=dict)  # imports that the file needs, by local name

    @property
    def path(self) -> str:
        module = self.whole.module if self.whole else self.existing
        return path_of(self.module) + ("/__init__.py" if module and module.package else ".py")

    def import_name(self, local: str, origin: Import) -> str:
        """Import ``origin`` into the file, and return its local name there."""
        theirs = self.existing.imports if self.existing else {}
        known = {**theirs, **self.imports}
        for bound in (local, origin.attribute, *(theirs if origin.attribute else ())):
            if bound in known and _is_same(known[bound], origin):
                return bound
        clash = local in known or (self.existing is not None and local in self.existing.definitions)
        bound = f"_{local.lstrip('_')}_" if clash else local
        self.imports[bound] = origin
        return bound


def _is_same(one: Import, other: Import) -> bool:
    """Whether two imports give the same object. A package re-exports names of its modules."""
    same_package = bool(one.attribute) and one.module.split(".")[0] == other.module.split(".")[0]
    return one.dotted == other.dotted or (one.attribute == other.attribute and same_package)


def text_of(target: Target, ours: Tree) -> str:
    """Return the whole text of the file ``target`` after the change."""
    return _merged(target, target.existing, ours) if target.existing else _new_file(target, target.whole)


def _new_file(target: Target, whole: Piece | None) -> str:
    if whole is None:
        raise AssertionError(f"there is nothing for {target.path}")
    text = _with_imports(apply(whole.module.text, whole.edits), target.imports)
    if target.module.split(".")[0] == "test" and not text.startswith(_OWNERS):
        text = text.lstrip("\n")
        text = _OWNERS + ("" if text.startswith(('"""', "#")) else "\n") + text
    return formatted(sorted_imports(text, "I,F401"))


def _merged(target: Target, existing: Module, ours: Tree) -> str:
    pieces = _sorted(target.pieces.values(), ours)
    names = [piece.name for piece in pieces if not piece.into]
    classes = [each.node for each in existing.definitions.values() if each.is_class]
    first_class = existing.first_line(classes[0]) if classes else 0
    deferred = Import("__future__", "annotations") in existing.imports.values()
    eager: set[str] = set()  # names read when a class is made, and what their definitions read then
    for piece in reversed(pieces):
        if piece.into or piece.name in eager:
            eager |= _eager_names(piece)
    at_end: list[str] = []
    edits: list[Edit] = []
    for piece in pieces:
        undefined = names if piece.into else names[names.index(piece.name) :]
        text = _formatted(piece, () if deferred else undefined)
        if piece.into:
            last = span(existing.definitions[piece.into].node)[1]
            edits.append(replace_lines(last + 1, last, f"\n{text}"))
        elif first_class and (
            piece.name in eager or isinstance(getattr(piece.statements[0], "value", 0), ast.Constant)
        ):
            edits.append(replace_lines(first_class, first_class - 1, f"{text}\n\n"))
        else:
            at_end.append(f"\n\n{text}")
    text = _with_imports(apply(existing.text, edits), target.imports)
    if sorted_imports(existing.text) == existing.text:
        text = sorted_imports(text)
    return "".join([text.rstrip("\n"), "\n", *at_end]) if at_end else text


def _eager_names(piece: Piece) -> set[str]:
    """Return the names that a definition reads; of a method only those of its decorators and defaults."""
    statement, read = piece.statements[0], list[ast.AST](piece.statements)
    if piece.into and isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        read = [*statement.decorator_list, *statement.args.defaults, *filter(None, statement.args.kw_defaults)]
    return {each.id for node in read for each in ast.walk(node) if isinstance(each, ast.Name)}


def _formatted(piece: Piece, undefined: Collection[str]) -> str:
    """Return a piece as upstream formats it. Quotes annotations with names of ``undefined``, which do not exist yet."""
    parts = []
    for statement in piece.statements:
        first, last = piece.module.first_line(statement), span(statement)[1]
        parts.append(apply(piece.module.text, piece.edits, first, last).strip("\n") + "\n")
    text = ("class _:\n" if piece.into else "") + "".join(parts)
    quotes = [
        replace_node(annotation, f'"{ast.unparse(annotation)}"')
        for annotation in _annotations(text if undefined else "")
        if any(isinstance(each, ast.Name) and each.id in undefined for each in ast.walk(annotation))
    ]
    text = formatted(apply(text, quotes)).strip("\n") + "\n"
    return text.split("\n", 1)[1].lstrip("\n") if piece.into else text


def _annotations(text: str) -> list[ast.expr]:
    nodes = ast.walk(ast.parse(text))
    found = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    return [each for each in found if each is not None]


def _sorted(pieces: Iterable[Piece], ours: Tree) -> list[Piece]:
    """Return ``pieces`` in the order in which Python would define them here: modules as they import each other."""
    modules: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        module = ours.module(name) if name.split(".")[0] in ("torch_ext", "test") else None
        if module is None or name in modules or name in path:
            return
        for each in module.imports.values():
            visit(each.dotted, (*path, name))
            visit(each.module, (*path, name))
        modules.append(name)

    pieces = list(pieces)
    for piece in pieces:
        visit(piece.module.name, ())
    # A statement that defines several names goes once.
    unique: dict[tuple[int, int], Piece] = {}
    for piece in pieces:
        unique.setdefault((modules.index(piece.module.name), piece.statements[0].lineno), piece)
    return [unique[key] for key in sorted(unique)]


def _with_imports(text: str, imports: Mapping[str, Import]) -> str:
    """Add imports below the first one of the file, or below its docstring."""
    body = ast.parse(text).body
    top = [each for each in body if isinstance(each, (ast.Import, ast.ImportFrom))]
    head = [each for each in body[:1] if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)]
    future = [each for each in top if getattr(each, "module", "") == "__future__"]
    place = next(iter(future or top or head), None)
    last = span(place)[1] if place is not None else 0
    return apply(text, [replace_lines(last + 1, last, "".join(map(_import_line, imports, imports.values())))])


def _import_line(local: str, origin: Import) -> str:
    line = f"from {origin.module} import {origin.attribute}" if origin.attribute else f"import {origin.module}"
    return line + (f" as {local}" if local != (origin.attribute or origin.module.split(".")[0]) else "") + "\n"
