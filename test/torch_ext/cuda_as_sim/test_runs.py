"""A file that names CUDA runs on the simulated accelerator: ``run_test.py --upstream FILE --cuda-as-sim``."""

import json

import pytest

from test.torch_ext.interpreter import RUN_TEST, python

FILE = """
import os
import unittest

import torch
import torch.distributed as dist
from helpers import the_device
from torch.distributed import is_nccl_available
from torch.testing._internal.common_cuda import TEST_MULTIGPU
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_distributed import (
    MultiProcessTestCase, requires_nccl, requires_nccl_version, skip_if_lt_x_gpu
)
from torch.testing._internal.common_utils import TEST_CUDA, TestCase, run_tests


class TestCuda(MultiProcessTestCase):
    @property
    def world_size(self):
        return torch.cuda.device_count() // 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @requires_nccl()
    @requires_nccl_version((2, 10), "needs 2.10")
    @unittest.skipIf(not TEST_MULTIGPU, "needs two devices")
    @skip_if_lt_x_gpu(2)
    def test_trains(self):
        torch.cuda.set_device(self.rank)
        dist.init_process_group(
            os.environ["BACKEND"], init_method=f"file://{self.file_name}", rank=self.rank, world_size=self.world_size
        )
        self.assertTrue(TEST_CUDA and is_nccl_available())
        self.assertEqual(dist.get_backend(), "nccl")
        x = torch.ones(2, device=f"cuda:{self.rank}")
        dist.all_reduce(x)
        self.assertTrue(x.is_cuda and x.device.type == "cuda" and the_device(x).type == "cuda")
        self.assertEqual(x, torch.full((2,), 2.0).cuda())
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=[self.rank])
        model(x).sum().backward()

    def test_allocator(self):
        Plug = torch.cuda.CUDAPluggableAllocator

        def annotated(plug: Plug | None, other: None | Plug = None) -> None: ...

        Plug("allocator.so", "allocate", "free")

    def test_fails_and_says_so(self):
        self.assertFalse(torch.cuda.is_available())


class TestPerDevice(TestCase):
    def test_device_is_unused_until_now(self, device):
        self.assertEqual(device, "cuda:0")
        self.assertEqual(torch.ones(1, device=device).item(), 1)
        self.assertIn("add", {op.name for op in op_db})


instantiate_device_type_tests(TestPerDevice, globals(), only_for=("cuda", "hpu"))

if __name__ == "__main__":
    run_tests()
"""


def run(*arguments):
    return python(RUN_TEST, *arguments, BACKEND="nccl", TORCH_EXT_DEVICE=None)


@pytest.mark.costly
def test_unmodified_file_trains_and_cuda_features_skip_with_a_reason(tmp_path):
    file = tmp_path / "test_cuda.py"
    file.write_text(FILE)
    (tmp_path / "helpers.py").write_text("def the_device(x):\n    return x.device if x.is_cuda else None\n")
    known = tmp_path / "known.json"
    known.write_text(json.dumps([{"test": "test_cuda.py::TestCuda::test_fails*", "reason": "it asks for no device"}]))
    done = run("--upstream", str(file), "--cuda-as-sim", "--json", "-", "--differences", str(known))
    events = [json.loads(line) for line in done.stdout.splitlines()]
    results = [one for one in events if one["event"] == "result"]
    assert (events[-1]["passed"], events[-1]["failed"]) == (3, 0), done.stderr  # a known difference counts as passed
    assert sorted(one["reason"] for one in results if one["reason"]) == [
        "known difference: it asks for no device",
        "torch.cuda: CUDAPluggableAllocator: CUDA's allocator can be replaced; the simulated accelerator's cannot.",
    ]
    assert done.returncode == 0


def test_other_devices_and_our_own_suites_are_refused(tmp_path):
    assert "--cuda-as-sim needs --upstream" in run("--cuda-as-sim").stderr
    done = run("--cuda-as-sim", "--upstream", str(tmp_path), "--device", "cpu")
    assert done.returncode == 2
    assert "got --cuda-as-sim and the device cpu" in done.stderr


ON_LOADING = """
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import requires_cuda_p2p_access, run_tests

{when_loaded}


@requires_cuda_p2p_access()
class TestLoaded(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_device(self):
        self.assertEqual(torch.ones(2, device=f"cuda:{{self.rank}}").sum().item(), 2.0)


if __name__ == "__main__":
    run_tests()
"""


@pytest.mark.long
def test_file_that_queries_or_uses_a_device_on_import_has_working_ranks(tmp_path):
    asks, uses = tmp_path / "test_asks.py", tmp_path / "test_uses.py"
    asks.write_text(ON_LOADING.format(when_loaded='assert torch.cuda.get_device_name(1).startswith("Simulated")'))
    uses.write_text(ON_LOADING.format(when_loaded="X = torch.ones(2).cuda()"))
    done = run("--upstream", str(asks), str(uses), "--cuda-as-sim")
    assert "2 passed, 0 failed, 0 skipped" in done.stdout, done
    reason = "cannot fork: it has used a device, cuda, which its children then cannot use; every rank gets a fresh"
    events = done.stdout + done.stderr
    assert events.count(reason) == 1 and f"the zygote of test_uses {reason}" in events
