"""Changes of text by the positions that syntax trees give."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from torch_ext.upstream.export.modules import Definition

__all__ = ["Edit", "apply", "renamed", "replace_node", "without"]


@dataclass(frozen=True)
class Edit:
    """Replace what stands from ``start`` to ``end`` by ``text``. Places are (line from 1, column in UTF-8 bytes)."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def replace_node(node: ast.expr | ast.stmt, text: str) -> Edit:
    return Edit((node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0), text)


def without(statement: ast.stmt) -> Edit:
    """Return the change that takes a statement out, with its lines."""
    return Edit((statement.lineno, 0), ((statement.end_lineno or statement.lineno) + 1, 0), "")


def renamed(definition: Definition, name: str) -> list[Edit]:
    """Return the changes that give a definition another name where it is made."""
    node = definition.node
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        keyword = {"ClassDef": "class ", "FunctionDef": "def ", "AsyncFunctionDef": "async def "}[type(node).__name__]
        column = node.col_offset + len(keyword)
        return [Edit((node.lineno, column), (node.lineno, column + len(node.name)), name)]
    return [
        replace_node(each, name)
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id == definition.name
    ]


def apply(text: str, edits: Iterable[Edit], first: int = 1, last: int | None = None) -> str:
    """Return lines ``first`` to ``last`` of ``text`` with ``edits`` made. An edit inside another one is dropped."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(place: tuple[int, int]) -> int:
        return starts[place[0] - 1] + place[1]

    pieces, position, end = [], starts[first - 1], starts[last if last is not None else len(lines)]
    whole = b"".join(lines)
    for edit in sorted(edits, key=lambda each: (offset(each.start), each.start != each.end, -offset(each.end))):
        if not position <= offset(edit.start) <= offset(edit.end) <= end:
            continue
        pieces += [whole[position : offset(edit.start)], edit.text.encode()]
        position = offset(edit.end)
    return b"".join([*pieces, whole[position:end]]).decode()
