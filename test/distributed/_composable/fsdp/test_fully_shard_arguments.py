# Owner(s): ["oncall: distributed"]
"""Arguments that FSDP2 passes on: inputs to modules, sizes to constructors, operations
and groups to collectives, settings to both groups of a module, names to messages.
"""

import copy
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    CollectiveLog,
    FSDPTest,
    ThreeUnits,
    average_gradients,
    check_sharded_parity,
    check_train_parity,
    fully_shard_units,
    patch_reduce_scatter,
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


class ArgumentsTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    def kinds(self, *parameters):
        return [
            "sharded" if isinstance(each, DTensor) else "whole" for each in parameters
        ]


class Inner(nn.Linear):
    """Adds tensors of a list and of a dictionary. Notes both."""

    def forward(self, rows, named=None):
        self.got = rows, named
        return super().forward(sum(rows) + sum(named.values()))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner(4, 4)

    def forward(self, x=None, y=None):
        self.gave = [x], {"y": y}
        return self.inner(self.gave[0], named=self.gave[1])


class TestFullyShardInputs(ArgumentsTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_containers_without_gradients_pass_as_they_are(self):
        """A module may change a list of its caller, unless FSDP replaces tensors in
        it: to cast them, or to follow their gradients.
        """
        model = Outer().to(self.device)
        for module in (model.inner, model):
            fully_shard(module, mesh=world_mesh(2))
        for records in (True, False):
            with torch.set_grad_enabled(records):
                model(self.rows(4), y=self.rows(4))
            for found, given in zip(model.inner.got, model.gave, strict=True):
                self.assertIs(found, given, f"with gradients: {records}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_inputs_of_the_root_are_moved(self):
        """By position, by keyword, or both."""
        model = fully_shard(Outer().to(self.device), mesh=world_mesh(2))
        host = torch.ones(3, 4)
        for args, kwargs in (
            ((host, host), {}),
            ((host,), {"y": host}),
            ((), {"x": host, "y": host}),
        ):
            model(*args, **kwargs).sum().backward()
            rows, named = model.inner.got
            found = {rows[0].device, named["y"].device}
            self.assertEqual(found, {self.device}, f"{len(args)} by position")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_module_of_a_group_that_runs_by_itself(self):
        """Its inputs are moved like the root's, and its group stays gathered until the
        module's backward.
        """
        layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
        model = nn.Sequential(*layers).to(self.device)
        model.forward = layers[0].__call__
        fully_shard(layers, mesh=world_mesh(2))
        fully_shard(model, mesh=world_mesh(2))
        for _ in range(2):
            counts = []

            def count(run, counts=counts):
                with CollectiveLog() as log:
                    result = run()
                names = [call.name for call in log.calls]
                counts.append((names.count("all-gather"), len(names)))
                return result

            hidden = count(lambda: model(self.rows(4))).detach()
            # Through torch 2.13 only the first of these inputs is moved.
            for rows in (hidden.cpu(), hidden):
                chunk = rows.detach().requires_grad_()
                loss = count(lambda chunk=chunk: layers[1](chunk).sum())
                count(loss.backward)
            expected = [(1, 1), (1, 1), (0, 1), (1, 1), (0, 1)]
            self.assertEqual(counts, expected, "all-gathers and collectives")
            model.zero_grad()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_arguments_of_constructors(self):
        """The class of a sharded module makes objects of the original class."""

        class Sized(nn.Linear):
            def __new__(cls, *sizes, bias=True):
                self = super().__new__(cls)
                object.__setattr__(self, "made", (sizes, bias))
                return self

        model = fully_shard(Sized(4, 4).to(self.device), mesh=world_mesh(2))
        other = type(model)(4, 8, bias=False)
        self.assertIs(type(other), Sized)
        self.assertEqual(other.made, ((4, 8), False), "arguments of __new__")
        self.assertEqual(other.weight.shape, (8, 4))
        self.assertIsNone(other.bias)


class TestFullyShardReductions(ArgumentsTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_operations(self):
        """The number of shards as factor is the average, of which collectives know; any
        other is a factor of their sum.
        """
        skip_without_accelerator("gloo cannot multiply before it adds")
        scatter, average = dist.reduce_scatter_single, dist.ReduceOp.AVG
        for sizes in ((2,), (1, 2)):
            for factor in (None, 2.0, 3.0):
                model, ops = fully_shard_units(self, world_mesh(*sizes)), []

                def scattering(*args, ops=ops, **kwargs):
                    ops.append(kwargs["op"] == average)
                    return scatter(*args, **kwargs)

                for unit in (model.first, model.second, model):
                    unit.set_gradient_divide_factor(factor)
                with patch_reduce_scatter(scattering):
                    model(self.rows(4)).sum().backward()
                self.assertEqual(ops, [factor != 3.0] * 3, f"{factor} over {sizes}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_name_of_a_separate_group(self):
        model = fully_shard_units(self)
        model.set_separate_reduce_scatter_group()
        scatter, names = dist.reduce_scatter_single, []

        def scattering(*args, **kwargs):
            names.append(kwargs["group"].group_desc)
            return scatter(*args, **kwargs)

        with patch_reduce_scatter(scattering):
            model(self.rows(4)).sum().backward()
        self.assertEqual(names, ["fsdp_reduce_scatter"] * 3, "names of groups")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_rows_and_columns_in_one_group(self):
        """Each parameter is sharded along the dimension that was asked for, whatever
        the order.
        """
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4, bias=each % 2 == 1) for each in range(4)]
        model = nn.Sequential(*layers)
        reference = copy.deepcopy(model).to(self.device)
        columns = {layers[1].weight, layers[2].weight}
        fully_shard(
            model.to(self.device),
            mesh=world_mesh(2),
            shard_placement_fn=lambda each: Shard(1) if each in columns else None,
        )
        for layer, dim in zip(layers, (0, 1, 1, 0), strict=True):
            self.assertEqual(layer.weight.placements, (Shard(dim),))
        rows = [self.rows(4, step) for step in range(2)]
        check_train_parity(self, reference, model, rows)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parameters_without_elements(self):
        """They are sharded and trained with the parameters around them."""
        torch.manual_seed(0)
        layer = nn.Linear(4, 4).to(self.device)
        layer.none = nn.Parameter(torch.ones(4, 0, device=self.device))
        layer.rows = nn.Parameter(torch.ones(0, 4, device=self.device))
        expected = layer(self.rows(4))
        fully_shard(layer, mesh=world_mesh(2))
        self.assertEqual(layer(self.rows(4)), expected)
        shapes = [tuple(each.shape) for each in (layer.none, layer.rows)]
        self.assertEqual(shapes, [(4, 0), (0, 4)], "while gathered")
        layer(self.rows(4)).sum().backward()
        self.assertEqual(
            layer.bias.grad.full_tensor(), 3 * torch.ones_like(expected[0])
        )


class TestFullyShardForwardDerivatives(ArgumentsTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_losses_of_outputs_and_their_derivatives(self):
        """A loss may use outputs within ``torch.func.jvp``, their derivatives, or both.
        Backward gathers the parameters that it needs.
        """
        for uses_output, uses_derivative in (
            (True, False),
            (False, True),
            (True, True),
        ):
            model = fully_shard_units(self, reshard_after_forward=True)
            reference = ThreeUnits().to(self.device)
            for step in range(2):
                rows, tangent = self.rows(4, step), self.rows(4, step + 5)
                for each in (model, reference):
                    each.zero_grad()
                    out, derivative = torch.func.jvp(each, (rows,), (tangent,))
                    loss = 0.0
                    if uses_output:
                        loss = loss + out.square().sum()
                    if uses_derivative:
                        loss = loss + derivative.square().sum()
                    loss.backward()
                average_gradients(reference)
                check_sharded_parity(self, reference, model)


class TestFullyShardBothGroups(ArgumentsTest):
    @property
    def world_size(self):
        return 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_reshard_after_forward(self):
        """The setting is for the parameters on all meshes."""
        mesh = init_device_mesh(
            self.device.type, (2, 2), mesh_dim_names=("expert", "shard")
        )
        info = FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)

        def place(parameter):
            return ShardPlacementResult(Shard(0), info) if parameter.ndim == 1 else None

        for asked, expected in (
            (None, "sharded"),
            (True, "sharded"),
            (2, "sharded"),
            (False, "whole"),
        ):
            model = nn.Sequential(nn.Linear(4, 4)).to(self.device)
            fully_shard(
                model[0],
                mesh=world_mesh(4),
                shard_placement_fn=place,
                reshard_after_forward=asked,
            )
            fully_shard(model, mesh=world_mesh(4))
            loss = model(self.rows(4)).sum()
            found = self.kinds(*model.parameters())
            self.assertEqual(found, [expected] * 2, f"after forward with {asked}")
            loss.backward()
            found = self.kinds(*model.parameters())
            self.assertEqual(found, ["sharded"] * 2, f"after backward with {asked}")


class TestFullyShardSharedParameters(ArgumentsTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_name_of_a_parameter_that_is_shared(self):
        """The error names the second place of the parameter, by its path."""
        for owner, name in (("one", "weight"), ("one", "bias"), ("", "weight")):
            model = nn.Module()
            model.one, model.two = (nn.Linear(4, 4).to(self.device) for _ in range(2))
            model.weight = nn.Parameter(torch.ones(4, 4, device=self.device))
            parameter = getattr(model.get_submodule(owner), name)
            setattr(model.two, name, parameter)
            model.forward = lambda x, model=model: model.two(model.one(x))
            for module in (model.one, model.two, model):
                fully_shard(module, mesh=world_mesh(2))
            with self.assertRaisesRegex(ValueError, f"'two.{name}' is shared with a"):
                model(self.rows(4))


if __name__ == "__main__":
    run_tests()
