"""Names reserved for certain files, and the layout of the tree."""

import ast
import warnings

import pytest

from test.torch_ext.house.source import CHECKOUT, device_literals, private_torch_names, python_files, shown

_KNOW_DEVICES = ("torch_ext/accelerator.py", "torch_ext/compat/", "torch_ext/cuda_as_sim/", "torch_ext/sim/")
_KNOW_PRIVATE_NAMES = ("torch_ext/compat/", "torch_ext/sim/")


def files_of(folders, but):
    found = [path for folder in folders for path in python_files(folder)]
    assert found
    return [path for path in found if not shown(path).startswith(but)]


def read(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def test_devices_are_chosen_by_accelerator_alone():
    """Tests of torch_ext itself may name the device they expect."""
    files = files_of(("torch_ext", "testing", "test/distributed", "benchmarks"), _KNOW_DEVICES)
    found = [f"{shown(path)}:{line} {source}" for path in files for line, source in device_literals(read(path))]
    assert found == [], "ask torch_ext.accelerator instead"


def test_native_sources_contain_no_local_paths():
    sources = [path for path in (CHECKOUT / "torch_ext/sim/csrc").rglob("*") if path.suffix in (".cpp", ".h")]
    assert sources
    found = [shown(path) for path in sources if '#include "/' in path.read_text(encoding="utf-8")]
    assert found == [], "include the file by its path below csrc"


def test_private_names_of_torch_come_through_compat():
    files = files_of(("torch_ext", "testing"), _KNOW_PRIVATE_NAMES)
    found = [f"{shown(path)}:{line} {name}" for path in files for line, name in private_torch_names(read(path))]
    assert found == [], "add the name to a file of torch_ext/compat and import it from there"


@pytest.mark.parametrize("module", ["torch_ext.world.tree", "torch_ext.testing.common", "test.a.test_b"])
def test_our_warnings_are_errors(module):
    with pytest.raises(FutureWarning, match="something new"):
        warnings.warn_explicit("something new", FutureWarning, "file.py", 1, module=module)


def test_torch_warnings_are_no_errors():
    with pytest.warns(FutureWarning, match="something new"):
        warnings.warn_explicit("something new", FutureWarning, "file.py", 1, module="torch.nn")
