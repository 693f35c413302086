"""Where torch keeps a private name, read from the tables of ``torch_ext.compat``."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from torch_ext.upstream.export.modules import Module

__all__ = ["places_of"]


def places_of(module: Module | None, name: str) -> tuple[str, ...]:
    """Return the places of a private name, from the table that its area passes to ``lazy_names``, constants put in."""
    if module is None:
        return ()
    constants = {
        each: definition.node.value.value
        for each, definition in module.definitions.items()
        if isinstance(definition.node, ast.Assign) and isinstance(definition.node.value, ast.Constant)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Tuple):
                    return tuple(_text(each, constants) for each in value.elts)
    return ()


def _text(node: ast.expr, constants: Mapping[str, object]) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(constants[ast.unparse(each.value)])
            if isinstance(each, ast.FormattedValue)
            else str(ast.literal_eval(each))
            for each in node.values
        )
    return str(ast.literal_eval(node))
