"""Imports point down: checked in every source file, then in running interpreters."""

import ast
import json
import pkgutil
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from torch.testing import _internal as upstream_helpers

import torch_ext.runner
import torch_ext.world
from test.torch_ext.house.source import CHECKOUT, below, imports, module_name, python_files, shown
from test.torch_ext.interpreter import python

# The modules of this project that each layer may import, besides itself. Names of the package omit `torch_ext.`.
_OF_THE_PACKAGE = {
    "compat": "",
    "cache": "",
    "machine_memory": "",
    "unbuilt": "",
    "faults": "compat",
    "personality": "",
    "sim": "cache faults machine_memory personality",
    "cuda_as_sim": "sim",
    "accelerator": "compat",
    "world": "compat faults machine_memory",
    "results": "world",
    "replicas": "compat faults world",
    "runner": "world results cache compat.untested_torch faults.plan machine_memory personality",
    "upstream": "accelerator world results compat personality unbuilt",
    "program": "world cache compat cuda_as_sim faults.plan machine_memory personality replicas sim "
    "runner.interrupts runner.options",
    "conformance": "accelerator cache compat results runner testing upstream.judge upstream.reasons world",
    "mutate": "cache results runner world",
    "__main__": "conformance mutate runner program sim unbuilt upstream.judge",
    "testing": "accelerator compat faults replicas world",
}
LAYERS = {
    **{f"torch_ext.{layer}": frozenset(f"torch_ext.{each}" for each in lower.split())
       for layer, lower in _OF_THE_PACKAGE.items()},
    "torch_ext": frozenset(),
    "test.distributed": frozenset({"torch_ext.testing._internal"}),
    "test.torch_ext": frozenset({"torch_ext", "test", "benchmarks.simulate"}),
    "test.programs": frozenset({"test.torch_ext"}),
    "test": frozenset(),
    "benchmarks": frozenset({"torch_ext"}),
    "setup": frozenset(),
    "run_test": frozenset({"torch_ext.__main__"}),
}  # fmt: skip

# The only upward import: a test file run by itself calls the runner. Being lazy, it costs other programs nothing.
_UP = {("torch_ext.testing._internal.common_utils", "torch_ext.runner.cli.main_for_file")}

# Suites go upstream, so they import helpers from upstream's places.
_HELPERS = "torch_ext.testing._internal"
UPSTREAM_HELPERS = Path(upstream_helpers.__file__).parent

_FOLDERS = ("torch_ext", "testing", "test", "benchmarks")
FILES = [path for folder in _FOLDERS for path in python_files(folder)]
FILES += [CHECKOUT / "setup.py", CHECKOUT / "run_test.py"]

ROOMS = {
    package.__name__: sorted(room.name for room in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))
    for package in (torch_ext.runner, torch_ext.world)
}


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def layer_of(name):
    """Return the longest layer that contains ``name``, or an empty string if it is not ours."""
    return max((layer for layer in LAYERS if below(name, [layer])), key=len, default="")


def wrong_imports(path):
    name = module_name(path)
    layer = layer_of(name)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for each in imports(tree_of(path), package):
        target = layer_of(each.name)
        # The package file only holds the version, so importing from it depends on no layer.
        if not target or target == layer or each.name in ("torch_ext", "torch_ext.__version__"):
            continue
        if not below(each.name, LAYERS[layer]) and not (each.lazy and (name, each.name) in _UP):
            allowed = " or ".join(sorted(LAYERS[layer])) or "nothing of this project"
            found.append(f"{shown(path)}:{each.line} imports {each.name}, but {layer} may import {allowed}")
    return found


def test_every_part_of_the_package_has_its_layer():
    parts = {module_name(path) for path in python_files("torch_ext")} | {"torch_ext.testing"}
    assert {name for name in parts if layer_of(name) == "torch_ext"} == {"torch_ext"}


def test_imports_point_down():
    assert [problem for path in FILES for problem in wrong_imports(path)] == []


def test_no_string_names_a_module_of_a_layer_above():
    """Zygotes and the runner import modules by such names."""
    named = {
        (shown(path), node.value)
        for path in FILES
        if (layer := layer_of(module_name(path))).startswith("torch_ext.")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"torch_ext(\.\w+)+(:\w+)?", node.value)
        if (target := layer_of(node.value.partition(":")[0])) != layer and below(layer, LAYERS[target])
    }
    assert named == set()


@pytest.mark.parametrize(("package", "other"), [("runner", "upstream"), ("upstream", "runner")])
def test_runner_and_upstream_do_not_import_each_other(package, other):
    """Neither imports nor names the other: ``torch_ext/__main__.py`` combines them."""
    sources = {shown(path): path.read_text(encoding="utf-8") for path in python_files(f"torch_ext/{package}")}
    assert sources and [name for name, text in sources.items() if f"torch_ext.{other}" in text] == []


def private_helpers(path):
    """Return the imports of ``path`` from modules of ``testing._internal`` that torch does not have under that name."""
    found = []
    for each in imports(tree_of(path)):
        if not below(each.name, [_HELPERS]):
            continue
        parts = each.name.removeprefix(_HELPERS).strip(".").split(".")
        files = (UPSTREAM_HELPERS.joinpath(*parts[:end]).with_suffix(".py") for end in range(1, len(parts) + 1))
        if not any(file.is_file() for file in files):
            found.append(f"{shown(path)}:{each.line} imports {each.name}; import it from a module that torch has too")
    return found


def test_suites_import_helpers_from_modules_that_upstream_has():
    suites = python_files("test/distributed")
    assert any(below(each.name, [f"{_HELPERS}.common_fsdp"]) for path in suites for each in imports(tree_of(path)))
    assert [problem for path in suites for problem in private_helpers(path)] == []


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        (f"from {_HELPERS}.common_fsdp import MLP", True),
        (f"from {_HELPERS} import common_fsdp", True),
        (f"from {_HELPERS}.distributed.rpc_utils import generate_tests", True),
        (f"from {_HELPERS}._fsdp.cases import FSDPTest", False),
        (f"from {_HELPERS} import _fsdp", False),
        (f"import {_HELPERS}._distributed.skips", False),
    ],
)
def test_an_import_of_a_private_helper_is_found(line, allowed, tmp_path):
    file = tmp_path / "suite.py"
    file.write_text(line, encoding="utf-8")
    assert (private_helpers(file) == []) is allowed


def test_expected_files_exist():
    names = {shown(path) for path in FILES}
    assert {"torch_ext/world/tree.py", "testing/_internal/common_utils.py", "setup.py", shown(Path(__file__))} <= names
    assert not any(name.startswith("torch_ext/testing/") for name in names)


def rooms_imported(path):
    """Return the names of this project's modules that a file imports, at once or later."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    known = {module_name(file) for file in FILES}
    found = {each.name for each in imports(tree_of(path), package)}
    return {target for each in found for target in (each, each.rpartition(".")[0]) if target in known} - {name}


@pytest.mark.parametrize("package", ["torch_ext.world", "torch_ext.runner", "torch_ext.sim", "torch_ext.compat"])
def test_no_package_imports_in_a_circle(package):
    """A cycle, lazy imports included, means that two modules are one or that a third is missing."""
    graph = {
        module_name(path): {each for each in rooms_imported(path) if path.name != "__init__.py"}
        for path in FILES
        if below(module_name(path), [package])
    }
    assert len(graph) > 4
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


@pytest.mark.parametrize("package", ["torch_ext/runner", "torch_ext/world"])
def test_no_package_imports_torch_by_name(package):
    files = {shown(path): imports(tree_of(path)) for path in python_files(package)}
    assert [name for name, found in files.items() if any(below(each.name, ["torch"]) for each in found)] == []


def modules_after(statement):
    program = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = python("-c", program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")  # without the entry point that torch would call
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def ours(loaded):
    return {layer_of(name) for name in loaded} - {"", "torch_ext"}


_OF_WORLD = {"torch_ext.world", "torch_ext.machine_memory"}
_OF_RUNNER = {
    "torch_ext.runner",
    "torch_ext.results",
    "torch_ext.cache",
    "torch_ext.compat",
    "torch_ext.faults",
    "torch_ext.machine_memory",
    "torch_ext.personality",
}
_OF_TESTS = {"torch_ext.testing", "torch_ext.accelerator", "torch_ext.compat", *_OF_WORLD}
_HEAVY = {"torch", "numpy", "torch_ext.accelerator"}
_UPSTREAMS = {"torch.testing._internal.common_distributed", "torch._dynamo"}


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("statement", "layers", "unloaded"),
    [
        ("import torch_ext", set(), _HEAVY),
        ("import torch_ext.runner.cli", _OF_RUNNER, _HEAVY),
        ("import torch_ext.world.tree, torch_ext.world.provider", {"torch_ext.world"}, _HEAVY),
        ("import torch_ext.world.follow", _OF_WORLD, _HEAVY),
        ("import " + ", ".join(ROOMS["torch_ext.world"]), _OF_WORLD, _HEAVY),
        ("import " + ", ".join(ROOMS["torch_ext.runner"]), _OF_RUNNER | _OF_WORLD, _HEAVY),
        (
            "import torch_ext.__main__",
            None,
            {"torch", "difflib", "torch_ext.runner.reporters", "torch_ext.runner.execute"},
        ),
        (f"from {_HELPERS} import common_distributed, common_utils", _OF_TESTS, _UPSTREAMS),
        (f"import {_HELPERS}.hypothesis_utils", None, {f"{_HELPERS}._fsdp"}),
    ],
    ids=["package", "cli", "tree", "follow", "world", "runner", "command", "tests", "hypothesis"],
)
def test_each_part_loads_no_more_than_it_needs(statement, layers, unloaded):
    """The supervising side loads neither torch nor tests; test files load neither the runner nor upstream's harness."""
    loaded = modules_after(statement)
    assert layers is None or ours(loaded) == layers
    assert loaded.isdisjoint(unloaded)
