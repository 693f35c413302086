# Owner(s): ["oncall: distributed"]
"""The forward of a sharded module: where inputs go, which parameters exist, which
methods gather.
"""

import copy
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    FSDPTest,
    check_sharded_parity,
    check_train_parity,
    fully_shard_children,
    sequential_mlps,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class ForwardTest(FSDPTest):
    @property
    def world_size(self):
        return 4


class TestFullyShardForwardInputs(ForwardTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_root_move_forward_input_to_device(self):
        """Inputs on the host are moved to the device, also within containers."""
        seen = []

        class Adds(nn.Module):
            def forward(self, x, pair, named):
                seen.extend([x, *pair, named["y"]])
                return x + pair[0] + pair[1] + named["y"]

        model = fully_shard(Adds().to(self.device), mesh=world_mesh(4))
        output = model(
            torch.ones(3), (torch.ones(3), torch.ones(3)), named={"y": torch.ones(3)}
        )
        self.assertEqual({tensor.device for tensor in seen}, {self.device})
        self.assertEqual(output, torch.full((3,), 4.0, device=self.device))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_root_no_forward_inputs(self):
        class Squared(nn.Module):
            def __init__(self, device):
                super().__init__()
                self.weight = nn.Parameter(torch.arange(16.0, device=device).view(4, 4))

            def forward(self):
                return self.weight @ self.weight

        model, reference = Squared(self.device), Squared(self.device)
        fully_shard(model, mesh=world_mesh(4))
        for each in (model, reference):
            each().sum().backward()
        check_sharded_parity(self, reference, model)


class TestFullyShardRegisteredParams(ForwardTest):
    """Which parameters a module has between the phases of a step."""

    def _check_kind(self, label, parameters, sharded):
        kinds = [isinstance(parameter, DTensor) for parameter in parameters]
        self.assertEqual(kinds, [sharded] * len(kinds), f"{label} are sharded")
        self.assertGreater(len(kinds), 0)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_param_registration_after_forward(self):
        self.run_subtests(
            {"reshard_after_forward": [True, False, 2, None]}, self._test_after_forward
        )

    def _test_after_forward(self, reshard_after_forward):
        model = sequential_mlps()
        model.append(nn.Linear(5, 5))
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device)
        for child in list(model)[:3]:
            fully_shard(child, reshard_after_forward=reshard_after_forward)
        fully_shard(model, reshard_after_forward=reshard_after_forward)
        root = list(model[3].parameters())
        self._check_kind("parameters at first", model.parameters(), True)
        model(self.rows(5))
        inner = [
            parameter for child in list(model)[:3] for parameter in child.parameters()
        ]
        self._check_kind("inner parameters", inner, reshard_after_forward is not False)
        # By default the root stays gathered, because backward needs it first.
        stays = reshard_after_forward in (None, False)
        self._check_kind("root parameters", model[3].parameters(), not stays)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._check_kind("parameters after reshard", model.parameters(), True)
        self.assertEqual(
            [id(each) for each in model[3].parameters()], [id(each) for each in root]
        )
        check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_param_registration_after_backward(self):
        for reshard_after_forward in (True, False, 2):
            model = fully_shard_children(
                sequential_mlps().to(self.device),
                reshard_after_forward=reshard_after_forward,
            )
            model(self.rows(5)).sum().backward()
            self._check_kind(
                f"parameters with {reshard_after_forward}", model.parameters(), True
            )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_reshard_to_fewer_ranks_holds_larger_shards(self):
        """With ``reshard_after_forward=2``, each pair of ranks holds all shards between
        forward and backward.
        """
        model = nn.Linear(4, 8, bias=False).to(self.device)
        fully_shard(model, reshard_after_forward=2)
        rows = []
        rows.append(model.weight.to_local().shape[0])
        loss = model(self.rows(4)).sum()
        rows.append(model.weight.to_local().shape[0])
        loss.backward()
        rows.append(model.weight.to_local().shape[0])
        self.assertEqual(rows, [2, 4, 2])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_hooks_before_forward_see_whole_parameters(self):
        model = sequential_mlps(1)[0]
        shown = []
        fully_shard(model.to(self.device))
        model.in_proj.register_forward_pre_hook(
            lambda module, _: shown.append(module.weight)
        )
        model(self.rows(5)).sum().backward()
        self.assertEqual(
            [(tuple(each.shape), isinstance(each, DTensor)) for each in shown],
            [((10, 5), False)],
        )
        self._check_kind("parameters after backward", model.parameters(), True)


class TestFullyShardCastAfterInit(ForwardTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_to_float64_after_init(self):
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device).double()
        fully_shard_children(model.to(self.device)).double()
        for parameter in model.parameters():
            self.assertEqual(
                (parameter.dtype, parameter.to_local().dtype),
                (torch.float64, torch.float64),
            )
            self.assertEqual(parameter._spec.tensor_meta.dtype, torch.float64)
        check_train_parity(
            self,
            reference,
            model,
            [self.rows(5, step) for step in range(2)],
            loss_of=lambda module, rows: module(rows.double()).square().sum(),
            atol=0,
            rtol=1e-12,
        )


class TestFullyShardCustomForwardMethod(ForwardTest):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.patches, self.body = nn.Linear(5, 6), MLP(6)

        def encode(self, x):
            return self.body(self.patches(x))

        def forward(self, x):
            return self.encode(x).mean(0)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_registered_method_trains_as_forward_does(self):
        model = self.Encoder()
        reference = copy.deepcopy(model).to(self.device)
        fully_shard(model.to(self.device))
        register_fsdp_forward_method(model, "encode")
        check_train_parity(
            self,
            reference,
            model,
            [self.rows(5, step) for step in range(2)],
            loss_of=lambda module, rows: module.encode(rows).square().sum(),
        )
        self.assertIsInstance(model.patches.weight, DTensor)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_unregistered_method_finds_its_parameters_sharded(self):
        model = self.Encoder()
        fully_shard(model.to(self.device))
        register_fsdp_forward_method(model.body, "encode")  # is not sharded itself
        with self.assertRaisesRegex(RuntimeError, "mixed torch.Tensor and DTensor"):
            model.encode(self.rows(5))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_register_fsdp_forward_method_of_no_method_is_refused(self):
        model = fully_shard(self.Encoder().to(self.device))
        with self.assertRaisesRegex(ValueError, "nothing_of_that_name"):
            register_fsdp_forward_method(model, "nothing_of_that_name")


if __name__ == "__main__":
    run_tests()
