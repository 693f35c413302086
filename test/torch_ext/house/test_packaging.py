"""The contents of the installed package; building needs no torch."""

import json
import re
import shutil
import stat
import zipfile
from pathlib import Path

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


COSTLY = pytest.mark.costly  # one mark: these tests share a run


def test_package_has_one_version_and_accepts_any_torch_from_2_13():
    """With an upper bound on torch, pip would replace a nightly or a source build."""
    pytest.importorskip("setuptools")
    metadata = json.loads(python("-c", _DESCRIBE).stdout.splitlines()[-1])
    assert metadata["version"] == torch_ext.__version__
    assert [each for each in metadata["requires"] if re.match(r"torch\b", each)] == ["torch>=2.13"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a wheel with the built simulator."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    done = python(str(CHECKOUT / ".ci" / "wheel"), str(folder))
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(built):
    return zipfile.ZipFile(built)


@COSTLY
def test_wheel_holds_both_packages_and_native_sources_only(wheel):
    names = set(wheel.namelist())
    files = {shown(path): path for path in python_files("torch_ext")}
    files |= {f"torch_ext/{shown(path)}": path for path in python_files("testing")}
    assert "torch_ext/testing/_internal/common_distributed.py" in files
    sources = [path for path in (CHECKOUT / "torch_ext").rglob("csrc/**/*") if path.is_file()]
    assert sorted({*files, "torch_ext/py.typed", *map(shown, sources)} - names) == []
    assert [name for name, path in files.items() if wheel.read(name) != path.read_bytes()] == []
    assert [each.filename for each in wheel.infolist() if stat.S_ISLNK(each.external_attr >> 16)] == []
    dist_info = "-".join(Path(wheel.filename).name.split("-")[:2]) + ".dist-info"
    assert {name.split("/")[0] for name in names} == {"torch_ext", dist_info}
    (entries,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "torch_ext = torch_ext.__main__:main" in wheel.read(entries).decode()


@COSTLY
@pytest.mark.long
@pytest.mark.processes
def test_suite_runs_from_the_wheel_without_a_compiler(built, tmp_path):
    """On `sim`, where an unbuilt simulator would leave the tests to the host."""
    site = tmp_path / "site"
    done = python("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, built)
    assert done.returncode == 0, done.stderr
    for name in ("home", "bin"):
        (tmp_path / name).mkdir()
    suite = tmp_path / "test_input.py"
    shutil.copy(CHECKOUT / "test/distributed/fsdp/test_fsdp_input.py", suite)
    done = python(
        "-c", "import runpy, torch_ext; print(torch_ext.__file__); runpy.run_module('torch_ext', run_name='__main__')",
        "--device", "sim", str(suite), folder=tmp_path,
        PYTHONPATH=str(site), PATH=str(tmp_path / "bin"), HOME=str(tmp_path / "home"), TORCH_EXT_CACHE="",
    )  # fmt: skip
    assert done.stdout.splitlines()[0] == str(site / "torch_ext/__init__.py")
    assert done.returncode == 0 and " passed, 0 failed, 0 skipped" in done.stdout, done.stdout + done.stderr


@pytest.mark.processes
def test_older_python_is_refused_in_a_sentence():
    code = "import runpy, sys; sys.version_info = (3, 9, 18); runpy.run_path('run_test.py')"
    done = python("-c", code)
    assert done.returncode == 1 and done.stderr.startswith("torch_ext needs Python 3.10 or newer")
