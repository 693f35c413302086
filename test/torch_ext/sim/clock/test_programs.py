"""``--clock``: the virtual time of programs and tests, and their reports."""

import html.parser
import json
import re
from collections import Counter

import pytest

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


class Drawn(html.parser.HTMLParser):
    """The headings and the works of the page, as a browser reads them."""

    def __init__(self, page):
        super().__init__()
        self.headings, self.works, self._titles = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self._inside = tag
        if tag == "rect":
            self.works.append([dict(attributes), ""])

    def handle_data(self, data):
        if self._inside in ("h2", "h3") and data.strip():
            self.headings.append(data)
        elif self._inside == "title" and self.works:
            self.works[-1][1] = data

    def shown_ms(self, name):
        """Return the share of the drawing's width that works of this name cover, times the step's length."""
        widths = sum(float(each["width"]) for each, title in self.works if title.startswith(f"{name} "))
        return round(widths / 1000 * float(self.headings[0].split()[2]))


@pytest.mark.costly
def test_a_program_ends_with_a_table_and_a_trace_of_all_ranks(tmp_path):
    ended = run("-n 2 --clock unit", PROGRAM, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    title, header, *rows, page, trace = ended.stdout.strip().splitlines()
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
    drawn = Drawn((tmp_path / "torch_ext_trace.html").read_text())
    assert page.endswith("torch_ext_trace.html") and drawn.headings == ["The run: 2000.00 s", "rank 0", "rank 1"]
    assert len(drawn.works) == sum(event["ph"] == "X" and event["dur"] > 0 for event in events)
    lanes = [event["tid"] for event in events if event["name"] == "thread_name"]
    assert len(set(lanes)) == len(lanes) and 0 not in lanes, "Perfetto would show two lanes as one"


@pytest.mark.costly
def test_a_second_run_says_what_moved(tmp_path):
    program = "import sys, torch\ntorch.ones(4, device='sim')\ntorch.sim._sleep(int(sys.argv[1]))"
    assert run("-n 1 --clock unit", program, "1000", folder=tmp_path).returncode == 0
    slower = ["rank 0: time 1.00 us -> 3.00 us", "rank 0: critical path: sleep 1.00 us -> 3.00 us"]
    for cycles, said in (("1000", ["nothing moved"]), ("3000", slower)):
        again = run("-n 1 --clock unit --compare torch_ext_trace.json", program, cycles, folder=tmp_path)
        assert again.returncode == 0, again.stderr
        assert again.stdout.strip().splitlines()[3:-2] == said, again.stdout
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    refused = run("-n 1 --clock unit --compare other.json", program, "1", folder=tmp_path)
    assert refused.returncode == 2 and "other.json is no trace that run --clock has written" in refused.stderr


MODULES = """
    import sys
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, cycles):
            ctx.cycles = cycles
            ctx.save_for_backward(x)  # so a checkpoint computes it again
            torch.sim._sleep(cycles)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            torch.sim._sleep(2 * ctx.cycles)
            return gradient, None

    class Layer(nn.Module):
        def __init__(self, cycles):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, device="sim"))
            self.cycles = cycles

        def forward(self, x):
            return Sleep.apply(x * self.weight, self.cycles)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(10**7), Layer(10**7)])
            self.head = Layer(5 * 10**7)

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if "checkpoint" in sys.argv else layer(x)
            torch.sim._sleep(3 * 10**7)
            return self.head(x)  # the tensor that the net returns, too

    net = Net()
    if "compile" in sys.argv:
        net.compile(backend="eager", fullgraph=False)
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.register_step_pre_hook(lambda *_: torch.sim._sleep(4 * 10**7))
    for step in range(2):
        loss = net(torch.ones(1, device="sim"))
        torch.sim._sleep(10**8)
        loss.backward()
        torch.sim._sleep(10**8)
        optimizer.step()
"""


@pytest.mark.costly
def test_the_critical_path_is_by_modules(tmp_path):
    """Per step 10 and 10 for two layers, 50 for the head, 30 for the net itself, twice the layers' in backward; 40 for
    the optimizer, and 200 outside of all.
    """
    milliseconds = {"layers.*": 20, "head": 50, "Net": 30, "layers.* backward": 40, "head backward": 100, "SGD": 40}
    for variant, more in (("", 0), ("checkpoint", 20), ("compile", 0)):
        ended = run("-n 1 --clock unit", MODULES, *variant.split(), folder=tmp_path)
        assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
        events = json.loads((tmp_path / "torch_ext_trace.json").read_text())["traceEvents"]
        spent = Counter()
        for event in events:
            if event["name"] == "sleep":
                module = re.sub(r"\d+", "*", event["args"].get("module", "none"))
                spent[module] += round(event["dur"] / 2000)
        assert spent == {**milliseconds, "none": 200} | ({"layers.*": 40} if more else {}), variant
        if not variant:
            total = 200 + sum(milliseconds.values())
            drawn = Drawn((tmp_path / "torch_ext_trace.html").read_text())
            assert drawn.headings[0] == f"One step: {total}.00 ms" == f"One step: {drawn.shown_ms('sleep')}.00 ms"
            assert f"sleep {200 / total:.0%}, head backward {100 / total:.0%}, head {50 / total:.0%}" in ended.stdout


def test_what_the_model_does_not_know_fails_the_program(tmp_path):
    ended = run("-n 2 --clock cpu", PROGRAM.replace("assert abs", "assert True or abs"), "half", folder=tmp_path)
    assert ended.returncode == 1
    assert "no model: cpu has no flops.Half, link. " in ended.stderr
    assert not (tmp_path / "torch_ext_trace.json").exists()


@pytest.mark.costly
def test_bodies_of_tests_run_in_virtual_time(tmp_path):
    (tmp_path / "test_clock.py").write_text(TEST)
    ended = python(RUN_TEST, "--clock", "unit", "-v", "--device", "sim", tmp_path)
    assert "1 passed, 1 failed" in ended.stdout, ended.stdout + ended.stderr
    assert "rank 1 raised AssertionError" in ended.stdout
    assert "--device sim --clock unit\n" in ended.stdout
