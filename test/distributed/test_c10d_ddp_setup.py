# Owner(s): ["oncall: distributed"]
"""How DistributedDataParallel is set up: the sizes of its buckets, kinds of gradients,
inputs on other devices, its reducer in Python, copies, and a change of its group.

Two ranks add two numbers in one order and halving is exact, so gradients equal the
reference's bit by bit.
"""

import contextlib
import copy
import io
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch._dynamo import config as dynamo_config
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    CollectiveLog,
    DDPTest,
    skip_without_accelerator,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

MIB = 2**20
FLOAT = 4


class Vectors(nn.Module):
    """Parameters of ``sizes`` elements, whose gradients come in reverse order."""

    def __init__(self, sizes, device):
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(size) for size in sizes)
        self.to(device)

    def forward(self, x):
        for each in self.vectors:
            x = x * each.mean()
        return x


class TestDDPBuckets(DDPTest):
    def _elements(self, ddp):
        """Return the elements of each all-reduce of three steps."""
        steps = []
        for _ in range(3):
            with CollectiveLog() as log:
                ddp(torch.ones(1, device=self.device)).sum().backward()
            steps.append(
                [
                    call.numel
                    for call in log.calls
                    if call.name == "all-reduce" and call.dtype.is_floating_point
                ]
            )
        return steps

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_bucket_is_full_at_its_limit(self):
        """The first bucket may hold 1 MiB unless a size is asked for, and those after
        it 25 MiB. The first step has one bucket, and the order of gradients decides
        about later ones; a module that looks for unused parameters keeps its first.
        """
        half = MIB // 2 // FLOAT
        for limit, looks, first, later in (
            (None, False, [6 * half], [2 * half, 4 * half]),
            (None, True, [4 * half, 2 * half], [4 * half, 2 * half]),
            (25, True, [6 * half], [6 * half]),
            (1, False, [6 * half], [2 * half] * 3),
            (1, True, [2 * half] * 3, [2 * half] * 3),
            (1.25, False, [6 * half], [3 * half] * 2),
        ):
            ddp = DDP(
                Vectors([half] * 6, self.device),
                bucket_cap_mb=limit,
                find_unused_parameters=looks,
            )
            self.assertEqual(
                self._elements(ddp),
                [first, later, later],
                f"elements of buckets, limit {limit}, looks for unused: {looks}",
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_each_bucket_may_have_a_limit(self):
        """The last limit is that of all further buckets."""
        caps = [each * FLOAT / MIB for each in (1, 40)]
        for static_graph in (False, True):
            ddp = DDP(
                Vectors([24, 6, 18, 3, 30], self.device),
                bucket_cap_mb_list=caps,
                static_graph=static_graph,
            )
            steps = self._elements(ddp)
            self.assertEqual(steps[0], [57, 24], "in the order of definition")
            self.assertEqual(steps[-1], [30, 51], "in the order of gradients")
            self.assertEqual(ddp.bucket_bytes_cap, 40 * FLOAT, "largest limit")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_bucket_that_no_rank_uses_is_left_out_if_asked(self):
        for skips in (False, True):
            model = Vectors([24, 6, 18], self.device)
            used = list(model.vectors)
            ddp = DDP(
                model,
                find_unused_parameters=True,
                bucket_cap_mb=1e-5,
                skip_all_reduce_unused_params=skips,
            )
            model.forward = lambda x, used=used: x * used[0].mean() * used[2].mean()
            expected = [18, 24] if skips else [18, 6, 24]
            self.assertEqual(self._elements(ddp)[0], expected, f"skips: {skips}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_gradients_may_be_copied_at_once(self):
        model, reference = self.net(), self.net()
        ddp = DDP(model, batched_grad_copy=True)
        for step in range(3):
            for each in (ddp, reference):
                each.zero_grad()
                self.backward(each, step)
            self.check_gradients(ddp, self.averaged(reference), f"step {step}")


class TestDDPGradientKinds(DDPTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_sparse_gradients(self):
        """Of an embedding, and of a bag; rows that no rank looks up stay out."""
        group = dist.new_group(backend="gloo")  # NCCL reduces no sparse tensors
        for kind in (nn.Embedding, nn.EmbeddingBag):
            torch.manual_seed(0)
            table = kind(8, 3, sparse=True).to(self.device)
            weight = table.weight.detach().clone().requires_grad_()
            ddp = DDP(table, process_group=group)
            for step in range(2):
                ids = torch.tensor([[self.rank, 3], [3, 6 + step]], device=self.device)
                ddp.zero_grad()
                weight.grad = None
                ddp(ids).square().sum().backward()
                self.assertTrue(table.weight.grad.is_sparse, f"{kind}: sparse")
                rows = weight[ids] if kind is nn.Embedding else weight[ids].mean(1)
                rows.square().sum().backward()
                dist.all_reduce(weight.grad)
                found = table.weight.grad.coalesce()
                expected = weight.grad / self.world_size
                self.assertEqual(found.to_dense(), expected, f"{kind}, step {step}")
                looked = sorted({0, 1, 3, 6 + step})
                self.assertEqual(found.indices().tolist(), [looked], f"rows of {kind}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_models_that_cannot_work_are_refused(self):
        split = nn.Sequential(self.net(), nn.Linear(3, 3, device="meta"))
        with self.assertRaisesRegex(ValueError, "same type of devices.*meta"):
            DDP(split)
        on_host = nn.Linear(2, 2)
        for options in ({"device_ids": [0]}, {"output_device": 1}):
            with self.assertRaisesRegex(ValueError, "only work with single-device"):
                DDP(on_host, **options)
        with self.assertRaisesRegex(ValueError, "SyncBatchNorm layers only work"):
            DDP(nn.SyncBatchNorm(3), process_group=dist.new_group(backend="gloo"))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_modules_that_need_an_accelerator(self):
        """A module over several devices has no ``device_ids``. DDP logs that a module
        has, or is, a batch norm over ranks.
        """
        skip_without_accelerator("device_ids name devices of an accelerator")
        if torch.accelerator.device_count() > 1:
            devices = [torch.device(self.device.type, index) for index in (0, 1)]
            spread = nn.Sequential(*(nn.Linear(3, 3, device=each) for each in devices))
            for options in ({"device_ids": [0]}, {"output_device": 1}):
                with self.assertRaisesRegex(ValueError, "only work with single-device"):
                    DDP(spread, **options)
        ddp = DDP(nn.SyncBatchNorm(3).to(self.device))
        self.assertEqual(ddp._get_ddp_logging_data()["has_sync_bn"], 1)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_deprecated_options_say_so(self):
        """``broadcast_buffers`` also decides about buffers at the start."""
        for options, message, forward in (
            ({"broadcast_buffers": False}, "broadcast_buffers` is deprecated", False),
            (
                {"broadcast_buffers": False, "forward_sync_buffers": True},
                "its value is ignored",
                True,
            ),
            ({"check_reduction": True}, "check_reduction` argument", True),
        ):
            model = nn.BatchNorm1d(3).to(self.device)
            model.running_mean.fill_(self.rank)
            with self.assertWarnsRegex(FutureWarning, message):
                ddp = DDP(model, **options)
            self.assertEqual(ddp.forward_sync_buffers, forward, options)
            self.assertEqual(ddp.broadcast_buffers, forward, options)
            mean = 0.0 if forward else float(self.rank)
            self.assertEqual(model.running_mean.tolist(), [mean] * 3, options)


class TestDDPInputs(DDPTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_inputs_are_moved_to_the_device(self):
        """Tensors in any nesting, and by keyword. Without ``device_ids`` they stay."""
        skip_without_accelerator("inputs are moved from the host")
        seen = []

        class Nested(nn.Linear):
            def forward(self, rows, *, more):
                seen.append((rows["x"].device.type, more[0].device.type, more[1]))
                return super().forward(rows["x"].to(self.weight.device))

        index = self.rank % torch.accelerator.device_count()
        for ids in ([index], None):
            ddp = DDP(Nested(4, 3).to(self.device), device_ids=ids)
            rows = self.rows(4).cpu()
            ddp({"x": rows}, more=[rows, "a word"]).sum().backward()
            there = (self.device if ids else rows.device).type
            self.assertEqual(seen.pop(), (there, there, "a word"), ids)
            self.assertEqual(ddp.device_ids, ids)
            self.assertEqual(ddp.output_device, ids and index)
        here = torch.device(self.device.type, index)
        for moved, more in (
            ddp.scatter((rows,), {"more": rows}, [here]),
            ddp.to_kwargs((rows,), {"more": rows}, index),
        ):
            for each in (moved[0][0], more[0]["more"]):
                self.assertEqual(each.device, here, "device of a helper's result")
                self.assertEqual(each, self.rows(4), "values of a helper's result")
        gathered = ddp.gather([self.rows(4), self.rows(4, 1)], here)
        self.assertEqual(gathered, torch.cat([self.rows(4), self.rows(4, 1)]))


class TestDDPPythonReducer(DDPTest):
    """The reducer that compiled backwards see, in a backward that is not compiled."""

    def _ddp(self, model=None, **options):
        with dynamo_config.patch(optimize_ddp="python_reducer"):
            return DDP(self.net() if model is None else model, **options)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_gradients_are_averaged(self):
        reference, model = self.net(), self.net()
        model[0].bias.requires_grad_(False)
        ddp = self._ddp(model)
        for step in range(3):
            for each in (ddp, reference):
                each.zero_grad()
                self.backward(each, step)
            expected = self.averaged(reference)
            del expected["0.bias"]
            self.check_gradients(ddp, expected, f"step {step}")
        self.assertIsNone(model[0].bias.grad, "gradient of a frozen parameter")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_no_sync(self):
        ddp, reference = self._ddp(), self.net()
        with ddp.no_sync():
            self.backward(ddp)
        self.backward(reference)
        self.check_gradients(ddp, self.gradients(reference), "local gradients")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_hook_takes_the_place_of_the_average(self):
        """The hook gets its state, each gradient, and the gradient's parameter."""
        seen = []

        def hook(state, bucket):
            gradient, parameter = bucket
            self.assertIs(parameter.grad, gradient, "gradient and parameter")
            state.append(parameter)
            gradient.fill_(7.0)

        ddp = self._ddp()
        ddp.register_comm_hook(seen, hook)
        self.backward(ddp)
        self.assertEqual({*map(id, seen)}, {*map(id, ddp.parameters())}, "parameters")
        for name, gradient in self.gradients(ddp.module).items():
            self.assertEqual(gradient, torch.full_like(gradient, 7.0), name)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_limits_by_bucket_are_refused(self):
        with self.assertRaisesRegex(AssertionError, "bucket_cap_mb_list"):
            self._ddp(bucket_cap_mb_list=[1, 2])


class TestDDPCopies(DDPTest):
    def _copies(self, ddp):
        yield "copy", copy.deepcopy(ddp)
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        yield "saved", torch.load(file, weights_only=False)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_copy_has_a_reducer(self):
        """A copy averages its gradients with the options of the first module, and
        leaves that one's alone.
        """
        for options in (
            {"forward_sync_buffers": False, "bucket_cap_mb": 1e-5},
            {"find_unused_parameters": True, "gradient_as_bucket_view": True},
            {"static_graph": True},
        ):
            model = self.net()
            if "bucket_cap_mb" not in options:
                model.unused = nn.Parameter(torch.ones(2, device=self.device))
            ddp = DDP(model, **options)
            for kind, each in self._copies(ddp):
                label = f"{kind} of DDP with {options}"
                reference = self.net()
                for step in range(3):
                    each.zero_grad()
                    reference.zero_grad()
                    self.backward(each, step)
                    self.backward(reference, step)
                    self.check_gradients(each, self.averaged(reference), label)
                for name in ("forward_sync_buffers", "static_graph"):
                    self.assertEqual(getattr(each, name), getattr(ddp, name), label)
            untouched = dict.fromkeys(self.gradients(model))
            self.assertEqual(self.gradients(model), untouched, "of the first module")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_copies_of_old_releases(self):
        """They have ``broadcast_buffers``, and no flags of a step."""
        ddp = DDP(self.net(), forward_sync_buffers=False)
        state = ddp.__getstate__()
        for name in (
            "forward_sync_buffers",
            "require_forward_param_sync",
            "require_backward_grad_sync",
        ):
            del state[name]
        restored = DDP.__new__(DDP)
        restored.__setstate__(state)
        self.assertFalse(restored.forward_sync_buffers)
        self.assertTrue(restored.require_forward_param_sync)
        self.assertTrue(restored.require_backward_grad_sync)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_copy_over_another_group_is_refused(self):
        ddp = DDP(self.net(), process_group=dist.new_group())
        with self.assertRaisesRegex(RuntimeError, "only supported.*default process"):
            copy.deepcopy(ddp)


class TestDDPChanges(DDPTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_group_may_change(self):
        """After the change, gradients are averaged over the new group's ranks alone."""
        alone = [dist.new_group([rank]) for rank in range(self.world_size)]
        ddp, reference = DDP(self.net(), bucket_cap_mb=1e-5), self.net()
        for step in range(5):
            if step == 2:
                ddp._update_process_group(alone[self.rank])
            for each in (ddp, reference):
                each.zero_grad()
                self.backward(each, step)
            whole = self.averaged(reference)
            expected = whole if step < 2 else self.gradients(reference)
            self.check_gradients(ddp, expected, f"step {step}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_outputs_are_copied_unless_told_otherwise(self):
        """DDP looks for used parameters in a node that it puts behind the outputs; a
        loss may change a copy in place.
        """

        class Passing(nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net, self.last = net, None

            def forward(self, x):
                self.last = self.net(x)
                return self.last

        for copies in (True, False):
            model = Passing(self.net())
            ddp = DDP(model, find_unused_parameters=True)
            ddp._set_ddp_sink_clone(copies)
            output = ddp(self.rows(4))
            same = output.data_ptr() == model.last.data_ptr()
            self.assertEqual(same, not copies, f"shared memory, copies: {copies}")
            with contextlib.ExitStack() as stack:
                if not copies:
                    stack.enter_context(
                        self.assertRaisesRegex(RuntimeError, "modified inplace")
                    )
                output.mul_(2)
                output.sum().backward()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_static_graph_may_be_set_later(self):
        """A module that runs twice needs it; setting it again does nothing."""
        ddp = DDP(self.net(), find_unused_parameters=True)
        with self.assertWarnsRegex(UserWarning, "will detect unused parameters"):
            ddp._set_static_graph()
        with self.assertWarnsRegex(UserWarning, "no need to set it again"):
            ddp._set_static_graph()
        reference = self.net()
        for step in range(3):
            for each in (ddp, reference):
                each.zero_grad()
                self.backward(each, step)
            self.check_gradients(ddp, self.averaged(reference), f"step {step}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_error_names_unused_parameters_where_asked(self):
        """Shared parameters once, those that DDP ignores not at all."""
        level = dist.get_debug_level()
        dist.set_debug_level(dist.DebugLevel.INFO)
        try:
            model = self.net()
            model.add_module("unused", nn.Linear(2, 2).to(self.device))
            model.unused.ignored = nn.Parameter(model[0].bias.detach().clone())
            DDP._set_params_and_buffers_to_ignore_for_model(model, ["unused.ignored"])
            ddp = DDP(model)
            model.forward = model[:3].forward
            self.backward(ddp)
            with self.assertRaises(RuntimeError) as caught:
                self.backward(ddp)
        finally:
            dist.set_debug_level(level)
        self.assertRegex(str(caught.exception), r"unused\.bias, unused\.weight")
        self.assertNotIn("unused.ignored", str(caught.exception))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_logged_data_is_that_of_the_module(self):
        model = self.net()
        ddp = DDP(model, bucket_cap_mb=2, find_unused_parameters=True)
        ddp.register_comm_hook(None, allreduce_hook)
        ddp._set_ddp_runtime_logging_sample_rate(1)
        with self.assertRaisesRegex(ValueError, "equal or greater than 1"):
            ddp._set_ddp_runtime_logging_sample_rate(0)
        for step in range(2):
            self.backward(ddp, step)
        data = ddp._get_ddp_logging_data()
        expected = {
            "module_name": "Sequential",
            "world_size": self.world_size,
            "rank": self.rank,
            "bucket_cap_bytes": 2 * MIB,
            "find_unused_parameters": 1,
            "gradient_as_bucket_view": 0,
            "broadcast_buffers": 1,
            "num_parameter_tensors": 4,
            "total_parameter_size_bytes": 51 * FLOAT,
            "comm_hook": "allreduce_hook",
            "has_sync_bn": 0,
        }
        found = {name: data.get(name) for name in expected}
        self.assertEqual(found, expected, "logged data")


if __name__ == "__main__":
    run_tests()
