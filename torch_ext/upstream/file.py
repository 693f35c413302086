"""Gives an upstream file the devices and variables that it needs; its zygote imports this module right before the file.

A file may choose its tests and their ranks by the device count at import. A simulated accelerator has as many devices
as the process requests, so this module first reads the largest number in the file's source.

Some files cannot be imported without the variables that upstream's own runner sets. That runner also starts files in
the checkout's ``test``; so does this module where programs that a test starts would find an unbuilt torch.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch_ext import accelerator, personality
from torch_ext.unbuilt import has_unbuilt_torch
from torch_ext.upstream import devices
from torch_ext.world import files

# Functions of torch's helpers that take a number of devices, and names that hold one.
_SKIP_HELPERS = ("skip_if_lt_x_gpu", "at_least_x_gpu", "requires_world_size", "skip_if_no_gpu")
_COUNT, _WORLD_SIZE = "device_count", "world_size"
# Upstream's runner starts such a file once for each backend.
_READS_BACKEND = re.compile(r"""\benviron\[["']BACKEND["']\]""")


def devices_wanted(source: str) -> int:
    """Return the largest number of devices that ``source`` requests in the ways of torch's tests; 0 if none.

    >>> devices_wanted("@skip_if_lt_x_gpu(2)\\ndef test(self): self.assertEqual(1, 99)")
    2
    >>> devices_wanted("if torch.accelerator.device_count() >= 8: WORLD_SIZE = 8")
    8
    """
    found = (number for node in ast.walk(ast.parse(source)) for number in _numbers(node))
    return max((number for number in found if number <= accelerator.MAX_DEVICES), default=0)


def _numbers(node: ast.AST) -> Iterator[int]:
    if isinstance(node, ast.Call):
        name = _name(node.func)
        if name in _SKIP_HELPERS or (name == "min" and any(map(_counts_devices, node.args))):
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


def _set_variables() -> None:
    """Set unset variables of upstream's runner: two ranks, on the device's or the host's backend."""
    os.environ.setdefault("BACKEND", accelerator.backend() if personality.is_cuda() else "gloo")
    os.environ.setdefault("WORLD_SIZE", "2")
    os.environ.setdefault("TEMP_DIR", files.folder())


def _leave_unbuilt_checkout(path: Path) -> None:
    """Leave the root of an unbuilt checkout: ``python -c "import torch"`` fails there."""
    here = Path.cwd()
    if has_unbuilt_torch(here):
        tests = here / "test"
        os.chdir(tests if tests.is_dir() else path.parent)


def _prepare() -> None:
    path = Path(sys.argv[0])
    _leave_unbuilt_checkout(path)
    if (known := sys.modules.get(path.stem)) is not None:
        raise ImportError(f"{path.name} has the name of a module that is loaded already, {known!r}: rename the file")
    if path.is_file():
        try:
            source = importlib.util.decode_source(path.read_bytes())
            wanted = devices_wanted(source)
        except (OSError, SyntaxError, ValueError):
            return  # the import, which comes next, raises the error
        accelerator.request_devices(max(1, wanted))
        devices.update_device_count()
        if _READS_BACKEND.search(source):
            _set_variables()


_prepare()
