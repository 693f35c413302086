# Owner(s): ["oncall: distributed"]
"""FSDP2 trains like the unsharded model, for every way to shard, place and synchronize.

The reference has the full model on every rank. Data differs by rank and step. So the
first step shows gradients that come from one rank only, are divided by the wrong
number, or go to the wrong shard; later steps show stale state.
"""

import copy
import itertools
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    share_comm_ctx,
)
from torch.distributed.tensor import DTensor, Shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    FSDPTest,
    MLPStack,
    average_gradients,
    check_races,
    check_sharded_parity,
    check_train_parity,
    fully_shard_children,
    sequential_mlps,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TrainingTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def batches(self, width=5):
        """Return this rank's inputs for two steps."""
        return [self.rows(width, step) for step in range(2)]

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class TestFullyShard1DTrainingCore(TrainingTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_single_group_shard_dim0(self):
        """Rows that divide evenly or unevenly, and so few that ranks hold none."""
        self.run_subtests(
            {"widths": [(4, 8, 4), (5, 7, 3), (6, 2, 1), (1, 1, 1)]},
            self._test_single_group,
        )

    def _test_single_group(self, widths, shard_placement_fn=None):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(widths[0], widths[1]), nn.Tanh(), nn.Linear(widths[1], widths[2])
        )
        reference = copy.deepcopy(model).to(self.device)
        fully_shard(model.to(self.device), shard_placement_fn=shard_placement_fn)
        check_train_parity(self, reference, model, self.batches(widths[0]))

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
        """Resharding to two of two ranks would be the same as ``True``, so it is not
        tried.
        """
        layouts = [((4,), reshard) for reshard in (True, False, 1, 2)]
        layouts += [((2, 2), reshard) for reshard in (True, False, 1)]
        self.run_subtests(
            {"layout": layouts, "prefetch": [False, True]}, self._test_multi_group
        )

    def _test_multi_group(self, layout, prefetch):
        mesh_shape, reshard_after_forward = layout
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(
            model.to(self.device),
            mesh=world_mesh(*mesh_shape),
            reshard_after_forward=reshard_after_forward,
        )
        if prefetch:
            for earlier, later in itertools.pairwise(model):
                earlier.set_modules_to_forward_prefetch([later])
                later.set_modules_to_backward_prefetch([earlier])
        check_train_parity(self, reference, model, self.batches())

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_multi_group_cpu_offload(self):
        """Parameters, gradients and optimizer state are on the host; compute is on the
        device.
        """
        self.run_subtests(
            {"pin_memory": [True, False], "accumulates": [True, False]},
            self._test_cpu_offload,
        )

    def _test_cpu_offload(self, pin_memory, accumulates):
        skip_without_accelerator(
            "CPUOffloadPolicy needs an accelerator to offload from"
        )
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        policy = CPUOffloadPolicy(pin_memory=pin_memory)
        fully_shard_children(
            model,
            mesh=world_mesh(4),
            reshard_after_forward=accumulates,
            offload_policy=policy,
        )
        computed_on = set()
        for module in model.modules():
            module.register_forward_hook(
                lambda _, args, output: computed_on.add(output.device)
            )

        def check(reference, model):
            for name, parameter in model.named_parameters():
                self.assertFalse(
                    torch.device(parameter.device).type == self.device.type, name
                )
                self.assertEqual(
                    parameter.to_local().to(self.device),
                    self._shard(reference, name),
                    name,
                )
                if parameter.grad is not None:
                    expected = self._shard(reference, name, of_gradient=True)
                    self.assertEqual(
                        parameter.grad.to_local().to(self.device),
                        expected,
                        f"{name}.grad",
                    )

        def loss_of(module, rows):
            if accumulates:
                module(rows + 1).square().sum().backward()
            return module(rows).square().sum()

        check_train_parity(
            self, reference, model, self.batches(), check=check, loss_of=loss_of
        )
        self.assertEqual(computed_on, {self.device})

    def _shard(self, reference, name, *, of_gradient=False):
        """Return this rank's rows, without using DTensor."""
        tensor = reference.get_parameter(name)
        tensor = tensor.grad if of_gradient else tensor.detach()
        size = -(-len(tensor) // self.world_size)
        return tensor[self.rank * size : (self.rank + 1) * size]

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_offload_policy_default_changes_nothing(self):
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(model.to(self.device), offload_policy=OffloadPolicy())
        check_train_parity(self, reference, model, [self.rows(5)])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_explicit_prefetching_of_modules_out_of_order(self):
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(model.to(self.device))
        model[0].set_modules_to_forward_prefetch([model[2], model[1]])
        model[2].set_modules_to_backward_prefetch([model[0]])
        check_train_parity(self, reference, model, self.batches())

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_post_optim_event(self):
        """The next forward waits for the event after which parameters are ready, and
        later ones wait as usual.
        """
        skip_without_accelerator("events need an accelerator")
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(model.to(self.device))
        optimizer = self.optimizer(model)
        optimizer.register_step_post_hook(
            lambda *_: model.set_post_optim_event(
                torch.accelerator.current_stream().record_event()
            )
        )
        reference_optimizer = self.optimizer(reference)
        with check_races():
            for step in range(3):
                for each in (reference, model):
                    each(self.rows(5, step)).sum().backward()
                average_gradients(reference)
                check_sharded_parity(self, reference, model)
                for each in (optimizer, reference_optimizer):
                    each.step()
                    each.zero_grad()
            # Copies from the host and checks above order steps, too. Here nothing does.
            for batch in [self.rows(5, step) for step in range(3)]:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_list_of_modules_is_one_group(self):
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        fully_shard([model.to(self.device)[0], model[1]])
        fully_shard(model)
        check_train_parity(self, reference, model, self.batches())


class TestFullyShard1DTrainingCompose(TrainingTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_with_activation_checkpointing(self):
        """Activation checkpointing outside or inside sharded modules, and of a module
        that contains sharded ones.
        """
        self.run_subtests(
            {
                "reshard_after_forward": [True, False],
                "where": ["same", "inside", "around"],
            },
            self._test_checkpointing,
        )

    def _test_checkpointing(self, reshard_after_forward, where):
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        runs = []
        model.to(self.device)
        for mlp in model:
            # Before the layer, because recomputation stops as soon as it has all that
            # backward needs.
            mlp.in_proj.register_forward_pre_hook(lambda *_: runs.append(None))
            checkpoint(mlp.in_proj if where == "inside" else mlp)
            if where == "around":
                fully_shard(mlp.in_proj, reshard_after_forward=reshard_after_forward)
            else:
                fully_shard(mlp, reshard_after_forward=reshard_after_forward)
        fully_shard(model, reshard_after_forward=reshard_after_forward)
        check_train_parity(self, reference, model, self.batches())
        self.assertEqual(
            len(runs), 12, "forwards of three layers in two steps, each run again"
        )


class TestFullyShardSharedParams(TrainingTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_with_shared_params(self):
        self.run_subtests(
            {"reshard_after_forward": [True, False], "use_checkpoint": [False, True]},
            self._test_shared,
        )

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
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device)
        if use_checkpoint:
            checkpoint(model.body)
        fully_shard(model.body, reshard_after_forward=reshard_after_forward)
        fully_shard(model, reshard_after_forward=reshard_after_forward)

        def loss_of(module, rows):
            tokens = (rows.abs() * 10).long() % 7
            return F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())

        check_train_parity(self, reference, model, self.batches(4), loss_of=loss_of)
        self.assertIs(model.head.weight, model.embed.weight)


class TestFullyShardGradientAccumulation(TrainingTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_gradient_accumulation(self):
        """Microbatches with a reduction in each, only in the last, or (HSDP) with the
        all-reduce in the last.
        """
        self.run_subtests(
            {
                "mode": ["every", "no_sync", "no_all_reduce"],
                "mesh_shape": [(4,), (2, 2)],
                "reshard_after_forward": [True, False],
                "reshard_after_backward": [True, False],
            },
            self._test_accumulation,
        )

    def _test_accumulation(
        self, mode, mesh_shape, reshard_after_forward, reshard_after_backward
    ):
        model = sequential_mlps(2)
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(
            model.to(self.device),
            mesh=world_mesh(*mesh_shape),
            reshard_after_forward=reshard_after_forward,
        )
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
                    self.assertEqual(
                        [
                            each.grad
                            for each in model.parameters()
                            if each.grad is not None
                        ],
                        [],
                    )
            average_gradients(reference)
            check_sharded_parity(self, reference, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_1f1b_microbatching(self):
        """Several forwards before their backwards, as in pipeline parallelism."""
        model = sequential_mlps(2)
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(model.to(self.device), reshard_after_forward=False)
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
        check_sharded_parity(self, reference, model)


class TestFullyShardHSDPTraining(TrainingTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_hsdp(self):
        self.run_subtests(
            {"reshard_after_forward": [True, False], "use_checkpoint": [False, True]},
            self._test_train_parity_hsdp,
        )

    def _test_train_parity_hsdp(self, reshard_after_forward, use_checkpoint):
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device)
        for child in model:
            if use_checkpoint:
                checkpoint(child)
        fully_shard_children(
            model, mesh=world_mesh(2, 2), reshard_after_forward=reshard_after_forward
        )
        check_train_parity(self, reference, model, self.batches())

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_replicas_stay_equal(self):
        """After steps on different data, ranks with the same shard have the
        same bits.
        """
        model = fully_shard_children(
            sequential_mlps().to(self.device), mesh=world_mesh(2, 2)
        )
        optimizer = self.optimizer(model)
        for step in range(3):
            model(self.rows(5, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        local = torch.cat(
            [
                parameter.to_local().detach().flatten()
                for parameter in model.parameters()
            ]
        )
        self.assertNotEqual(
            model[0].in_proj.weight.full_tensor(),
            sequential_mlps()[0].in_proj.weight.detach().to(self.device),
        )
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, local.cpu())
        self.assertEqual(
            everyone[self.rank], everyone[(self.rank + 2) % 4], atol=0, rtol=0
        )


class TestFullyShardNDTraining(TrainingTest):
    """FSDP2 with tensor parallelism on two by two ranks."""

    def rows(self, width, step=0):
        """The same data for ranks of one tensor-parallel group."""
        own = super().rows(width, step)
        dist.broadcast(own, self.rank // 2 * 2, self._mesh["tp"].get_group())
        return own

    def _check_full_tensors(self, reference, model):
        for (name, whole), part in zip(
            reference.named_parameters(), model.parameters(), strict=True
        ):
            self.assertEqual(part.full_tensor(), whole.detach(), name)
            self.assertEqual(
                part.grad is None, whole.grad is None, f"{name} has a gradient"
            )
            if whole.grad is not None:
                self.assertEqual(part.grad.full_tensor(), whole.grad, f"{name}.grad")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_train_parity_2d_with_tensor_parallel(self):
        self._mesh = init_device_mesh(
            self.device.type, (2, 2), mesh_dim_names=("dp", "tp")
        )
        self.run_subtests(
            {
                "reshard_after_forward": [True, False],
                "use_activation_checkpointing": [False, True],
            },
            self._test_2d,
        )
        names = ("replicate", "dp", "tp")
        self._mesh = init_device_mesh(self.device.type, (2, 1, 2), mesh_dim_names=names)
        # In another type, and with a norm whose gradient is a sum over tp.
        wide = MixedPrecisionPolicy(torch.float64)
        replicated = self._mesh["replicate", "dp"]
        self._test_2d(True, False, replicated, with_seq_parallel=True, mp_policy=wide)

    def _test_2d(
        self,
        reshard_after_forward,
        use_activation_checkpointing,
        dp=None,
        with_seq_parallel=False,
        **options,
    ):
        torch.manual_seed(0)
        model = MLPStack(8, with_seq_parallel=with_seq_parallel)
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device).parallelize(
            self._mesh["tp"],
            dp or self._mesh["dp"],
            use_activation_checkpointing,
            reshard_after_forward=reshard_after_forward,
            **options,
        )

        def loss_of(module, rows):
            out = module(
                rows.unsqueeze(1).expand(-1, 2, -1) if with_seq_parallel else rows
            )
            out = out.full_tensor() if isinstance(out, DTensor) else out
            return out.float().square().mean()

        check_train_parity(
            self,
            reference,
            model,
            self.batches(8),
            check=self._check_full_tensors,
            loss_of=loss_of,
        )


class TestFullyShardShareCommContext(TrainingTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_share_comm_context(self):
        """Roots that share a communication context train correctly, and really share
        it.
        """
        torch.manual_seed(0)
        stages = nn.Sequential(MLP(5), MLP(5))
        reference = copy.deepcopy(stages).to(self.device)
        for stage in stages.to(self.device):
            fully_shard(stage)
        share_comm_ctx(list(stages))
        check_train_parity(self, reference, stages, self.batches())
        contexts = [stage._get_fsdp_state()._comm_ctx for stage in stages]
        self.assertIs(contexts[0], contexts[1])


if __name__ == "__main__":
    run_tests()
