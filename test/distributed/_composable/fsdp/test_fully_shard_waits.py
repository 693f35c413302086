# Owner(s): ["oncall: distributed"]
"""Waits of FSDP2's steps: for copies to the host, and between streams whose operations
overlap.
"""

import sys
import types
from functools import partial

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    ThreeUnits,
    WatchedUnits,
    patch_foreach_reduce,
    patch_reduce_scatter,
    shard_units,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        ShardPlacementResult,
    )
except ImportError:
    print("this torch has no meshes for single parameters", file=sys.stderr)
    sys.exit(0)


class WaitsTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    def step(self, model, step=0):
        model(self.rows(4, step)).square().sum().backward()


class TestFullyShardWaits(WaitsTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_prefetched_parameters_that_backward_does_not_use(self):
        """An optimizer comes after their all-gather."""

        class Skipping(ThreeUnits):
            def forward(self, x):
                return self.last(torch.relu(self.second(x)))

        for is_async in (False, True):

            def shard(model, is_async=is_async):
                model.__class__ = Skipping
                shard_units(model, world_mesh(2))
                model.second.set_modules_to_backward_prefetch([model.first])
                model._set_unshard_async_op(is_async)
                return model

            watched = WatchedUnits(self.device, shard)
            watched.run_steps(1)
            watched.check(
                self, "0 backward: gather first comes before 0 backward: optimizer"
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_host_waits_for_offloaded_gradients(self):
        """After backward, the host may read each gradient that was copied meanwhile."""
        skip_without_accelerator("offloading needs a device")
        model, copied, awaited = nn.Linear(4, 4), [], []
        fully_shard(model, mesh=world_mesh(2), offload_policy=CPUOffloadPolicy())
        reduce = dist.fsdp._fully_shard._fsdp_param_group.foreach_reduce

        def reducing(params, *args):
            result = reduce(params, *args)
            for number, each in enumerate(params):
                if (event := each.grad_offload_event) is not None:
                    copied.append(number)

                    def synchronize(number=number, event=event):
                        awaited.append(number)
                        event.synchronize()

                    each.grad_offload_event = types.SimpleNamespace(
                        synchronize=synchronize
                    )
            return result

        with patch_foreach_reduce(reducing):
            for step in range(2):
                self.step(model, step)
                self.assertEqual(copied, [0, 1], f"copied in step {step}")
                self.assertEqual(awaited, copied, f"waited for in step {step}")
                copied.clear()
                awaited.clear()
                model.zero_grad()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_next_all_gather_overlaps_the_copy_of_the_last(self):
        """Forward gathers a module while the parameters of the one before are copied
        out of their buffer.
        """

        class Watched(WatchedUnits):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.fsdp.split_with_sizes_copy.default:
                    size = sum(each.numel() for each in kwargs["out"])
                    self.mark(f"copy {self._units[size]}")
                return super().__torch_dispatch__(func, types, args, kwargs)

        watched = Watched(self.device, partial(shard_units, mesh=world_mesh(2)))
        watched.run_steps(2)
        watched.check(
            self,
            """\
1 forward: copy first overlaps 1 forward: gather second
1 forward: copy last comes before 1 forward: gather second""",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_reduction_of_a_group_overlaps_what_follows(self):
        """A group of modules of which all ran is reduced like one module."""

        def shard(model):
            fully_shard([model.second, model.last], mesh=world_mesh(2))
            for unit in (model.first, model):
                fully_shard(unit, mesh=world_mesh(2))
            return model

        watched = WatchedUnits(self.device, shard)
        watched._units[48 + 240] = "pair"
        watched.run_steps(2)
        watched.check(
            self,
            """\
1 backward: computed second comes before 1 backward: reduce pair
1 backward: reduce pair overlaps 1 backward: computed first""",
        )


class TestFullyShardWaitsOfFourRanks(WaitsTest):
    @property
    def world_size(self):
        return 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_microbatches_over_replicas(self):
        """A module's all-reduce is over before the next microbatch goes past it, also
        if backward did not wait for it.
        """
        shard = partial(shard_units, mesh=world_mesh(2, 2))
        watched = WatchedUnits(self.device, shard)
        with watched.watching():
            for step, is_last in enumerate((False, False, True)):
                watched.model.set_is_last_backward(is_last)
                watched.run_step(step)
        watched.check(
            self,
            """\
0 backward: all-reduce second comes before 1 backward: computed first
1 backward: all-reduce second comes before 2 backward: computed first
2 backward: all-reduce first comes before 2 backward: optimizer""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_groups_of_a_module_are_reduced_together(self):
        """FSDP waits for earlier reductions once for both groups of a module."""
        mesh = init_device_mesh(
            self.device.type, (2, 2), mesh_dim_names=("expert", "shard")
        )
        info = FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(self.device)

        def place(parameter):
            return ShardPlacementResult(Shard(0), info) if parameter.ndim == 1 else None

        for layer in model:
            fully_shard(layer, mesh=world_mesh(4), shard_placement_fn=place)
        fully_shard(model, mesh=world_mesh(4))
        scatter, kept = dist.reduce_scatter_single, []

        def scattering(*args, **kwargs):
            kept.append(len(fully_shard.state(model)._comm_ctx.reduce_scatter_states))
            return scatter(*args, **kwargs)

        with patch_reduce_scatter(scattering):
            for step in range(2):
                self.step(model, step)
        self.assertEqual(kept, [0, 1] * 4, "inputs kept when a reduction begins")


if __name__ == "__main__":
    run_tests()
