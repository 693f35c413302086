"""The text of upstream's files after a change: what is merged into a file stands out as few added lines."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable

from torch_ext.upstream.export.edits import Edit, apply, replace_node
from torch_ext.upstream.export.modules import Import, Module, Tree
from torch_ext.upstream.export.pieces import Piece, Target
from torch_ext.upstream.export.references import annotations_of, evaluated_at_once, uses
from torch_ext.upstream.export.ruff import formatted

__all__ = ["OWNERS", "formatted_piece", "rendered", "text_of"]

OWNERS = '# Owner(s): ["oncall: distributed"]\n'
_WIDTH = 88


def text_of(target: Target, ours: Tree) -> str:
    """Return the whole text of the file ``target`` after the change."""
    return _merged(target, ours) if target.existing is not None else _new_file(target)


# A file of its own.


def _new_file(target: Target) -> str:
    module = target.whole
    if module is None:
        return _from_pieces(target)
    edits = [*target.edits, *_without_engine(module)]
    text = apply(module.text, edits)
    text = _with_imports(Module(target.module, text, module.package), target.imports)
    if _is_test(target) and not text.startswith(OWNERS):
        text = text.lstrip("\n")
        text = OWNERS + ("" if text.startswith(('"""', "#")) else "\n") + text
    return formatted(text, sort_imports=True)


def _from_pieces(target: Target) -> str:
    chunks = "\n\n\n".join(rendered(piece) for piece in target.pieces.values())
    return formatted(_with_imports(Module(target.module, chunks), target.imports), sort_imports=True)


def _is_test(target: Target) -> bool:
    return target.module.split(".")[0] == "test"


def _without_engine(module: Module) -> list[Edit]:
    """Remove top-level calls of the engine, such as ``frames.hide(...)``: they make no sense where it is not."""
    found = []
    for statement in module.tree.body:
        if isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant):
            origins = (module.imports.get(use.name) for use in uses(statement))
            if any(each and each.dotted.startswith("torch_ext.world") for each in origins):
                found.append(Edit((statement.lineno, 0), ((statement.end_lineno or statement.lineno) + 1, 0), ""))
    return found


# Into upstream's file.


def _merged(target: Target, ours: Tree) -> str:
    existing = target.existing
    if existing is None:
        raise AssertionError(f"upstream has no {target.module}")
    ordered = _in_order(target.pieces.values(), ours)
    deferred = "annotations" in existing.imports and existing.imports["annotations"].module == "__future__"
    names = [piece.name for piece in ordered if not piece.member]
    by_class: dict[str, list[str]] = {}
    ahead = _ahead(ordered)
    chunks: list[str] = []
    before: dict[str, list[str]] = {}
    for piece in ordered:
        later = set() if deferred else set(names[names.index(piece.name) :] if piece.name in names else names)
        text = _quoted(rendered(piece), later)
        if piece.member is None:
            place = before.setdefault(ahead[piece.name], []) if piece.name in ahead else chunks
            place.append(formatted(text, _WIDTH).strip("\n"))
        else:
            by_class.setdefault(piece.into, []).append(_member_text(text))
    edits = [
        Edit(_end(existing, name), _end(existing, name), "".join(f"\n{text}" for text in members))
        for name, members in by_class.items()
    ]
    for name, texts in before.items():
        start = (existing.first_line(existing.definitions[name].node), 0)
        edits.append(Edit(start, start, "".join(f"{text}\n\n\n" for text in texts)))
    for statement, changed in target.replaced:
        line = existing.first_line(statement)
        edits.append(Edit((line, 0), ((statement.end_lineno or statement.lineno) + 1, 0), changed.strip("\n") + "\n"))
    text = _with_imports(Module(existing.name, apply(existing.text, edits), existing.package), target.imports)
    return text.rstrip("\n") + "\n" + "".join(f"\n\n{chunk}\n" for chunk in chunks) if chunks else text


def _ahead(pieces: Iterable[Piece]) -> dict[str, str]:
    """Return what must stand before a class of upstream's, whose new members need it when the class is made."""
    pieces = list(pieces)
    by_key = {(piece.module.name, piece.definition.name): piece for piece in pieces if not piece.member}
    found: dict[str, str] = {}

    def move(piece: Piece, into: str) -> None:
        if piece.name not in found:
            found[piece.name] = into
            for key in piece.inside:
                if key in by_key:
                    move(by_key[key], into)

    for member in pieces:
        if member.member is not None:
            at_once = {use.name for each in evaluated_at_once(member.member) for use in uses(each)}
            for key in member.inside:
                if key in by_key and key[1] in at_once:
                    move(by_key[key], member.into)
    return found


def rendered(piece: Piece) -> str:
    """Return the lines of a piece with its changes made: a definition with what belongs to it, or a member."""
    parts = []
    for statement in piece.statements:
        first, last = piece.module.first_line(statement), statement.end_lineno or statement.lineno
        parts.append(apply(piece.module.text, piece.edits, first, last).strip("\n"))
    return "\n".join(parts) + "\n"


def formatted_piece(piece: Piece) -> str:
    """Return a piece as upstream formats it, indented as it stands."""
    text = rendered(piece)
    return _member_text(text) if piece.member else formatted(text, _WIDTH)


def _member_text(text: str) -> str:
    around = formatted(f"class _:\n{text}", _WIDTH)
    return around.split("\n", 1)[1].strip("\n") + "\n"


def _end(module: Module, name: str) -> tuple[int, int]:
    """Return the place behind the last line of class ``name``."""
    node = module.definitions[name].node
    return (node.end_lineno or node.lineno) + 1, 0


def _in_order(pieces: Iterable[Piece], ours: Tree) -> list[Piece]:
    """Return ``pieces`` in the order in which Python would define them here: modules as they import each other."""
    pieces = list(pieces)
    modules: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        module = ours.module(name)
        if module is None or name in modules or name in path or name.split(".")[0] not in ("torch_ext", "test"):
            return
        for each in module.imports.values():
            visit(each.dotted, (*path, name))
            visit(each.module, (*path, name))
        modules.append(name)

    for piece in pieces:
        visit(piece.module.name, ())
    # A statement that defines several names goes once.
    seen: set[tuple[str, int]] = set()
    unique = []
    for piece in sorted(pieces, key=lambda each: (modules.index(each.module.name), each.statements[0].lineno)):
        key = (piece.module.name, piece.statements[0].lineno)
        if key not in seen:
            seen.add(key)
            unique.append(piece)
    return unique


def _quoted(text: str, names: set[str]) -> str:
    """Return ``text`` with quotes around annotations that use ``names``, which do not exist when they are evaluated."""
    if not names:
        return text
    indented = text[:1].isspace()
    source = f"class _:\n{text}" if indented else text
    edits = [
        replace_node(annotation, f'"{ast.unparse(annotation)}"')
        for annotation in annotations_of(ast.parse(source))
        if any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(annotation))
    ]
    changed = apply(source, edits)
    return changed.split("\n", 1)[1] if indented else changed


# Imports.


def _with_imports(module: Module, imports: dict[str, Import]) -> str:
    edits: list[Edit] = []
    wanted: dict[str, dict[str, str]] = {}
    for local, origin in imports.items():
        wanted.setdefault(origin.module if origin.attribute else "", {})[local] = origin.attribute or origin.module
    top = [each for each in module.tree.body if isinstance(each, (ast.Import, ast.ImportFrom))]
    for home, names in sorted(wanted.items()):
        if not home:
            for local, name in sorted(names.items()):
                words = f"import {name}" + (f" as {local}" if local != name.split(".")[0] else "")
                edits.append(_new_import(module, top, name, words))
            continue
        known = next((each for each in top if isinstance(each, ast.ImportFrom) and each.module == home), None)
        aliases = [name if local == name else f"{name} as {local}" for local, name in names.items()]
        if known is None:
            edits.append(_new_import(module, top, home, _from(home, aliases)))
        else:
            edits += _extended(module, known, aliases)
    return apply(module.text, _joined(edits))


def _from(home: str, aliases: Iterable[str]) -> str:
    names = sorted(aliases, key=str.lower)
    line = f"from {home} import {', '.join(names)}"
    return (
        line
        if len(line) <= _WIDTH
        else "".join([f"from {home} import (\n", *(f"    {each},\n" for each in names), ")"])
    )


def _extended(module: Module, known: ast.ImportFrom, aliases: list[str]) -> list[Edit]:
    """Add names to an import: one line each if it has a line for each name, else the line is written anew."""
    has = [alias.name if not alias.asname else f"{alias.name} as {alias.asname}" for alias in known.names]
    lines = [alias.lineno for alias in known.names]
    if known.end_lineno != known.lineno and len(set(lines)) == len(lines):
        edits = []
        for name in sorted(set(aliases) - set(has), key=str.lower):
            after = [line for each, line in zip(has, lines, strict=True) if each.lower() < name.lower()]
            place = (max(after) + 1 if after else lines[0], 0)
            edits.append(Edit(place, place, f"    {name},\n"))
        return edits
    return [replace_node(known, _from(known.module or "", {*has, *aliases}))]


def _new_import(module: Module, top: list[ast.Import | ast.ImportFrom], home: str, words: str) -> Edit:
    """Put an import where it belongs by name, among those of its kind: the standard library's, or others."""
    plain = words.startswith("import ")

    def kind(each: ast.Import | ast.ImportFrom) -> tuple[bool, bool, str]:
        name = each.module or "" if isinstance(each, ast.ImportFrom) else each.names[0].name
        return _outside(name), isinstance(each, ast.ImportFrom), name

    own = (_outside(home), not plain, home)
    alike = [each for each in top if kind(each)[0] == own[0] and kind(each)[2] != "__future__"]
    before = [each for each in alike if kind(each) < own]
    if before:
        line = (before[-1].end_lineno or before[-1].lineno) + 1
    elif alike:
        line = alike[0].lineno
    elif top:
        line, words = (top[-1].end_lineno or top[-1].lineno) + 1, words if own[0] is False else f"\n{words}"
    else:
        body = module.tree.body
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            line, words = (body[0].end_lineno or 1) + 1, f"\n{words}"
        else:
            line, words = (module.first_line(body[0]) if body else 1), f"{words}\n\n"
    return Edit((line, 0), (line, 0), f"{words}\n")


def _outside(name: str) -> bool:
    return name.split(".")[0] not in sys.stdlib_module_names


def _joined(edits: list[Edit]) -> list[Edit]:
    """Return ``edits`` with insertions at one place made one, in their order."""
    by_place: dict[tuple[tuple[int, int], tuple[int, int]], str] = {}
    for edit in edits:
        key = (edit.start, edit.end)
        by_place[key] = by_place.get(key, "") + edit.text if edit.start == edit.end else edit.text
    return [Edit(start, end, text) for (start, end), text in by_place.items()]
