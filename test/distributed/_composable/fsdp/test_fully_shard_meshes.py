# Owner(s): ["oncall: distributed"]
"""FSDP2 over more than one mesh: single parameters on their own, and one for all kinds
of parallelism.
"""

import copy
import sys
import unittest

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    CollectiveLog,
    FSDPTest,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

try:
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        ShardPlacementResult,
    )
except ImportError:
    DataParallelMeshDims = None

NEEDS_MESHES = unittest.skipIf(
    DataParallelMeshDims is None,
    "fully_shard of this torch has no meshes for single parameters: install a newer "
    "one",
)


class Experts(nn.Module):
    """A dense layer and experts' weights. Shapes: ``(*, 4)`` to itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(4, 6)
        self.experts = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return torch.relu(self.dense(x)) @ self.experts


class MeshesTest(FSDPTest):
    @property
    def world_size(self):
        return 4


class TestFullyShardPerParamMesh(MeshesTest):
    """Dense parameters are sharded over all four ranks. Experts' are sharded over two,
    which alone average their gradients.
    """

    def _meshes(self):
        mesh = init_device_mesh(
            self.device.type, (2, 2), mesh_dim_names=("expert", "shard")
        )
        return mesh["shard"], FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)

    def _sharded(self, model, info, mesh=None, **options):
        def place(parameter):
            return (
                ShardPlacementResult(Shard(0), info)
                if parameter is model.experts
                else None
            )

        return fully_shard(
            model.to(self.device),
            mesh=mesh or world_mesh(4),
            shard_placement_fn=place,
            **options,
        )

    @NEEDS_MESHES
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity(self):
        layouts = [((4,), True), ((4,), False), ((4,), 2), ((2, 2), True)]
        self.run_subtests({"layout": layouts}, self._test_train_parity)

    def _test_train_parity(self, layout):
        sizes, reshard_after_forward = layout
        model = Experts()
        reference = copy.deepcopy(model).to(self.device)
        # Replicas of a mesh of two dimensions shard over the same ranks as experts.
        mesh = world_mesh(2, 2)["shard"]
        info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
        self._sharded(
            model, info, world_mesh(*sizes), reshard_after_forward=reshard_after_forward
        )
        shapes = {
            name: tuple(each.to_local().shape)
            for name, each in model.named_parameters()
        }
        rows = (2, 2, 2, 0)[self.rank] if sizes == (4,) else 3
        expected = {"experts": (3, 4), "dense.weight": (rows, 4), "dense.bias": (rows,)}
        self.assertEqual(shapes, expected, "shapes of shards")
        optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9, foreach=False)
            for each in (reference, model)
        ]
        for step in range(2):
            for each in (reference, model):
                with CollectiveLog() as log:
                    each(self.rows(4, step)).square().sum().backward()
            gathered = [call.name for call in log.calls].count("all-gather")
            self.assertEqual(gathered, 4 if reshard_after_forward else 2, "gathers")
            for name, parameter in reference.named_parameters():
                group = mesh.get_group() if name == "experts" else None
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad.div_(dist.get_world_size(group))
                found = model.get_parameter(name).grad
                self.assertEqual(
                    found.full_tensor(),
                    parameter.grad,
                    f"step {step}: gradient of {name}",
                )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, parameter in reference.named_parameters():
            self.assertEqual(
                model.get_parameter(name).full_tensor(), parameter.detach(), name
            )

    @NEEDS_MESHES
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_custom_collectives_are_refused(self):
        """Custom collectives do not say which of the groups they are for."""
        model = Experts()
        self._sharded(model, self._meshes()[1])
        for name in (
            "set_custom_all_gather",
            "set_custom_reduce_scatter",
            "set_all_reduce_hook",
        ):
            with self.assertRaisesRegex(
                ValueError, f"{name} is not supported with multiple param groups"
            ):
                getattr(model, name)(None)

    @NEEDS_MESHES
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_one_group_has_one_mesh(self):
        """Parameters over the same ranks must share the object that describes their
        mesh.
        """
        model = Experts()
        mesh, _ = self._meshes()
        with self.assertRaisesRegex(
            ValueError, "sharing the same process group must use the same"
        ):
            fully_shard(
                model.to(self.device),
                mesh=world_mesh(4),
                shard_placement_fn=lambda _: ShardPlacementResult(
                    Shard(0), FSDPMeshInfo(mesh, shard_mesh_dim=0)
                ),
            )


class TestFullyShardMeshOfAllDimensions(MeshesTest):
    """Parameters are on a mesh of data and tensor parallel ranks, and FSDP gets the
    names of its own dimensions.
    """

    def _trained(self, dims, names, placements):
        """Return a plain linear layer and one on a mesh of ``dims``, after a backward
        of both.
        """
        torch.manual_seed(0)
        reference = nn.Linear(4, 8, bias=False).to(self.device)
        mesh = init_device_mesh(self.device.type, dims, mesh_dim_names=names)
        model = nn.Linear(4, 8, bias=False).to(self.device)
        model.weight = nn.Parameter(
            distribute_tensor(reference.weight.detach(), mesh, placements)
        )
        shards, replicas = (
            tuple(name for name in names if name.startswith(kind))
            for kind in ("shard", "replicate")
        )
        own = DataParallelMeshDims(
            shard=shards[0] if len(shards) == 1 else shards or None,
            replicate=replicas[0] if len(replicas) == 1 else replicas or None,
        )
        fully_shard(model, mesh=mesh, dp_mesh_dims=own)
        # Ranks that differ only in tensor parallelism have the same rows.
        tensor = names.index("tensor")
        data = [
            place
            for index, place in enumerate(mesh.get_coordinate())
            if index != tensor
        ]
        generator = torch.Generator().manual_seed(
            sum(10**index * place for index, place in enumerate(data))
        )
        rows = torch.randn(3, 4, generator=generator).to(self.device)
        spread = [Replicate() if name == "tensor" else Shard(0) for name in names]
        out = model(DTensor.from_local(rows, mesh, spread))
        out.to_local().square().sum().backward()
        reference(rows).square().sum().backward()
        dist.all_reduce(reference.weight.grad)
        reference.weight.grad.div_(self.world_size)
        return reference, model

    def _check(self, dims, names, placements, shape):
        reference, model = self._trained(dims, names, placements)
        self.assertEqual(
            model.weight.grad.full_tensor(), reference.weight.grad, "gradient"
        )
        self.assertEqual(
            model.weight.full_tensor(), reference.weight.detach(), "weight"
        )
        self.assertEqual(
            tuple(model.weight.to_local().shape), shape, "shape of the shard"
        )

    @NEEDS_MESHES
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_tensor_parallelism(self):
        """The same dimension of the weight may be sharded twice."""
        for placement, shape in ((Shard(0), (2, 4)), (Replicate(), (4, 4))):
            self._check((2, 2), ("shard", "tensor"), [Replicate(), placement], shape)
        names = ("shard_a", "shard_b", "tensor")
        self._check((2, 1, 2), names, [Replicate(), Replicate(), Shard(0)], (2, 4))

    @NEEDS_MESHES
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_several_dimensions_of_data_parallelism(self):
        """FSDP shards over two dimensions as over one of their product, and averages
        over replicas.
        """
        for dims, names, shape in (
            ((2, 2, 1), ("shard_a", "shard_b", "tensor"), (2, 4)),
            ((2, 2, 1), ("replicate", "shard", "tensor"), (4, 4)),
            ((2, 1, 2, 1), ("replicate", "shard_a", "shard_b", "tensor"), (4, 4)),
            ((4, 1), ("replicate", "tensor"), (8, 4)),
        ):
            self._check(dims, names, [Replicate()] * len(dims), shape)

    @NEEDS_MESHES
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_inconsistent_meshes_are_refused(self):
        mesh, other = (
            init_device_mesh(self.device.type, (2, 2), mesh_dim_names=names)
            for names in (("shard", "tensor"), ("shard", "other"))
        )
        own = DataParallelMeshDims(shard="shard")

        def layer(on, placements):
            module = nn.Linear(4, 8, bias=False).to(self.device)
            if on is not None:
                module.weight = nn.Parameter(
                    distribute_tensor(module.weight.detach(), on, placements)
                )
            return module

        for error, words, module, options in (
            (ValueError, "all parameters must be", layer(None, None), {}),
            (
                ValueError,
                r"Expected Replicate\(\) on DP shard dim 'shard'",
                layer(mesh, [Shard(0), Replicate()]),
                {},
            ),
            (ValueError, "same mesh passed", layer(other, [Replicate()] * 2), {}),
            (
                NotImplementedError,
                "as int",
                layer(mesh, [Replicate()] * 2),
                {"reshard_after_forward": 2},
            ),
            (
                ValueError,
                "'none' not found in mesh.mesh_dim_names",
                layer(mesh, [Replicate()] * 2),
                {"dp_mesh_dims": DataParallelMeshDims("shard", "none")},
            ),
            (
                ValueError,
                r"Expected Replicate\(\) on DP replicate dim 'tensor'",
                layer(mesh, [Replicate(), Shard(0)]),
                {"dp_mesh_dims": DataParallelMeshDims("shard", "tensor")},
            ),
            (
                ValueError,
                "mesh must have mesh_dim_names",
                layer(mesh, [Replicate()] * 2),
                {"mesh": DeviceMesh(self.device.type, [[0, 1], [2, 3]])},
            ),
        ):
            with self.assertRaisesRegex(error, words):
                fully_shard(module, **{"mesh": mesh, "dp_mesh_dims": own, **options})
        with self.assertRaisesRegex(ValueError, "At least one of shard or replicate"):
            DataParallelMeshDims()


if __name__ == "__main__":
    run_tests()
