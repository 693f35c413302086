# Owner(s): ["oncall: distributed"]
"""Combinations that FSDP2 does not support. Each is refused with its cause, rather than
trained with wrong gradients.
"""

import re
import sys
import types
import warnings

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    fully_shard_units,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

try:
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        DDPMeshInfo,
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )
except ImportError:
    print("this torch has no meshes for single parameters", file=sys.stderr)
    sys.exit(0)


class Viewing(nn.Linear):
    """Returns a view of its output if told."""

    def __init__(self, is_viewing):
        super().__init__(4, 4)
        self.is_viewing = is_viewing

    def forward(self, x):
        out = super().forward(x)
        return out.view(-1) if self.is_viewing else out


class RefusalsTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def refused(self, error, text):
        return self.assertRaisesRegex(error, re.escape(text))

    def linear(self):
        return nn.Linear(4, 8, bias=False).to(self.device)

    def mesh(self, sizes, *names):
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=names or None)

    def on(self, mesh, placements):
        """Return a layer whose weight is a DTensor."""
        layer = self.linear()
        layer.weight = nn.Parameter(
            distribute_tensor(layer.weight.detach(), mesh, placements)
        )
        return layer


class TestFullyShardMeshRefusals(RefusalsTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_descriptions_of_meshes(self):
        """A description of a mesh names the dimensions that it is about."""
        mesh = world_mesh(2, 2)
        for kind, dims, words in (
            (FSDPMeshInfo, {}, "At least one of shard_mesh_dim and replicate_mesh_dim"),
            (FSDPMeshInfo, {"replicate_mesh_dim": 0}, "non-None shard_mesh_dim"),
            (DDPMeshInfo, {"shard_mesh_dim": 1}, "non-None replicate_mesh_dim"),
            (HSDPMeshInfo, {"shard_mesh_dim": 1}, "non-None replicate_mesh_dim"),
        ):
            with self.refused(AssertionError, words):
                kind(mesh, **dims)
        info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        found = (
            (info.shard_mesh_size, info.shard_mesh_rank),
            (info.replicate_mesh_size, info.replicate_mesh_rank),
        )
        self.assertEqual(found, ((2, self.rank % 2), (2, self.rank // 2)), "both")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_placements(self):
        """``shard_placement_fn`` returns how to shard, and over which mesh."""
        unnamed = DeviceMesh(self.device.type, [[0, 1], [2, 3]])
        for error, words, placement in (
            (ValueError, "Invalid shard_placement_fn result: 0", 0),
            (ValueError, "Invalid shard_placement_fn result: R", Replicate()),
            (
                AssertionError,
                "Expected Shard, got <class 'types.SimpleNamespace'>",
                ShardPlacementResult(
                    types.SimpleNamespace(dim=0), FSDPMeshInfo(world_mesh(4), 0)
                ),
            ),
            (
                AssertionError,
                "Expected mesh_dim_names to not be None",
                ShardPlacementResult(None, FSDPMeshInfo(unnamed, shard_mesh_dim=1)),
            ),
        ):
            with self.refused(error, words):
                fully_shard(
                    self.linear(),
                    mesh=world_mesh(4),
                    shard_placement_fn=lambda _, placement=placement: placement,
                )
        mesh = self.mesh((2, 2), "replicate", "tensor")
        with self.refused(
            ValueError,
            "shard_placement_fn is not supported with DDPMeshInfo; it requires "
            "FSDPMeshInfo",
        ):
            fully_shard(
                self.on(mesh, [Replicate(), Shard(0)]),
                mesh=mesh,
                dp_mesh_dims=DataParallelMeshDims(replicate="replicate"),
                shard_placement_fn=lambda _: Shard(0),
            )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_tensor_parallel_parameters(self):
        mesh = self.mesh((2, 2, 1, 1), "data", "a", "b", "c")
        layer = self.on(mesh["a", "b", "c"], [Shard(0)] * 3)
        with self.refused(NotImplementedError, "only supports 1D TP/EP or 2D EP+TP"):
            fully_shard(layer, mesh=mesh["data"])
        # Two dimensions next to two of data parallelism are the most that there may be.
        layer = self.on(mesh["b", "c"], [Replicate(), Shard(0)])
        fully_shard(layer, mesh=mesh["data", "a"])
        self.assertEqual(layer.weight.device_mesh.ndim, 4, "dimensions of the mesh")

        mesh = self.mesh((2, 2), "data", "tensor")
        layer = self.on(mesh["tensor"], [Shard(0)])
        fully_shard(layer, mesh=mesh["data"])
        self.assertEqual(layer.weight.device_mesh.ndim, 2, "dimensions of the mesh")
        mesh = self.mesh((4, 1), "data", "tensor")
        layer = self.on(mesh["tensor"], [Shard(0)])
        model = nn.Sequential(layer)
        fully_shard(layer, mesh=mesh["data"], reshard_after_forward=2)
        fully_shard(model, mesh=mesh["data"])
        rows = DTensor.from_local(self.rows(4), mesh["tensor"], [Replicate()])
        with self.refused(NotImplementedError, "smaller mesh is not supported for DT"):
            model(rows)

        mesh = self.mesh((2, 2, 1), "shard", "replicate", "tensor")
        info = HSDPMeshInfo(
            mesh["shard", "replicate"], shard_mesh_dim=0, replicate_mesh_dim=1
        )
        with self.refused(AssertionError, "Expected replicate_mesh_dim to be 0, got 1"):
            fully_shard(
                self.on(mesh["tensor"], [Shard(0)]),
                mesh=mesh["shard"],
                shard_placement_fn=lambda _: ShardPlacementResult(Shard(0), info),
            )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_parameters_on_a_mesh_without_names(self):
        mesh = self.mesh((2, 2), "shard", "tensor")
        unnamed = DeviceMesh(self.device.type, [[0, 1], [2, 3]])
        own = DataParallelMeshDims("shard")
        with self.refused(AssertionError, "spmd_mesh.mesh_dim_names must not be None"):
            fully_shard(
                self.on(unnamed, [Replicate()] * 2), mesh=mesh, dp_mesh_dims=own
            )
        own.shard = None
        with self.refused(ValueError, "shard or replicate must be set in dp_mesh_dims"):
            fully_shard(self.on(mesh, [Replicate()] * 2), mesh=mesh, dp_mesh_dims=own)
        for name in ("shard", "replicate"):
            own = DataParallelMeshDims(**{name: "shard"})
            for reshard in (True, False):
                layer = self.on(mesh, [Replicate(), Shard(0)])
                fully_shard(
                    layer, mesh=mesh, dp_mesh_dims=own, reshard_after_forward=reshard
                )
                self.assertIs(layer.weight.device_mesh, mesh)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_parameters_on_another_device(self):
        skip_without_accelerator("there is one kind of device")
        host = DeviceMesh("cpu", list(range(4)))
        layer = nn.Linear(4, 8, bias=False)
        layer.weight = nn.Parameter(
            DTensor.from_local(layer.weight.detach(), host, [Replicate()])
        )
        with self.refused(
            ValueError,
            "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
            f"cpu for DTensor and {self.device.type} for FSDP",
        ):
            fully_shard(layer, mesh=world_mesh(4))
        layer = nn.Linear(4, 8, bias=False)
        fully_shard(layer, mesh=host)
        self.assertEqual(layer.weight.to_local().device.type, "cpu", "of a host mesh")
        mesh = world_mesh(4)
        whole = distribute_tensor(
            torch.ones(8, 4, device=self.device), mesh, [Shard(0)]
        )
        moved = DTensor(whole.to_local().cpu(), whole._spec, requires_grad=False)
        layer = nn.Linear(4, 8, bias=False)
        layer.weight = nn.Parameter(moved)
        with self.refused(AssertionError, "Expects DTensor to be moved to"):
            fully_shard(layer, mesh=mesh)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_tensor_parallel_parameters_with_columns_in_memory(self):
        mesh = self.mesh((2, 2), "data", "tensor")
        layer = self.linear()
        layer.weight = nn.Parameter(
            DTensor.from_local(
                torch.ones(4, 4, 2, device=self.device)[..., 0],
                mesh["tensor"],
                [Shard(0)],
                shape=torch.Size((8, 4)),
                stride=(4, 1),
            )
        )
        with self.refused(AssertionError, "Expected contiguous tensor, got"):
            fully_shard(layer, mesh=mesh["data"])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_sizes_that_are_the_whole_or_one(self):
        """The world's size means ``True``, and one means ``False`` with a warning."""
        for size, is_sharded, logged in (
            (4, True, self.assertNoLogs),
            (1, False, self.assertLogs),
        ):
            model = nn.Sequential(self.linear())
            with logged("torch.distributed.fsdp", "WARNING"):
                fully_shard(model[0], mesh=world_mesh(4), reshard_after_forward=size)
            fully_shard(model, mesh=world_mesh(4))
            model(self.rows(4)).sum().backward()
            model(self.rows(4))
            weight = model[0].weight
            self.assertEqual(isinstance(weight, DTensor), is_sharded, f"for {size}")
            if is_sharded:
                self.assertEqual(weight.placements, (Shard(0),), "after forward")


class TestFullyShardStepRefusals(RefusalsTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_a_stream_without_its_hook(self):
        model = fully_shard_units(self)
        model.set_all_reduce_hook(None, stream=object())
        with self.refused(AssertionError, "hook stream is specified but hook itself"):
            model(self.rows(4)).sum().backward()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_gradients_of_two_types(self):
        """A group reduces gradients of one type. The rank that has several says so."""
        model = nn.Linear(4, 8).to(self.device)
        fully_shard(
            model,
            mesh=world_mesh(4),
            mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        )
        model.set_requires_gradient_sync(False)
        model.bias.requires_grad_(False)
        model(self.rows(4)).sum().backward()
        model.set_requires_gradient_sync(True)
        model.bias.requires_grad_(True)
        with self.refused(AssertionError, "expects uniform gradient dtype but got {"):
            model(self.rows(4)).sum().backward()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_a_gradient_that_is_not_sharded(self):
        model = fully_shard_units(self)
        model(self.rows(4)).sum().backward()
        weight = model.last.weight
        weight.grad = None
        weight.grad = torch.zeros_like(weight).full_tensor()
        with self.refused(AssertionError, "to be DTensor, got <class 'torch.Tensor'>"):
            model(self.rows(4)).sum().backward()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_another_parameter_where_conversion_swaps_tensors(self):
        model = fully_shard_units(self)
        weight = model.last.weight
        model.last.weight = nn.Parameter(weight.detach().clone())
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with self.refused(AssertionError, "Expects swap_tensors to preserve obj"):
                model(self.rows(4))
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_columns_of_another_size(self):
        """A tensor that replaces a shard along dimension 1 has the shard's size."""
        model = self.linear()
        fully_shard(model, mesh=world_mesh(4), shard_placement_fn=lambda _: Shard(1))
        model.weight._local_tensor = torch.ones(8, 2, device=self.device)
        with self.refused(AssertionError, "Shard(1) requires even sharding"):
            model(self.rows(4))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_the_group_of_a_module_with_two(self):
        """The one group of parameters, which older programs read, is refused if there
        are two, and there is none without parameters.
        """
        mesh = self.mesh((2, 2), "expert", "shard")
        info = FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)
        model = nn.Linear(4, 4).to(self.device)
        fully_shard(
            model,
            mesh=world_mesh(4),
            shard_placement_fn=lambda each: (
                ShardPlacementResult(Shard(0), info) if each.ndim == 1 else None
            ),
        )
        state = fully_shard.state(model)
        with self.refused(AssertionError, "at most 1 param group for backward compat"):
            state._fsdp_param_group  # noqa: B018
        with self.assertLogs("torch.distributed.fsdp.fully_shard", "DEBUG") as logs:
            model(self.rows(4))
        lines = [record.getMessage() for record in logs.records]
        for line in ("FSDP::pre_forward [pg=4]", "FSDP::post_forward [pg=2]"):
            self.assertIn(line, lines, "the log says which group")
        empty = fully_shard(nn.Identity(), mesh=world_mesh(4))
        self.assertIsNone(fully_shard.state(empty)._fsdp_param_group)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_modules_without_a_state(self):
        with self.refused(AssertionError, "No FSDP state found on Linear"):
            FSDPModule._get_fsdp_state(self.linear())

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_replicas_have_no_shards(self):
        """Settings of sharding are refused by a module that is replicated."""
        try:
            from torch.distributed._composable.replicate_with_fsdp import replicate
        except ImportError:
            self.skipTest("this torch has no replicate by FSDP2")
        for name, argument, words in (
            ("set_separate_reduce_scatter_group", True, "to be FSDPMeshInfo, got"),
            ("set_allocate_memory_from_process_group_for_comm", True, "FSDPMeshInfo"),
            ("set_reshard_after_forward", True, ""),
        ):
            model = replicate(self.linear())
            with self.refused(AssertionError, words):
                getattr(model, name)(argument)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_view_outputs_are_warned_about(self):
        """In-place operations on a view would skip the hook that gathers."""
        for is_viewing in (True, False):
            model = fully_shard(Viewing(is_viewing).to(self.device), mesh=world_mesh(4))
            for autograd in (True, False):
                with (
                    warnings.catch_warnings(record=True) as caught,
                    torch.set_grad_enabled(autograd),
                ):
                    warnings.simplefilter("always")
                    model(self.rows(4))
                found = [str(each.message) for each in caught]
                texts = [each for each in found if "returned a view tensor" in each]
                self.assertEqual(len(texts), int(is_viewing and autograd), found)
                for text in texts:
                    self.assertIn("module (FSDPViewing) returned", text)


if __name__ == "__main__":
    run_tests()
