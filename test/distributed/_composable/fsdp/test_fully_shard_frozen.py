# Owner(s): ["oncall: distributed"]
"""Parameters that are frozen: before sharding or between steps, some of a group or all
of it.
"""

import copy
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    average_gradients,
    check_sharded_parity,
    fully_shard_children,
    patch_reduce_scatter,
    sequential_mlps,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TestFullyShardFrozen(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _step(self, reference, model, step, forwards=1):
        """Run both and return how many elements each reduce-scatter takes. The width of
        5 is padded to 6.
        """
        reduce_scatter, taken = dist.reduce_scatter_single, []

        def noting(*args, **kwargs):
            taken.append((args[1] if len(args) > 1 else kwargs["input"]).numel())
            return reduce_scatter(*args, **kwargs)

        with patch_reduce_scatter(noting):
            for each in (reference, model):
                each.zero_grad()
                sum(
                    each(self.rows(5, 10 * step + run)).square().sum()
                    for run in range(forwards)
                ).backward()
        average_gradients(reference)
        check_sharded_parity(self, reference, model)
        return taken

    def _frozen(self, freeze):
        model = sequential_mlps(2)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not freeze(name))
        reference = copy.deepcopy(model).to(self.device)
        return reference, fully_shard_children(model.to(self.device))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_train_mixed_requires_grad_per_group(self):
        """Gradients of frozen weights are neither computed nor sent."""
        reference, model = self._frozen(lambda name: "bias" in name)
        for step in range(2):
            self.assertEqual(
                self._step(reference, model, step),
                [16 * 5 + 6 * 15, 10 * 5 + 6 * 10],
                "elements reduced",
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_train_mixed_requires_grad_across_groups(self):
        reference, model = self._frozen(lambda name: name.startswith("0."))
        for step in range(2):
            reduced = self._step(reference, model, step)
            self.assertEqual(reduced, [16 * 5 + 16 + 6 * 15 + 6], "elements reduced")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_multi_forward_mixed_requires_grad(self):
        reference, model = self._frozen(lambda name: name == "1.in_proj.weight")
        for step in range(2):
            self._step(reference, model, step, forwards=2)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_requires_grad_changed_between_steps(self):
        """Users may freeze sharded parameters at any time between a backward and the
        next forward.
        """
        reference, model = self._frozen(lambda name: False)
        whole, without = 10 * 5 + 10 + 6 * 10 + 6, 10 + 6 * 10 + 6
        for step, trains in enumerate((True, False, True, False)):
            for each in (reference, model):
                each[0].in_proj.weight.requires_grad_(trains)
            reduced = self._step(reference, model, step)
            self.assertEqual(
                reduced[-1],
                whole if trains else without,
                f"step {step}: elements reduced",
            )
            self.assertEqual(
                model[0].in_proj.weight.grad is not None,
                trains,
                f"step {step}: a gradient",
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_requires_grad_is_that_of_the_unsharded_parameter(self):
        """Forward sees the ``requires_grad`` that was set outside."""
        model = fully_shard(nn.Linear(4, 4).to(self.device))
        seen = []
        model.register_forward_hook(
            lambda *_: seen.append(
                (model.weight.requires_grad, model.bias.requires_grad)
            )
        )
        for weight, bias in ((True, True), (False, True), (True, False)):
            model.weight.requires_grad_(weight)
            model.bias.requires_grad_(bias)
            model(self.rows(4)).sum().backward()
        self.assertEqual(
            seen,
            [(True, True), (False, True), (True, False)],
            "requires_grad in forward",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_frozen_parameters_may_have_another_type(self):
        """A group reduces in one type, and frozen parameters are not reduced."""

        class Mixed(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layer = nn.Linear(5, 5)
                self.table = nn.Parameter(
                    torch.randn(5).to(torch.bfloat16), requires_grad=False
                )

            def forward(self, x):
                return self.layer(x) + self.table.float()

        model = Mixed()
        reference = copy.deepcopy(model).to(self.device)
        self._step(reference, fully_shard(model.to(self.device)), 0)
        model = Mixed()
        model.table.requires_grad_(True)
        fully_shard(model.to(self.device))
        with self.assertRaisesRegex(
            AssertionError, "FSDP expects uniform original parameter dtype"
        ):
            model(self.rows(5))


if __name__ == "__main__":
    run_tests()
