"""Changes of text by the positions that syntax trees give."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Edit", "apply", "replace_node"]


@dataclass(frozen=True)
class Edit:
    """Replace what stands from ``start`` to ``end`` by ``text``. Places are (line from 1, column in UTF-8 bytes)."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


def replace_node(node: ast.expr | ast.stmt, text: str) -> Edit:
    return Edit((node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0), text)


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
