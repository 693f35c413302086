# Owner(s): ["oncall: distributed"]
"""Training as in ``test_fully_shard_training``, under options and in orders of calls that are used less.

The reference holds the whole model on every rank. Data differs by rank and step: a gradient that comes from one rank
only, is divided by the wrong number or lands in another shard shows in the first step; state that survives from one
step to the next shows in the later ones.
"""

import itertools
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.tensor import DTensor, Shard

from torch_ext.testing._internal._fsdp.beside import BesideTest, average_gradients, whole
from torch_ext.testing._internal._fsdp.four_ranks import mesh_of
from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    DoubleLinear,
    leave_out_without_accelerator,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


def mlps(count=3, width=5):
    """Widths that no number of ranks divides, so that every parameter is padded."""
    torch.manual_seed(0)
    return nn.Sequential(*(MLP(width, dim_multiplier=multiplier) for multiplier in (2, 3, 2)[:count]))


def shard_all(model, **options):
    """Shard each child, then the root with what is left."""
    for child in model.children():
        fully_shard(child, **options)
    return fully_shard(model, **options)


class TestFullyShardForwardInputs(BesideTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_root_move_forward_input_to_device(self):
        """Inputs on the host reach the module on the device, also from within containers."""
        seen = []

        class Adds(nn.Module):
            def forward(self, x, pair, named):
                seen.extend([x, *pair, named["y"]])
                return x + pair[0] + pair[1] + named["y"]

        model = fully_shard(Adds().to(self.device), mesh=mesh_of(4))
        output = model(torch.ones(3), (torch.ones(3), torch.ones(3)), named={"y": torch.ones(3)})
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
        fully_shard(model, mesh=mesh_of(4))
        for each in (model, reference):
            each().sum().backward()
        self.check_shards(reference, model)


class TestFullyShardRegisteredParams(BesideTest):
    """Which parameters a module shows between the phases of a step."""

    def _check_kind(self, what, parameters, sharded):
        kinds = [isinstance(parameter, DTensor) for parameter in parameters]
        self.check_equal(f"{what} are sharded", kinds, [sharded] * len(kinds))
        self.assertGreater(len(kinds), 0)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_param_registration_after_forward(self):
        self.run_subtests({"reshard_after_forward": [True, False, 2, None]}, self._test_after_forward)

    def _test_after_forward(self, reshard_after_forward):
        model = mlps()
        model.append(nn.Linear(5, 5))
        reference = self.replica(model)
        model.to(self.device)
        for child in list(model)[:3]:
            fully_shard(child, reshard_after_forward=reshard_after_forward)
        fully_shard(model, reshard_after_forward=reshard_after_forward)
        root = list(model[3].parameters())
        self._check_kind("parameters at first", model.parameters(), True)
        model(self.rows(5))
        inner = [parameter for child in list(model)[:3] for parameter in child.parameters()]
        self._check_kind("inner parameters", inner, reshard_after_forward is not False)
        # By default the root is needed first in backward and stays gathered.
        stays = reshard_after_forward in (None, False)
        self._check_kind("root parameters", model[3].parameters(), not stays)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._check_kind("parameters after reshard", model.parameters(), True)
        self.assertEqual([id(each) for each in model[3].parameters()], [id(each) for each in root])
        self.check_shards(reference, model)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_param_registration_after_backward(self):
        for reshard_after_forward in (True, False, 2):
            model = shard_all(mlps().to(self.device), reshard_after_forward=reshard_after_forward)
            model(self.rows(5)).sum().backward()
            self._check_kind(f"parameters with {reshard_after_forward}", model.parameters(), True)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_reshard_to_fewer_ranks_holds_larger_shards(self):
        """With ``reshard_after_forward=2`` a pair of ranks holds the whole between forward and backward."""
        model = nn.Linear(4, 8, bias=False).to(self.device)
        fully_shard(model, reshard_after_forward=2)
        rows = []
        rows.append(model.weight.to_local().shape[0])
        loss = model(self.rows(4)).sum()
        rows.append(model.weight.to_local().shape[0])
        loss.backward()
        rows.append(model.weight.to_local().shape[0])
        self.assertEqual(rows, [2, 4, 2])


class TestFullyShardCastAfterInit(BesideTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_to_float64_after_init(self):
        model = mlps()
        reference = self.replica(model).double()
        shard_all(model.to(self.device)).double()
        for parameter in model.parameters():
            self.assertEqual((parameter.dtype, parameter.to_local().dtype), (torch.float64, torch.float64))
            self.assertEqual(parameter._spec.tensor_meta.dtype, torch.float64)
        self.train_beside(
            reference, model, 5, loss_of=lambda module, rows: module(rows.double()).square().sum(), atol=0, rtol=1e-12
        )


class TestFullyShard1DTrainingCore(BesideTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_single_group_shard_dim0(self):
        """Rows that divide evenly, unevenly, and so few that ranks hold none."""
        self.run_subtests({"widths": [(4, 8, 4), (5, 7, 3), (6, 2, 1)]}, self._test_single_group)

    def _test_single_group(self, widths, shard_placement_fn=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(widths[0], widths[1]), nn.Tanh(), nn.Linear(widths[1], widths[2]))
        reference = self.replica(model)
        fully_shard(model.to(self.device), shard_placement_fn=shard_placement_fn)
        self.train_beside(reference, model, widths[0])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_single_group_shard_largest_dim(self):
        placements = set()

        def largest(parameter):
            placements.add(dim := parameter.shape.index(max(parameter.shape)))
            return Shard(dim)

        self._test_single_group((16, 8, 4), largest)
        self.assertEqual(placements, {0, 1})

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_multi_group(self):
        self.run_subtests(
            {"reshard_after_forward": [True, False, 2], "mesh_shape": [(4,), (2, 2)], "prefetch": [True]},
            self._test_multi_group,
        )

    def _test_multi_group(self, reshard_after_forward, mesh_shape, prefetch):
        if reshard_after_forward == 2 and mesh_shape == (2, 2):
            reshard_after_forward = 1  # of two shards, the smaller divisor
        model = mlps()
        reference = self.replica(model)
        shard_all(model.to(self.device), mesh=mesh_of(*mesh_shape), reshard_after_forward=reshard_after_forward)
        if prefetch:
            for earlier, later in itertools.pairwise(model):
                earlier.set_modules_to_forward_prefetch([later])
                later.set_modules_to_backward_prefetch([earlier])
        self.train_beside(reference, model, 5)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_multi_group_cpu_offload(self):
        """Parameters, gradients and optimizer state stay on the host; compute does not."""
        self.run_subtests({"pin_memory": [True, False], "reshard_after_forward": [True, False]}, self._test_cpu_offload)

    def _test_cpu_offload(self, pin_memory, reshard_after_forward):
        leave_out_without_accelerator("CPUOffloadPolicy needs an accelerator to offload from")
        model = mlps()
        reference = self.replica(model)
        policy = CPUOffloadPolicy(pin_memory=pin_memory)
        shard_all(model, mesh=mesh_of(4), reshard_after_forward=reshard_after_forward, offload_policy=policy)
        computed_on = set()
        for module in model.modules():
            module.register_forward_hook(lambda _, args, output: computed_on.add(output.device))

        def check(reference, model):
            for name, parameter in model.named_parameters():
                self.assertFalse(torch.device(parameter.device).type == self.device.type, name)
                self.check_equal(name, parameter.to_local().to(self.device), self._shard(reference, name))
                if parameter.grad is not None:
                    expected = self._shard(reference, name, of_gradient=True)
                    self.check_equal(f"{name}.grad", parameter.grad.to_local().to(self.device), expected)

        self.train_beside(reference, model, 5, check=check)
        self.assertEqual(computed_on, {self.device})

    def _shard(self, reference, name, *, of_gradient=False):
        """This rank's rows, cut without help from DTensor."""
        tensor = reference.get_parameter(name)
        tensor = tensor.grad if of_gradient else tensor.detach()
        size = -(-len(tensor) // self.world_size)
        return tensor[self.rank * size : (self.rank + 1) * size]

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_offload_policy_default_changes_nothing(self):
        model = mlps()
        reference = self.replica(model)
        shard_all(model.to(self.device), offload_policy=OffloadPolicy())
        self.train_beside(reference, model, 5, steps=1)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_non_root_forward_backward(self):
        """A child may run by itself once the root has run, and its gradients add up with those of the root's run."""
        model = mlps()
        reference = self.replica(model)
        shard_all(model.to(self.device))
        for each in (reference, model):
            each(self.rows(5, 1)).sum().backward()
            each[0](self.rows(5, 2)).sum().backward()
            each(self.rows(5, 3)).sum().backward()
        average_gradients(reference)
        self.check_shards(reference, model)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_child_that_runs_first_is_a_root_for_good(self):
        model = shard_all(mlps().to(self.device))
        model[0](self.rows(5)).sum().backward()
        with self.assertRaisesRegex(RuntimeError, "already been lazily initialized for 0"):
            model(self.rows(5))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_multi_forward_module(self):
        """A module that runs twice in forward gathers the sum of both gradients."""

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)

            def forward(self, x):
                return self.outer(self.inner(x) * self.inner(x + 1))

        self.run_subtests({"reshard_after_forward": [True, False]}, self._test_multi_forward, Twice)

    def _test_multi_forward(self, make_model, reshard_after_forward):
        model = make_model()
        reference = self.replica(model)
        shard_all(model.to(self.device), reshard_after_forward=reshard_after_forward)
        self.train_beside(reference, model, 5)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_explicit_prefetching_of_modules_out_of_order(self):
        model = mlps()
        reference = self.replica(model)
        shard_all(model.to(self.device))
        model[0].set_modules_to_forward_prefetch([model[2], model[1]])
        model[2].set_modules_to_backward_prefetch([model[0]])
        self.train_beside(reference, model, 5)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_post_optim_event(self):
        """The next forward waits for the event that says parameters are ready, once."""
        leave_out_without_accelerator("events need an accelerator")
        model = mlps()
        reference = self.replica(model)
        shard_all(model.to(self.device))
        optimizer = self.optimizer(model)
        optimizer.register_step_post_hook(
            lambda *_: model.set_post_optim_event(torch.accelerator.current_stream().record_event())
        )
        reference_optimizer = self.optimizer(reference)
        for step in range(3):
            for each in (reference, model):
                each(self.rows(5, step)).sum().backward()
            average_gradients(reference)
            self.check_shards(reference, model)
            for each in (optimizer, reference_optimizer):
                each.step()
                each.zero_grad()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_unused_forward_output(self):
        """A module whose output the loss leaves out in some steps stalls no rank and gets no gradient."""

        class Halves(DoubleLinear):
            def forward(self, x):
                first, second = self.lin1(x), self.lin2(x)
                return torch.cat([first, second.detach() if self.drop_second else second])

        torch.manual_seed(0)
        model = Halves(5)
        reference = self.replica(model)
        shard_all(model.to(self.device))
        for drop in (True, False, True):
            for each in (reference, model):
                each.drop_second = drop
                each.zero_grad()
                each(self.rows(5)).square().sum().backward()
            average_gradients(reference)
            self.check_shards(reference, model)
            self.assertEqual(model.lin2.weight.grad is None, drop)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_sharding_below_a_module_that_is_not_sharded(self):
        """Parameters outside stay plain: averaging their gradients is up to the caller."""
        model = mlps()
        reference = self.replica(model)
        model.to(self.device)
        fully_shard(model[1])
        for each in (reference, model):
            each(self.rows(5)).square().sum().backward()
        self.assertEqual(model[0].in_proj.weight.grad, reference[0].in_proj.weight.grad)
        average_gradients(reference)
        self.check_shards(reference[1], model[1])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_list_of_modules_is_one_group(self):
        model = mlps()
        reference = self.replica(model)
        fully_shard([model.to(self.device)[0], model[1]])
        fully_shard(model)
        self.train_beside(reference, model, 5)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_ignored_params(self):
        model = mlps()
        reference = self.replica(model)
        model.to(self.device)
        ignored = set(model[1].parameters())
        fully_shard(model, ignored_params=ignored)
        for each in (reference, model):
            each(self.rows(5)).square().sum().backward()
        self.assertEqual(set(model[1].parameters()), ignored)
        self.assertEqual(model[1].in_proj.weight.grad, reference[1].in_proj.weight.grad)
        average_gradients(reference)
        self.check_shards(reference[0], model[0])


class TestFullyShardGradientAccumulation(BesideTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_gradient_accumulation(self):
        """Microbatches with the reduction in all of them, in the last, or (hybrid) the all-reduce in the last."""
        self.run_subtests(
            {
                "mode": ["every", "no_sync", "no_all_reduce"],
                "mesh_shape": [(4,), (2, 2)],
                "reshard_after_forward": [True, False],
                "reshard_after_backward": [True, False],
            },
            self._test_accumulation,
        )

    def _test_accumulation(self, mode, mesh_shape, reshard_after_forward, reshard_after_backward):
        model = mlps(2)
        reference = self.replica(model)
        shard_all(model.to(self.device), mesh=mesh_of(*mesh_shape), reshard_after_forward=reshard_after_forward)
        optimizers = [self.optimizer(each) for each in (reference, model)]
        for step in range(2):
            for micro in range(3):
                is_last = micro == 2
                if mode == "no_sync":
                    model.set_requires_gradient_sync(is_last)
                elif mode == "no_all_reduce":
                    model.set_requires_all_reduce(is_last)
                model.set_is_last_backward(is_last)
                model.set_reshard_after_backward(reshard_after_backward or is_last)
                for each in (reference, model):
                    each(self.rows(5, 10 * step + micro)).square().sum().backward()
                if mode == "no_sync" and not is_last and reshard_after_backward:
                    self.assertIsNone(next(iter(model.parameters())).grad)
            average_gradients(reference)
            self.check_shards(reference, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_1f1b_microbatching(self):
        """Several forwards before the backwards, as a pipeline has them."""
        model = mlps(2)
        reference = self.replica(model)
        shard_all(model.to(self.device), reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        model.set_is_last_backward(False)
        for each in (reference, model):
            losses = [each(self.rows(5, micro)).square().sum() for micro in range(3)]
            for micro, loss in enumerate(losses):
                if each is model and micro == 2:
                    model.set_is_last_backward(True)
                    model.set_reshard_after_backward(True)
                loss.backward()
        average_gradients(reference)
        self.check_shards(reference, model)


class TestFullyShard1DTrainingCompose(BesideTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_with_activation_checkpointing(self):
        """Checkpointing outside or inside the sharded module, and sharded modules within a checkpointed one."""
        self.run_subtests(
            {"reshard_after_forward": [True, False], "where": ["same", "inside", "around"]}, self._test_checkpointing
        )

    def _test_checkpointing(self, reshard_after_forward, where):
        model = mlps()
        reference = self.replica(model)
        runs = []
        model.to(self.device)
        for mlp in model:
            # Before the layer: what is run again stops as soon as it has all that backward needs.
            mlp.in_proj.register_forward_pre_hook(lambda *_: runs.append(None))
            checkpoint(mlp.in_proj if where == "inside" else mlp)
            if where == "around":
                fully_shard(mlp.in_proj, reshard_after_forward=reshard_after_forward)
            else:
                fully_shard(mlp, reshard_after_forward=reshard_after_forward)
        fully_shard(model, reshard_after_forward=reshard_after_forward)
        self.train_beside(reference, model, 5, steps=2)
        self.check_equal("forwards of three layers in two steps, each run again", len(runs), 12)


class TestFullyShardSharedParams(BesideTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_with_shared_params(self):
        self.run_subtests({"reshard_after_forward": [True, False], "use_checkpoint": [False, True]}, self._test_shared)

    def _test_shared(self, reshard_after_forward, use_checkpoint):
        torch.manual_seed(0)

        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(7, 6)
                self.body = MLP(6)
                self.head = nn.Linear(6, 7, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, tokens):
                return self.head(self.body(self.embed(tokens)))

        model = Tied()
        reference = self.replica(model)
        model.to(self.device)
        if use_checkpoint:
            checkpoint(model.body)
        fully_shard(model.body, reshard_after_forward=reshard_after_forward)
        fully_shard(model, reshard_after_forward=reshard_after_forward)

        def loss_of(module, rows):
            tokens = (rows.abs() * 10).long() % 7
            return F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())

        self.train_beside(reference, model, 4, loss_of=loss_of)
        self.assertIs(model.head.weight, model.embed.weight)


class TestFullyShardHSDPTraining(BesideTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_hsdp(self):
        self.run_subtests(
            {"reshard_after_forward": [True, False], "use_checkpoint": [False, True]}, self._test_train_parity_hsdp
        )

    def _test_train_parity_hsdp(self, reshard_after_forward, use_checkpoint):
        model = mlps()
        reference = self.replica(model)
        model.to(self.device)
        for child in model:
            if use_checkpoint:
                checkpoint(child)
        shard_all(model, mesh=mesh_of(2, 2), reshard_after_forward=reshard_after_forward)
        self.train_beside(reference, model, 5)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_replicas_stay_equal(self):
        """After steps on different data, ranks that hold the same shard hold the same bits."""
        model = shard_all(mlps().to(self.device), mesh=mesh_of(2, 2))
        optimizer = self.optimizer(model)
        for step in range(3):
            model(self.rows(5, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        local = torch.cat([parameter.to_local().detach().flatten() for parameter in model.parameters()])
        self.assertNotEqual(whole(model[0].in_proj.weight), mlps()[0].in_proj.weight.detach().to(self.device))
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, local.cpu())
        self.assertEqual(everyone[self.rank], everyone[(self.rank + 2) % 4], atol=0, rtol=0)


class TestFullyShardCustomForwardMethod(BesideTest):
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
    def test_unregistered_method_finds_its_parameters_sharded(self):
        model = self.Encoder()
        fully_shard(model.to(self.device))
        with self.assertRaisesRegex(RuntimeError, "mixed torch.Tensor and DTensor"):
            model.encode(self.rows(5))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_register_fsdp_forward_method_of_no_method_is_refused(self):
        model = fully_shard(self.Encoder().to(self.device))
        with self.assertRaisesRegex(ValueError, "nothing_of_that_name"):
            register_fsdp_forward_method(model, "nothing_of_that_name")


class TestFullyShardShareCommContext(BesideTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_share_comm_context(self):
        """Roots that share streams train as ever, and do share them."""
        torch.manual_seed(0)
        stages = nn.Sequential(MLP(5), MLP(5))
        reference = self.replica(stages)
        for stage in stages.to(self.device):
            fully_shard(stage)
        share_comm_ctx(list(stages))
        self.train_beside(reference, stages, 5)
        contexts = [stage._get_fsdp_state()._comm_ctx for stage in stages]
        self.assertIs(contexts[0], contexts[1])


class TestFullyShardHooks(BesideTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_post_accumulate_grad_hook_sees_the_sharded_gradient(self):
        model = mlps(1)
        reference = self.replica(model)
        fully_shard(model.to(self.device))
        seen = {}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda each, name=name: seen.update({name: whole(each.grad)}))
        for each in (reference, model):
            each(self.rows(5)).square().sum().backward()
        average_gradients(reference)
        self.assertEqual(seen, {name: each.grad for name, each in reference.named_parameters()})


if __name__ == "__main__":
    run_tests()
