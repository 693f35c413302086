"""Reads imports, private torch names and literal device types from source, without running it."""

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]

# Device types that a test may run on. "meta" is left out: nothing runs there, so comparing to it chooses no device.
DEVICE_TYPES = frozenset(
    {"cpu", "cuda", "fpga", "hip", "hpu", "ipu", "maia", "mps", "mtia", "npu", "privateuseone", "sim", "tpu", "ve",
     "vulkan", "xla", "xpu"}
)  # fmt: skip

# Torch's test utilities, which this project builds on: only private names below them count.
_TEST_UTILITIES = ("torch", "testing", "_internal")


@dataclass(frozen=True)
class Import:
    """One imported name, dotted and absolute; ``lazy`` if the import is inside a function."""

    name: str
    line: int
    lazy: bool


def python_files(folder):
    """Return the Python files below ``folder`` of the checkout, sorted. Links to folders are not followed."""
    found = (CHECKOUT / folder).rglob("*.py")
    return sorted(path for path in found if not any(parent.is_symlink() for parent in path.parents))


def shown(path):
    """Return ``path`` relative to the checkout, with forward slashes."""
    return path.relative_to(CHECKOUT).as_posix() if path.is_relative_to(CHECKOUT) else path.name


def module_name(path):
    """Return the dotted name under which a file of the checkout is imported."""
    parts = list(path.relative_to(CHECKOUT).with_suffix("").parts)
    if parts[0] == "testing":
        parts.insert(0, "torch_ext")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree, package=""):
    """Return every import, those of functions and of ``TYPE_CHECKING`` blocks included.

    ``from a import b`` counts as ``a.b``, since ``b`` may be a module; relative imports are resolved in ``package``.
    """
    return list(_imports(tree, package, lazy=False))


def _imports(node, package, lazy):
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        yield from (Import(f"{origin}.{alias.name}", node.lineno, lazy) for alias in node.names)
    lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package, lazy)


def private_torch_names(tree):
    """Return ``(line, dotted name)`` of every private name of torch that is imported or reached through an import."""
    found = [(each.line, each.name) for each in imports(tree) if _is_private(each.name)]
    aliases = _torch_aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node, aliases)) and _is_private(name):
            found.append((node.lineno, name))
    return sorted(set(found))


def _torch_aliases(tree):
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = f"{origin}{alias.name}"
                if name.split(".")[0] == "torch":
                    bound = alias.asname or alias.name.split(".")[0]
                    aliases[bound] = name if alias.asname or origin else "torch"
    # A module that takes torch from sys.modules to avoid importing it.
    return aliases if "torch" in aliases else {**aliases, "torch": "torch"}


def _dotted(node, aliases):
    if isinstance(node, ast.Name):
        return aliases.get(node.id, "")
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value, aliases)):
        return f"{base}.{node.attr}"
    return ""


def _is_private(name):
    parts = tuple(name.split("."))
    if parts[0] != "torch":
        return False
    if parts[: len(_TEST_UTILITIES)] == _TEST_UTILITIES:
        parts = parts[len(_TEST_UTILITIES) :]
    elif _TEST_UTILITIES[: len(parts)] == parts:
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


def device_literals(tree):
    """Return ``(line, source)`` of every expression that branches on a literal device type.

    That is a comparison (``==``, ``!=``, ``in``, ``not in``), a test of the beginning of a string, a ``case``, and a
    dictionary keyed by device types.
    """
    return sorted({(node.lineno, ast.unparse(node)) for node in ast.walk(tree) if _chooses(node)})


def _chooses(node):
    if isinstance(node, ast.Compare):
        return any(_names_device(side) for side in [node.left, *node.comparators])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("startswith", "endswith", "removeprefix") and any(map(_names_device, node.args))
    if isinstance(node, ast.Dict):
        return any(key is not None and _names_device(key) for key in node.keys)
    return isinstance(node, ast.MatchValue) and _names_device(node.value)


def _names_device(node):
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(map(_names_device, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] in DEVICE_TYPES


def below(name, packages):
    """Whether ``name`` is one of ``packages`` or lies in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)
