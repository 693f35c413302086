"""Imported by the zygote of one upstream file, right before the file: asks for the devices that the file will ask for.

A file that reads the device count while it is imported decides then which tests it has and how many ranks they get. An
accelerator whose devices are simulated has as many as anybody asks for, so what the file asks for later is read off its
source first.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch_ext import accelerator

__all__ = ["devices_wanted"]

_MOST = 64
# Functions of torch's helpers that take a number of devices, and names that hold one.
_ASKING = ("skip_if_lt_x_gpu", "at_least_x_gpu", "requires_world_size", "skip_if_no_gpu")
_COUNT, _WORLD_SIZE = "device_count", "world_size"


def devices_wanted(source: str) -> int:
    """Return the largest number of devices that ``source`` asks for in a place that torch's tests use; 0 if none.

    >>> devices_wanted("@skip_if_lt_x_gpu(2)\\ndef test(self): self.assertEqual(1, 99)")
    2
    >>> devices_wanted("if torch.accelerator.device_count() >= 8: WORLD_SIZE = 8")
    8
    """
    found = (number for node in ast.walk(ast.parse(source)) for number in _numbers(node))
    return max((number for number in found if number <= _MOST), default=0)


def _numbers(node: ast.AST) -> Iterator[int]:
    if isinstance(node, ast.Call):
        name = _name(node.func)
        if name in _ASKING or (name == "min" and any(map(_counts_devices, node.args))):
            yield from _constants(node.args)
    elif isinstance(node, ast.Compare) and any(map(_counts_devices, (node.left, *node.comparators))):
        yield from _constants((node.left, *node.comparators))
    elif isinstance(node, ast.Assign) and any(_WORLD_SIZE in _name(target).lower() for target in node.targets):
        yield from _constants((node.value,))
    elif isinstance(node, ast.FunctionDef) and node.name == _WORLD_SIZE:
        yield from _constants(each.value for each in ast.walk(node) if isinstance(each, ast.Return))


def _counts_devices(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) == _COUNT


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _constants(nodes: Iterable[ast.AST | None]) -> Iterator[int]:
    for node in nodes:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield node.value


def _request() -> None:
    path = Path(sys.argv[0])
    if path.is_file():
        accelerator.request_devices(max(1, min(_MOST, devices_wanted(path.read_text(encoding="utf-8")))))


_request()
