# Owner(s): ["oncall: distributed"]
"""Edges of FSDP2's steps: works of custom collectives, hooks around a module, groups of
which a part ran or failed, shards that are replaced, and settings that meet.
"""

import contextlib
import copy
import gc
import io
import sys
import types
import weakref

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    CollectiveLog,
    FSDPTest,
    StepLog,
    ThreeUnits,
    average_gradients,
    check_sharded_parity,
    check_train_parity,
    fully_shard_units,
    shard_units,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class EdgesTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    def step(self, model, step=0):
        model(self.rows(4, step)).square().sum().backward()

    def kinds(self, *modules):
        return [
            "sharded" if isinstance(module.weight, DTensor) else "gathered"
            for module in modules
        ]


class Work(dist.distributed_c10d.Work):
    """Counts how often it is waited for, and then waits for ``work``."""

    def __init__(self, work):
        super().__init__()
        self.work, self.waits = work, 0

    def wait(self, timeout=None):
        self.waits += 1
        return self.work.wait()


class AllGather:
    """Gathers asynchronously. Notes the works that it returns."""

    def __init__(self):
        self.works = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        work = dist.all_gather_single(
            output_tensor, input_tensor, group=group, async_op=True
        )
        self.works.append(Work(work))
        return self.works[-1]


class Ordered(nn.Module):
    """Layers that run in the order ``order``. Shapes: ``(*, 4)`` to itself."""

    def __init__(self, count, order):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count))
        self.order = order

    def forward(self, x):
        for index in self.order:
            x = self.layers[index](x)
        return x


class TestFullyShardWorks(EdgesTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_works_of_custom_all_gathers(self):
        """Each work is waited for once: before the parameters are used, else when the
        backward ends or the step is given up.
        """
        model, gather = Ordered(2, [0, 1]).to(self.device), AllGather()
        reference = copy.deepcopy(model)
        for each in (*model.layers, model):
            fully_shard(each, mesh=world_mesh(2))
        model.layers[0].set_custom_all_gather(gather)

        def check(number, what):
            found = [work.waits for work in gather.works]
            self.assertEqual(found, [1] * number, f"waits for works: {what}")
            gather.works.clear()

        check_train_parity(self, reference, model, [self.rows(4)])
        check(2, "before forward and before backward")
        model.order = [1]
        model.layers[1].set_modules_to_backward_prefetch([model.layers[0]])
        self.step(model)
        check(1, "prefetched, and not reached by backward")
        model.layers[0].unshard(async_op=True)
        model.reset_iter_state()
        check(1, "given up")


class TestFullyShardHooks(EdgesTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_hooks_from_before_see_whole_parameters(self):
        """Hooks that a module had before it was sharded run with its parameters
        gathered and its output not yet cast, those of later with the module's result.
        """
        policy = MixedPrecisionPolicy(torch.float32, output_dtype=torch.float64)
        for groups in (([0], [1]), ([0, 1],)):
            model, seen = Ordered(2, [0, 1]).to(self.device), []

            def note(module, *args, seen=seen):
                output = args[1].dtype if len(args) == 2 else None
                seen.append((*self.kinds(module), output))

            for layer in model.layers:
                layer.register_forward_pre_hook(note)
                layer.register_forward_hook(note)
            for group in groups:
                layers = [model.layers[index] for index in group]
                fully_shard(layers, mesh=world_mesh(2), mp_policy=policy)
            fully_shard(model, mesh=world_mesh(2))
            late = []
            model.layers[1].register_forward_hook(
                lambda module, _, output, late=late: late.append(
                    (*self.kinds(module), output.dtype)
                )
            )
            model(self.rows(4))
            expected = [("gathered", None), ("gathered", torch.float32)] * 2
            self.assertEqual(seen, expected, f"hooks from before, groups {groups}")
            self.assertEqual(late, [("sharded", torch.float64)], "hooks of later")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_handles_of_the_hooks(self):
        """A state has the handles of its hooks: tools take them away."""
        for count in (1, 2):
            model = Ordered(2, [0, 1]).to(self.device)
            fully_shard([*model.layers][:count], mesh=world_mesh(2))
            state = fully_shard.state(model.layers[0])
            with CollectiveLog() as log:
                state._pre_forward_hook_handle.remove()
                state._post_forward_hook_handle.remove()
                layer = model.layers[count - 1]
                layer.register_forward_pre_hook(lambda *_: (torch.ones(4),))
                with contextlib.suppress(RuntimeError):
                    layer(self.rows(4))
            self.assertEqual(log.calls, [], f"collectives of {count} without hooks")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_without_gradients_tensors_pass_as_they_are(self):
        """A module gets the tensors of its caller, and a tensor that it returns does
        not call FSDP in a later backward.
        """

        class Passes(nn.Linear):
            def forward(self, x):
                self.got = x
                return x

        model = fully_shard(Passes(4, 4).to(self.device), mesh=world_mesh(2))
        rows = self.rows(4).requires_grad_()
        with torch.no_grad():
            out = model(rows)
        self.assertIs(model.got, rows)
        self.assertIs(out, rows)
        model.reshard()
        with CollectiveLog() as log:
            (out * 2).sum().backward()
        self.assertEqual(log.calls, [], "collectives of the caller's backward")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_recomputation_casts_as_forward_does(self):
        policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
        model, seen = model.to(self.device), []
        layer = model[0]
        checkpoint(layer)
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        fully_shard(layer, mesh=world_mesh(2), mp_policy=policy)
        fully_shard(model, mesh=world_mesh(2))
        layer.register_forward_hook(lambda *args: seen.append(args[2].dtype))
        with set_checkpoint_early_stop(False):
            self.step(model)
        self.assertIsNotNone(layer.weight.grad)
        expected = [torch.bfloat16, torch.float64] * 2
        self.assertEqual(seen, expected, "types in forward and in recomputation")


class TestFullyShardParts(EdgesTest):
    """Groups of modules of which a part runs, or fails."""

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_output_of_a_model_that_ran_parts_of_groups(self):
        """The first group's type counts, as it is the outer one. All groups are freed,
        whatever runs between them.
        """
        model = Ordered(5, [0, 2, 3]).to(self.device)
        first, second = [*model.layers][:2], [*model.layers][3:]
        for modules, dtype in ((first, torch.float64), (second, torch.float16)):
            policy = MixedPrecisionPolicy(torch.float32, output_dtype=dtype)
            fully_shard(modules, mesh=world_mesh(2), mp_policy=policy)
        policy = MixedPrecisionPolicy(torch.float32)
        for module in (model.layers[2], model):
            fully_shard(module, mesh=world_mesh(2), mp_policy=policy)
        for step in range(2):
            with self.assertLogs("torch.distributed.fsdp", "DEBUG") as logs:
                out = model(self.rows(4))
            lines = [record.getMessage() for record in logs.records]
            completed = lines.count("FSDP::force_complete_post_forward")
            self.assertEqual(completed, 2, f"groups in the log of step {step}")
            self.assertEqual(out.dtype, torch.float64, f"type in step {step}")
            found = self.kinds(*model.layers)
            self.assertEqual(found, ["sharded"] * 5, f"after forward {step}")
            out.sum().backward()
            for index, layer in enumerate(model.layers):
                self.assertEqual(
                    layer.weight.grad is not None, index in model.order, f"{index}"
                )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_forward_whose_output_is_dropped(self):
        """It leaves nothing behind, also for two backwards of a later forward."""
        for resets in (False, True):
            model = fully_shard_units(self, reshard_after_forward=True)
            reference = ThreeUnits().to(self.device)
            for each in (model, reference):
                each(self.rows(4))
                if not resets:
                    self.step(each)
                elif each is model:
                    each.reset_iter_state()
                each.zero_grad()
                loss = each(self.rows(4)).square().sum()
                loss.backward(retain_graph=True)
                loss.backward()
            average_gradients(reference)
            check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_group_whose_last_module_fails_is_freed(self):
        model = Ordered(2, [0, 1]).to(self.device)
        fully_shard([*model.layers], mesh=world_mesh(2))
        fully_shard(model, mesh=world_mesh(2))

        def stop(*_):
            raise KeyError

        model.layers[1].register_forward_hook(stop)
        with self.assertRaises(KeyError):
            model(self.rows(4))
        self.assertEqual(self.kinds(*model.layers), ["sharded"] * 2, "after the error")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_group_prefetches_once(self):
        """Modules that follow the first of a group prefetch nothing again."""
        model = Ordered(3, [0, 1, 2]).to(self.device)
        fully_shard([model.layers[0], model.layers[2]], mesh=world_mesh(2))
        for module in (model.layers[1], model):
            fully_shard(module, mesh=world_mesh(2))
        model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
        with torch.no_grad(), CollectiveLog() as log:
            model(self.rows(4))
        self.assertEqual([call.numel for call in log.calls], [32, 16], "elements")
        self.assertEqual(self.kinds(model.layers[1]), ["sharded"])


class TestFullyShardSettingsThatMeet(EdgesTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_prefetch_of_a_module_without_parameters_in_backward(self):
        """It is prefetched in forward alone."""
        model = ThreeUnits().to(self.device)
        log = StepLog(model)
        shard_units(model, world_mesh(2))
        model.second.set_unshard_in_backward(False)
        model.set_modules_to_forward_prefetch([model.second])
        model.set_modules_to_backward_prefetch([model.second, model.first])
        with log.of("forward"):
            out = model(self.rows(4))
        with log.of("backward"), contextlib.suppress(RuntimeError):
            out.sum().backward()
        lines = [line.strip() for line in log.lines]
        self.assertLess(
            lines.index("all-gather second"), lines.index("forward first"), log.text()
        )
        gathered = lines.count("all-gather first"), lines.count("all-gather second")
        self.assertEqual(gathered, (2, 1), log.text())

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_microbatches_that_keep_parameters(self):
        """Parameters stay gathered after a backward, whether or not it reduces."""
        for syncs in (True, False):
            for keeps in (True, False):
                model = fully_shard_units(self)
                model.set_requires_gradient_sync(syncs)
                model.set_reshard_after_backward(not keeps)
                self.step(model)
                expected = ["gathered" if keeps else "sharded"] * 3
                units = (model.first, model.second, model.last)
                self.assertEqual(self.kinds(*units), expected, f"{syncs=}, {keeps=}")


class TestFullyShardReplacedShards(EdgesTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_assigned_tensors_are_used_as_they_are(self):
        """Shards with as many rows as on other ranks are not copied, also by
        conversions that do nothing; a reshard does not undo an assignment.
        """
        model = fully_shard_units(self)
        shards = {name: each._local_tensor for name, each in model.named_parameters()}
        self.step(model)
        for name, each in model.named_parameters():
            self.assertIs(each._local_tensor, shards[name], f"shard of {name}")
            self.assertFalse(each.grad.requires_grad, f"gradient of {name}")
        state = {name: 2 * each.detach() for name, each in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        self.step(model)
        for name, each in model.named_parameters():
            found, expected = each.to_local(), state[name].to_local()
            self.assertEqual(found.data_ptr(), expected.data_ptr(), name)
        model = fully_shard_units(self)
        model.last.weight = nn.Parameter(2 * model.last.weight.detach())
        model.reshard()
        reference = ThreeUnits().to(self.device)
        reference.last.weight.data.mul_(2)
        self.assertEqual(model(self.rows(4)), reference(self.rows(4)))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_state_of_before_the_first_step_follows_training(self):
        """Also of parameters whose shards differ in size."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).to(self.device)
        fully_shard(model, mesh=world_mesh(2))
        state = model.state_dict()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            self.step(model, step)
            optim.step()
        for name, each in model.state_dict().items():
            self.assertEqual(state[name].to_local(), each.to_local(), name)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_model_from_meta_with_ranks_without_rows(self):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        fully_shard(model, mesh=world_mesh(2))
        model.to_empty(device=self.device)
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).to(self.device)
        with torch.no_grad():
            for part, whole in zip(
                model.parameters(), reference.parameters(), strict=True
            ):
                chunk = [*whole.chunk(2), whole[:0]][self.rank]
                part.to_local().copy_(chunk)
        self.assertEqual(model(self.rows(4)), reference(self.rows(4)))
        self.step(model)
        self.step(reference)
        average_gradients(reference)
        check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_conversions_that_swap_tensors(self):
        """They keep the parameters that FSDP knows."""
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model = fully_shard_units(self)
            parameters = [*model.parameters()]
            reference = ThreeUnits().to(self.device)
            for each in (model, reference):
                each.double()
            for one, two in zip(parameters, model.parameters(), strict=True):
                self.assertIs(one, two)
            rows = self.rows(4).double()
            self.assertEqual(model(rows), reference(rows))
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_offloaded_model_on_meta_is_refused(self):
        with torch.device("meta"):
            model = nn.Linear(4, 4)
        fully_shard(model, mesh=world_mesh(2), offload_policy=CPUOffloadPolicy())
        with self.assertRaisesRegex(RuntimeError, "still on meta device: .'weight'"):
            model(self.rows(4))


class Metadata:
    """Something that an extension passes from one hook to the other."""


class TestFullyShardExtensionData(EdgesTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_metadata_is_released(self):
        """FSDP keeps what a hook passes on until the all-gather is over, no longer."""
        model, passed = nn.Linear(4, 4, bias=False).to(self.device), []
        fully_shard(model, mesh=world_mesh(2))
        shard = model.weight._local_tensor

        def before(shard, mesh):
            metadata = Metadata()
            passed.append(weakref.ref(metadata))
            return (shard,), metadata

        def after(shard, outputs, metadata, dtype, *, out=None):
            self.assertIs(metadata, passed[-1]())
            return None if out is not None else (outputs[0], outputs)

        shard.fsdp_pre_all_gather = types.MethodType(before, shard)
        shard.fsdp_post_all_gather = types.MethodType(after, shard)
        for number in (1, 2):
            model.unshard()
            gc.collect()
            found = [each() for each in passed]
            self.assertEqual(found, [None] * number, "metadata that is kept")
            model.reshard()


class TestFullyShardMessages(EdgesTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_broken_invariants_are_printed(self):
        """With the rank, as other ranks may hang, and with the stack."""
        model = fully_shard_units(self)
        out, err = io.StringIO(), io.StringIO()
        parameter = fully_shard.state(model.first)._fsdp_param_group.fsdp_params[0]
        model.first.unshard()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            self.assertRaisesRegex(AssertionError, "Expects to be in one of"),
        ):
            parameter.all_gather_inputs  # noqa: B018
        self.assertRegex(out.getvalue(), rf"\[Rank {self.rank}\] Expects to be in one")
        self.assertIn("all_gather_inputs", err.getvalue(), "stack")


class TestFullyShardOnTheHost(EdgesTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_training_on_the_host(self):
        """The device of the mesh counts, also where there is an accelerator."""
        host, ranks = torch.device("cpu"), torch.arange(2)
        both = dist.new_group(backend=dist.Backend.GLOO)
        own, _ = dist.new_subgroups(1, backend=dist.Backend.GLOO)
        for groups, sizes, names in (
            ([both], (2,), ("shard",)),
            ([own, both], (1, 2), ("replicate", "shard")),
            ([both, own], (2, 1), ("replicate", "shard")),
        ):
            mesh = DeviceMesh.from_group(
                groups if len(sizes) > 1 else both,
                host.type,
                mesh=ranks.view(sizes),
                mesh_dim_names=names,
            )
            model, reference = shard_units(ThreeUnits(), mesh), ThreeUnits()
            self.assertEqual({each.device for each in model.parameters()}, {host})
            for step in range(2):
                rows = self.rows(4, step).to(host)
                for each in (model, reference):
                    each.zero_grad()
                    each(rows).square().sum().backward()
                for parameter in reference.parameters():
                    dist.all_reduce(parameter.grad, group=both)
                    parameter.grad /= 2
                check_sharded_parity(self, reference, model)


class Spread(nn.Linear):
    """Returns complex numbers, their absolute values and their signs."""

    def forward(self, x):
        out = super().forward(x)
        return torch.complex(out, 2 * out), out.square(), out.sign().int()


class TestFullyShardTransforms(EdgesTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_second_derivatives(self):
        """Products with the Hessian are those of the model, by forward over reverse."""
        model, reference = (
            fully_shard_units(self, reshard_after_forward=True),
            ThreeUnits().to(self.device),
        )
        rows, tangent = self.rows(4), self.rows(4, 1)
        found = []
        for each in (model, reference):

            def loss(x, each=each):
                return each(x).pow(4).sum()

            found.append(torch.func.jvp(torch.func.grad(loss), (rows,), (tangent,)))
        self.assertEqual(*found, "gradient and product")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_outputs_of_all_types(self):
        model = Spread(4, 4).to(self.device)
        reference = copy.deepcopy(model)
        inner = nn.Sequential(model)
        for module in (model, inner):
            fully_shard(module, mesh=world_mesh(2), reshard_after_forward=True)
        rows, found = self.rows(4), []
        for each in (inner, reference):

            def loss(x, each=each, which=0):
                if each is inner:
                    model.unshard(async_op=True)
                found = each(x)
                self.assertEqual(found[2].dtype, torch.int32)
                return found[which].abs().square().sum()

            for which in (0, 1):
                grad = torch.func.grad(lambda x, which=which: loss(x, which=which))
                found.append(grad(rows))
        self.assertEqual(found[:2], found[2:], "derivatives")


if __name__ == "__main__":
    run_tests()
