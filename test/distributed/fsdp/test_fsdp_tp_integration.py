# Owner(s): ["oncall: distributed"]
"""FSDP1 over tensor parallelism: each rank holds a shard of its tensor-parallel part,
and all train as one.
"""

import sys
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    FSDPTest,
    get_devtype,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

# Layer ``c`` is left out: FSDP alone shards it.
PLAN = {"a": ColwiseParallel(), "b": RowwiseParallel()}
PLACEMENTS = {
    "a.weight": [Shard(0), Shard(0)],
    "a.bias": [Shard(0), Shard(0)],
    "b.weight": [Shard(0), Shard(1)],
    "b.bias": [Shard(0), Replicate()],
    "c.weight": [Shard(0), Replicate()],
    "c.bias": [Shard(0), Replicate()],
}


class TestTPFSDPIntegration(FSDPTest):
    """Two data-parallel ranks of two tensor-parallel ones."""

    @property
    def world_size(self):
        return 4

    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(get_devtype().type, (2, 2), mesh_dim_names=("dp", "tp"))

    def _sharded(
        self, mesh: DeviceMesh, seed: int = 0, each: bool = False, **fsdp_kwargs: Any
    ) -> FSDP:
        """Return a chain in both parallelisms, wrapped as a whole or also layer by
        layer.
        """
        model = parallelize_module(
            Chain(device=self.device, seed=seed), mesh["tp"], PLAN
        )
        if each:
            for name in Chain.LAYERS:
                setattr(
                    model,
                    name,
                    FSDP(
                        getattr(model, name),
                        device_id=self.device,
                        device_mesh=mesh["dp"],
                        **fsdp_kwargs,
                    ),
                )
        return FSDP(model, device_id=self.device, device_mesh=mesh["dp"], **fsdp_kwargs)

    def _whole(self, model: FSDP) -> dict[str, torch.Tensor]:
        """Return the parameters of a sharded state dict, whole. Checks how each was
        sharded.
        """
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
        for name, placements in PLACEMENTS.items():
            self.assertIsInstance(state[name], DTensor, name)
            self.assertEqual(
                list(state[name].placements), placements, f"placements of {name}"
            )
        return {name: tensor.full_tensor() for name, tensor in state.items()}

    def _step(self, model: nn.Module, rank: int | None, step: int) -> torch.Tensor:
        rows = Chain.rows(self.device, 2, rank, step).requires_grad_()
        model(rows).square().mean().backward()
        return rows.grad

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_fsdp_tp_integration(self):
        """Both parallelisms together train as one rank with all rows."""
        layouts = [
            {"each": True},
            {"use_orig_params": True},
            {
                "each": True,
                "use_orig_params": True,
                "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
            },
        ]
        self.run_subtests(
            {"layout": layouts}, self._test_fsdp_tp_integration, mesh=self._mesh()
        )

    def _test_fsdp_tp_integration(self, layout, mesh):
        reference, model = Chain(device=self.device), self._sharded(mesh, **layout)
        dp_rank = mesh.get_local_rank("dp")
        own = slice(2 * dp_rank, 2 * dp_rank + 2)
        self.assertEqual(
            self._whole(model),
            dict(reference.named_parameters()),
            "parameters before training",
        )
        optims = [
            torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
            for each in (reference, model)
        ]
        for step in range(2):
            expected = 2 * self._step(reference, None, step)[own]
            self.assertEqual(
                self._step(model, dp_rank, step),
                expected,
                f"gradient of the input in step {step}",
            )
            for optim in optims:
                optim.step()
                optim.zero_grad()
        self.assertEqual(
            self._whole(model),
            dict(reference.named_parameters()),
            "parameters after training",
        )
        self._check_momentum(reference, model, *optims)

    def _check_momentum(self, reference, model, expected, optim) -> None:
        """Check that states of the optimizer are sharded like parameters."""
        FSDP.set_state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        )
        states = FSDP.optim_state_dict(model, optim)["state"]
        self.assertEqual({*states}, {*PLACEMENTS})
        for name, parameter in reference.named_parameters():
            found = states[name]["momentum_buffer"]
            self.assertIsInstance(found, DTensor, name)
            self.assertEqual([*found.placements], PLACEMENTS[name], name)
            whole = expected.state[parameter]["momentum_buffer"]
            self.assertEqual(found.full_tensor(), whole, f"momentum of {name}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_fsdp_tp_extension_grad(self):
        """Gradients are those of this rank's tensor-parallel part, averaged only over
        data-parallel ranks.
        """
        mesh, reference = self._mesh(), Chain(device=self.device)
        model = self._sharded(mesh, use_orig_params=True)
        self._step(reference, None, 0)
        self._step(model, mesh.get_local_rank("dp"), 0)
        tp_rank = mesh.get_local_rank("tp")
        expected = {}
        for name, parameter in reference.named_parameters():
            placement, gradient = PLACEMENTS[name][1], parameter.grad
            expected[name] = (
                gradient.chunk(2, placement.dim)[tp_rank]
                if placement.is_shard()
                else gradient
            )
        with FSDP.summon_full_params(model, with_grads=True):
            for name, parameter in model.named_parameters():
                name, grad = name.replace("_fsdp_wrapped_module.", ""), parameter.grad
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                self.assertEqual(
                    local.view(expected[name].shape),
                    expected[name],
                    f"gradient of {name}",
                )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_sharded_state_dict_is_loaded(self):
        """A model in both parallelisms takes over the parameters of another."""
        mesh = self._mesh()
        source, target = self._sharded(mesh), self._sharded(mesh, seed=1)
        with (
            FSDP.state_dict_type(source, StateDictType.SHARDED_STATE_DICT),
            FSDP.state_dict_type(target, StateDictType.SHARDED_STATE_DICT),
        ):
            target.load_state_dict(source.state_dict())
        self.assertEqual(
            self._whole(target),
            self._whole(source),
            "loaded parameters",
            atol=0,
            rtol=0,
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_fsdp_tp_sync_module_state(self):
        """Data-parallel ranks get the states of their first; each tensor-parallel part
        keeps its own.
        """
        skip_without_accelerator("FSDP1 synchronizes states on an accelerator alone")
        mesh = self._mesh()
        model = self._sharded(
            mesh, seed=mesh.get_local_rank("dp"), sync_module_states=True
        )
        self.assertEqual(
            self._whole(model),
            dict(Chain(device=self.device).named_parameters()),
            "parameters",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_extension_shards_parts(self):
        """A part of tensor parallelism is sharded over the whole mesh, and comes back
        as the part. A tensor without a part is replicated over it.
        """
        mesh, whole = self._mesh(), torch.arange(48.0, device=self.device).view(8, 6)
        dp = mesh.get_local_rank("dp")
        extension = DTensorExtensions(torch.get_device_module(self.device))
        for placement in (Shard(0), Shard(1), Replicate(), None):
            where = f"placement {placement}"
            part = local = whole
            if placement is not None:
                part = distribute_tensor(whole, mesh["tp"], [placement])
                local = part.to_local()
            made = extension.chunk_dtensor(part, dp, mesh["dp"])
            self.assertEqual(made.device_mesh, mesh, where)
            layout = (Shard(0), placement or Replicate())
            self.assertEqual(made.placements, layout, where)
            expected = distribute_tensor(whole, mesh, layout).to_local()
            self.assertEqual(made.to_local(), expected, where)
            self.assertNotEqual(made.to_local().data_ptr(), local.data_ptr(), where)
            self.assertEqual(extension.all_gather_dtensor(made, mesh), local, where)
            with self.assertRaises(AssertionError):
                extension.all_gather_dtensor(made, mesh["tp"])
        with self.assertRaisesRegex(RuntimeError, "must be at least 2D"):
            extension.chunk_dtensor(whole, dp, world_mesh(4))


if __name__ == "__main__":
    run_tests()
