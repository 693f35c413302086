# Owner(s): ["oncall: distributed"]
"""``ignored_params``: neither sharded, nor moved, nor reduced. Modules with no other
parameters are left alone.
"""

import copy
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    average_gradients,
    check_sharded_parity,
    sequential_mlps,
    skip_without_accelerator,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TestFullyShardIgnoreParams(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _backward(self, *models):
        for each in models:
            each(self.rows(5)).square().sum().backward()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ddp_A_fsdp_B_ddp_C(self):
        """The outer layers are replicated by DDP, which ignores the inner one, which
        FSDP2 shards.
        """
        model = sequential_mlps(3)
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device)
        fully_shard(model[1])
        DDP._set_params_and_buffers_to_ignore_for_model(
            model,
            [name for name, _ in model.named_parameters() if name.startswith("1.")],
        )
        self._backward(DDP(model), reference)
        average_gradients(reference)
        check_sharded_parity(self, reference[1], model[1])
        for index in (0, 2):
            for name, parameter in model[index].named_parameters():
                expected = reference[index].get_parameter(name).grad
                self.assertEqual(
                    parameter.grad, expected, f"gradient of {index}.{name}"
                )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_part_of_a_module(self):
        """An ignored weight stays a plain tensor with its own gradient, and its bias is
        sharded.
        """
        model = sequential_mlps(2)
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device)
        weight = model[0].in_proj.weight
        fully_shard(model, ignored_params={weight})
        self._backward(model, reference)
        kinds = {
            name: isinstance(each, DTensor) for name, each in model.named_parameters()
        }
        self.assertEqual(
            kinds,
            {name: name != "0.in_proj.weight" for name in kinds},
            "sharded parameters",
        )
        self.assertIs(model[0].in_proj.weight, weight)
        self.assertEqual(
            weight.grad, reference[0].in_proj.weight.grad, "local gradient"
        )
        average_gradients(reference)
        check_sharded_parity(self, reference[1], model[1])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ignored_parameters_are_not_moved(self):
        """Buffers are moved, even if all parameters of their module are ignored."""
        skip_without_accelerator("everything is on the host anyway")
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        ignored = set(model[0].parameters()) | set(model[1].parameters())
        fully_shard(model, ignored_params=ignored)
        host = torch.device("cpu")
        places = {
            name: each.device
            for name, each in (*model.named_parameters(), *model.named_buffers())
        }
        expected = {
            name: host
            if name.startswith("0.") or name in ("1.weight", "1.bias")
            else self.device
            for name in places
        }
        self.assertEqual(places, expected, "devices")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_scalars_may_be_ignored(self):
        """Parameters without dimensions cannot be sharded."""

        class Scaled(nn.Linear):
            def __init__(self):
                super().__init__(4, 4)
                self.scale = nn.Parameter(torch.tensor(2.0))

            def forward(self, x):
                return super().forward(x) * self.scale

        model = Scaled().to(self.device)
        with self.assertRaisesRegex(
            ValueError, "Change scale to a 1D tensor with numel equal to 1"
        ):
            fully_shard(model)
        model = Scaled().to(self.device)
        fully_shard(model, ignored_params={model.scale})
        model(self.rows(4)).sum().backward()
        self.assertNotIsInstance(model.scale.grad, DTensor)


if __name__ == "__main__":
    run_tests()
