# Owner(s): ["oncall: distributed"]
"""``torch.amp.GradScaler`` over sharded gradients: an overflow on one rank is one of
all.
"""

import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import MLP, FSDPTest, world_mesh
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TestFullyShardGradientScaler(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _model(self, layout):
        torch.manual_seed(0)
        model = MLP(4, device=self.device)
        if layout == "2D":
            mesh = init_device_mesh(
                self.device.type, (2, 2), mesh_dim_names=("dp", "tp")
            )
            plan = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            return fully_shard(model, mesh=mesh["dp"])
        return fully_shard(
            model, mesh=world_mesh(*{"1D": (4,), "hybrid": (2, 2)}[layout])
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_gradient_scaler(self):
        self.run_subtests(
            {"layout": ["1D", "hybrid", "2D"]}, self._test_gradient_scaler
        )

    def _test_gradient_scaler(self, layout):
        """Four steps: in the second only one rank overflows. The scale grows after two
        good steps in a row.
        """
        model = self._model(layout)
        scaler = GradScaler(self.device.type, init_scale=4.0, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # Replicas of a shard have the same gradients, and so the same overflow.
        overflowing = (1, 3) if layout == "hybrid" else (3,)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(-model(torch.ones(2, 4, device=self.device)).sum()).backward()
            gradients = [
                each.grad.full_tensor() / scaler.get_scale()
                for each in model.parameters()
            ]
            # The loss falls as outputs grow, so that ReLU keeps passing gradients.
            self.assertTrue(
                all(bool(gradient.any()) for gradient in gradients), f"step {step}"
            )
            before = [each.full_tensor().clone() for each in model.parameters()]
            if step == 1 and self.rank in overflowing:
                model.in_proj.weight.grad.to_local()[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            if step != 1:
                found = [each.grad.full_tensor() for each in model.parameters()]
                self.assertEqual(
                    found, gradients, f"step {step}: gradients without their scale"
                )
            scaler.step(optimizer)
            scaler.update()
            after = [each.full_tensor() for each in model.parameters()]
            expected = (
                before
                if step == 1
                else [
                    old - 0.1 * each
                    for old, each in zip(before, gradients, strict=True)
                ]
            )
            self.assertEqual(after, expected, f"step {step}: parameters")
            scales.append(scaler.get_scale())
        self.assertEqual(scales, [4.0, 2.0, 2.0, 4.0], "scales")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_each_optimizer_skips_for_itself(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(self.device)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        scaler = GradScaler(self.device.type, init_scale=2.0)
        scaler.scale(model(torch.ones(2, 4, device=self.device)).sum()).backward()
        if self.rank == 2:
            model[0].weight.grad.to_local()[0, 0] = float("nan")
        before = [layer.weight.full_tensor().detach().clone() for layer in model]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        changed = [
            not layer.weight.full_tensor().equal(old)
            for layer, old in zip(model, before, strict=True)
        ]
        self.assertEqual(changed, [False, True], "layers that were trained")
        self.assertEqual(scaler.get_scale(), 1.0, "scale")


if __name__ == "__main__":
    run_tests()
