"""``torch_ext doctor`` and ``torch_ext demo``: what they say, and their exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from test.torch_ext.house.source import CHECKOUT


def command(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_ext", *words],
        cwd=CHECKOUT,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_doctor_says_what_is_there(tmp_path: Path) -> None:
    done = command("doctor")
    assert f"torch         {torch.__version__}" in done.stdout
    assert "start method  fork" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("all well")
    assert done.returncode == 0


def test_doctor_fails_where_no_device_can_be_had(tmp_path: Path) -> None:
    done = command("doctor", TORCH_EXT_CACHE=str(tmp_path), CXX="no-such-compiler")
    assert "simulator     not built for this torch yet" in done.stdout
    assert "PROBLEM       no C++ compiler" in done.stdout
    assert done.returncode == 1
    assert list(tmp_path.iterdir()) == [], "it builds nothing"


def test_output_that_cannot_be_written_is_said_in_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "torch_ext", "doctor"], cwd=CHECKOUT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr.splitlines()[-1] == "error: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


def test_demo_finds_the_race_and_nothing_else() -> None:
    done = command("demo")
    assert done.stdout.count("step 2: loss") == 2
    assert done.stderr.count("FAILED demo.py") == 1
    assert "must wait for stream 1 of sim:" in done.stderr
    assert done.returncode == 0
