"""Which device a run chooses by default; the simulated one has as many devices as a test asks for."""

import re

import pytest
import torch

from test.torch_ext.world.suites import suite_of
from torch_ext import cache

SUITE = """
from torch_ext.testing._internal.common_distributed import requires_world_size, skip_if_lt_x_gpu


class TestProcesses(Ranks):
    @skip_if_lt_x_gpu(6)
    def test_asks_for_six(self):
        self.assertEqual(torch.accelerator.device_count(), 6)
        self.assertEqual(torch.ones(1, device=f"sim:{4 + self.rank}").item(), 1)

    def test_asks_for_none(self):
        self.assertEqual(torch.accelerator.device_count(), 4)

    @skip_if_lt_x_gpu(2)
    def test_asks_for_few(self):
        self.assertEqual(torch.accelerator.device_count(), 4)


class TestLargeWorld(Ranks):
    world_size = 5

    def test_has_a_device_a_rank(self):
        self.assertEqual(torch.accelerator.device_count(), 5)


class TestThreads(Threads):
    @skip_if_lt_x_gpu(7)
    def test_asks_for_seven(self):
        self.assertEqual(torch.accelerator.device_count(), 7)


class TestStanding(Standing):
    @requires_world_size(6)
    def test_asks_for_six(self):
        self.assertEqual(torch.accelerator.device_count(), 6)
"""
WHERE = """
from torch_ext import accelerator


class TestWhere(Ranks):
    world_size = 1

    def test_where(self):
        print("this rank is on", accelerator.device_type())
"""
BUILT = {"TORCH_EXT_CACHE": str(cache.folder())}
ON_SIM = {"TORCH_EXT_DEVICE": "sim", **BUILT}
CHOOSES = {"TORCH_EXT_DEVICE": "", **BUILT}


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("tests", "more", "counts"),
    [
        ("test", {}, "6 passed, 0 failed, 0 skipped"),
        # The user's number overrides the number that a test asks for.
        ("asks_for_six or asks_for_few", {"TORCH_EXT_SIM_DEVICES": "4"}, "1 passed, 0 failed, 2 skipped"),
    ],
)
def test_device_count_follows_the_test_or_the_user(tests, more, counts, tmp_path):
    with suite_of(tmp_path, SUITE) as suite:
        run = suite.run("-k", tests, extra={**ON_SIM, **more})
    assert run.out.splitlines()[-1] == counts, run
    assert ("Needs 6 accelerator devices" in run.out) == bool(more)


@pytest.mark.costly
@pytest.mark.skipif(
    "torch.accelerator.current_accelerator().type != 'sim'", reason="torch prefers an accelerator of this machine"
)
def test_a_machine_without_accelerator_runs_on_the_simulated_one(tmp_path):
    with suite_of(tmp_path, WHERE) as suite:
        by_unittest = suite.run_unittest(extra={**CHOOSES, "TORCH_EXT_SHOW_OUTPUT": "1"})
        for run in (suite.run("--show-output", extra=CHOOSES), by_unittest):
            assert "this rank is on sim" in run.out + run.err, run


@pytest.mark.costly
@pytest.mark.skipif(torch.cuda.is_available(), reason="the run would choose the accelerator of this machine")
def test_without_a_compiler_tests_run_on_the_host_with_a_message(tmp_path):
    missing = {"CXX": str(tmp_path / "no-compiler"), "TORCH_EXT_CACHE": str(tmp_path / "cache"), "TORCH_EXT_DEVICE": ""}
    with suite_of(tmp_path, WHERE) as suite:
        run = suite.run("--show-output", extra=missing)
        assert run.code == 0 and "this rank is on cpu" in run.out + run.err, run
        lines = re.findall(r"^torch_ext: no accelerator here.*", run.err, re.MULTILINE)
        assert len(lines) == 1 and "apt install g++" in lines[0] and "python -m torch_ext build" in lines[0], run
        refused = suite.run("--device", "sim", extra=missing)
        assert refused.code != 0 and "apt install g++" in refused.out + refused.err, refused
