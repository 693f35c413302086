# Owner(s): ["oncall: distributed"]
"""Settings of FSDP2's backward, recomputation in it, conversion between steps, and
three ranks, which divide few sizes.
"""

import copy
import sys
import unittest

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    StepLog,
    ThreeUnits,
    average_gradients,
    check_sharded_parity,
    check_train_parity,
    fully_shard_children,
    patch_reduce_scatter,
    sequential_mlps,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class Branches(nn.Module):
    """Two linear layers, of which forward uses those named by ``use``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.use = ("one", "two")

    def forward(self, x):
        return sum(getattr(self, name)(x) for name in self.use)


class BackwardTest(FSDPTest):
    @property
    def world_size(self):
        return 4


class TestFullyShardBackward(BackwardTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_set_unshard_in_backward(self):
        """A module that needs no parameters in backward, such as an embedding, is not
        gathered again.
        """

        class Shifted(nn.Module):
            def __init__(self):
                super().__init__()
                self.shift = nn.Parameter(torch.ones(4))

            def forward(self, x):
                return x + self.shift

        for gathers in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(Shifted(), nn.Linear(4, 4, bias=False))
            reference = copy.deepcopy(model).to(self.device)
            fully_shard_children(model.to(self.device), mesh=world_mesh(2))
            model[0].set_unshard_in_backward(gathers)
            log = StepLog(ThreeUnits())
            for each in (reference, model):
                loss = each(self.rows(4)).square().sum()
                with log.of("backward"):
                    loss.backward()
            gathered = sum("all-gather" in line for line in log.lines)
            self.assertEqual(
                gathered, 1 + gathers, f"{gathers}: all-gathers in backward"
            )
            average_gradients(reference)
            check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_set_reduce_scatter_unused_params(self):
        """Parameters that this rank does not use are reduced as zeros, so that ranks
        may use different ones.
        """
        model = Branches()
        model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        reference = copy.deepcopy(model).to(self.device)
        fully_shard(model.to(self.device))
        model.set_reduce_scatter_unused_params(True)
        own = ("one", "two")[self.rank]
        reduce_scatter, taken = dist.reduce_scatter_single, []

        def noting(*args, **kwargs):
            taken.append((args[1] if len(args) > 1 else kwargs["input"]).numel())
            return reduce_scatter(*args, **kwargs)

        # First all use one, so that a rank that reduces too little hangs no other.
        for use in (("one",), (own,)):
            taken.clear()
            with patch_reduce_scatter(noting):
                for each in (reference, model):
                    each.use = use
                    each.zero_grad()
                    each(self.rows(4)).square().sum().backward()
            self.assertEqual(taken, [32], "elements reduced")
            for name in ("one.weight", "two.weight"):
                parameter = reference.get_parameter(name)
                gradient = (
                    torch.zeros_like(parameter)
                    if parameter.grad is None
                    else parameter.grad
                )
                dist.all_reduce(gradient)
                found = model.get_parameter(name).grad.full_tensor()
                self.assertEqual(
                    found, gradient / self.world_size, f"gradient of {name}"
                )
        model.set_reduce_scatter_unused_params(False)
        model.zero_grad()
        model.use = ("one",)
        model(self.rows(4)).sum().backward()
        self.assertIsNone(model.two.weight.grad, "unused by all, and not asked for")

    # Through torch 2.13 the reduction gets gradients of two types, and refuses them.
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @unittest.expectedFailure
    def test_microbatches_that_use_other_parameters(self):
        """A parameter may get its first gradient in the microbatch that reduces."""
        model = Branches().to(self.device)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(model, mp_policy=policy)
        for is_last, use in enumerate((("one",), ("one", "two"))):
            model.use = use
            model.set_requires_gradient_sync(bool(is_last))
            model(torch.ones(2, 4, device=self.device)).sum().backward()
        for name, gradient in (("one", 4.0), ("two", 2.0)):
            found = model.get_parameter(f"{name}.weight").grad.full_tensor()
            self.assertEqual(found, torch.full_like(found, gradient), name)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_checkpointed_module_with_several_forwards(self):
        """Each recomputation finds its parameters gathered, though an earlier backward
        has freed them.
        """
        model = sequential_mlps(2)
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device)
        for mlp in model:
            fully_shard(mlp.in_proj)
            fully_shard(mlp)
            checkpoint(mlp)
        fully_shard(model)
        for step in range(2):
            for each in (reference, model):
                each.zero_grad()
                sum(
                    each(self.rows(5, 2 * step + run)).square().sum()
                    for run in range(2)
                ).backward()
            average_gradients(reference)
            check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_checkpointed_module_is_gathered_once_in_backward(self):
        """Recomputation is no forward: it neither frees parameters nor changes what is
        prefetched.
        """
        model = ThreeUnits().to(self.device)
        log = StepLog(model)
        for unit in (model.first, model.second):
            checkpoint(unit)
            fully_shard(unit, mesh=world_mesh(2))
        fully_shard(model, mesh=world_mesh(2))
        for _ in range(2):
            model.zero_grad()
            log.lines.clear()
            loss = model(self.rows(4).requires_grad_()).square().sum()
            with log.of("backward"):
                loss.backward()
            found = [
                line.strip()
                for line in log.lines
                if "gather" in line or "scatter" in line
            ]
            expected = [
                "all-gather second",
                "all-gather first",
                "reduce-scatter second",
                "reduce-scatter first",
                "reduce-scatter last",
            ]
            self.assertEqual(found, expected, "collectives of backward")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_conversion_of_a_gathered_module(self):
        """``to()`` and similar methods reshard first: they change shards, which the
        next forward gathers.
        """
        model = sequential_mlps(1)
        reference = copy.deepcopy(model).to(self.device)
        fully_shard(model.to(self.device), reshard_after_forward=False)
        model(self.rows(5))  # leaves parameters gathered
        model.to(self.device)
        kinds = {type(parameter).__name__ for parameter in model.parameters()}
        self.assertEqual(kinds, {"DTensor"}, "kinds of converted parameters")
        model(self.rows(5))
        for each in (reference, model):
            each._apply(lambda tensor: tensor * 2)  # every conversion calls this
            each(self.rows(5)).square().sum().backward()
        average_gradients(reference)
        check_sharded_parity(self, reference, model)


class TestFullyShardThreeRanks(BackwardTest):
    @property
    def world_size(self):
        return 3

    @skip_if_lt_x_gpu(3, allow_cpu=True)
    def test_train_parity(self):
        """First dimensions of 1, 2, 3, 4, 6 and 7: fewer than ranks, as many, and with
        one row too many.
        """
        torch.manual_seed(0)
        model = nn.Sequential(
            *(
                nn.Linear(*sizes)
                for sizes in ((5, 6), (6, 7), (7, 4), (4, 3), (3, 2), (2, 1))
            )
        )
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(model.to(self.device))
        reduce_scatter, taken = dist.reduce_scatter_single, []

        def noting(*args, **kwargs):
            taken.append((args[1] if len(args) > 1 else kwargs["input"]).numel())
            return reduce_scatter(*args, **kwargs)

        with patch_reduce_scatter(noting):
            check_train_parity(
                self, reference, model, [self.rows(5, step) for step in range(2)]
            )
        padded = [
            rows * (columns + 1)
            for columns, rows in ((2, 3), (3, 3), (4, 3), (7, 6), (6, 9), (5, 6))
        ]
        self.assertEqual(taken, padded * 2, "elements reduced")

    @skip_if_lt_x_gpu(3, allow_cpu=True)
    def test_half_precision(self):
        """Gradients are divided before the sum and after it, by factors whose product
        is three.
        """
        torch.manual_seed(0)
        model = nn.Linear(4, 5)
        reference = copy.deepcopy(model).to(self.device)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
        fully_shard(model.to(self.device), mp_policy=policy)
        for each in (reference, model):
            each(self.rows(4)).square().sum().backward()
        average_gradients(reference)
        for name, parameter in reference.named_parameters():
            found = model.get_parameter(name).grad.full_tensor()
            # Three roundings to eleven bits.
            self.assertEqual(
                found, parameter.grad, f"gradient of {name}", rtol=2e-3, atol=2e-2
            )


if __name__ == "__main__":
    run_tests()
