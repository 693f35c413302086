"""``run_test.py --check-replicas`` names the first replica in which the ranks of a test differ."""

import pytest

from test.torch_ext.testing.test_leaks import RUN_TEST, python

# A norm before a tensor-parallel layer sees a part of the sequence on each rank, so that its gradients are parts too.
MODULE = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch_ext.replicas import replicated
from torch_ext.testing._internal.common_distributed import DistributedTestBase
from torch_ext.testing._internal.common_fsdp import get_devtype
from torch_ext.testing._internal.common_utils import run_tests

class TestTensorParallel(DistributedTestBase):
    world_size = 2

    def train(self, reduces):
        device = get_devtype().type
        self.create_pg(device)
        torch.manual_seed(0)
        norm, model = nn.LayerNorm(8).to(device), nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).to(device)
        parallelize_module(model, init_device_mesh(device, (2,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
        replicated(norm.weight, name="norm.weight")
        optimizer = torch.optim.SGD([*norm.parameters(), *model.parameters()], 0.1, foreach=False)
        for step in range(3):
            sequence = torch.randn(2, 4, 8, device=device)
            parts = [torch.empty(2, 4, 8, device=device) for _ in range(2)]
            dist.all_gather(parts, norm(sequence[self.rank].expand(2, 4, 8)).detach())
            own = norm(sequence[self.rank]).square().mul(sequence[self.rank]).sum()
            (model(torch.cat(parts)).sum() + own).backward()
            if reduces:
                dist.all_reduce(norm.weight.grad)
            optimizer.step()
            optimizer.zero_grad()

    def test_forgets(self):
        self.train(False)

    def test_reduces(self):
        self.train(True)

    def test_fails(self):
        self.train(False)
        assert self.rank == 0, "another failure"

if __name__ == "__main__":
    run_tests()
"""
FIRST = "replicas of ranks 0, 1 differ, first in the gradient of norm.weight before step 1 (test_tp.py:"


@pytest.mark.costly
@pytest.mark.drawn(1)
@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_a_gradient_that_nobody_reduces_is_named_in_step_1(device, tmp_path):
    (tmp_path / "test_tp.py").write_text(MODULE)
    ended = python(RUN_TEST, "--check-replicas", "-v", "--device", device, tmp_path)
    failures = dict(part.split("  ", 1) for part in ended.stdout.split("FAILED test_tp.py::TestTensorParallel::")[1:])
    assert set(failures) == {"test_forgets", "test_fails"}, ended.stdout
    assert failures["test_forgets"].splitlines()[1].startswith(FIRST), ended.stdout
    assert "AssertionError" in failures["test_fails"].splitlines()[1] and FIRST in failures["test_fails"]


@pytest.mark.costly
def test_off(tmp_path):
    (tmp_path / "test_tp.py").write_text(MODULE)
    ended = python(RUN_TEST, "-v", "--device", "cpu", "-k", "forgets", tmp_path)
    assert "1 passed" in ended.stdout
