# Owner(s): ["oncall: distributed"]
"""FSDP2 trains as the model without it does: losses, gradients and parameters, step by step.

The reference is the same model on every rank with gradients averaged over the ranks by hand.
"""

import copy
import sys
from collections.abc import Callable

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    DoubleLinear,
    FSDPTest,
    MLPStack,
    check_sharded_parity,
    get_devtype,
    leave_out_without_accelerator,
    rank_device,
)
from torch_ext.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

STEPS = 4


class TrainingCase(FSDPTest):
    @property
    def world_size(self) -> int:
        return 2

    @property
    def device(self) -> torch.device:
        return rank_device(self.rank)

    def _mlps(self, count: int = 3, dim: int = 6) -> nn.Sequential:
        torch.manual_seed(42)
        return nn.Sequential(*(MLP(dim, self.device) for _ in range(count)))

    def _inputs(self, dim: int = 6, step: int = 0) -> torch.Tensor:
        torch.manual_seed(100 * step + self.rank)
        return torch.randn(4, dim, device=self.device)

    def _average_gradients(self, model: nn.Module) -> None:
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad.div_(self.world_size)

    def _train_beside(
        self,
        reference: nn.Module,
        model: nn.Module,
        step_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
        prefixes_to_ignore: tuple[str, ...] = (),
    ) -> None:
        """Train both for some steps; compare the loss in each, and gradients and parameters after it."""
        forward = step_of or (lambda module, inputs: module(inputs))
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2, foreach=True) for each in (reference, model)]
        for step in range(STEPS):
            inputs = self._inputs(step=step)
            losses = [forward(each, inputs).square().sum() for each in (reference, model)]
            self.assertEqual(losses[1], losses[0], f"loss of step {step}")
            for loss in losses:
                loss.backward()
            self._average_gradients(reference)
            check_sharded_parity(self, reference, model, prefixes_to_ignore)
            for optim in optims:
                optim.step()
                optim.zero_grad()
            check_sharded_parity(self, reference, model, prefixes_to_ignore)


class TestFullyShardTraining(TrainingCase):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("reshard_after_forward", [True, False, 1])
    @parametrize("offload_policy", [OffloadPolicy(), CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)])
    def test_train_parity_multi_group(self, reshard_after_forward, offload_policy):
        if isinstance(offload_policy, CPUOffloadPolicy):
            leave_out_without_accelerator("CPUOffloadPolicy needs an accelerator to offload from")
        model = self._mlps()
        reference = copy.deepcopy(model)
        for module in (*model, model):
            fully_shard(module, reshard_after_forward=reshard_after_forward, offload_policy=offload_policy)
        if not isinstance(offload_policy, CPUOffloadPolicy):
            self._train_beside(reference, model)
            return
        self.assertEqual({param.device.type for param in model.parameters()}, {"cpu"})
        reference_on_host = copy.deepcopy(reference).cpu()
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference_on_host, model)]
        for step in range(STEPS):
            inputs = self._inputs(step=step)
            reference.load_state_dict(reference_on_host.state_dict())
            reference.zero_grad()
            losses = [each(inputs).square().sum() for each in (reference, model)]
            self.assertEqual(losses[1], losses[0])
            for loss in losses:
                loss.backward()
            self._average_gradients(reference)
            for host, here in zip(reference_on_host.parameters(), reference.parameters(), strict=True):
                host.grad = here.grad.cpu()
            for param in model.parameters():
                self.assertEqual(param.grad.device, torch.device("cpu"))
            for optim in optims:
                optim.step()
                optim.zero_grad()
        for host, sharded in zip(reference_on_host.parameters(), model.parameters(), strict=True):
            self.assertEqual(sharded.to(self.device).full_tensor().cpu(), host)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("lin_shapes", [((16, 15), (15, 8)), ((7, 15), (15, 3)), ((1, 1), (1, 1))], name_fn=lambda s: f"{s[0]}")
    def test_train_parity_single_group(self, lin_shapes):
        """Uneven first dimensions, and one of which a rank gets nothing."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(*shape, device=self.device) for shape in lin_shapes))
        reference = copy.deepcopy(model)
        fully_shard(model)
        width = lin_shapes[0][0]
        self._train_beside(reference, model, lambda module, x: module(x.repeat(1, width)[:, :width]))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_train_parity_with_activation_checkpointing(self):
        for reshard_after_forward in (True, False):
            model = self._mlps()
            reference = copy.deepcopy(model)
            for module in model:
                checkpoint(module)
                fully_shard(module, reshard_after_forward=reshard_after_forward)
            fully_shard(model)
            self._train_beside(reference, model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_train_parity_with_shared_params(self):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 6, device=self.device), MLP(6, self.device), nn.Linear(6, 6, device=self.device)
        )
        model[2].weight = model[0].weight
        reference = copy.deepcopy(model)
        self.assertIs(reference[2].weight, reference[0].weight)
        fully_shard(model[1])
        fully_shard(model)
        self.assertIs(model[2].weight, model[0].weight, "sharding split what was shared")
        self._train_beside(reference, model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("reshard_after_forward", [True, False])
    def test_non_root_forward_backward(self, reshard_after_forward):
        """A submodule may be run by itself, before the root ever was, and gives the same gradients."""
        model = self._mlps(2)
        reference = copy.deepcopy(model)
        for module in (*model, model):
            fully_shard(module, reshard_after_forward=reshard_after_forward)
        inputs = self._inputs()
        for each in (reference, model):
            each[0](inputs).sum().backward()
        self._average_gradients(reference)
        check_sharded_parity(self, reference, model)
        self.assertIsNone(model[1].in_proj.weight.grad)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("use_second_linear", [True, False])
    def test_unused_parameters(self, use_second_linear):
        torch.manual_seed(0)
        model = DoubleLinear(6, use_second_linear=use_second_linear).to(self.device)
        reference = copy.deepcopy(model)
        fully_shard(model.lin1)
        fully_shard(model.lin2)
        fully_shard(model)
        inputs = self._inputs()
        for each in (reference, model):
            output = each(inputs)
            (output[0].sum() if isinstance(output, tuple) else output.sum()).backward()
        self._average_gradients(reference)
        check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_custom_forward_methods(self):
        """A method registered as a forward gathers and frees parameters as ``forward`` does; others see shards."""
        model = self._mlps(1)[0]
        reference = copy.deepcopy(model)
        fully_shard(model)
        inputs = self._inputs()
        MLP.again = lambda module, x: MLP.forward(module, x)
        self.addCleanup(delattr, MLP, "again")
        with self.assertRaisesRegex(RuntimeError, "mixed torch.Tensor and DTensor"):
            model.again(inputs)
        register_fsdp_forward_method(model, "again")
        self._train_beside(reference, model, lambda module, x: module.again(x))
        self.assertIsInstance(model.in_proj.weight, DTensor)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("sync_last_only", [True, False])
    def test_gradient_accumulation(self, sync_last_only):
        model = self._mlps()
        reference = copy.deepcopy(model)
        for module in (*model, model):
            fully_shard(module)
        for step in range(3):
            if sync_last_only:
                model.set_requires_gradient_sync(step == 2)
            inputs = self._inputs(step=step)
            for each in (reference, model):
                each(inputs).square().sum().backward()
            if sync_last_only and step < 2:
                self.assertEqual([param.grad for param in model.parameters()], [None] * len(list(model.parameters())))
        self._average_gradients(reference)
        check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_frozen_parameters_and_no_grad(self):
        model = self._mlps()
        for param in model[1].parameters():
            param.requires_grad_(False)
        reference = copy.deepcopy(model)
        for module in (*model, model):
            fully_shard(module)
        self._train_beside(reference, model)
        with torch.no_grad():
            self.assertEqual(model(self._inputs()), reference(self._inputs()))
        self.assertFalse(any(param.requires_grad for param in model[1].parameters()))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_forward_hooks_see_whole_parameters(self):
        model = self._mlps(1)[0]
        shapes: list[torch.Size] = []
        fully_shard(model)
        hook = model.in_proj.register_forward_pre_hook(lambda module, _: shapes.append(module.weight.shape))
        kinds: list[bool] = []
        model.in_proj.register_forward_pre_hook(lambda module, _: kinds.append(isinstance(module.weight, DTensor)))
        model(self._inputs()).sum().backward()
        hook.remove()
        self.assertEqual((shapes, kinds), ([torch.Size([24, 6])], [False]))
        self.assertIsInstance(model.in_proj.weight, DTensor)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_gradient_clipping(self):
        model = self._mlps()
        reference = copy.deepcopy(model)
        for module in (*model, model):
            fully_shard(module)
        for each in (reference, model):
            each(self._inputs()).square().sum().mul(100).backward()
        self._average_gradients(reference)
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (reference, model)]
        self.assertEqual(norms[1].full_tensor(), norms[0])
        self.assertGreater(norms[0].item(), 0.5)
        check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_changing_type_and_device_of_shards(self):
        model = self._mlps(1)[0]
        fully_shard(model)
        model.to(torch.float64)
        self.assertEqual({param.dtype for param in model.parameters()}, {torch.float64})
        reference = copy.deepcopy(self._mlps(1)[0]).to(torch.float64)
        self._train_beside(reference, model, lambda module, x: module(x.double()))


class TestFullyShardMeshes(TrainingCase):
    """Four ranks, as a grid: replicas of shards, and shards of tensor-parallel pieces."""

    @property
    def world_size(self) -> int:
        return 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("reshard_after_forward", [True, False])
    def test_train_parity_hsdp(self, reshard_after_forward):
        mesh = init_device_mesh(get_devtype().type, (2, 2), mesh_dim_names=("replicate", "shard"))
        model = self._mlps()
        reference = copy.deepcopy(model)
        for module in (*model, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        self._train_beside(reference, model)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_hsdp_reduces_over_replicas_when_asked(self):
        """Without the all-reduce, gradients are those of the own shard group, until a backward that does it."""
        mesh = init_device_mesh(get_devtype().type, (2, 2), mesh_dim_names=("replicate", "shard"))
        model = self._mlps(1)[0]
        reference = copy.deepcopy(model)
        fully_shard(model, mesh=mesh)
        for last in (False, True):
            model.set_requires_all_reduce(last)
            for each in (reference, model):
                each(self._inputs(step=last)).square().sum().backward()
        self._average_gradients(reference)
        check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("use_activation_checkpointing", [False, True])
    def test_train_parity_2d_with_tensor_parallel(self, use_activation_checkpointing):
        mesh = init_device_mesh(get_devtype().type, (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        stack = MLPStack(8).to(self.device)
        reference = copy.deepcopy(stack)
        model = stack.parallelize(mesh["tp"], mesh["dp"], use_activation_checkpointing, reshard_after_forward=True)
        optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
        for step in range(STEPS):
            torch.manual_seed(10 * step + mesh["dp"].get_local_rank())  # the same for the ranks of one piece
            inputs = torch.randn(4, 8, device=self.device)
            losses = [each(inputs).square().sum() for each in (reference, model)]
            self.assertEqual(losses[1], losses[0])
            for loss in losses:
                loss.backward()
            self._average_gradients(reference)
            for whole, part in zip(reference.parameters(), model.parameters(), strict=True):
                self.assertEqual(part.grad.full_tensor(), whole.grad)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        for whole, part in zip(reference.parameters(), model.parameters(), strict=True):
            self.assertEqual(part.full_tensor(), whole)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_other_dimension_sharded(self):
        """``shard_placement_fn`` shards along the dimension it names."""
        model = self._mlps(dim=8)
        reference = copy.deepcopy(model)

        def longest(param: nn.Parameter) -> Shard | None:
            return Shard(1) if param.ndim == 2 and param.shape[1] > param.shape[0] else None

        for module in (*model, model):
            fully_shard(module, shard_placement_fn=longest)
        self.assertEqual(model[0].out_proj.weight.placements, (Shard(1),))
        self.assertEqual(model[0].in_proj.weight.placements, (Shard(0),))
        optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
        for step in range(STEPS):
            inputs = self._inputs(8, step)
            for each in (reference, model):
                each(inputs).square().sum().backward()
            self._average_gradients(reference)
            check_sharded_parity(self, reference, model)
            for optim in optims:
                optim.step()
                optim.zero_grad()


for case in (TestFullyShardTraining, TestFullyShardMeshes):
    instantiate_parametrized_tests(case)

if __name__ == "__main__":
    run_tests()
