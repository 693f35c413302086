"""``torch_ext doctor`` and ``torch_ext demo``: their output and exit codes."""

import pytest
import torch

from test.torch_ext.interpreter import python


@pytest.mark.costly
def test_doctor_reports_machine_features(tmp_path):
    done = python("-m", "torch_ext", "doctor")
    assert f"torch         {torch.__version__}" in done.stdout
    assert "start method  fork" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("all well")
    assert done.returncode == 0


@pytest.mark.costly
def test_doctor_says_that_the_simulator_is_not_built(tmp_path):
    done = python("-m", "torch_ext", "doctor", TORCH_EXT_CACHE=str(tmp_path))
    assert done.stdout.splitlines()[-1].startswith("not built") and "all well" not in done.stdout
    assert done.returncode == 0


@pytest.mark.costly
def test_doctor_fails_without_a_device(tmp_path):
    done = python("-m", "torch_ext", "doctor", TORCH_EXT_CACHE=str(tmp_path), CXX="no-such-compiler")
    assert "simulator     not built for this torch yet" in done.stdout
    assert "PROBLEM       no C++ compiler" in done.stdout
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == [], "it builds nothing"


@pytest.mark.costly
def test_unwritable_output_is_reported_in_one_sentence():
    with open("/dev/full", "w") as full:
        done = python("-m", "torch_ext", "doctor", stdout=full.fileno())
    assert done.stderr.splitlines()[-1] == "error: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


@pytest.mark.costly
def test_demo_finds_the_race_and_nothing_else():
    done = python("-m", "torch_ext", "demo")
    assert done.stdout.count("step 2: loss") == 2
    assert done.stderr.count("FAILED demo.py") == 1
    assert "must wait for stream 1 of sim:" in done.stderr
    assert done.returncode == 0
