# Owner(s): ["oncall: distributed"]
"""FSDP2's communication: how often it gathers and reduces, in which order, and what the
collectives transfer.

``test_fully_shard_anatomy`` shows the order of a plain step. The tests here cover the
settings that change it.
"""

import copy
import functools
import sys
import unittest

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    ThreeUnits,
    average_gradients,
    check_sharded_parity,
    effective_reduce_dtype,
    fully_shard_units,
    patch_all_gather,
    patch_foreach_all_gather,
    patch_foreach_reduce,
    patch_reduce_scatter,
    patch_reshard,
    patch_unshard,
    reduce_scatter_with_assert,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

c10d_ops = torch.ops.c10d


class CommTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def step(self, model, step=0):
        model(self.rows(4, step)).square().sum().backward()

    def counts(self, run):
        """Return how many all-gathers, reduce-scatters and all-reduces
        ``run`` issues.
        """
        with CommDebugMode() as counted:
            run()
        found = counted.get_comm_counts()
        names = (
            c10d_ops._allgather_base_,
            c10d_ops._reduce_scatter_base_,
            c10d_ops.allreduce_,
        )
        return tuple(found.get(name, 0) for name in names)


class TestFullyShardCollectiveOps(CommTest):
    """Inputs and results of the two main collectives."""

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_all_gather_fp32(self):
        """An all-gather transfers a padded shard of every parameter of its group,
        concatenated by rank.
        """
        torch.manual_seed(0)
        model = nn.Linear(3, 5).to(self.device)
        weight = model.weight.detach().clone()
        original = dist.all_gather_single
        seen = []

        def all_gather(*args, **kwargs):
            output, source = [*args, *kwargs.values()][:2]
            work = original(*args, **kwargs)
            seen.append((output, source.shape, work))
            return work

        fully_shard(model)
        with patch_all_gather(all_gather):
            model.unshard()
        output, shape, work = seen[0]
        self.assertIsNone(work, "the host waits for no all-gather by default")
        # Rows per rank: 2 of 3 columns for the weight, 2 for the bias; ranks 2 and 3
        # pad.
        self.assertEqual((len(seen), tuple(shape), output.numel()), (1, (8,), 32))
        self.assertEqual(model.weight.detach(), weight)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_unshard_numerics_over_uneven_parameters(self):
        """Unshard restores each full parameter, and reshard restores each shard."""
        torch.manual_seed(0)
        model = nn.ParameterList(
            nn.Parameter(torch.randn(*shape))
            for shape in [(5, 3), (1,), (7, 2), (4, 4), (2, 1)]
        )
        reference = copy.deepcopy(model).to(self.device)
        fully_shard(model.to(self.device))
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        model.unshard()
        self.assertEqual(
            list(model.parameters()), list(reference.parameters()), atol=0, rtol=0
        )
        model.reshard()
        self.assertEqual(
            [parameter.to_local() for parameter in model.parameters()],
            before,
            atol=0,
            rtol=0,
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_reduce_scatter_fp32(self):
        """Each rank receives the average of its rows. The padding of short shards is
        sent as zeros.
        """
        torch.manual_seed(0)
        model = nn.Linear(3, 5, bias=False).to(self.device)
        reference = copy.deepcopy(model).to(self.device)
        original, sent = dist.reduce_scatter_single, []

        def reduce_scatter(*args, **kwargs):
            source = args[1] if len(args) > 1 else kwargs["input"]
            sent.append(source.clone())
            return original(*args, **kwargs)

        fully_shard(model)
        with patch_reduce_scatter(reduce_scatter):
            for each in (reference, model):
                each(self.rows(3)).square().sum().backward()
        self.assertEqual(sent[0].numel(), 4 * 2 * 3)
        self.assertEqual(sent[0].view(8, 3)[:5], reference.weight.grad)
        self.assertEqual(sent[0].view(8, 3)[5:], torch.zeros(3, 3, device=self.device))
        average_gradients(reference)
        check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_reduce_scatter_output_is_a_shard(self):
        model = fully_shard_units(self)
        found = []
        assert_fn = functools.partial(self._note_shape, found)
        original = dist.reduce_scatter_single
        with patch_reduce_scatter(
            functools.partial(reduce_scatter_with_assert, self, original, assert_fn)
        ):
            self.step(model)
        self.assertEqual(
            sorted(found),
            [(4, torch.float32), (12, torch.float32), (60, torch.float32)],
        )

    def _note_shape(self, found, output):
        found.append((output.numel(), output.dtype))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_types_on_the_wire(self):
        """Parameters are gathered in ``param_dtype``; gradients are computed in it and
        reduced in ``reduce_dtype``.
        """
        self.run_subtests(
            {
                "param_dtype": [None, torch.bfloat16],
                "reduce_dtype": [None, torch.float32, torch.bfloat16],
            },
            self._test_types_on_the_wire,
        )

    def _test_types_on_the_wire(self, param_dtype, reduce_dtype):
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

        original_gather, original_reduce = (
            groups.foreach_all_gather,
            groups.foreach_reduce,
        )
        reduce_scatter = dist.reduce_scatter_single
        gathered, computed, reduced = [], [], []

        def all_gather(*args, **kwargs):
            result = original_gather(*args, **kwargs)
            gathered.append(
                (result.all_gather_output.dtype, result.all_gather_output.numel())
            )
            return result

        def reduce(params, gradients, *args, **kwargs):
            computed.extend(gradient.dtype for gradient in gradients)
            return original_reduce(params, gradients, *args, **kwargs)

        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype
        )
        model = fully_shard_units(self, mp_policy=policy)
        note = functools.partial(self._note_shape, reduced)
        with (
            patch_foreach_all_gather(all_gather),
            patch_foreach_reduce(reduce),
            patch_reduce_scatter(
                functools.partial(
                    reduce_scatter_with_assert, self, reduce_scatter, note
                )
            ),
        ):
            self.step(model)
        used, reduced_in = param_dtype or torch.float32, effective_reduce_dtype(policy)
        self.assertEqual(gathered, [(used, numel) for numel in (240, 16, 48, 48, 16)])
        # Since torch 2.15 some of them may be cast before they reach the reduction.
        arriving = {used, reduced_in} if torch.__version__ >= "2.15" else {used}
        self.assertEqual(len(computed), 3)
        self.assertLessEqual(set(computed), arriving)
        self.assertEqual(reduced, [(numel, reduced_in) for numel in (12, 60, 4)])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_set_gradient_divide_factor(self):
        """A factor of one gives the sum; any other divides it. The collective does it,
        or FSDP if it may only sum.
        """
        self.run_subtests(
            {"sizes": [(4,), (2, 2)], "force_sum": [True, False]},
            self._test_divide_factor,
        )
        self.run_subtests(
            {"sizes": [(4, 1)], "force_sum": [False]}, self._test_divide_factor
        )

    # Through torch 2.13 a group of one rank divides its shard, and then the sum too.
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @unittest.expectedFailure
    def test_divide_factor_if_a_group_of_one_may_only_sum(self):
        self._test_divide_factor((4, 1), True)

    def _test_divide_factor(self, sizes, force_sum):
        if not force_sum:
            skip_without_accelerator(
                "gloo has no PREMUL_SUM, with which FSDP divides by a factor of its own"
            )
        for factor in (1.0, 2.0, 3.0, 4.0):
            model = ThreeUnits()
            reference = copy.deepcopy(model).to(self.device)
            fully_shard(model.to(self.device), mesh=world_mesh(*sizes))
            model.set_force_sum_reduction_for_comms(force_sum)
            model.set_gradient_divide_factor(factor)
            for each in (reference, model):
                self.step(each)
            average_gradients(reference)
            for parameter in reference.parameters():
                parameter.grad.mul_(self.world_size / factor)
            check_sharded_parity(self, reference, model)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_half_precision_neither_overflows_nor_vanishes(self):
        """Gradients are halved before four of them are added, and again after it."""
        for sizes in ((4,), (2, 2)):
            model = nn.Linear(2, 1, bias=False).to(self.device)
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
            fully_shard(model, mesh=world_mesh(*sizes), mp_policy=policy)
            rows = torch.tensor([[30000.0, 2.0**-23]], device=self.device)
            model(rows).sum().backward()
            gradient = model.weight.grad.full_tensor()
            self.assertEqual(gradient, rows, f"over {sizes}", atol=0, rtol=0)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_set_all_reduce_hook(self):
        """The hook gets each group's reduced gradients once, and its changes reach the
        parameters. Over replicas it runs on the stream of their reduction.
        """
        self.run_subtests({"sizes": [(4,), (2, 2)]}, self._test_all_reduce_hook)

    def _test_all_reduce_hook(self, sizes):
        model = ThreeUnits()
        reference = copy.deepcopy(model).to(self.device)
        fully_shard(model.to(self.device), mesh=world_mesh(*sizes))
        if len(sizes) > 1:
            with self.assertRaisesRegex(ValueError, "stream cannot be set"):
                model.set_all_reduce_hook(print, stream=object())
        numels = []

        def double(reduced):
            numels.append(reduced.numel())
            reduced.mul_(2)

        model.set_all_reduce_hook(double)
        for each in (reference, model):
            self.step(each)
        average_gradients(reference)
        for parameter in reference.parameters():
            parameter.grad.mul_(2)
        check_sharded_parity(self, reference, model)
        self.assertEqual(numels, [(16 + 48 + 240) // sizes[-1]])


class TestFullyShardCommunication(CommTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_fully_shard_communication_count(self):
        """Per group: an all-gather in forward, another in backward if it resharded, and
        a reduce-scatter.
        """
        for reshard, expected in (
            (True, (6, 3, 0)),
            (False, (3, 3, 0)),
            (None, (5, 3, 0)),
        ):
            model = fully_shard_units(self, reshard_after_forward=reshard)
            for _ in range(2):
                self.assertEqual(
                    self.counts(lambda model=model: self.step(model)),
                    expected,
                    f"{reshard}",
                )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_communication_count_of_a_hybrid_mesh(self):
        model = fully_shard_units(self, mesh=world_mesh(2, 2))
        self.assertEqual(self.counts(lambda: self.step(model)), (5, 3, 3))
        model.set_requires_all_reduce(False, recurse=False)
        self.assertEqual(self.counts(lambda: self.step(model)), (5, 3, 2))
        model.set_requires_all_reduce(False)
        self.assertEqual(self.counts(lambda: self.step(model)), (5, 3, 0))
        model.set_requires_all_reduce(True)
        model.set_requires_gradient_sync(False)
        self.assertEqual(self.counts(lambda: self.step(model)), (5, 0, 0))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_set_requires_gradient_sync_of_one_module(self):
        model = fully_shard_units(self)
        model.first.set_requires_gradient_sync(False)
        self.assertEqual(self.counts(lambda: self.step(model)), (5, 2, 0))
        self.assertIsNone(model.first.weight.grad)
        model.set_requires_gradient_sync(False, recurse=False)
        self.assertEqual(self.counts(lambda: self.step(model)), (5, 1, 0))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_set_reshard_after_forward(self):
        """The setting affects the next forward, of one module or of all below it."""
        model = fully_shard_units(self)
        model.set_reshard_after_forward(False)
        self.assertEqual(self.counts(lambda: self.step(model)), (3, 3, 0))
        model.set_reshard_after_forward(True)
        self.assertEqual(self.counts(lambda: self.step(model)), (6, 3, 0))
        model.set_reshard_after_forward(False, recurse=False)
        self.assertEqual(self.counts(lambda: self.step(model)), (5, 3, 0))
        with self.assertRaisesRegex(ValueError, "should be a bool"):
            model.set_reshard_after_forward(2)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_set_reshard_after_backward(self):
        """Parameters that stay gathered need no all-gather in the next step."""
        model = fully_shard_units(self, reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        self.assertEqual(self.counts(lambda: self.step(model)), (3, 3, 0))
        self.assertEqual(self.counts(lambda: self.step(model)), (0, 3, 0))
        model.set_requires_gradient_sync(False)
        self.assertEqual(self.counts(lambda: self.step(model)), (0, 0, 0))
        model.set_reshard_after_backward(True)
        self.assertEqual(self.counts(lambda: self.step(model)), (0, 0, 0))
        self.assertEqual(self.counts(lambda: self.step(model)), (3, 0, 0))
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(False, recurse=False)
        self.assertEqual(self.counts(lambda: self.step(model)), (3, 3, 0))
        self.assertEqual(self.counts(lambda: self.step(model)), (2, 3, 0))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_manual_reshard_with_reshard_after_forward_false(self):
        model = fully_shard_units(self, reshard_after_forward=False)
        loss = model(self.rows(4)).sum()
        for module in (model.first, model.second):
            module.reshard()
        self.assertEqual(self.counts(loss.backward), (2, 3, 0))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_gradients_of_a_group_that_backward_never_reaches_are_not_reduced(self):
        model = fully_shard_units(self)
        model.first.requires_grad_(False)
        self.assertEqual(self.counts(lambda: self.step(model)), (5, 2, 0))


class TestFullyShardUnshard(CommTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_unshard_async(self):
        """Parameters are gathered once, whether you wait for the handle once, twice or
        not at all.
        """
        for waits in (2, 0):
            model = fully_shard_units(self)
            reference = ThreeUnits().to(self.device)
            with CommDebugMode() as counted:
                handles = [
                    module.unshard(async_op=True)
                    for module in (model, model.first, model.second)
                ]
                for handle in handles * waits:
                    handle.wait()
            self.assertEqual(
                counted.get_total_counts(),
                3,
                "collectives of three asynchronous unshards",
            )
            if waits:
                self.assertEqual(
                    model.second.weight.detach(),
                    reference.second.weight.detach(),
                    atol=0,
                    rtol=0,
                )
            with torch.no_grad():
                counts = self.counts(lambda model=model: model(self.rows(4)))
                self.assertEqual(
                    counts, (0, 0, 0), "collectives of a forward of unsharded modules"
                )
                self.assertIsInstance(
                    model.second.weight, DTensor, "second is resharded after forward"
                )
                self.assertEqual(model(self.rows(4)), reference(self.rows(4)))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_unshard_without_async(self):
        model = fully_shard_units(self)
        with CommDebugMode() as counted:
            for _ in range(2):  # the second call does nothing
                self.assertIsNone(model.first.unshard())
        self.assertEqual(counted.get_total_counts(), 1)
        self.assertNotIsInstance(model.first.weight, DTensor)
        self.assertEqual(tuple(model.first.weight.shape), (4, 4))
        self.assertIsInstance(model.second.weight, DTensor)


class TestFullyShardPrefetch(CommTest):
    """The order in which modules are gathered and freed. Prefetching only issues
    all-gathers earlier.
    """

    def order_of_step(self, model):
        """Return the events of forward and of backward, in words, without calls that do
        nothing.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        units = {getattr(model, unit).weight.numel() // 4: unit for unit in model.UNITS}
        calls = []

        def recording(label, original):
            def method(group, *args, **kwargs):
                before = (group.is_unsharded, group._all_gather_result is None)
                result = original(group, *args, **kwargs)
                if before != (group.is_unsharded, group._all_gather_result is None):
                    numel = sum(
                        param._sharded_param_data.numel() for param in group.fsdp_params
                    )
                    calls.append(f"{label} {units[numel]}")
                return result

            return method

        with (
            patch_unshard(recording("gather", FSDPParamGroup.unshard)),
            patch_reshard(recording("free", FSDPParamGroup.reshard)),
        ):
            loss = model(self.rows(4)).square().sum()
            forward, calls[:] = ", ".join(calls), []
            loss.backward()
        return forward, ", ".join(calls)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_order_without_prefetch_settings(self):
        """Backward prefetches the next module while it computes. It learns the order in
        the first step.
        """
        model = fully_shard_units(self, reshard_after_forward=True)
        for _ in range(2):
            forward, backward = self.order_of_step(model)
            self.assertEqual(
                forward,
                "gather last, gather first, free first, gather second, free second, "
                "free last",
            )
            self.assertEqual(
                backward,
                "gather last, gather second, gather first, free second, free last, "
                "free first",
            )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_set_modules_to_forward_prefetch(self):
        model = fully_shard_units(self)
        model.set_modules_to_forward_prefetch([model.first, model.second])
        forward, _ = self.order_of_step(model)
        self.assertEqual(
            forward, "gather last, gather first, gather second, free first, free second"
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_set_modules_to_backward_prefetch(self):
        model = fully_shard_units(self)
        model.set_modules_to_backward_prefetch([model.second, model.first])
        self.order_of_step(model)
        _, backward = self.order_of_step(model)
        self.assertEqual(
            backward, "gather second, gather first, free second, free last, free first"
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_prefetch_of_a_plain_module_is_refused(self):
        model = fully_shard_units(self)
        for setter in (
            model.set_modules_to_forward_prefetch,
            model.set_modules_to_backward_prefetch,
        ):
            with self.assertRaisesRegex(ValueError, "FSDP"):
                setter([nn.Linear(2, 2)])


if __name__ == "__main__":
    run_tests()
