# Owner(s): ["oncall: distributed"]
"""``fully_shard`` before the first step: where it puts tensors, how it splits them, its
names, its errors in full.
"""

import re
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    FSDPTest,
    sequential_mlps,
    skip_without_accelerator,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class InitTest(FSDPTest):
    @property
    def world_size(self):
        return 2


class TestFullyShardErrors(InitTest):
    """Each error names its cause and the remedy."""

    def _refused(self, error, text):
        return self.assertRaisesRegex(error, re.escape(text))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parameter_shared_across_groups(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(self.device)
        model[1].weight = model[0].weight
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        advice = (
            "use fully_shard([module_a, module_b]) to place them in the same FSDP "
            "group."
        )
        with self._refused(
            ValueError,
            "is shared with a parameter already managed by another FSDP group.",
        ) as caught:
            model(self.rows(4))
        self.assertIn("Parameter '", str(caught.exception))
        self.assertIn(advice, str(caught.exception))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parameters_on_meta(self):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0])
        fully_shard(model)
        model[1].to_empty(device=self.device)
        with self._refused(
            RuntimeError,
            "the following were still on meta device: ['0.weight', '0.bias']",
        ):
            model(self.rows(4))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_offloaded_parameters_on_the_device(self):
        skip_without_accelerator("offloading needs a device")
        model = nn.Linear(4, 4)
        fully_shard(model, offload_policy=CPUOffloadPolicy())
        model.to(self.device)
        text = (
            "Found following parameters on non-CPU device: [('weight', "
            f"{self.device!r}), ('bias', {self.device!r})]"
        )
        with self._refused(RuntimeError, text):
            model(self.rows(4))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_noncontiguous_parameter(self):
        model = nn.Linear(4, 6).to(self.device)
        model.weight = nn.Parameter(model.weight.detach().T)
        text = (
            "FSDP does not support non-contiguous parameters yet: "
            "param.shape=torch.Size([4, 6]) param.stride()=(1, 4)"
        )
        with self._refused(NotImplementedError, text):
            fully_shard(model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_uneven_columns(self):
        text = (
            "FSDP does not support uneven sharding on dim 1: torch.Size([4, 5]) "
            "(world size: 2)"
        )
        with self._refused(NotImplementedError, text):
            fully_shard(
                nn.Linear(5, 4, bias=False).to(self.device),
                shard_placement_fn=lambda _: Shard(1),
            )
        with self._refused(
            AssertionError, "Shard dim 1 is invalid for 1D tensor: torch.Size([4])"
        ):
            fully_shard(
                nn.Linear(4, 4).to(self.device), shard_placement_fn=lambda _: Shard(1)
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_modules_without_forward(self):
        with self._refused(
            ValueError,
            "fully_shard does not support containers that do not implement forward",
        ):
            fully_shard(nn.ModuleList([nn.Linear(4, 4)]).to(self.device))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_sizes_to_reshard_to(self):
        mesh = DeviceMesh(self.device.type, [0, 1])
        for size in (3, 0, -1):
            with self._refused(ValueError, f"it should be a factor of 2, not {size}"):
                fully_shard(
                    nn.Linear(4, 4).to(self.device),
                    mesh=mesh,
                    reshard_after_forward=size,
                )
        with self._refused(ValueError, "not two"):
            fully_shard(
                nn.Linear(4, 4).to(self.device), mesh=mesh, reshard_after_forward="two"
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_invalid_meshes(self):
        with self._refused(
            ValueError, "fully_shard expects a 1D or 2D DeviceMesh but got"
        ):
            fully_shard(
                nn.Linear(4, 4).to(self.device),
                mesh=DeviceMesh(self.device.type, [[[0, 1]]]),
            )
        with self._refused(
            AssertionError,
            "Please init the 2D mesh for HSDP with mesh_dim_names specified",
        ):
            fully_shard(
                nn.Linear(4, 4).to(self.device),
                mesh=DeviceMesh(self.device.type, [[0, 1]]),
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_root_of_several_modules(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(self.device)
        fully_shard([model[0], model[1]])
        with self._refused(RuntimeError, "FSDP requires a single root module but got"):
            model(self.rows(4))


class TestFullyShardDeviceTensor(InitTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_move_states_to_device_tensor(self):
        """Parameters and buffers go to the device of the mesh."""
        model = fully_shard(MLP(4, with_buffer=True))
        places = {each.device for each in (*model.parameters(), *model.buffers())}
        self.assertEqual(places, {self.device}, "devices")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_pinned_memory(self):
        """Offloaded shards are in pinned memory if asked, also after others were loaded
        in their place.
        """
        skip_without_accelerator("pinned memory is for copies to a device")
        for pin_memory in (True, False):
            model = fully_shard(
                nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=pin_memory)
            )

            def pinned(model=model):
                return [each.to_local().is_pinned() for each in model.parameters()]

            self.assertEqual(
                pinned(), [pin_memory] * 2, f"pinned at first, pin_memory={pin_memory}"
            )
            state = {
                name: each.detach().clone() for name, each in model.state_dict().items()
            }
            model.load_state_dict(state, assign=True)
            model(self.rows(4)).sum().backward()
            self.assertEqual(
                pinned(),
                [pin_memory] * 2,
                f"pinned after loading, pin_memory={pin_memory}",
            )


class TestFullyShardLazyInit(InitTest):
    def _nested(self):
        model = sequential_mlps(2).to(self.device)
        fully_shard(model[0].in_proj)
        fully_shard(model[0])
        return fully_shard(model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fully_shard_is_root(self):
        """The module that runs first becomes the root of all modules below it."""
        model = self._nested()
        model(self.rows(5))
        modules = (model, model[0], model[0].in_proj)
        found = [module._get_fsdp_state()._is_root for module in modules]
        self.assertEqual(found, [True, False, False], "roots")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fully_shard_module_and_param_fqns(self):
        model = self._nested()
        model(self.rows(5))
        groups = [
            module._get_fsdp_state()._fsdp_param_group
            for module in (model, model[0], model[0].in_proj)
        ]
        self.assertEqual(
            [group._module_fqn for group in groups],
            ["", "0", "0.in_proj"],
            "names of modules",
        )
        names = [
            [parameter._param_fqn for parameter in group.fsdp_params]
            for group in groups
        ]
        rest = [
            "1.in_proj.weight",
            "1.in_proj.bias",
            "1.out_proj.weight",
            "1.out_proj.bias",
        ]
        expected = [
            rest,
            ["0.out_proj.weight", "0.out_proj.bias"],
            ["0.in_proj.weight", "0.in_proj.bias"],
        ]
        self.assertEqual(names, expected, "names of parameters")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_root_keeps_its_parameters(self):
        """By default the root stays unsharded; an explicit request overrides that."""
        for asked, sharded in ((None, False), (True, True), (False, False)):
            model = fully_shard(
                nn.Linear(4, 4).to(self.device), reshard_after_forward=asked
            )
            model(self.rows(4))
            found = model._get_fsdp_state()._fsdp_param_group.is_sharded
            self.assertEqual(
                found, sharded, f"asked for {asked}: root is sharded after forward"
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_reset_sharded_param_in_lazy_init(self):
        """A tensor that replaces a shard before the first forward is gathered."""
        model = fully_shard(nn.Linear(4, 3, bias=False).to(self.device))
        whole = torch.arange(12.0, device=self.device).view(3, 4)
        shard = whole[:2] if self.rank == 0 else whole[2:]
        model.weight._local_tensor = shard.clone()
        rows = self.rows(4)
        self.assertEqual(
            model(rows), rows @ whole.T, "output of the assigned parameters"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fully_shard_double_lazy_init(self):
        model = sequential_mlps(2).to(self.device)
        fully_shard(model[0])
        fully_shard(model)
        model[0](self.rows(5))
        text = (
            "FSDP state has already been lazily initialized for 0\nFSDP requires "
            "running forward through the root"
        )
        with self.assertRaisesRegex(RuntimeError, re.escape(text)):
            model(self.rows(5))


class TestFullyShardShardPlacementFn(InitTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_negative_dimension_counts_from_the_end(self):
        model = nn.ParameterDict(
            {"two": torch.randn(3, 4), "three": torch.randn(3, 4, 2)}
        ).to(self.device)
        whole = {name: each.detach().clone() for name, each in model.items()}
        fully_shard(model, shard_placement_fn=lambda _: Shard(-1))
        for name, parameter in model.items():
            self.assertEqual(
                parameter.placements,
                (Shard(parameter.ndim - 1),),
                f"placement of {name}",
            )
            own = whole[name].chunk(2, dim=-1)[self.rank]
            self.assertEqual(parameter.to_local(), own, f"shard of {name}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_some_parameters_by_default(self):
        model = nn.Linear(4, 5).to(self.device)
        weight = model.weight.detach().clone()
        fully_shard(
            model, shard_placement_fn=lambda each: Shard(1) if each.ndim == 2 else None
        )
        self.assertEqual(
            (model.weight.placements, model.bias.placements),
            ((Shard(1),), (Shard(0),)),
            "placements",
        )
        self.assertEqual(model.weight.full_tensor(), weight, "weight")
        model(self.rows(4)).sum().backward()
        self.assertEqual(
            model.weight.grad.placements, (Shard(1),), "placement of the gradient"
        )


if __name__ == "__main__":
    run_tests()
