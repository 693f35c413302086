"""Finds the calls in torch's source that wait or keep memory alive, records which a test reaches, and skips some.

Runs in zygotes and ranks too.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from test.torch_ext.suite_faults.mutation import OtherTorchError, exchange

# The modules that wait, by the name of their feature.
MODULES = {
    "FSDP1": (
        "torch.distributed.fsdp._runtime_utils",
        "torch.distributed.fsdp._flat_param",
        "torch.distributed.fsdp._unshard_param_utils",
        "torch.distributed.fsdp._state_dict_utils",
        "torch.distributed.fsdp._optim_utils",
        "torch.distributed.fsdp.sharded_grad_scaler",
        "torch.distributed.algorithms._comm_hooks.default_hooks",
        "torch.distributed.utils",
    ),
    "FSDP2": (
        "torch.distributed.fsdp._fully_shard._fsdp_collectives",
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "torch.distributed.fsdp._fully_shard._fully_shard",
    ),
    "DDP": (
        "torch.nn.parallel.distributed",
        "torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks",
        "torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks",
    ),
    "DTensor": (
        "torch.distributed._functional_collectives",
        "torch.distributed.tensor._collective_utils",
        "torch.distributed.tensor._redistribute",
        "torch.distributed.tensor.placement_types",
        "torch.distributed.tensor.parallel._data_parallel_utils",
    ),
}

_METHODS = {"wait_stream", "wait_event", "wait", "synchronize", "record_stream", "wait_tensor"}
_FUNCTIONS = {"_no_dispatch_record_stream", "wait_tensor"}
# Tuples of FSDP2 that hold a tensor until the event beside it is over. The tensor comes first.
_KEEPERS = {"AllGatherState", "ReduceScatterState", "AllReduceState"}

FOLDER_VARIABLE = "STUDY_OF_WAITS_FOLDER"
_CALL = "__torch_ext_wait__"


@dataclass(frozen=True)
class Site:
    """A call that waits. A method is ``Class.method``; ``line`` counts in the module's file."""

    family: str
    module: str
    function: str
    line: int
    text: str

    @property
    def id(self) -> str:
        return f"{self.module}:{self.function}:{self.line}"


@cache  # reads all of these modules
def all_sites() -> tuple[Site, ...]:
    """Return the waits in order. A module that does not exist in this torch has none."""
    found = []
    for family, module in ((family, module) for family, modules in MODULES.items() for module in modules):
        with contextlib.suppress(ImportError):
            source = inspect.getsource(importlib.import_module(module))
            for name, function in _functions(ast.parse(source)):
                for call in sorted(filter(_is_wait, ast.walk(function)), key=lambda call: call.lineno):
                    found.append(Site(family, module, name, call.lineno, " ".join(ast.unparse(call).split())))
    return tuple(found)


def _is_wait(node: ast.AST) -> bool:
    called = getattr(node, "func", None)
    return getattr(called, "attr", "") in _METHODS or getattr(called, "id", "") in _FUNCTIONS | _KEEPERS


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and node.name not in _FUNCTIONS:
            yield f"{prefix}{node.name}", node


class _Wrap(ast.NodeTransformer):
    """Turns ``wait(x)`` into ``_call(id, wait, x)``."""

    def __init__(self, place: str) -> None:
        self._place = place

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if _is_wait(node):
            node.args = [ast.Constant(f"{self._place}:{node.lineno}"), node.func, *node.args]
            node.func = ast.Name(_CALL, ast.Load())
        return node


_test = ""
_deleted = ""
_seen: set[str] = set()


def _call(site: str, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wait, unless the site is deleted: then return the awaited object."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and _test and site not in _seen:
        _seen.add(site)
        with Path(folder, str(os.getpid())).open("a") as file:
            file.write(f"{site} {_test}\n")
    if site != _deleted:
        return wait(*args, **kwargs)
    if wait.__name__ in _KEEPERS:
        return wait(None, *args[1:], **kwargs)
    return args[0] if wait.__name__ in _FUNCTIONS else getattr(wait, "__self__", None)


def wrap_all() -> None:
    """Wrap every wait, in this process and its forks. Call it in the zygote, because it takes a second.

    Functions that are closures stay as they are, and their waits count as not reached.
    """
    setattr(builtins, _CALL, _call)
    for place in dict.fromkeys(f"{site.module}:{site.function}" for site in all_sites()):
        with contextlib.suppress(OtherTorchError):
            exchange(place, _Wrap(place).visit)


def begin(deleted: str, test: str) -> None:
    """Called by a rank before the test, whose name is recorded for each site that it reaches."""
    global _test, _deleted
    _test, _deleted = test, deleted
