"""Projects whose programs and tests say CUDA, as their authors wrote them: nothing in them is changed. Each is fetched
at the commit in ``projects.json``, which also records the outcome of every test file, failures and skips with their
reasons. ``.ci/programs`` makes an environment that has what they import. Needs git and the network.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import random
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from test.torch_ext.servers import environment

_PROJECTS: dict[str, Any] = json.loads((Path(__file__).parent / "projects.json").read_text(encoding="utf-8"))
_FILES = [(name, file) for name, project in _PROJECTS.items() for file in project.get("files", {})]
_PROGRAMS = [(name, line) for name, project in _PROJECTS.items() for line in project.get("programs", [])]
_LIMIT_S = 600.0  # far above the duration of any


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[Path]:
    return functools.partial(_fetched, tmp_path_factory.getbasetemp() / "projects")


@functools.cache
def _fetched(below: Path, name: str) -> Path:
    """Return a checkout of a project's folders, without their history."""
    project, folder = _PROJECTS[name], below / name
    subprocess.run(["git", "init", "-q", folder], check=True)
    for words in (
        ["remote", "add", "origin", project["url"]],
        ["sparse-checkout", "set", *project["folders"]],
        ["fetch", "-q", "--depth", "1", "--filter=blob:none", "origin", project["commit"]],
        ["checkout", "-q", "FETCH_HEAD"],
    ):
        subprocess.run(["git", "-C", folder, *words], check=True, timeout=_LIMIT_S)
    return folder


def _run(name: str, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a project on simulated devices."""
    source = folder / _PROJECTS[name].get("source", ".")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    variables = environment({"TORCH_EXT_SIM": "cuda", "PYTHONPATH": os.fspath(source), "PATH": path})
    variables |= _PROJECTS[name].get("variables", {})  # scripts of accelerate expect two devices, and fill them
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=variables, timeout=_LIMIT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _outcomes(report: Path) -> dict[str, Any]:
    """Return how many tests of a JUnit report passed, which failed, and how many were skipped for each reason."""
    passed, failed, skipped = 0, [], collections.Counter[str]()
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        if (skip := case.find("skipped")) is not None:
            skipped[skip.get("message", "")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed.append(case.get("name"))
        else:
            passed += 1
    return {"passed": passed, "failed": sorted(failed), "skipped": dict(sorted(skipped.items()))}


@pytest.mark.parametrize(("name", "file"), _FILES, ids=[f"{name}:{file}" for name, file in _FILES])
def test_each_test_of_a_project_ends_as_recorded(
    name: str, file: str, folders: functools.partial[Path], tmp_path: Path
) -> None:
    report = tmp_path / "report.xml"
    options = _PROJECTS[name].get("options", [])  # the conftest.py of PyTorch 2.4 is for an older pytest
    ended = _run(name, ["-m", "pytest", "-q", *options, f"--junit-xml={report}", file], folders(name))
    assert report.exists(), ended.stdout
    expected = {"passed": 0, "failed": {}, "skipped": {}} | _PROJECTS[name]["files"][file]
    expected["failed"] = sorted(expected["failed"])  # the record holds the reason of each
    assert _outcomes(report) == expected, ended.stdout


@pytest.mark.parametrize(("name", "line"), _PROGRAMS, ids=[f"{name}:{line}" for name, line in _PROGRAMS])
def test_a_program_of_a_project_runs_to_its_end(name: str, line: str, folders: functools.partial[Path]) -> None:
    ended = _run(name, line.split(), folders(name))
    assert ended.returncode == 0, ended.stdout


# The script names CUDA for each rank of DDP. It has no form of these lines for the CPU.
_ON_HOST = [
    ("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
    ("torch.cuda.set_device(device)", "pass"),
    ("DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"),
]
_OPTIONS = (
    "--dataset=words --eval_interval=4 --eval_iters=2 --log_interval=1 --max_iters=6 --batch_size=4 --block_size=32 "
    "--n_layer=2 --n_head=2 --n_embd=32 --gradient_accumulation_steps=2 --compile=False --dtype=float32"
)
_LOSSES = 11  # two of each of two evaluations, and one of each of seven steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_nanogpt_prints_the_losses_of_the_host(ranks: int, folders: functools.partial[Path]) -> None:
    folder = folders("nanoGPT")
    words = folder / "data" / "words"
    words.mkdir(exist_ok=True)
    draw = random.Random(0)
    for split, length in (("train", 4096), ("val", 1024)):
        (words / f"{split}.bin").write_bytes(struct.pack(f"<{length}H", *(draw.randrange(65) for _ in range(length))))
    text = (folder / "train.py").read_text(encoding="utf-8")
    for of_cuda, of_host in _ON_HOST:
        assert text.count(of_cuda) == 1, of_cuda
        text = text.replace(of_cuda, of_host)
    (folder / "train_on_host.py").write_text(text, encoding="utf-8")

    def losses(program: str, *options: str) -> list[str]:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        ended = _run("nanoGPT", [*start, program, *_OPTIONS.split(), *options], folder)
        assert ended.returncode == 0, ended.stdout
        return re.findall(r"loss (\d+\.\d+)", ended.stdout)

    found = losses("train.py")
    assert len(found) == _LOSSES, found
    assert found == losses("train_on_host.py", "--device=cpu", "--backend=gloo")
