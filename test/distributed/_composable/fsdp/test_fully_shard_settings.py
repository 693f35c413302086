# Owner(s): ["oncall: distributed"]
"""What a setting of FSDP2 reaches: the order of a module's two groups, names and
streams, the parameter that is registered between forward and backward, and meshes
with one shard or with rows that tensor parallel ranks share.
"""

import copy
import itertools
import sys
import unittest

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    CollectiveLog,
    FSDPTest,
    ThreeUnits,
    average_gradients,
    check_sharded_parity,
    check_train_parity,
    fully_shard_units,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

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
    print("this torch has no meshes for single parameters", file=sys.stderr)
    sys.exit(0)


class SettingsTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def step(self, model, step=0):
        model(self.rows(4, step)).square().sum().backward()


class Block(nn.Module):
    """A dense layer and experts' weights. Shapes: ``(*, 4)`` to itself."""

    def __init__(self, hidden):
        super().__init__()
        self.dense = nn.Linear(4, hidden)
        self.experts = nn.Parameter(torch.randn(hidden, 4))

    def forward(self, x):
        return torch.relu(self.dense(x)) @ self.experts


class TestFullyShardTwoGroups(SettingsTest):
    """Modules with a group over all four ranks, and another over two."""

    SIZES = {40: "0 dense", 32: "0 experts", 60: "1 dense", 48: "1 experts"}

    def blocks(self, **options):
        mesh = init_device_mesh(
            self.device.type, (2, 2), mesh_dim_names=("expert", "shard")
        )
        info = FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)
        torch.manual_seed(0)
        model = nn.Sequential(Block(8), Block(12)).to(self.device)
        for block in model:
            fully_shard(
                block,
                mesh=world_mesh(4),
                shard_placement_fn=lambda each, block=block: (
                    ShardPlacementResult(Shard(0), info)
                    if each is block.experts
                    else None
                ),
                **options,
            )
        return fully_shard(model, mesh=world_mesh(4))

    def lines(self, run):
        with CollectiveLog() as log:
            result = run()
        kinds = {"all-gather": "gather", "reduce-scatter": "reduce"}
        return result, [
            f"{kinds[call.name]} {self.SIZES[call.numel]}" for call in log.calls
        ]

    def text(self, model, needs_grad=False):
        rows = self.rows(4).requires_grad_(needs_grad)
        loss, forward = self.lines(lambda: model(rows).square().sum())
        _, backward = self.lines(loss.backward)
        return "\n".join(["forward", *forward, "backward", *backward])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_order_of_a_step(self):
        model = self.blocks()
        for _ in range(2):
            self.assertExpectedInline(
                self.text(model),
                """\
forward
gather 0 dense
gather 0 experts
gather 1 dense
gather 1 experts
backward
gather 1 dense
gather 1 experts
gather 0 experts
gather 0 dense
reduce 1 experts
reduce 1 dense
reduce 0 experts
reduce 0 dense""",
            )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_order_with_explicit_prefetching(self):
        model = self.blocks()
        model[0].set_modules_to_forward_prefetch([model[1]])
        model[1].set_modules_to_backward_prefetch([model[0]])
        for _ in range(2):
            self.assertExpectedInline(
                self.text(model, needs_grad=True),
                """\
forward
gather 0 dense
gather 0 experts
gather 1 dense
gather 1 experts
backward
gather 1 dense
gather 1 experts
gather 0 experts
gather 0 dense
reduce 1 experts
reduce 1 dense
reduce 0 experts
reduce 0 dense""",
            )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_settings_reach_both_groups(self):
        model = self.blocks(reshard_after_forward=True)
        model[0].set_reshard_after_forward(False)
        model[1].set_unshard_in_backward(False)
        loss, _ = self.lines(lambda: model(self.rows(4)).square().sum())
        model[1].unshard()
        model[1].set_requires_gradient_sync(False)
        _, found = self.lines(loss.backward)
        self.assertEqual(found, ["reduce 0 experts", "reduce 0 dense"])
        for is_async in (False, True):
            handle, found = self.lines(lambda flag=is_async: model[1].unshard(flag))
            self.assertEqual(found, ["gather 1 dense", "gather 1 experts"])
            if is_async:
                handle.wait()
            kinds = [type(each).__name__ for each in model[1].parameters()]
            self.assertEqual(kinds, ["Parameter"] * 3, "gathered by hand")
            model[1].reshard()
            kinds = [type(each).__name__ for each in model[1].parameters()]
            self.assertEqual(kinds, ["DTensor"] * 3, "resharded by hand")


class TestFullyShardSettings(SettingsTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_recurse(self):
        """Settings affect the module alone, or all that are sharded below it."""
        for setter, default, value, read in (
            ("requires_gradient_sync", True, False, "reduce_grads"),
            ("requires_gradient_sync", True, False, "all_reduce_grads"),
            ("requires_all_reduce", True, False, "all_reduce_grads"),
            ("reshard_after_backward", True, False, "reshard_after_backward"),
            ("reduce_scatter_unused_params", False, True, None),
            ("reduce_scatter_max_input_buffers", 1, 3, None),
        ):
            for options, reached in (({}, 3), ({"recurse": False}, 1)):
                model = fully_shard_units(self)
                getattr(model, f"set_{setter}")(value, **options)
                found = [
                    getattr(fully_shard.state(each)._fsdp_param_group, read or setter)
                    for each in (model, model.first, model.second)
                ]
                expected = [value] * reached + [default] * (3 - reached)
                self.assertEqual(found, expected, f"{setter}, {options}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_settings_of_one_module(self):
        model = fully_shard_units(self)
        model.set_gradient_divide_factor(3.0)
        with self.assertWarnsRegex(DeprecationWarning, "set_gradient_divide_factor"):
            model.first.set_reduce_scatter_divide_factor(2.0)
        model.set_force_sum_reduction_for_comms(True)
        model.second.set_unshard_in_backward(False)
        groups = [
            fully_shard.state(each)._fsdp_param_group
            for each in (model, model.first, model.second)
        ]
        for name, expected in (
            ("gradient_divide_factor", [3.0, 2.0, None]),
            ("force_sum_reduction_for_comms", [True, False, False]),
            ("unshard_in_backward", [True, True, False]),
        ):
            found = [getattr(group, name) for group in groups]
            self.assertEqual(found, expected, name)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_modules_without_parameters_or_with_their_own_rules(self):
        """They are handled as any other."""
        empty = fully_shard(nn.Identity(), mesh=world_mesh(4))
        self.assertIsNone(empty.unshard())
        handle = empty.unshard(async_op=True)
        self.assertIsNone(handle.wait())
        self.assertIs(empty.to(self.device), empty)

        assigned = []

        class Watching(nn.Linear):
            def __setattr__(self, name, value):
                assigned.append(name)
                super().__setattr__(name, value)

        class Listed(nn.ModuleList):
            def forward(self, x):
                return self[0](x)

        model = Listed([Watching(4, 4, bias=False)]).to(self.device)
        fully_shard(model, mesh=world_mesh(4))
        self.assertIs(model.to(self.device), model)
        assigned.clear()
        self.step(model)
        self.assertIn("weight", assigned, "a module sees its parameters change")
        self.assertIsInstance(model[0].weight, DTensor)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_root_that_is_asked_to_reshard(self):
        """A setting before the first forward counts as one of ``fully_shard``."""
        for asked, recurses in itertools.product((True, False), repeat=2):
            model = fully_shard_units(self)
            model.set_reshard_after_forward(asked, recurse=recurses)
            model(self.rows(4))
            found = [
                isinstance(unit.weight, DTensor) for unit in (model.last, model.first)
            ]
            self.assertEqual(found, [asked, asked or not recurses], "root, child")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_modules_of_which_all_parameters_are_ignored(self):
        """The compiler handles modules that FSDP manages in another way: those with a
        parameter or a buffer that is not ignored, in them or below.
        """
        model = nn.ModuleDict(
            {
                "plain": nn.Linear(4, 4),
                "statistics": nn.BatchNorm1d(4, affine=False),
                "ignored": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
                "partly": nn.Linear(4, 4),
                "inner": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()),
                "outer": Block(8),
            }
        )
        model.forward = print  # containers need one
        model = nn.Sequential(model).to(self.device)
        parts = model[0]
        ignored = {
            *parts["ignored"].parameters(),
            parts["partly"].weight,
            *parts["inner"][0].parameters(),
            parts["outer"].experts,
        }
        fully_shard(model, mesh=world_mesh(4), ignored_params=ignored)
        found = {
            name
            for name, module in parts.named_modules()
            if getattr(module, "_is_fsdp_managed_module", False)
        }
        expected = {"", "plain", "statistics", "partly", "inner", "inner.1"}
        expected |= {"outer", "outer.dense"}
        self.assertEqual(found, expected, "managed modules")
        self.assertTrue(parts["plain"]._fsdp_use_orig_params)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_names(self):
        """A group and its parameters say what they are. A module that two names lead to
        has both.
        """
        model = ThreeUnits().to(self.device)
        model.other = model.second
        fully_shard([model.first, model.second], mesh=world_mesh(4))
        fully_shard(model, mesh=world_mesh(4))
        group = fully_shard.state(model.second)._fsdp_param_group
        self.assertEqual(repr(group), "FSDPParamGroup(fqn=None)", "before forward")
        with self.assertLogs("torch.distributed.fsdp.fully_shard", "DEBUG") as logs:
            model(self.rows(4))
        self.assertEqual(repr(group), "FSDPParamGroup(fqn=first, second)")
        self.assertEqual(
            [repr(each) for each in group.fsdp_params],
            [
                "FSDPParam(fqn=first.weight, orig_size=torch.Size([4, 4]))",
                "FSDPParam(fqn=second.weight, orig_size=torch.Size([12, 4]))",
            ],
        )
        lines = [record.getMessage() for record in logs.records]
        self.assertIn("FSDP::pre_forward (first, second)", lines)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_streams(self):
        """Gathering and reducing take precedence over computing, and all-reduces, over
        a slower network, do not.
        """
        skip_without_accelerator("the host has no streams")
        model = fully_shard_units(self)
        self.step(model)
        context = fully_shard.state(model)._comm_ctx
        names = ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce")
        streams = [getattr(context, f"{name}_stream") for name in names]
        self.assertEqual(len(set(streams)), 4, "streams")
        found = [each.priority for each in streams]
        self.assertEqual(found, [-1, -1, -1, 0], "priorities")


class TestFullyShardRegisteredAfterForward(SettingsTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_smaller_mesh(self):
        """After forward a module has the shards over the smaller mesh, with the global
        shape and values of the parameter, and its ``requires_grad``.
        """
        self._test_smaller_mesh(8)

    # Through torch 2.13 they are cut from memory with the padding for the larger mesh.
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @unittest.expectedFailure
    def test_smaller_mesh_with_uneven_shards(self):
        self._test_smaller_mesh(5)

    def _test_smaller_mesh(self, rows):
        torch.manual_seed(0)
        layer = nn.Linear(4, rows).to(self.device)
        layer.bias.requires_grad_(False)
        whole = {name: each.detach().clone() for name, each in layer.named_parameters()}
        model = nn.Sequential(layer)
        fully_shard(layer, mesh=world_mesh(4), reshard_after_forward=2)
        fully_shard(model, mesh=world_mesh(4))
        for _ in range(2):
            loss = model(self.rows(4)).square().sum()
            for name, each in layer.named_parameters():
                self.assertIsInstance(each, DTensor, name)
                self.assertEqual(each.placements, (Replicate(), Shard(0)), name)
                self.assertEqual(each.device_mesh.shape, (2, 2), f"mesh of {name}")
                self.assertEqual(each.shape, whole[name].shape, name)
                own = whole[name].chunk(2)[self.rank % 2]
                self.assertEqual(each.to_local(), own, f"shard of {name}")
                self.assertEqual(each.requires_grad, name == "weight", name)
            with CollectiveLog() as log:
                loss.backward()
            gathered = [call.numel for call in log.calls if call.name == "all-gather"]
            self.assertEqual(gathered, [rows * 4 + rows], "elements gathered again")
            for name, each in layer.named_parameters():
                self.assertEqual(each.placements, (Shard(0),), f"{name} after backward")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_state_dict_between_forward_and_backward(self):
        """It has the shards, and a backward may follow, or two."""
        for reshard in (True, False, 2):
            model = fully_shard_units(self, reshard_after_forward=reshard)
            reference = ThreeUnits().to(self.device)
            rows = self.rows(4)
            loss, expected = (each(rows).square().sum() for each in (model, reference))
            for name, each in model.state_dict().items():
                self.assertEqual(each.placements, (Shard(0),), f"{name}, {reshard}")
            for each in (loss, expected):
                each.backward(retain_graph=True)
                each.backward()
            average_gradients(reference)
            check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_uneven_shards_that_are_assigned(self):
        """Assigned shards are what the next forward gathers, before the first and after
        one, also on ranks whose shard is empty.
        """
        for runs_first in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)).to(self.device)
            reference = copy.deepcopy(model)
            for layer in (model[0], model):
                fully_shard(layer, mesh=world_mesh(4))
            rows = self.rows(4)
            if runs_first:
                model(rows)
            for factor in (2, 3):
                state = {
                    name: factor * each for name, each in model.state_dict().items()
                }
                model.load_state_dict(state, assign=True)
                for each in reference.parameters():
                    each.data.mul_(factor)
                self.assertEqual(model(rows), reference(rows), f"factor {factor}")
                model.reshard()
                with torch.no_grad():  # as an optimizer does
                    for each in (*model.parameters(), *reference.parameters()):
                        each.mul_(2)
                self.assertEqual(model(rows), reference(rows), "changed in place")


class TestFullyShardSharedRows(SettingsTest):
    """Parameters are on one mesh of data and tensor parallel ranks."""

    def sharded(self, dims, names, **own):
        mesh = init_device_mesh(self.device.type, dims, mesh_dim_names=names)
        torch.manual_seed(0)
        layer = nn.Linear(4, 8, bias=False).to(self.device)
        reference = copy.deepcopy(layer)
        layer.weight = nn.Parameter(
            distribute_tensor(layer.weight.detach(), mesh, [Replicate() for _ in dims])
        )
        fully_shard(layer, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**own))
        return mesh, layer, reference

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_rows_that_tensor_parallel_ranks_share(self):
        """Gradients are added over tensor parallel ranks, which have different rows,
        and averaged over the ranks of data parallelism.
        """
        for dims, names, own in (
            ((2, 2), ("shard", "tensor"), {"shard": "shard"}),
            ((2, 1, 2), ("a", "b", "tensor"), {"replicate": ("a", "b")}),
        ):
            mesh, layer, reference = self.sharded(dims, names, **own)
            rows = self.rows(4)
            spread = DTensor.from_local(rows, mesh, [Shard(0) for _ in dims])
            layer(spread).to_local().square().sum().backward()
            reference(rows).square().sum().backward()
            dist.all_reduce(reference.weight.grad)
            found = layer.weight.grad.full_tensor()
            self.assertEqual(found, reference.weight.grad / 2, f"{names}")


class TestFullyShardOneShard(SettingsTest):
    """Four replicas of one shard: nothing is gathered, and gradients are averaged."""

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("reshard", [True, False])
    def test_train_parity(self, reshard):
        policy = MixedPrecisionPolicy(torch.float64 if reshard else None)
        model = fully_shard_units(
            self, world_mesh(4, 1), reshard_after_forward=reshard, mp_policy=policy
        )
        model.second.weight.requires_grad_(False)
        reference = ThreeUnits().to(self.device)
        reference.second.weight.requires_grad_(False)

        def loss_of(each, rows):  # two forwards before the backward
            return sum(each(rows * factor).float().square().sum() for factor in (1, 2))

        with CollectiveLog() as log:
            check_train_parity(
                self,
                reference,
                model,
                [self.rows(4, step) for step in range(2)],
                loss_of=loss_of,
            )
        self.assertNotIn("all-gather", {call.name for call in log.calls})

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_prefetch_of_a_module_that_backward_does_not_reach(self):
        """Nothing is under way that the end of backward, or a reset, would wait for."""
        for ends in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(self.device)
            reference = copy.deepcopy(model)
            for layer in (*model, model):
                fully_shard(layer, mesh=world_mesh(4, 1))
            self.step(model)
            skipped = model[0]
            model[2].set_modules_to_backward_prefetch([skipped])
            del model[0], reference[0]
            loss = model(self.rows(4)).square().sum()
            if ends:
                loss.backward()
            else:
                skipped.unshard(async_op=True)
                model.reset_iter_state()
            for each in (model, reference):
                each.zero_grad()
                self.step(each, 1)
            average_gradients(reference)
            check_sharded_parity(self, reference, model)


instantiate_parametrized_tests(TestFullyShardOneShard)

if __name__ == "__main__":
    run_tests()
