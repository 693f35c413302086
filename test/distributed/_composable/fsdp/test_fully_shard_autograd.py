# Owner(s): ["oncall: distributed"]
"""Which gradients reach which parameters: graphs that use a module twice, alone or not
at all; frozen parameters; gradient clipping; parameters outside FSDP.
"""

import copy
import functools
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    DoubleLinear,
    FSDPTest,
    average_gradients,
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


class AutogradTest(FSDPTest):
    @property
    def world_size(self):
        return 4


class TestFullyShardAutograd(AutogradTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_non_root_forward_backward(self):
        """A child may run by itself after the root has run. Its gradients add to those
        of the root's run.
        """
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(model.to(self.device))
        for each in (reference, model):
            each(self.rows(5, 1)).sum().backward()
            each[0](self.rows(5, 2)).sum().backward()
            each(self.rows(5, 3)).sum().backward()
        average_gradients(reference)
        check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_child_that_runs_first_is_a_root_for_good(self):
        """A module that runs alone gets the gradients of that run. A module above may
        not become the root later.
        """
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(model.to(self.device))
        for each in (reference, model):
            each[0](self.rows(5)).square().sum().backward()
        average_gradients(reference)
        check_sharded_parity(self, reference, model)
        with self.assertRaisesRegex(
            RuntimeError, "already been lazily initialized for 0"
        ):
            model(self.rows(5))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_multi_forward_module(self):
        """A module that runs twice in forward accumulates both gradients."""

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)

            def forward(self, x):
                return self.outer(self.inner(x) * self.inner(x + 1))

        self.run_subtests(
            {"reshard_after_forward": [True, False]}, self._test_multi_forward, Twice
        )

    def _test_multi_forward(self, make_model, reshard_after_forward):
        model = make_model()
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(
            model.to(self.device), reshard_after_forward=reshard_after_forward
        )
        check_train_parity(
            self, reference, model, [self.rows(5, step) for step in range(2)]
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_unused_forward_output(self):
        """If the loss does not use a module's output, no rank hangs, and the module
        gets no gradient.
        """

        class Halves(DoubleLinear):
            def forward(self, x):
                first, second = self.lin1(x), self.lin2(x)
                return torch.cat(
                    [first, second.detach() if self.drop_second else second]
                )

        torch.manual_seed(0)
        model = Halves(5)
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(model.to(self.device))
        for drop in (True, False, True):
            for each in (reference, model):
                each.drop_second = drop
                each.zero_grad()
                each(self.rows(5)).square().sum().backward()
            average_gradients(reference)
            check_sharded_parity(self, reference, model)
            self.assertEqual(model.lin2.weight.grad is None, drop)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_unused_module(self):
        """A module that forward skips, or whose output the loss ignores, has no
        gradients.
        """
        for use_second_linear in (True, False):
            torch.manual_seed(0)
            model = DoubleLinear(5, use_second_linear=use_second_linear)
            reference = copy.deepcopy(model).to(self.device)
            fully_shard_children(model.to(self.device))
            for each in (reference, model):
                output = each(self.rows(5))
                (output[0] if use_second_linear else output).square().sum().backward()
            average_gradients(reference)
            check_sharded_parity(self, reference, model)
            self.assertIsNone(model.lin2.weight.grad)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_frozen_parameters(self):
        """Frozen parameters are gathered, but not trained. Forward gives the same
        output with autograd and without.
        """
        model = sequential_mlps()
        model[1].requires_grad_(False)
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(model.to(self.device))
        check_train_parity(
            self, reference, model, [self.rows(5, step) for step in range(2)]
        )
        with torch.no_grad():
            self.assertEqual(model(self.rows(5)), reference(self.rows(5)))
        self.assertEqual(
            {each.requires_grad for each in model[1].parameters()}, {False}
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_gradient_clipping(self):
        """The norm is that of all shards, even if shards differ in size."""
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        fully_shard_children(model.to(self.device))
        for each in (reference, model):
            each(self.rows(5)).square().sum().mul(100).backward()
        average_gradients(reference)
        norms = [
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            for each in (reference, model)
        ]
        self.assertEqual(norms[1].full_tensor(), norms[0])
        self.assertGreater(norms[0].item(), 0.5, "there was nothing to clip")
        check_sharded_parity(self, reference, model)


class TestFullyShardIgnoredParams(AutogradTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_ignored_params(self):
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device)
        ignored = set(model[1].parameters())
        fully_shard(model, ignored_params=ignored)
        for each in (reference, model):
            each(self.rows(5)).square().sum().backward()
        self.assertEqual(set(model[1].parameters()), ignored)
        self.assertEqual(model[1].in_proj.weight.grad, reference[1].in_proj.weight.grad)
        average_gradients(reference)
        check_sharded_parity(self, reference[0], model[0])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_sharding_below_a_module_that_is_not_sharded(self):
        """Parameters outside FSDP stay plain tensors, whose gradients the caller
        averages.
        """
        model = sequential_mlps()
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device)
        fully_shard(model[1])
        for each in (reference, model):
            each(self.rows(5)).square().sum().backward()
        self.assertEqual(model[0].in_proj.weight.grad, reference[0].in_proj.weight.grad)
        average_gradients(reference)
        check_sharded_parity(self, reference[1], model[1])


class TestFullyShardPostAccGradHook(AutogradTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_post_accumulate_grad_hook_sees_the_sharded_gradient(self):
        """A hook may read the gradient at once, also on the host."""
        self.run_subtests({"offloads": [False, True]}, self._test_hook)

    def _test_hook(self, offloads):
        if offloads:
            skip_without_accelerator("offloading needs a device")
        model = sequential_mlps(1)
        reference = copy.deepcopy(model).to(self.device)
        policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
        model = model if offloads else model.to(self.device)
        fully_shard(model, mesh=world_mesh(4), offload_policy=policy)
        seen = {}

        def note(each, name):
            copied = each.grad.clone().to(self.device)
            seen[name] = copied.full_tensor()

        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                functools.partial(note, name=name)
            )
        for each in (reference, model):
            each(self.rows(5)).square().sum().backward()
        average_gradients(reference)
        expected = {name: each.grad for name, each in reference.named_parameters()}
        self.assertEqual(seen, expected, "gradients that the hooks have seen")


if __name__ == "__main__":
    run_tests()
