# Owner(s): ["oncall: distributed"]
"""Communication hooks of DistributedDataParallel: their buckets, the order of these,
and torch's own hooks.
"""

import sys

import torch
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    post_localSGD_hook as post_local_sgd,
)
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
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

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

HALF = torch.float16


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
        over the subgroup, here this rank.
        """
        alone, _ = dist.new_subgroups(group_size=1)
        state = post_local_sgd.PostLocalSGDState(
            process_group=None, subgroup=alone, start_localSGD_iter=2
        )
        ddp, reference = (
            self._hooked(state, post_local_sgd.post_localSGD_hook),
            self.net(),
        )
        for step in range(4):
            for each in (ddp, reference):
                each.zero_grad()
                self.backward(each, step)
            expected = (
                self.averaged(reference) if step < 2 else self.gradients(reference)
            )
            self.check_gradients(ddp, expected, f"step {step}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_power_sgd_of_full_rank_averages(self):
        """The hook averages until the given step, and then, with factors of full rank,
        does the same up to rounding.
        """
        state = power_sgd.PowerSGDState(
            None, 8, start_powerSGD_iter=2, min_compression_rate=0
        )
        ddp, reference = self._hooked(state, power_sgd.powerSGD_hook), self.net()
        for step in range(4):
            for each in (ddp, reference):
                each.zero_grad()
                self.backward(each, step)
            for name, expected in self.averaged(reference).items():
                found = ddp.module.get_parameter(name).grad
                tolerance = (
                    {"atol": 1e-4, "rtol": 1e-4}
                    if step >= 2
                    else {"atol": 0, "rtol": 0}
                )
                self.assertEqual(
                    found, expected, f"step {step}: gradient of {name}", **tolerance
                )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_power_sgd_keeps_compression_errors(self):
        """With rank one, weights lose something, which is added to the next step's;
        biases, with one dimension, are averaged. All ranks get the same.
        """
        state = power_sgd.PowerSGDState(
            None, 1, start_powerSGD_iter=2, min_compression_rate=1
        )
        ddp, reference = self._hooked(state, power_sgd.powerSGD_hook), self.net()
        received, owed = 0, 0
        for step in range(5):
            for each in (ddp, reference):
                each.zero_grad()
                self.backward(each, step)
            expected = self.averaged(reference)
            found = {
                name: each.grad.clone() for name, each in ddp.module.named_parameters()
            }
            self.assertEqual(found["0.bias"], expected["0.bias"], f"step {step}: bias")
            everywhere = [None] * self.world_size
            dist.all_gather_object(everywhere, [each.cpu() for each in found.values()])
            self.assertEqual(
                everywhere[1],
                everywhere[0],
                f"step {step}: gradients of the ranks",
                atol=0,
                rtol=0,
            )
            if step < 2:
                continue
            weight = found["0.weight"]
            rank = int(torch.linalg.matrix_rank(weight.cpu(), atol=1e-4))
            self.assertEqual(rank, 1, f"step {step}: rank of the weight's gradient")
            received, owed = received + weight, owed + expected["0.weight"]
            (error,) = state.error_dict.values()
        # All sent gradients plus the remaining error equal the sum of all gradients.
        dist.all_reduce(error)
        # Elements of the parameters that come before it in the bucket, the last
        # parameter first.
        behind = 3 + 18 + 6
        still_owed = (error / self.world_size)[behind : behind + 24].view(6, 4)
        self.assertEqual(
            received + still_owed, owed, "sent and still owed", atol=1e-4, rtol=1e-4
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_optimizer_in_backward(self):
        """Each bucket's parameters are stepped when it has been reduced, and keep no
        gradients.
        """
        skip_without_accelerator(
            "an optimizer in DDP's backward has a stream of its own"
        )
        model, reference = self.net(), self.net()
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        ddp = DDP(model)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(3):
            self.backward(ddp, step)
            self.backward(reference, step)
            for name, gradient in self.averaged(reference).items():
                reference.get_parameter(name).grad.copy_(gradient)
            optimizer.step()
            optimizer.zero_grad()
            for name, each in model.named_parameters():
                self.assertEqual(
                    each, reference.get_parameter(name), f"step {step}: {name}"
                )
                self.assertIsNone(each.grad, f"gradient of {name}")

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
