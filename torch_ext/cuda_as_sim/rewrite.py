"""Rewrites the syntax tree of a program that speaks of CUDA into one that speaks of the simulated accelerator.

Note [What is rewritten]
~~~~~~~~~~~~~~~~~~~~~~~~
The words of a program cannot be changed from outside: ``x.device.type == "cuda"`` compares what C++ returns with what
the file says. So the file says something else. Lines and columns stay.

- A string that is a device or a backend, or in which a device stands with its index, names the simulated one.
- ``torch.cuda``, in expressions and imports, is the module of ``cuda.py``; so are the names of NCCL.
- ``x.is_cuda`` asks for the simulated device.
- What torch asks of CUDA without saying so, such as ``torch.is_autocast_enabled()``, is asked of the simulated one.
- ``ProfilerActivity.CUDA``, ``DispatchKey.CUDA`` and ``DeviceType.CUDA`` are those of PrivateUse1.
- Where a value that is computed is used as a device, or compared with a string that was changed, it is asked first
  whether it names CUDA. Arguments and variables of the program arrive this way.

What this does not reach: TorchScript, which reads the file again; programs that a program starts; names that are put
together at run time out of parts none of which is a device.
"""

from __future__ import annotations

import ast

from torch_ext.cuda_as_sim.words import BACKEND, DEVICE, FACADE, text_as_sim

__all__ = ["rewrite"]

_ROOM = "__cuda_as_sim__"
_PACKAGE = "torch_ext.cuda_as_sim.runtime"

# Names of torch.distributed that this room has in its front door.
_NCCL_NAMES = {"is_nccl_available", "ProcessGroupNCCL"}
_KINDS = {"ProfilerActivity", "DispatchKey", "DeviceType", "ActivityType"}
_DEVICE_KEYWORDS = {"device", "map_location", "backend", "device_type", "device_id", "device_types"}
# Functions whose first argument is a device, a device type or a backend.
_DEVICE_FIRST = {
    "Generator", "DeviceMesh", "autocast", "device", "get_device_module", "init_device_mesh", "init_process_group",
    "set_default_device", "to",
}  # fmt: skip
# Functions that default to CUDA: name -> (arity of the default form, device-generic replacement).
_AUTOCAST = {
    "is_autocast_enabled": (0, "is_autocast_enabled"),
    "set_autocast_enabled": (1, "set_autocast_enabled"),
    "get_autocast_gpu_dtype": (0, "get_autocast_dtype"),
    "set_autocast_gpu_dtype": (1, "set_autocast_dtype"),
}
# Names of torch of which this room has its own, by the dotted path behind torch.
_OF_TORCH = {
    "backends.cuda.is_built": "is_built",
    "set_default_tensor_type": "set_default_tensor_type",
    "version.cuda": "VERSION",
}
_EQUALITIES = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def rewrite(tree: ast.Module) -> ast.Module:
    """Rewrite ``tree`` in place and return it. See Note [What is rewritten].

    >>> print(ast.unparse(rewrite(ast.parse("import torch\\nx = torch.ones(2, device='cuda').cuda()"))))
    import torch_ext.cuda_as_sim.runtime as __cuda_as_sim__
    import torch
    x = torch.ones(2, device='sim').cuda()
    """
    _Rewriter(_names_of_torch(tree)).visit(tree)
    at = _first_line_of_code(tree.body)
    line = tree.body[at].lineno if at < len(tree.body) else 1
    tree.body.insert(at, _placed(ast.Import([ast.alias(_PACKAGE, _ROOM)]), line))
    return tree


def _placed(node: ast.stmt, line: int) -> ast.stmt:
    """Give ``node`` and all below it the place ``line``."""
    for each in ast.walk(node):
        if "lineno" in each._attributes:
            each.lineno = each.end_lineno = line  # type: ignore[attr-defined]
            each.col_offset = each.end_col_offset = 0  # type: ignore[attr-defined]
    return node


def _first_line_of_code(body: list[ast.stmt]) -> int:
    at = 0
    while at < len(body) and (_is_docstring(body[at]) or _is_future(body[at])):
        at += 1
    return at


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_future(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _names_of_torch(tree: ast.Module) -> frozenset[str]:
    """The names under which ``tree`` knows torch itself."""
    imports = (alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names)
    return frozenset(
        alias.asname or "torch" for alias in imports if alias.name == "torch" or (
            alias.name.startswith("torch.") and not alias.asname
        )
    )  # fmt: skip


class _Rewriter(ast.NodeTransformer):
    def __init__(self, torch: frozenset[str]) -> None:
        self._torch = torch
        # The strings that were rewritten, by identity; held here so that no other node takes their place.
        self._changed: dict[int, ast.expr] = {}

    # Text

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if _is_docstring(node) else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and (said := text_as_sim(node.value)) != node.value:
            return self._changed_to(said, node)
        return node

    def _changed_to(self, text: str, like: ast.expr) -> ast.expr:
        made = ast.copy_location(ast.Constant(text), like)
        self._changed[id(made)] = made
        return made

    def _is_changed(self, node: ast.AST) -> bool:
        inside = node.elts if isinstance(node, (ast.List, ast.Tuple, ast.Set)) else (node,)
        return any(id(each) in self._changed for each in inside)

    # Names

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if (own := _OF_TORCH.get(self._behind_torch(node))) and isinstance(node.ctx, ast.Load):
            return self._of_room(own, node)
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id in self._torch:
            return self._of_room("cuda", node)
        if not isinstance(node.ctx, ast.Load):
            return node
        if node.attr in _NCCL_NAMES:
            return self._of_room(node.attr, node)
        if node.attr == "NCCL" and _last_name(node.value) == "Backend":
            return self._changed_to(BACKEND, node)
        if node.attr == "CUDA" and _last_name(node.value) in _KINDS:
            node.attr = "PrivateUse1"
        elif node.attr == "is_cuda":
            return self._call("is_cuda", node.value)
        return node

    def _behind_torch(self, node: ast.expr) -> str:
        """The names behind torch itself, as ``version.cuda`` of ``torch.version.cuda``; empty for anything else."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        return ".".join(names) if isinstance(node, ast.Name) and node.id in self._torch else ""

    def _of_room(self, name: str, like: ast.expr) -> ast.expr:
        room = ast.copy_location(ast.Name(_ROOM, ast.Load()), like)
        return ast.copy_location(ast.Attribute(room, name, getattr(like, "ctx", ast.Load())), like)

    def _call(self, function: str, argument: ast.expr) -> ast.expr:
        name = ast.copy_location(
            ast.Attribute(ast.copy_location(ast.Name(_ROOM, ast.Load()), argument), function, ast.Load()), argument
        )
        return ast.copy_location(ast.Call(name, [argument], []), argument)

    # Imports

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            if alias.asname and (alias.name == "torch.cuda" or alias.name.startswith("torch.cuda.")):
                alias.name = FACADE + alias.name.removeprefix("torch.cuda")
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        module = node.module or ""
        if node.level or not module.startswith("torch"):
            return node
        if module == "torch.cuda" or module.startswith("torch.cuda."):
            node.module = FACADE + module.removeprefix("torch.cuda")
            return node
        ours = [alias for alias in node.names if _moves(module, alias.name)]
        if not ours:
            return node
        moved = ast.copy_location(ast.ImportFrom(_PACKAGE, ours, 0), node)
        node.names = [alias for alias in node.names if alias not in ours]
        return [node, moved] if node.names else moved

    # Values

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        if any(map(self._is_changed, sides)) and all(isinstance(operator, _EQUALITIES) for operator in node.ops):
            node.left, *node.comparators = [self._asked(side) for side in sides]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        changed = self._with_dispatch_key(node)
        self.generic_visit(node)
        if changed:
            return node
        self._tell_autocast(node)
        self._tell_profiler(node)
        name = _last_name(node.func)
        for keyword in node.keywords:
            if keyword.arg in _DEVICE_KEYWORDS:
                keyword.value = self._asked(keyword.value)
        if node.args and name in _DEVICE_FIRST and not isinstance(node.args[0], ast.Starred):
            node.args[0] = self._asked(node.args[0])
        if name == "startswith" and isinstance(node.func, ast.Attribute) and any(map(self._is_changed, node.args)):
            node.func.value = self._asked(node.func.value)
        return node

    def _tell_autocast(self, node: ast.Call) -> None:
        count, told = _AUTOCAST.get(self._behind_torch(node.func), (-1, ""))
        if isinstance(node.func, ast.Attribute) and len(node.args) == count and not node.keywords:
            node.func.attr = told
            node.args.insert(0, ast.copy_location(ast.Constant(DEVICE), node))

    def _tell_profiler(self, node: ast.Call) -> None:
        """``torch.autograd.profiler.profile(use_cuda=...)`` is ``use_device`` of the simulated one, or of none."""
        for keyword in node.keywords:
            if keyword.arg == "use_cuda" and _last_name(node.func) == "profile":
                keyword.arg = "use_device"
                none, device = (ast.copy_location(ast.Constant(each), keyword.value) for each in (None, DEVICE))
                keyword.value = ast.copy_location(ast.IfExp(keyword.value, device, none), keyword.value)

    def _with_dispatch_key(self, node: ast.Call) -> bool:
        """Whether ``node`` registered a kernel for CUDA, which it now does for the simulated device's key."""
        keys = [arg for arg in node.args if isinstance(arg, ast.Constant) and arg.value == "CUDA"]
        if not keys or _last_name(node.func) not in ("impl", "Library", "py_impl"):
            return False
        for key in keys:
            key.value = "PrivateUse1"
        return True

    def _asked(self, value: ast.expr) -> ast.expr:
        return value if isinstance(value, (ast.Constant, ast.List, ast.Tuple, ast.Set)) else self._call("as_sim", value)


def _moves(module: str, name: str) -> bool:
    return (module == "torch" and name == "cuda") or (module.startswith("torch.distributed") and name in _NCCL_NAMES)


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
