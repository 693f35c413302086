"""Unsuitable files and folders for ``--upstream``: one sentence each, and the rest still runs."""

import json
import re
import signal
from pathlib import Path

import pytest

from test.torch_ext.interpreter import RUN_TEST, python
from torch_ext.runner.cli import main
from torch_ext.upstream.judge import Judge, read
from torch_ext.upstream.reasons import release_of_checkout

PASSES = (
    'import unittest\n\nclass TestA(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(len("é"), 1)\n'
)


@pytest.fixture
def upstream():
    """The arguments that the command passes to the runner. Importing the command replaces pytest's SIGINT handler."""
    before = signal.getsignal(signal.SIGINT)
    from torch_ext.__main__ import upstream

    signal.signal(signal.SIGINT, before)
    return upstream()


@pytest.mark.parametrize(
    "case",
    [
        ("", "argument --upstream: got an empty value, as from an unset variable"),
        ("nowhere.py", "nowhere.py, which does not exist; give test files or folders"),
        ("README.md", "README.md, which is not a Python module"),
        ("/dev/null", "/dev/null, which is not a Python module"),
        ("test_a.b.py", "test_a.b.py, which is not a Python module"),
    ],
)
def test_a_path_that_cannot_be_run(tmp_path, upstream, monkeypatch, capfd, case):
    name, sentence = case
    monkeypatch.chdir(tmp_path)
    for file in ("README.md", "test_a.b.py"):
        Path(file).touch()
    assert main(["--upstream", name], upstream) == 2
    shown = capfd.readouterr()
    assert sentence in shown.err and "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.costly
def test_folder_with_odd_files_runs_its_other_files(tmp_path):
    (tmp_path / "version.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "torch").mkdir()
    folder = tmp_path / "tests, ä"
    folder.mkdir()
    (folder / "test_latin.py").write_bytes(f"# coding: latin-1\n{PASSES}".encode("latin-1"))
    (folder / "test_syntax.py").write_text("def f(:\n")
    (folder / "test_zero.py").write_bytes(b"x\0")
    # Without tests: a skip that says so.
    (folder / "test_without.py").write_text("import torch\nif torch.cuda.is_available():\n    pass\n")
    (folder / "test_plain.py").write_text("x = 1\n")
    done = python(RUN_TEST, "--upstream", folder, "--device", "cpu", folder=tmp_path)
    assert done.returncode == 1, done
    assert "1 passed, 2 failed, 2 skipped" in done.stdout
    assert "1  the file defines no test here\n" in done.stdout
    assert "1  the file defines no test here: --cuda-as-sim has CUDA mean" in done.stdout
    assert f'File "{folder}/test_syntax.py", line 1' in done.stdout
    assert "upstream/file.py" not in done.stdout + done.stderr


@pytest.mark.costly
def test_a_file_with_the_name_of_a_loaded_module_is_not_that_module(tmp_path, upstream, monkeypatch, capfd):
    (tmp_path / "sys.py").write_text(PASSES)
    monkeypatch.chdir(tmp_path)
    assert main(["--upstream", "sys.py", "--device", "cpu"], upstream) == 1
    assert "sys.py has the name of a module that is loaded already" in capfd.readouterr().out


@pytest.mark.costly
def test_a_file_without_the_tests_that_were_asked_for_selects_nothing(tmp_path, upstream, capfd):
    (tmp_path / "test_plain.py").write_text("x = 1\n")
    assert main(["--upstream", str(tmp_path), "--device", "cpu", "-k", "test_a"], upstream) == 2
    assert "nothing selected" in capfd.readouterr().err


@pytest.mark.costly
def test_class_of_known_skips_delays_no_other_class(tmp_path):
    (tmp_path / "test_two.py").write_text(f"{PASSES}\n\n{PASSES.replace('TestA', 'TestB')}")
    known = {"test": "test_two.py::TestA::*", "when": {}, "do": "skip", "reason": "it would hang", "link": ""}
    (tmp_path / "known.json").write_text(json.dumps([known]))
    options = ("--differences", tmp_path / "known.json", "--device", "cpu", "--repeat", "2")
    done = python(RUN_TEST, "--upstream", tmp_path / "test_two.py", *options)
    skipped, passed = "test_two.py::TestA  1 skipped", "test_two.py::TestB  1 passed"
    lines = re.findall("^.*::Test[AB]  1 [a-z ]+(?=  )", done.stdout, re.MULTILINE)
    assert [line.rpartition("/")[2] for line in lines] == [skipped, passed] * 2, done.stdout


def test_malformed_files_are_refused(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "version.txt").write_bytes(b"\xff\xfe")
    assert release_of_checkout(tmp_path / "test_a.py")
    differences = tmp_path / "differences.json"
    for text in (b"{", b"\xff"):
        differences.write_bytes(text)
        with pytest.raises(ValueError, match=r"differences\.json is no JSON in UTF-8"):
            read(differences)


def test_skips_that_cuda_as_sim_would_avoid_name_the_option(tmp_path):
    from torch_ext.results import Status, TestName, TestResult

    no_ranks = "no rank was started, because the test's world_size is 0"
    counts, constant = tmp_path / "test_counts.py", tmp_path / "test_constant.py"
    counts.write_text("WORLD_SIZE = torch.cuda.device_count()\n")
    constant.write_text("WORLD_SIZE = 0\n")

    def judged(file, reason, **surroundings):
        judge = Judge([counts, constant], [], surroundings)
        return judge.judged(TestResult(TestName(file.name, "T", "test"), Status.SKIPPED, 0.0, reason=reason)).reason

    assert "--cuda-as-sim" in judged(counts, no_ranks)
    assert judged(constant, no_ranks) == no_ranks
    assert judged(counts, no_ranks, cuda_as_sim="true") == no_ranks
    assert "--cuda-as-sim" in judged(constant, "This torch is built without NCCL.")
    assert judged(counts, "CUDA out of luck") == "CUDA out of luck"
    for skip in (
        "CUDA unavailable",
        "multi-GPU not supported",
        "no supported device (cuda, xla) found",
        "Requires CUDA",
    ):
        assert judged(counts, skip) == f"{skip}: --cuda-as-sim has CUDA mean the simulated accelerator"
        assert judged(constant, skip) == judged(counts, skip, cuda_as_sim="true") == skip
    for skip in ("requires gpu", "requires gpu and triton", "Inductor+gpu needs triton and recent GPU arch"):
        reason = f"needs Triton, which has no compiler for this device: {skip}"
        assert judged(counts, skip, cuda_as_sim="true") == reason
    assert judged(constant, "requires GPUs") == "requires GPUs"
