"""Commands started in the root of an unbuilt checkout find the installed torch, and not its sources."""

import os

import pytest

from test.torch_ext.interpreter import CHECKOUT, RUN_TEST, python
from torch_ext.unbuilt import has_unbuilt_torch

# The first part reports which torch is in use; programs started by a test look where the test runs.
FILE = """
import multiprocessing
import subprocess
import sys
import unittest

import torch
from torch.testing._internal.common_distributed import MultiProcessTestCase


def import_torch():
    import torch


class TestRanks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_torch(self):
        self.assertTrue(hasattr(torch, "ones"))


class TestPrograms(unittest.TestCase):
    def test_command(self):
        done = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_process(self):
        process = multiprocessing.get_context("spawn").Process(target=import_torch)
        process.start()
        process.join()
        self.assertEqual(process.exitcode, 0)
"""


def make_checkout(root):
    (root / "torch" / "_C").mkdir(parents=True)
    (root / "torch" / "__init__.py").write_text("raise ImportError('the sources of torch, not built')\n")
    (root / "torch" / "_C" / "__init__.pyi").touch()
    file = root / "test" / "distributed" / "test_a.py"
    file.parent.mkdir(parents=True)
    file.write_text(FILE)
    return file.relative_to(root)


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "path"),
    [
        pytest.param(("-m", "torch_ext", "--start-method", "interpreter"), (CHECKOUT,), marks=pytest.mark.long),
        ((RUN_TEST,), (".", CHECKOUT)),
    ],
)
def test_the_installed_torch_is_found(tmp_path, command, path):
    file = make_checkout(tmp_path)
    words = (*command, "--upstream", file, "--device", "cpu", "--junit", "report.xml")
    done = python(*words, folder=tmp_path, PYTHONPATH=os.pathsep.join(map(str, path)))
    assert "3 passed, 0 failed, 0 skipped" in done.stdout, done
    assert (tmp_path / "report.xml").is_file()  # where the command started, not where its tests ran


def test_a_checkout_that_was_built_in_place_is_taken(tmp_path):
    make_checkout(tmp_path)
    assert has_unbuilt_torch(tmp_path)
    (tmp_path / "torch" / "_C.cpython-312-x86_64-linux-gnu.so").touch()
    assert not has_unbuilt_torch(tmp_path)
    assert not has_unbuilt_torch(tmp_path / "test")
