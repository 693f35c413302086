"""Runs that share the cores have the results of a run of one class after another."""

import os
import re

import pytest

from test.torch_ext.interpreter import RUN_TEST, python

_LINE = re.compile(r"^(\S+::\w+::\w+)  (passed|failed|skipped|flaky)", re.MULTILINE)


def run(cache, *arguments):
    suites = ("-v", "--device", "sim", "-i", "distributed/fsdp")
    done = python(RUN_TEST, *suites, *arguments, timeout_s=1200, TORCH_EXT_CACHE=str(cache))
    return done.returncode, dict(_LINE.findall(done.stdout)), done.stdout + done.stderr


@pytest.mark.long  # half an hour on two cores
def test_ten_parallel_runs_of_the_fsdp_suites_have_no_flake_that_a_sequential_run_has_not(tmp_path):
    alone = run(tmp_path, "-j", "1")
    for number in range(10):
        *found, out = run(tmp_path, "--slots", str(8 * (os.cpu_count() or 1)))
        assert found == list(alone[:2]), f"run {number}\n{out}"
