"""Where torch's code waits, or keeps memory from being used again: found in its source, and deleted one at a time.

Runs in ranks too.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from test.torch_ext.suite_faults.mutation import OtherTorchError, exchange

__all__ = ["MODULES", "Site", "delete", "mark", "sites"]

# By what people call it, the modules that wait.
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

_REACHED = "__torch_ext_reached__"


@dataclass(frozen=True)
class Site:
    """A place that waits."""

    module: str
    function: str  # a method as `Class.method`
    line: int  # in the module's file
    text: str  # the call

    @property
    def id(self) -> str:
        """Says the place without its line, which moves between releases, unless the text is there twice."""
        return f"{self.module}:{self.function}:{self.line}"

    @property
    def family(self) -> str:
        return next(name for name, modules in MODULES.items() if self.module in modules)


def _is_wait(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in _METHODS
    return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS | _KEEPERS


def sites(module: str) -> list[Site]:
    """Return the places of a module that wait, in order. One that does not exist in this torch has none."""
    try:
        source = inspect.getsource(importlib.import_module(module))
    except ImportError:
        return []
    return [
        Site(module, name, node.lineno, " ".join(ast.unparse(node).split()))
        for name, function in _functions(ast.parse(source))
        for node in sorted(_waits(function), key=lambda node: node.lineno)
    ]


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and node.name not in _FUNCTIONS:
            yield f"{prefix}{node.name}", node


def _waits(function: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(function) if isinstance(node, ast.Call) and _is_wait(node)]


class _Delete(ast.NodeTransformer):
    """Takes a call out: a statement does nothing, and a value is what was waited for."""

    def __init__(self, lines: set[int]) -> None:
        self._lines = lines
        self.found = 0

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        value = node.value
        if _is_wait(value) and value.lineno in self._lines:
            self.found += 1
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not (_is_wait(node) and node.lineno in self._lines):
            return self.generic_visit(node)
        self.found += 1
        if isinstance(node.func, ast.Name) and node.func.id in _KEEPERS:
            node.args[0] = ast.copy_location(ast.Constant(None), node.args[0])
            return node
        waits_for_argument = isinstance(node.func, ast.Name) or node.func.attr == "wait_tensor"
        return node.args[0] if waits_for_argument else node.func.value  # type: ignore[attr-defined]


class _Mark(ast.NodeTransformer):
    """Says that a statement is reached."""

    def __init__(self, ids: dict[int, str]) -> None:
        self._ids = ids

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, [each for statement in body for each in (*self._said(statement), statement)])
        return node

    def _said(self, statement: ast.stmt) -> list[ast.stmt]:
        if not isinstance(statement, (ast.Expr, ast.Assign, ast.Return, ast.AnnAssign, ast.AugAssign)):
            return []
        calls = [ast.parse(f"{_REACHED}({self._ids[node.lineno]!r})").body[0] for node in _waits(statement)]
        return [ast.copy_location(call, statement) for call in calls]


def delete(*ids: str) -> None:
    """Take sites out of torch's code, in this process and in all that are forked from it.

    Raises:
        OtherTorchError: the code of its function cannot be exchanged.
        ValueError: there is no such site.
    """
    lines: dict[tuple[str, str], set[int]] = {}
    for each in ids:
        module, function, line = each.split(":")
        lines.setdefault((module, function), set()).add(int(line))
    for (module, function), those in lines.items():
        change = _Delete(those)
        exchange(f"{module}:{function}", change.visit)
        if change.found < len(those):
            raise ValueError(f"{module}:{function} has no wait in one of the lines {sorted(those)}")


def mark(reached: Callable[[str], None]) -> list[str]:
    """Have every site say that it is reached, and return those that cannot: their functions are closures."""
    setattr(builtins, _REACHED, reached)
    silent = []
    for module in (module for modules in MODULES.values() for module in modules):
        by_function: dict[str, dict[int, str]] = {}
        for site in sites(module):
            by_function.setdefault(site.function, {})[site.line] = site.id
        for function, ids in by_function.items():
            try:
                exchange(f"{module}:{function}", _Mark(ids).visit)
            except OtherTorchError:
                silent += ids.values()
    return silent
