# Owner(s): ["oncall: distributed"]
"""Communication hooks of DistributedDataParallel: their buckets, the order of these,
and torch's own hooks.
"""

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks import (
    post_localSGD_hook as post_local_sgd,
)
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks import (
    quantization_hooks as quantization,
)
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _OptimizerHookState,
)
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    CollectiveLog,
    DDPTest,
    skip_without_accelerator,
)
from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

HALF = torch.float16
# Torch refuses bfloat16 there; the future of gloo's all_gather is no list of lists.
NOT_WITH_GLOO = ("BF16_COMPRESS", "QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL")
# The largest error of an average, in shares of the largest gradient: eps of the type,
# for the rounding of the shares and of their sum; half of the 255 steps of a range.
ROUNDING = {
    kind: bound
    for bound, kinds in {
        0.0: ["ALLREDUCE", "POWER_SGD", "POWER_SGD_RANK2", "BATCHED_POWER_SGD"],
        torch.finfo(HALF).eps: ["FP16_COMPRESS"],
        torch.finfo(torch.bfloat16).eps: ["BF16_COMPRESS"],
        1.01 / 255: ["QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL"],
    }.items()
    for kind in map(DDPCommHookType.__getitem__, kinds)
}


def quantized(rows):
    """Return rows as 256 steps represent each row's range with zero in it."""
    low, high = rows.amin(1, True).clamp(max=0), rows.amax(1, True).clamp(min=0)
    size = ((high - low) / 255).clamp(min=torch.finfo(rows.dtype).eps)
    zero = -(low / size).round()
    return (((rows / size).round() + zero).clamp(0, 255) - zero) * size


class DistributedDataParallelCommHookTest(DDPTest):
    def _hooked(self, state, hook, **options):
        ddp = DDP(self.net(), **options)
        ddp.register_comm_hook(state, hook)
        return ddp

    def _check_averages(self, ddp, sent_as=torch.float32, steps=3):
        """Check steps against averages computed and rounded by hand, and the type of
        the all-reduces.
        """
        reference = self.net()
        for step in range(steps):
            for each in (ddp, reference):
                each.zero_grad()
            with CollectiveLog() as log:
                self.backward(ddp, step)
            sent = {call.dtype for call in log.calls if call.name == "all-reduce"}
            self.assertEqual(sent, {sent_as}, "types that are reduced")
            self.backward(reference, step)
            expected = {}
            for name, gradient in self.gradients(reference).items():
                share = gradient.to(sent_as).div_(self.world_size)
                dist.all_reduce(share)
                expected[name] = share.to(gradient.dtype)
            self.check_gradients(ddp, expected, f"step {step}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ddp_comm_hook_allreduce_hook(self):
        for gradient_as_bucket_view in (False, True):
            self._check_averages(
                self._hooked(
                    None,
                    allreduce_hook,
                    gradient_as_bucket_view=gradient_as_bucket_view,
                )
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ddp_comm_hook_fp16compress_hook(self):
        self._check_averages(self._hooked(None, fp16_compress_hook), HALF)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ddp_comm_hook_fp16compress_wrapper(self):
        self._check_averages(
            self._hooked(None, fp16_compress_wrapper(allreduce_hook)), HALF
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ddp_comm_hook_noop_hook(self):
        """Without communication every rank keeps its own gradients."""
        ddp, reference = self._hooked(None, noop_hook), self.net()
        reductions, _ = self.counts(lambda: self.backward(ddp))
        self.assertEqual(reductions, 0, "all-reduces")
        self.backward(reference)
        self.check_gradients(ddp, self.gradients(reference), "own gradients")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_hook_gets_each_bucket_in_order(self):
        """The first bucket has the last parameters. Its parameters, gradients and
        buffer belong together.
        """
        buckets = []

        def note(state, bucket):
            parameters, gradients = bucket.parameters(), bucket.gradients()
            buckets.append(
                (
                    state,
                    bucket.index(),
                    bucket.is_last(),
                    [names[id(each)] for each in parameters],
                )
            )
            flat = torch.cat([each.flatten() for each in gradients])
            self.assertEqual(
                bucket.buffer()[: flat.numel()],
                flat,
                f"buffer of bucket {bucket.index()}",
            )
            return allreduce_hook(None, bucket)

        ddp = self._hooked("the state", note, bucket_cap_mb=1e-5)
        names = {
            id(parameter): name for name, parameter in ddp.module.named_parameters()
        }
        expected = [
            ("the state", index, index == 3, [name])
            for index, name in enumerate(["2.bias", "2.weight", "0.bias", "0.weight"])
        ]
        for step in range(3):
            buckets.clear()
            self.backward(ddp, step)
            if step:  # before, one bucket in the order of the parameters
                self.assertEqual(buckets, expected, "buckets")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_gradients_equal_the_result_of_the_hook(self):
        """The result of the hook's future counts, and DDP divides nothing."""

        def sevens(state, bucket):
            future = torch.futures.Future()
            future.set_result(torch.full_like(bucket.buffer(), 7.0))
            return future

        ddp = self._hooked(None, sevens)
        for step in range(2):
            self.backward(ddp, step)
            expected = {
                name: torch.full_like(each, 7.0)
                for name, each in ddp.module.named_parameters()
            }
            self.check_gradients(ddp, expected, f"step {step}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_hook_runs_only_where_gradients_are_synchronized(self):
        calls = []

        def note(state, bucket):
            calls.append(bucket.index())
            return allreduce_hook(state, bucket)

        ddp = self._hooked(None, note)
        with ddp.no_sync():
            self.backward(ddp)
        self.assertEqual(calls, [], "calls within no_sync")
        self.backward(ddp)
        self.assertEqual(calls, [0], "calls afterwards")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_post_local_sgd_averages_over_the_subgroup(self):
        """Hooks reduce over the whole world at first, and from the given step on only
        over the subgroup, here this rank, or not at all.
        """
        alone, _ = dist.new_subgroups(group_size=1)
        for reduces, limit in ((True, 25), (False, 25), (True, 1e-5)):
            state = post_local_sgd.PostLocalSGDState(None, alone, 2, reduces)
            ddp = self._hooked(
                state, post_local_sgd.post_localSGD_hook, bucket_cap_mb=limit
            )
            reference = self.net()
            for step in range(4):
                for each in (ddp, reference):
                    each.zero_grad()
                sent, _ = self.counts(
                    lambda ddp=ddp, step=step: self.backward(ddp, step)
                )
                self.backward(reference, step)
                expected = (
                    self.averaged(reference) if step < 2 else self.gradients(reference)
                )
                where = f"step {step}, {reduces}, {limit}"
                self.check_gradients(ddp, expected, where)
                self.assertEqual(sent > 0, step < 2 or reduces, f"reductions, {where}")
                self.assertEqual(state.iter, min(step + 1, 2), f"counted, {where}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_every_hook_averages(self):
        """Hooks registered by name average up to the rounding of what they send, with
        any buckets, the group given or not. PowerSGD starts after a thousand steps.
        """
        options = {
            "kind": tuple(ROUNDING),
            "bucket_cap_mb": (25, 1e-5),
            "gradient_as_bucket_view": (False, True),
            "has_group": (False, True),
            "wide": (False, True),
        }

        def works(row):
            # With several buckets, the hooks that quantize free memory that their
            # callbacks' streams still read, as PowerSGD's does.
            quantizes = "QUANTIZE" in getattr(row.get("kind"), "name", "")
            return not quantizes or row.get("bucket_cap_mb") != 1e-5

        for row in pairwise(options, works):
            if dist.get_backend() != "gloo" or row["kind"].name not in NOT_WITH_GLOO:
                self._test_hook_averages(**row)

    def _test_hook_averages(self, kind, has_group, wide, **options):
        def net():  # more elements than a channel of the quantization has
            torch.manual_seed(0)
            return self.net() if not wide else nn.Linear(4, 150).to(self.device)

        ddp, reference = DDP(net(), **options), net()
        register_ddp_comm_hook(kind, ddp, dist.group.WORLD if has_group else None)
        for step in range(3):
            for each in (ddp, reference):
                each.zero_grad()
                self.backward(each, step)
            local = list(self.gradients(reference).values())
            averages = self.averaged(reference)
            # Of the gradients that one bucket may hold.
            largest = max(each.abs().max() for each in local)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            for name, average in averages.items():
                error = (ddp.module.get_parameter(name).grad - average).abs().max()
                where = f"{name} of step {step}, {kind}, {has_group}, {wide}, {options}"
                bound = ROUNDING[kind] * largest.item()
                self.assertLessEqual(error.item(), bound, f"error of {where}")
                # Rounding shows, so the hook is another than the default.
                if average.numel() > 20 and ROUNDING[kind]:
                    self.assertGreater(error.item(), 0, f"error of {where}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_quantization_per_channel_keeps_small_gradients(self):
        """Large gradients do not spoil the resolution of others in the same bucket, if
        these are in other channels of 512 elements.
        """
        skip_without_accelerator("quantization hooks do not work with gloo")

        def net():
            torch.manual_seed(0)
            return nn.Linear(8, 256, bias=False).to(self.device)

        scale = torch.ones(256, device=self.device)
        scale[:64] = 1000.0  # the first 512 elements of the weight
        reference = net()
        (reference(self.rows(8)) * scale).sum().backward()
        average = self.averaged(reference)["weight"][64:]
        errors = {}
        for kind in (
            DDPCommHookType.QUANTIZE_PER_TENSOR,
            DDPCommHookType.QUANTIZE_PER_CHANNEL,
        ):
            ddp = DDP(net())
            register_ddp_comm_hook(kind, ddp)
            (ddp(self.rows(8)) * scale).sum().backward()
            errors[kind] = (ddp.module.weight.grad[64:] - average).abs().max().item()
        exact = average.abs().max().item() / 100
        self.assertLess(errors[DDPCommHookType.QUANTIZE_PER_CHANNEL], exact, "channels")
        self.assertGreater(errors[DDPCommHookType.QUANTIZE_PER_TENSOR], exact, "whole")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_quantization_rounds_to_256_steps(self):
        """Of the whole bucket's range or of each channel's, also where the last channel
        is not full; the average is of what the ranks of the group rounded.
        """
        skip_without_accelerator("quantization hooks do not work with gloo")
        alone = [dist.new_group([rank]) for rank in range(self.world_size)][self.rank]
        rows = {
            "length": (5, 512, 516, 1100),
            "channel": (None, 8, 512),
            "shift": (-1, 0, 1),
            "group": (None, dist.group.WORLD, alone),
        }
        for row in pairwise(rows):
            length, channel, group = row["length"], row["channel"], row["group"]
            everyone = []
            for rank in range(self.world_size):
                generator = torch.Generator().manual_seed(rank)
                values = torch.randn(length, generator=generator) * 0.1 + row["shift"]
                # Later channels have ever smaller gradients.
                everyone.append(values * 10.0 ** -(torch.arange(length) // 512))
            bucket = SimpleNamespace(buffer=everyone[self.rank].to(self.device).clone)
            if channel is None:
                hook = quantization.quantization_pertensor_hook(group, bucket)
            elif channel == 512:  # the default
                hook = quantization.quantization_perchannel_hook(group, bucket)
            else:
                hook = quantization.quantization_perchannel_hook(group, bucket, channel)
            rounded = []
            for values in everyone:
                size = channel or length
                padded = nn.functional.pad(values, (0, -length % size)).view(-1, size)
                rounded.append(quantized(padded).flatten()[:length])
            mine = [rounded[self.rank]] if group is alone else rounded
            found = hook.wait().cpu()
            for start in range(0, length, 512):
                part = slice(start, start + 512)
                expected = sum(mine)[part] / len(mine)
                bound = everyone[0][part].abs().max().item() * 1e-5
                self.assertEqual(
                    found[part], expected, f"from {start}, {row}", atol=bound, rtol=0
                )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_names_of_power_sgd(self):
        """They stand for a hook and a rank; the state is given as a group."""
        kinds = {
            "POWER_SGD": (power_sgd.powerSGD_hook, 1),
            "POWER_SGD_RANK2": (power_sgd.powerSGD_hook, 2),
            "BATCHED_POWER_SGD": (power_sgd.batched_powerSGD_hook, 1),
            "BATCHED_POWER_SGD_RANK2": (power_sgd.batched_powerSGD_hook, 2),
        }
        for name, (hook, rank) in kinds.items():
            for options, start in (({}, 1000), ({"start_powerSGD_iter": 7}, 7)):
                ddp = DDP(self.net())
                kind = DDPCommHookType[name]
                kind.value(model=ddp, state=dist.group.WORLD, **options)
                ((found, state),) = ddp._comm_hooks
                self.assertIs(found, hook, name)
                self.assertIs(state.process_group, dist.group.WORLD, name)
                found = state.matrix_approximation_rank, state.start_powerSGD_iter
                self.assertEqual(found, (rank, start), name)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_compiled_hooks_average_each_gradient(self):
        """Compiled backwards give hooks a gradient and its parameter."""
        alone = [dist.new_group([rank]) for rank in range(self.world_size)][self.rank]
        hooks = {fp16_compress_hook: HALF}
        if dist.get_backend() != "gloo":
            hooks[bf16_compress_hook] = torch.bfloat16
        for hook, dtype in hooks.items():
            for group in (None, dist.group.WORLD, alone):
                gradient = self.rows(4)
                expected = gradient.to(dtype)
                if group is not alone:
                    expected.div_(self.world_size)
                    dist.all_reduce(expected)
                with mock.patch("torch.compiler.is_compiling", return_value=True):
                    found = hook(group or dist.group.WORLD, (gradient, None))
                self.assertIs(found, gradient, "in place")
                self.assertEqual(found, expected.float(), f"{hook}, {group}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ddp_comm_hook_bf16compress_wrapper(self):
        skip_without_accelerator("torch refuses bfloat16 hooks on cpu")
        self._check_averages(
            self._hooked(None, bf16_compress_wrapper(allreduce_hook)), torch.bfloat16
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_hook_reduces_over_its_group_alone(self):
        """The group that a hook gets as its state decides, whatever DDP's is. DDP of a
        group of one rank trains alone, also for more steps than others.
        """
        skip_without_accelerator("quantization hooks do not work with gloo")
        mine = [dist.new_group([rank]) for rank in range(self.world_size)][self.rank]
        full = power_sgd.PowerSGDState(mine, 8, 2, min_compression_rate=0)
        hooks = [*(each for each in ROUNDING if "POWER" not in each.name), full, None]
        for kind in hooks:
            ddp, reference = DDP(self.net()), self.net()
            if kind is full:
                ddp.register_comm_hook(full, power_sgd.powerSGD_hook)
            elif kind is None:  # DDP's own group, for all that it does
                model = self.net()
                model.register_buffer("count", torch.full((2,), float(self.rank)))
                ddp = DDP(model.to(self.device), process_group=mine)
            else:
                register_ddp_comm_hook(kind, ddp, mine)
            with nullcontext() if kind else ddp.join():
                for step in range(4 if kind else 3 + self.rank):
                    for each in (ddp, reference):
                        each.zero_grad()
                        self.backward(each, step)
            for name, local in self.gradients(reference).items():
                found = ddp.module.get_parameter(name).grad
                where = f"{name}, {kind or 'join'}"
                self.assertEqual(found, local, where, atol=0.05, rtol=0.01)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fused_optimizer(self):
        """A fused optimizer steps the parameters it was given, or all, with averaged
        gradients, in backward.
        """
        for fused in (None, ["0.weight", "2.bias"]):
            model, reference = self.net(), self.net()
            ddp = DDP(model)
            some = None if fused is None else {*map(model.get_parameter, fused)}
            ddp._register_fused_optim(
                torch.optim.SGD, lr=0.1, momentum=0.9, optim_params=some
            )
            optimizer = torch.optim.SGD(
                [
                    each
                    for name, each in reference.named_parameters()
                    if fused is None or name in fused
                ],
                lr=0.1,
                momentum=0.9,
            )
            for step in range(3):
                for each in (ddp, reference):
                    each.zero_grad()
                    self.backward(each, step)
                for name, average in self.averaged(reference).items():
                    reference.get_parameter(name).grad.copy_(average)
                optimizer.step()
                for name, expected in reference.named_parameters():
                    found = model.get_parameter(name)
                    self.assertEqual(found, expected, f"{name}, {step}, {fused}")
        with self.assertRaisesRegex(ValueError, "must implement method step_param"):
            _OptimizerHookState(optimizer)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_optimizer_in_backward(self):
        """Each bucket's parameters are stepped when it has been reduced, and keep no
        gradients.
        """
        skip_without_accelerator(
            "an optimizer in DDP's backward has a stream of its own"
        )
        for views in (False, True):
            model, reference = self.net(), self.net()
            _apply_optimizer_in_backward(
                torch.optim.SGD, model.parameters(), {"lr": 0.1}
            )
            ddp = DDP(model, gradient_as_bucket_view=views)
            optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
            for step in range(3):
                self.backward(ddp, step)
                self.backward(reference, step)
                for name, gradient in self.averaged(reference).items():
                    reference.get_parameter(name).grad.copy_(gradient)
                optimizer.step()
                optimizer.zero_grad()
                for name, each in model.named_parameters():
                    where = f"step {step}: {name}, bucket views {views}"
                    self.assertEqual(each, reference.get_parameter(name), where)
                    self.assertIsNone(each.grad, f"gradient, {where}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_hooks_that_cannot_work_are_refused(self):
        def wrong_bucket(state, bucket: int):
            pass

        def wrong_result(state, bucket) -> int:
            pass

        refused = [
            (TypeError, "Communication hook must be callable", "no function"),
            (ValueError, "bucket annotation should be dist.GradBucket", wrong_bucket),
            (
                ValueError,
                "return annotation should be torch.futures.Future",
                wrong_result,
            ),
        ]
        if self.device == torch.device("cpu"):
            refused.append(
                (
                    TypeError,
                    "BF16 all reduce communication hook required CUDA",
                    bf16_compress_hook,
                )
            )
        for error, text, hook in refused:
            with self.assertRaisesRegex(error, text, msg=f"for {hook}"):
                DDP(self.net()).register_comm_hook(None, hook)
        ddp = self._hooked(None, allreduce_hook)
        with self.assertRaisesRegex(
            RuntimeError,
            "register_comm_hook or register_builtin_comm_hook can only be called",
        ):
            ddp.register_comm_hook(None, allreduce_hook)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_error_of_a_hook_reaches_backward(self):
        def broken(state, bucket):
            raise ValueError("of the hook")

        with self.assertRaisesRegex(Exception, "of the hook"):
            self.backward(self._hooked(None, broken))


if __name__ == "__main__":
    run_tests()
