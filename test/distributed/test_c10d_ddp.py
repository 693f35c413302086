# Owner(s): ["oncall: distributed"]
"""DistributedDataParallel: which gradients it averages, when and with which others, and
how buffers are kept equal.

Two ranks add two numbers in one order and halving is exact, so gradients equal the
reference's bit by bit.
"""

import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _BufferCommHookLocation

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    DDPTest,
    average_gradients,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TestDDPGradients(DDPTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_gradients_are_averaged(self):
        """DDP reduces in one bucket or several. Before the order of gradients is known
        there is one bucket, unless DDP looks for unused parameters: for one step, or
        two if the graph is static.
        """
        self.run_subtests(
            {
                "gradient_as_bucket_view": [False, True],
                "static_graph": [False, True],
                "bucket_cap_mb": [25, 1e-5],
                "find_unused_parameters": [False, True],
            },
            self._test_gradients_are_averaged,
        )

    def _test_gradients_are_averaged(self, **options):
        model, reference = self.net(), self.net()
        ddp = DDP(model, **options)
        optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
            for each in (model, reference)
        ]
        for step in range(3):
            reductions, _ = self.counts(lambda step=step: self.backward(ddp, step))
            self.backward(reference, step)
            average_gradients(reference)
            self.check_gradients(ddp, self.gradients(reference), f"step {step}")
            one_bucket = step < (
                2 if options["static_graph"] else not options["find_unused_parameters"]
            )
            if options["bucket_cap_mb"] == 25 or one_bucket:
                self.assertEqual(reductions, 1, f"all-reduces of step {step}")
            else:
                self.assertEqual(
                    reductions,
                    4,
                    f"all-reduces of step {step}, with buckets of 10 bytes",
                )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        self.assertEqual(
            list(model.parameters()),
            list(reference.parameters()),
            "weights after training",
            atol=0,
            rtol=0,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_gradients_accumulate(self):
        """Gradients are zeroed in place or set to None, and kept from step to step."""
        for gradient_as_bucket_view in (False, True):
            model, reference = self.net(), self.net()
            ddp = DDP(model, gradient_as_bucket_view=gradient_as_bucket_view)
            expected = [torch.zeros_like(each) for each in reference.parameters()]
            for step in range(3):
                self.backward(ddp, step)
                reference.zero_grad()
                self.backward(reference, step)
                # Gradients averaged before are averaged again, and equal on both ranks.
                for total, gradient in zip(
                    expected, self.averaged(reference).values(), strict=True
                ):
                    total.add_(gradient)
                self.assertEqual(
                    [each.grad for each in model.parameters()], expected, f"step {step}"
                )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_bucket_views_share_memory(self):
        """``gradient_as_bucket_view`` keeps gradients in the bucket, which is then the
        only copy.
        """
        for gradient_as_bucket_view in (False, True):
            model = self.net()
            ddp = DDP(model, gradient_as_bucket_view=gradient_as_bucket_view)
            for step in range(3):
                self.backward(ddp, step)
                storages = {
                    each.grad.untyped_storage().data_ptr()
                    for each in model.parameters()
                }
                self.assertEqual(
                    len(storages),
                    1 if gradient_as_bucket_view else 4,
                    f"memories of the gradients, {step}",
                )
                ddp.zero_grad(set_to_none=step == 1)
                if step != 1:
                    zeros = [torch.zeros_like(each) for each in model.parameters()]
                    self.assertEqual(
                        [each.grad for each in model.parameters()], zeros, "zeroed"
                    )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_no_sync(self):
        """Gradients stay local, and the next backward averages the sum of all."""
        for gradient_as_bucket_view in (False, True):
            model, reference = self.net(), self.net()
            ddp = DDP(model, gradient_as_bucket_view=gradient_as_bucket_view)
            for step in range(2):
                with ddp.no_sync():
                    reductions, _ = self.counts(
                        lambda ddp=ddp, step=step: self.backward(ddp, step)
                    )
                self.assertEqual(reductions, 0, "all-reduces within no_sync")
                self.backward(reference, step)
                self.check_gradients(
                    ddp, self.gradients(reference), f"within no_sync, {step}"
                )
            reductions, _ = self.counts(lambda ddp=ddp: self.backward(ddp, 2))
            self.assertEqual(reductions, 1, "all-reduces after no_sync")
            self.backward(reference, 2)
            self.check_gradients(ddp, self.averaged(reference), "after no_sync")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_no_sync_within_no_sync(self):
        ddp = DDP(self.net())
        with ddp.no_sync():
            with ddp.no_sync():
                self.backward(ddp)
            self.assertEqual(
                self.counts(lambda: self.backward(ddp))[0],
                0,
                "all-reduces in the outer no_sync",
            )
        self.assertEqual(
            self.counts(lambda: self.backward(ddp))[0], 1, "all-reduces outside"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_no_sync_ends_with_an_error(self):
        ddp = DDP(self.net())
        with self.assertRaisesRegex(ValueError, "of the body"), ddp.no_sync():
            raise ValueError("of the body")
        self.assertEqual(
            self.counts(lambda: self.backward(ddp))[0], 1, "all-reduces afterwards"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_forward_outside_no_sync_decides(self):
        """As documented, forward decides whether the next backward reduces."""
        ddp = DDP(self.net())
        loss = ddp(self.rows(4)).sum()
        with ddp.no_sync():
            self.assertEqual(self.counts(loss.backward)[0], 1, "all-reduces")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ignored_parameters_stay_local(self):
        model, reference = self.net(), self.net()
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
        ddp = DDP(model)
        for each in (ddp, reference):
            self.backward(each)
        local = reference[0].weight.grad.clone()
        averaged = self.averaged(reference)
        self.assertEqual(
            model[0].weight.grad,
            local,
            "gradient of 0.weight, which DDP ignores",
            atol=0,
            rtol=0,
        )
        self.assertEqual(
            model[0].bias.grad, averaged["0.bias"], "gradient of 0.bias", atol=0, rtol=0
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_frozen_parameters_are_left_alone(self):
        model, reference = self.net(), self.net()
        for each in (model, reference):
            each[0].requires_grad_(False)
        ddp = DDP(model)
        for step in range(2):
            for each in (ddp, reference):
                each.zero_grad()
                self.backward(each, step)
            self.check_gradients(ddp, self.averaged(reference), f"step {step}")
        self.assertEqual([each.grad for each in model[0].parameters()], [None, None])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_shared_parameter_is_reduced_once(self):
        def tied():
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            )
            model[1].weight = model[0].weight
            return model.to(self.device)

        model, reference = tied(), tied()
        ddp = DDP(model)
        elements = []
        ddp.register_comm_hook(
            None,
            lambda state, bucket: (
                elements.append(bucket.buffer().numel()) or done(bucket)
            ),
        )
        self.backward(ddp)
        self.assertEqual(elements, [16], "elements that are reduced")
        self.backward(reference)
        self.assertEqual(
            model[0].weight.grad,
            reference[0].weight.grad,
            "gradient of the shared weight",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_delayed_parameters_are_reduced_at_a_hook(self):
        """Delayed parameters start as rank 0's, and are reduced when the gradient of
        another has been computed.
        """
        model, reference = self.net(), self.net()
        with torch.no_grad():
            for each in model[0].parameters():
                each.add_(self.rank)
        options = (
            {"device_ids": [self.device.index]} if self.device.index is not None else {}
        )
        delayed = [("0.weight", model[0].weight), ("0.bias", model[0].bias)]
        # The first layer's bias is the last whose gradient comes, but the hook must
        # come after all delayed ones.
        rows = [self.rows(4, step).requires_grad_() for step in range(2)]
        trigger = nn.Parameter(torch.zeros(4, device=self.device))
        model.register_parameter("trigger", trigger)
        ddp = DDP(
            model,
            delay_all_reduce_named_params=delayed,
            param_to_hook_all_reduce=trigger,
            **options,
        )
        for step in range(2):
            ddp.zero_grad()
            reference.zero_grad()
            ddp(rows[step] + trigger).square().sum().backward()
            reference(rows[step]).square().sum().backward()
            expected = self.averaged(reference)
            for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
                found = model.get_parameter(name).grad
                self.assertEqual(
                    found,
                    expected[name],
                    f"step {step}: gradient of {name}",
                    atol=0,
                    rtol=0,
                )
        model[0].bias.grad = None
        kept = model[0].weight.grad.clone()
        ddp(rows[0] + trigger).square().sum().backward()
        reference.zero_grad()
        reference(rows[0]).square().sum().backward()
        expected = self.averaged(reference)
        found = (model[0].weight.grad, model[0].bias.grad)
        self.assertEqual(
            found,
            (kept + expected["0.weight"], expected["0.bias"]),
            "one kept, one reset",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_modes_and_parameters_are_those_of_the_module(self):
        ddp = DDP(self.net())
        for mode in (False, True):
            self.assertIs(ddp.train(mode), ddp)
            modes = [each.training for each in ddp.modules()]
            self.assertEqual(modes, [mode] * 5, "DDP, its module, three layers")
        for recurse, expected in ((True, [*ddp.parameters()]), (False, [])):
            found = [*map(id, ddp._get_parameters(ddp.module, recurse))]
            self.assertEqual(found, [*map(id, expected)], f"recurse={recurse}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_active_module_is_that_of_the_innermost_forward(self):
        """Dynamo asks for it. After an error of a forward no module is active."""
        seen = []

        class Outer(nn.Module):
            def __init__(self, inner, last):
                super().__init__()
                self.inner, self.last = inner, last

            def forward(self, x):
                x = self.inner(x)
                seen.append(DDP._get_active_ddp_module())
                return self.last(x)

        inner, last = self.net(), self.net()
        inner.register_forward_hook(
            lambda *_: seen.append(DDP._get_active_ddp_module())
        )
        ddp = DDP(Outer(inner_ddp := DDP(inner), last))
        with self.assertRaisesRegex(RuntimeError, "shapes|size|dimension"):
            ddp(self.rows(4))  # three columns where ``last`` needs four
        self.assertIs(seen[0], inner_ddp, "in the inner module")
        self.assertIs(seen[1], ddp, "after it")
        self.assertIsNone(DDP._get_active_ddp_module(), "after the error")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_arguments_that_cannot_work_are_refused(self):
        frozen = self.net().requires_grad_(False)
        with self.assertRaisesRegex(
            RuntimeError, "module doesn't have any parameter that requires a gradient"
        ):
            DDP(frozen)
        with self.assertRaisesRegex(
            ValueError, "device_ids can only be None or contain a single element"
        ):
            DDP(self.net(), device_ids=[0, 1])
        with self.assertRaisesRegex(ValueError, "need to be set at the same time"):
            DDP(self.net(), delay_all_reduce_named_params=[])
        with self.assertRaisesRegex(RuntimeError, "uninitialized parameters"):
            DDP(nn.LazyLinear(3).to(self.device))
        with self.assertRaisesRegex(RuntimeError, "Cannot specify both"):
            DDP(self.net(), process_group=self.process_group, device_mesh=world_mesh(2))
        with self.assertRaisesRegex(RuntimeError, "Only 1D device mesh"):
            DDP(self.net(), device_mesh=world_mesh(1, 2))
        self.assertIs(
            DDP(self.net(), device_mesh=world_mesh(2)).process_group,
            world_mesh(2).get_group(),
        )


def done(bucket):
    """Return a future with the bucket as it is."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Counting(nn.Module):
    """A linear layer with a buffer of shape ``(2,)``, and the values that the buffer
    had in forward.
    """

    def __init__(self, value, device):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.full((2,), float(value)))
        self.seen = []
        self.to(device)

    def forward(self, x):
        self.seen.append(self.count.tolist()[0])
        return self.layer(x)


class TestDDPBuffers(DDPTest):
    def _counting(self):
        return Counting(self.rank, self.device)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_initial_state_is_that_of_rank_0(self):
        for options, buffer in (
            ({}, 0.0),
            ({"forward_sync_buffers": False}, 0.0),
            ({"init_sync": False}, self.rank),
        ):
            model = self._counting()
            with torch.no_grad():
                model.layer.weight.fill_(self.rank)
            DDP(model, **options)
            weight = self.rank if "init_sync" in options else 0
            self.assertEqual(
                model.layer.weight.detach().mean().item(),
                weight,
                f"initial weight with {options}",
            )
            self.assertEqual(
                model.count.tolist(),
                [float(buffer)] * 2,
                f"initial buffer with {options}",
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_buffers_of_rank_0_reach_all_before_forward(self):
        model = self._counting()
        ddp = DDP(model)
        for step in range(3):
            with torch.no_grad():
                model.count.fill_(10 * step + self.rank)
            _, broadcasts = self.counts(lambda: ddp(self.rows(4)).sum().backward())
            self.assertEqual(broadcasts, 1, "broadcasts")
        self.assertEqual(model.seen, [0.0, 10.0, 20.0], "buffer in forward")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_reassigned_buffer_is_sent(self):
        model = self._counting()
        ddp = DDP(model)
        ddp(self.rows(4))
        model.count = torch.full((2,), 5.0 + self.rank, device=self.device)
        ddp(self.rows(4))
        self.assertEqual(model.seen, [0.0, 5.0], "reassigned buffer in forward")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_buffers_stay_local_if_asked(self):
        model = self._counting()
        ddp = DDP(model, forward_sync_buffers=False)
        with torch.no_grad():
            model.count.fill_(self.rank)
        _, broadcasts = self.counts(lambda: ddp(self.rows(4)).sum().backward())
        self.assertEqual(broadcasts, 0, "broadcasts in forward")
        self.assertEqual(model.seen, [float(self.rank)], "buffer in forward")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ignored_buffer_stays_local(self):
        model = self._counting()
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["count"])
        ddp = DDP(model)
        ddp(self.rows(4))
        self.assertEqual(model.seen, [float(self.rank)], "ignored buffer in forward")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_no_sync_saves_the_next_broadcast(self):
        """After a backward without a reduction, the next forward synchronizes no
        buffers.
        """
        ddp = DDP(self._counting())
        broadcasts = []
        for syncs in (True, False, False, True, True):
            ddp.require_backward_grad_sync = syncs
            broadcasts.append(
                self.counts(lambda: ddp(self.rows(4)).sum().backward())[1]
            )
        self.assertEqual(broadcasts, [1, 1, 0, 0, 1], "broadcasts of four forwards")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_buffer_hook_runs_where_asked(self):
        """The hook gets the buffers by name, in place of the broadcast."""
        for location, expected in (
            (_BufferCommHookLocation.PRE_FORWARD, ["hook", "forward"]),
            (_BufferCommHookLocation.POST_FORWARD, ["forward", "hook"]),
        ):
            model, order, named = self._counting(), [], []

            def hook(state, buffers, named=named):
                state.append("hook")
                named.extend(buffers)

            ddp = DDP(model)
            ddp._register_buffer_comm_hook(order, hook, location)
            model.layer.register_forward_hook(
                lambda *_, order=order: order.append("forward")
            )
            _, broadcasts = self.counts(
                lambda ddp=ddp: ddp(self.rows(4)).sum().backward()
            )
            self.assertEqual(order, expected, "order of hook and forward")
            self.assertEqual(named, ["count"], "buffers of the hook")
            self.assertEqual(broadcasts, 0, "broadcasts")


if __name__ == "__main__":
    run_tests()
