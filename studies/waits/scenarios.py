"""What the suites of this tree have no test of: DistributedDataParallel and DTensor where they wait."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import PackedSequence

from torch_ext.testing._internal.common_distributed import DistributedTestBase
from torch_ext.testing._internal.common_fsdp import get_devtype
from torch_ext.testing._internal.common_utils import run_tests


class ScenarioTest(DistributedTestBase):
    world_size = 2

    def _rows(self, *sizes: int) -> torch.Tensor:
        return torch.ones(sizes, device=get_devtype().type)

    def _begin(self) -> None:
        self.create_pg(get_devtype().type)


class Packed(nn.Module):
    """A layer that takes rows, and rows packed as a recurrent network gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16).to(get_devtype().type)

    def forward(self, rows: torch.Tensor, packed: PackedSequence) -> torch.Tensor:
        return self.layer(rows) + self.layer(packed.data).sum()


class TestDDP(ScenarioTest):
    def _layers(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to(get_devtype().type)

    def _steps(self, model: nn.Module, steps: int = 2) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(self._rows(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def test_steps(self) -> None:
        self._begin()
        self._steps(DDP(self._layers(), bucket_cap_mb=1e-3))

    def test_buckets_as_views_and_accumulation(self) -> None:
        self._begin()
        model = DDP(self._layers(), bucket_cap_mb=1e-3, gradient_as_bucket_view=True)
        with model.no_sync():
            model(self._rows(4, 16)).sum().backward()
        self._steps(model)

    def test_mixed_precision(self) -> None:
        from torch.nn.parallel.distributed import _MixedPrecision

        self._begin()
        policy = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
        self._steps(DDP(self._layers(), mixed_precision=policy))

    def test_optimizer_in_backward(self) -> None:
        from torch.distributed.optim import _apply_optimizer_in_backward

        self._begin()
        layers = self._layers()
        _apply_optimizer_in_backward(torch.optim.SGD, layers.parameters(), {"lr": 0.1})
        model = DDP(layers)
        for _ in range(2):
            model(self._rows(4, 16)).sum().backward()

    def test_inputs_from_another_device(self) -> None:
        self._begin()
        there = f"{get_devtype().type}:{1 - self.rank}"
        model = DDP(Packed(), device_ids=[self.rank])
        rows = torch.ones(4, 16, device=there)
        for _ in range(2):
            model(rows, PackedSequence(rows, torch.tensor([2, 2], device="cpu"))).sum().backward()
            rows = rows * 2

    def test_uneven_inputs(self) -> None:
        self._begin()
        model = DDP(self._layers())
        with model.join():
            self._steps(model, steps=1 + self.rank)


class TestDTensor(ScenarioTest):
    def test_redistribution(self) -> None:
        self._begin()
        mesh = init_device_mesh(get_devtype().type, (2,))
        rows = distribute_tensor(self._rows(8, 8), mesh, [Shard(0)])
        (rows.redistribute(mesh, [Replicate()], async_op=True) * 2).sum()
        rows.redistribute(mesh, [Shard(1)]).to_local().mul(2)
        rows.redistribute(mesh, [Replicate()]).to_local().mul(2)
        rows.sum().full_tensor().mul(2)

    def test_rows_that_two_dimensions_of_the_mesh_shard(self) -> None:
        self._begin()
        mesh = init_device_mesh(get_devtype().type, (1, 2))
        strided = DTensor.from_local(self._rows(4, 8), mesh, [Replicate(), _StridedShard(0, split_factor=2)])
        strided.full_tensor().mul(2)

    def test_tensor_parallel_training(self) -> None:
        self._begin()
        mesh = init_device_mesh(get_devtype().type, (2,))
        layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).to(get_devtype().type)
        model = parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for _ in range(2):
            model(self._rows(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def test_functional_collectives(self) -> None:
        self._begin()
        group = dist.group.WORLD
        assert group is not None
        rows = self._rows(4, 4)
        functional.all_reduce(rows, "sum", group).mul(2)
        functional.all_gather_tensor(rows, 1, group).mul(2)
        functional.reduce_scatter_tensor(rows, "sum", 0, group).wait().mul(2)
        functional.all_to_all_single(rows, None, None, group).mul(2)

    def test_functional_collectives_in_backward(self) -> None:
        self._begin()
        group = dist.group.WORLD
        assert group is not None
        rows = self._rows(4, 4).requires_grad_()
        for output in (
            functional.all_reduce(rows * 2, "sum", group),
            functional.all_gather_tensor_autograd(rows * 2, 0, group),
            functional.reduce_scatter_tensor_autograd(rows * 2, "sum", 0, group),
            functional.all_to_all_single_autograd(rows * 2, None, None, group),
        ):
            output.sum().backward()


if __name__ == "__main__":
    run_tests()
