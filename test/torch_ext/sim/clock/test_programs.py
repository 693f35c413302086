"""``--clock``: the virtual time of programs and tests, and their reports."""

import json

from test.torch_ext.interpreter import RUN_TEST, python
from test.torch_ext.program.commands import run

PROGRAM = """
    import os, sys, time
    import torch
    import torch.distributed as dist

    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    began = time.perf_counter(), time.monotonic_ns(), time.time()
    for step in range(2):
        torch.sim._sleep(10**12)
        dist.all_reduce(torch.ones(100, device="sim"))
    assert time.perf_counter() == began[0], "the host runs ahead"
    time.sleep(0.25)
    assert time.perf_counter() == began[0] + 0.25
    torch.sim.synchronize()
    passed = time.perf_counter() - began[0], time.monotonic_ns() - began[1]
    assert abs(passed[0] - 2000) < 1 and passed[1] == 2 * (10**12 + 1 + 400), passed
    assert time.time() - began[2] < 1000
    if len(sys.argv) > 1:
        torch.ones(3, 3, device="sim", dtype=torch.float16) @ torch.ones(3, 3, device="sim", dtype=torch.float16)
    sys.exit(0)
"""

TEST = """
import time
import unittest

import torch
import torch.distributed as dist
from torch_ext.testing._internal.common_distributed import MultiProcessTestCase

MONOTONIC = time.monotonic


class TestClock(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_time(self):
        began = time.process_time()
        torch.sim._sleep(10**15)
        torch.sim.synchronize()
        self.assertEqual(time.process_time() - began, 1e6)
        self.assertNotEqual(time.monotonic, MONOTONIC)
        self.assertGreater(MONOTONIC(), 0)

    def test_failure(self):
        torch.sim._sleep(10**15)
        self.assertEqual(self.rank, 0)
"""


def test_a_program_ends_with_a_table_and_a_trace_of_all_ranks(tmp_path):
    ended = run("-n 2 --clock unit", PROGRAM, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    title, header, *rows, trace = ended.stdout.strip().splitlines()
    assert title == "virtual time by the model unit (not validated)"
    assert " ".join(header.split()) == "rank time step exposed communication idle critical path"
    expected = "2000.00 s  -     all_reduce 800 ns      stream 0 0%  sleep 100%, all_reduce 0%, aten::fill_ 0%"
    assert rows == [f"{rank}     {expected}" for rank in range(2)]
    assert trace.endswith(str(tmp_path / "torch_ext_trace.json"))
    events = json.loads((tmp_path / "torch_ext_trace.json").read_text())["traceEvents"]
    reduces = [event for event in events if event["name"] == "all_reduce"]
    assert [(each["pid"], each["ts"], each["dur"]) for each in reduces] == [
        (1 + 1000 * rank, ts, 0.4) for rank in range(2) for ts in (10**9 + 0.001, 2 * 10**9 + 0.402)
    ]
    lanes = [event["tid"] for event in events if event["name"] == "thread_name"]
    assert len(set(lanes)) == len(lanes) and 0 not in lanes, "Perfetto would show two lanes as one"


def test_a_second_run_says_what_moved(tmp_path):
    program = "import sys, torch\ntorch.ones(4, device='sim')\ntorch.sim._sleep(int(sys.argv[1]))"
    assert run("-n 1 --clock unit", program, "1000", folder=tmp_path).returncode == 0
    slower = ["rank 0: time 1.00 us -> 3.00 us", "rank 0: critical path: sleep 1.00 us -> 3.00 us"]
    for cycles, said in (("1000", ["nothing moved"]), ("3000", slower)):
        again = run("-n 1 --clock unit --compare torch_ext_trace.json", program, cycles, folder=tmp_path)
        assert again.returncode == 0, again.stderr
        assert again.stdout.strip().splitlines()[3:-1] == said, again.stdout
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    refused = run("-n 1 --clock unit --compare other.json", program, "1", folder=tmp_path)
    assert refused.returncode == 2 and "other.json is no trace that run --clock has written" in refused.stderr


def test_what_the_model_does_not_know_fails_the_program(tmp_path):
    ended = run("-n 2 --clock cpu", PROGRAM.replace("assert abs", "assert True or abs"), "half", folder=tmp_path)
    assert ended.returncode == 1
    assert "no model: cpu has no flops.Half, link. " in ended.stderr
    assert not (tmp_path / "torch_ext_trace.json").exists()


def test_bodies_of_tests_run_in_virtual_time(tmp_path):
    (tmp_path / "test_clock.py").write_text(TEST)
    ended = python(RUN_TEST, "--clock", "unit", "-v", "--device", "sim", tmp_path)
    assert "1 passed, 1 failed" in ended.stdout, ended.stdout + ended.stderr
    assert "rank 1 raised AssertionError" in ended.stdout
    assert "--device sim --clock unit\n" in ended.stdout
