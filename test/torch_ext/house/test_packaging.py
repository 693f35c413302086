"""The contents of the installed package; building needs no torch."""

import json
import re
import shutil
import stat
import zipfile

import pytest

import torch_ext
from test.torch_ext.house.source import CHECKOUT, python_files, shown
from test.torch_ext.interpreter import python

# Prints the arguments of setup(), with torch made unimportable.
_DESCRIBE = """
import json, sys
sys.modules["torch"] = None
from setuptools import Distribution
from distutils.core import run_setup
told = run_setup("setup.py", ["--version"], stop_after="init")
print(json.dumps({"version": told.get_version(), "requires": told.install_requires}))
"""


def test_package_has_one_version_and_accepts_any_torch_from_2_13():
    """With an upper bound on torch, pip would replace a nightly or a source build."""
    pytest.importorskip("setuptools")
    metadata = json.loads(python("-c", _DESCRIBE).stdout.splitlines()[-1])
    assert metadata["version"] == torch_ext.__version__
    assert [each for each in metadata["requires"] if re.match(r"torch\b", each)] == ["torch>=2.13"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from a copy of the checkout, since building leaves files beside the sources. Needs no network."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    ours = [*CHECKOUT.glob("*.*"), CHECKOUT / "LICENSE"]
    for path in ours:
        if path.is_file():
            shutil.copy(path, folder)
    for name in ("torch_ext", "testing"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / name, folder / name, symlinks=True, ignore=ignored)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", "out"]
    done = python("-m", "pip", "wheel", ".", *options, folder=folder)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "out").glob("*.whl")
    return zipfile.ZipFile(built)


def test_wheel_holds_both_packages_and_native_sources_only(wheel):
    names = set(wheel.namelist())
    files = {shown(path): path for path in python_files("torch_ext")}
    files |= {f"torch_ext/{shown(path)}": path for path in python_files("testing")}
    assert "torch_ext/testing/_internal/common_distributed.py" in files
    sources = [path for path in (CHECKOUT / "torch_ext").rglob("csrc/**/*") if path.is_file()]
    assert sorted({*files, "torch_ext/py.typed", *map(shown, sources)} - names) == []
    assert [name for name, path in files.items() if wheel.read(name) != path.read_bytes()] == []
    assert [each.filename for each in wheel.infolist() if stat.S_ISLNK(each.external_attr >> 16)] == []
    assert {name.split("/")[0] for name in names} == {"torch_ext", f"torch_ext-{torch_ext.__version__}.dist-info"}
    (entries,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "torch_ext = torch_ext.__main__:main" in wheel.read(entries).decode()
