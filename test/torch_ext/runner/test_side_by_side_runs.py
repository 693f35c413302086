"""Several runners in one checkout at once do not disturb each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test.torch_ext.interpreter import CHECKOUT, RUN_TEST

_LINE = re.compile(r"^(\S+::\w+::\w+)  (passed|failed|skipped|flaky)", re.MULTILINE)


def start(*arguments: str, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, RUN_TEST, "-v", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=CHECKOUT,
        env={**os.environ, "TORCH_EXT_CACHE": str(cache)},
    )  # fmt: skip


def ended(runners: list[subprocess.Popen[str]], deadline_s: float) -> list[tuple[int, dict[str, str], str]]:
    try:
        found = [runner.communicate(timeout=deadline_s)[0] for runner in runners]
    finally:
        for runner in runners:
            runner.kill()
    return [(runner.returncode, dict(_LINE.findall(out)), out) for runner, out in zip(runners, found, strict=True)]


def test_two_runners_in_one_checkout_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Both begin without remembered names, and write them and the history to one folder."""
    runners = [start("--device", "cpu", "-i", "distributed/fsdp/test_fsdp_input.py", cache=tmp_path) for _ in range(2)]
    (one, first, out), (other, second, more) = ended(runners, 240)
    assert one == other == 0, out + more
    assert first == second and len(first) == 4, out + more
    (history,) = (tmp_path / "history").glob("*.json")
    assert len(json.loads(history.read_text())["tests"]) == 4


@pytest.mark.long  # half an hour on two cores
def test_ten_parallel_runs_of_the_fsdp_suites_have_no_flake_that_a_sequential_run_has_not(tmp_path: Path) -> None:
    suites = ("--device", "sim", "-i", "distributed/fsdp")
    alone = ended([start("-j", "1", *suites, cache=tmp_path)], 1200)[0]
    slots = str(8 * (os.cpu_count() or 1))
    for number in range(10):
        code, found, out = ended([start("--slots", slots, *suites, cache=tmp_path)], 1200)[0]
        assert found == alone[1] and code == alone[0], f"run {number}\n{out}"
