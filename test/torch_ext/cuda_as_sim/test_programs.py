"""Unmodified GPU programs run where the simulated device is CUDA's: those of ``programs.py``, and commands."""

import json
import sys
from pathlib import Path

import pytest

from test.torch_ext.cuda_as_sim.programs import programs
from test.torch_ext.interpreter import python

SHORT = """
import subprocess, sys, torch

assert not torch.cuda.is_initialized()
torch.cuda.synchronize()
assert torch.cuda.is_initialized()
assert torch.ones(1, device="cu" + "da").is_cuda
if __name__ == "__main__" and sys.argv[-1] != "child" and sys.argv[0].endswith(".py"):
    subprocess.run([sys.executable, __file__, "child"], check=True)
print("through")
"""
# Programs for launchers: the default backend is the device's own, also in groups made later.
RANKS = """
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group(os.environ.get("BACKEND"))
assert __name__ == "__main__" and torch.cuda.device_count() == 2
assert dist.get_backend() in ("nccl", "undefined") and dist.is_nccl_available() and torch.cuda.nccl.version() > (2, 10)
assert dist.get_default_backend_for_device("cuda") == "nccl"
x = torch.full((2,), rank + 1.0, device="cuda")
dist.all_reduce(x, op=dist.ReduceOp.AVG)
assert x.tolist() == [1.5, 1.5] and x.device.index == rank
dist.barrier(device_ids=[rank])
seen = [None, None]
dist.all_gather_object(seen, {"device": torch.device("cuda", rank)})
assert seen[1 - rank]["device"].index == 1 - rank
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
inputs = torch.randn(2, 3, 4)
sum(plain(part).square().mean() for part in inputs).div(2).backward()
wanted = plain[0].weight.grad
for wrap in (
    lambda model: DistributedDataParallel(model, device_ids=[rank]),
    lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=rank),
    fully_shard,
):
    model = copy.deepcopy(plain)
    model.zero_grad()
    model = wrap(model.cuda())
    model(inputs[rank].cuda()).square().mean().backward()
    grads = [each.grad for each in model.parameters()]
    first = grads[0].full_tensor() if hasattr(grads[0], "full_tensor") else grads[0]
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            first = next(model.parameters()).grad.clone()
    torch.testing.assert_close(first.cpu(), wanted)
group = dist.new_group(backend="nccl")
assert dist.get_backend(group) == "nccl" and isinstance(group._get_backend(torch.device("cuda")), dist.ProcessGroupNCCL)
dist.destroy_process_group()
print("through")
"""
TESTS = """
import unittest

import torch
from torch.testing._internal.common_cuda import TEST_CUDA, TEST_MULTIGPU, SM80OrLater
from torch.testing._internal.common_device_type import (
    deviceCountAtLeast, dtypes, dtypesIfCUDA, instantiate_device_type_tests, onlyCUDA, onlyNativeDeviceTypes,
)
from torch.testing._internal.common_utils import TestCase, run_tests


class TestThings(TestCase):
    @onlyCUDA
    def test_only_cuda(self, device):
        self.assertTrue(torch.ones(1, device=device).is_cuda)

    @onlyCUDA
    @deviceCountAtLeast(2)
    def test_two(self, devices):
        self.assertEqual([torch.ones(1, device=each).device.index for each in devices][:2], [0, 1])

    @dtypes(torch.float32)
    @dtypesIfCUDA(torch.float16)
    @unittest.skipIf(not (TEST_CUDA and TEST_MULTIGPU and SM80OrLater), "no CUDA")
    def test_type(self, device, dtype):
        self.assertEqual(torch.ones(2, device=device, dtype=dtype).sum().item(), 2)

    @onlyNativeDeviceTypes
    def test_equal(self, device):
        self.assertEqual(torch.ones(2, device=device), torch.zeros(2))


instantiate_device_type_tests(TestThings, globals(), only_for="cuda")
if __name__ == "__main__":
    run_tests()
"""


MORE_WORDS = (("-m", "program"), ("-i", "program.py"))


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The traceback of each program, or nothing if it passed; all run in one process."""
    done = python("-m", "test.torch_ext.cuda_as_sim.programs", TORCH_EXT_SIM="cuda")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.costly
@pytest.mark.parametrize("name", programs())
def test_program_for_gpus_runs(name, ends):
    assert not ends[name], ends[name]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "words", [("program.py",), ("-c", SHORT), *(pytest.param(words, marks=pytest.mark.long) for words in MORE_WORDS)]
)
def test_every_python_command_line_runs_it(words, tmp_path):
    (tmp_path / "program.py").write_text(SHORT)
    done = python(*words, folder=tmp_path, TORCH_EXT_SIM="cuda")
    assert done.returncode == 0 and set(done.stdout.split()) == {"through"}, done.stderr


@pytest.mark.costly
@pytest.mark.parametrize("backend", [None, pytest.param("nccl", marks=pytest.mark.long)])
def test_torchruns_workers_train_on_it(backend, tmp_path):
    (tmp_path / "train.py").write_text(RANKS)
    launched = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "train.py")
    done = python(*launched, folder=tmp_path, TORCH_EXT_SIM="cuda", BACKEND=backend, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and done.stdout.count("through") == 2, done.stderr


BY_SCRIPT, BY_CALL = str(Path(sys.executable).parent / "pytest"), "import pytest; raise SystemExit(pytest.main())"
MORE_STARTS = (("-m", "pytest"), ("-c", BY_CALL))


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "words",
    [(BY_SCRIPT,), ("test_things.py",), *(pytest.param(words, marks=pytest.mark.long) for words in MORE_STARTS)],
)
def test_torchs_test_helpers_count_its_devices_however_tests_are_started(words, tmp_path):
    (tmp_path / "test_things.py").write_text(TESTS)
    # With CI set, torch asks for xmlrunner.
    done = python(*words, folder=tmp_path, TORCH_EXT_SIM="cuda", CI="")
    output = done.stdout + done.stderr
    assert "1 failed, 3 passed" in output or ("Ran 4 tests" in output and "(failures=1)" in output), output
    assert "Tensor-likes are not close" in output and "skip" not in output, output
