# Owner(s): ["oncall: distributed"]
"""Ranks that run out of inputs at different times: the ``Join`` context with counting
joinables, and with DDP.
"""

import contextlib
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import DDPTest
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class NotingHook(JoinHook):
    def __init__(self, joinable):
        self.joinable = joinable

    def main_hook(self):
        self.joinable.note("main")
        self.joinable.add(0.0)

    def post_hook(self, is_last_joiner):
        self.joinable.note(f"post, last: {is_last_joiner}")


class Adder(Joinable):
    """Adds a number over all ranks in each step. Joined ranks add zero."""

    def __init__(self, name, calls, device):
        super().__init__()
        self.name, self.calls, self.device, self.sums = name, calls, device, []

    def note(self, label):
        self.calls.append(f"{self.name}: {label}")

    def add(self, number):
        total = torch.tensor([number], device=self.device)
        dist.all_reduce(total)
        return total.item()

    def __call__(self):
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        self.sums.append(self.add(1.0))

    def join_hook(self, **kwargs):
        self.note(f"made with {kwargs}")
        return NotingHook(self)

    @property
    def join_device(self):
        return self.device

    @property
    def join_process_group(self):
        return dist.group.WORLD


class TestJoin(DDPTest):
    """Rank 0 has one input, rank 1 has three."""

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_join_hooks(self):
        """A joined rank runs the main hooks once for each step of the others. At the
        end, all run the post hooks.
        """
        calls = []
        one, two = (Adder(name, calls, self.device) for name in ("one", "two"))
        with Join([one, two], factor=2):
            for _ in range(1 + 2 * self.rank):
                one()
                two()
        made = ["one: made with {'factor': 2}", "two: made with {'factor': 2}"]
        shadows = ["one: main", "two: main"] * (2 - 2 * self.rank)
        posts = [f"{name}: post, last: {self.rank == 1}" for name in ("one", "two")]
        self.assertEqual(calls, made + shadows + posts, "calls of the hooks")
        sums = [2.0] + [1.0] * 2 * self.rank
        self.assertEqual((one.sums, two.sums), (sums, sums), "sums over ranks")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ranks_that_end_together_are_both_last(self):
        calls = []
        adder = Adder("one", calls, self.device)
        with Join([adder]):
            adder()
        self.assertEqual(
            calls, ["one: made with {}", "one: post, last: True"], "calls of the hooks"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_throw_on_early_termination(self):
        """The rank that ends first says so, and all others learn of it."""
        expected = {
            0: "Rank 0 exhausted all inputs",
            1: "Detected at least one rank that exhausted inputs",
        }
        adder = Adder("one", [], self.device)
        with (
            self.assertRaisesRegex(RuntimeError, expected[self.rank]),
            Join([adder], throw_on_early_termination=True),
        ):
            for _ in range(1 + 2 * self.rank):
                adder()
        self.assertEqual(adder.sums, [2.0], "sums over ranks")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_disabled_join_does_nothing(self):
        calls = []
        adder = Adder("one", calls, self.device)
        with Join([adder], enable=False):
            adder()
        self.assertEqual(calls, ["one: made with {}"], "calls of the hooks")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_error_of_the_body_comes_through(self):
        adder = Adder("one", [], self.device)
        with self.assertRaisesRegex(ValueError, "of the body"), Join([adder]):
            raise ValueError("of the body")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_join_of_nothing_is_refused(self):
        with self.assertRaisesRegex(ValueError, "requires at least one joinable"):
            Join([])


class Noting(nn.Module):
    """A linear layer with a buffer that each forward sets to ten times the step and the
    rank, and notes before.
    """

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(1))
        self.rank, self.step, self.seen = rank, 0, []

    def forward(self, x):
        self.seen.append(self.count.item())
        self.step += 1
        output = self.layer(x)
        with torch.no_grad():
            self.count.fill_(10 * self.step + self.rank)
        return output


class TestDDPJoin(DDPTest):
    """The rank with fewer inputs is 0 or 1, so that no test passes by the order of the
    ranks.
    """

    STEPS = (2, 4)

    def _own_steps(self, short):
        return self.STEPS[self.rank != short]

    def _share(self, model, step, short, divisor):
        """Return gradients of ``step`` as they should be, by hand: a joined rank adds
        zero.
        """
        model.zero_grad()
        self.backward(model, step)
        joined = self.rank == short and step >= self.STEPS[0]
        shares = {}
        for name, gradient in self.gradients(model).items():
            shares[name] = torch.zeros_like(gradient) if joined else gradient.clone()
            dist.all_reduce(shares[name])
            shares[name] /= divisor
        return shares

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ddp_uneven_inputs(self):
        """Gradients of ranks that go on are divided by all ranks, or by those that are
        left.
        """
        self.run_subtests(
            {
                "short": [0, 1],
                "divide_by_initial_world_size": [True, False],
                "gradient_as_bucket_view": [False, True],
                "find_unused_parameters": [False, True],
            },
            self._test_ddp_uneven_inputs,
        )

    def _test_ddp_uneven_inputs(self, short, divide_by_initial_world_size, **options):
        ddp, reference = DDP(self.net(), **options), self.net()
        found = []
        with ddp.join(divide_by_initial_world_size=divide_by_initial_world_size):
            for step in range(self._own_steps(short)):
                ddp.zero_grad()
                self.backward(ddp, step)
                found.append(
                    {
                        name: gradient.clone()
                        for name, gradient in self.gradients(ddp.module).items()
                    }
                )
        for step in range(self.STEPS[1]):
            divisor = 2 if divide_by_initial_world_size or step < self.STEPS[0] else 1
            expected = self._share(reference, step, short, divisor)
            if step < len(found):
                for name, gradient in expected.items():
                    self.assertEqual(
                        found[step][name],
                        gradient,
                        f"step {step}: gradient of {name}",
                        atol=0,
                        rtol=0,
                    )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_final_model_is_that_of_the_last_joiner(self):
        """The rank that goes on trains alone, then sends its weights and buffers."""
        for short in (0, 1):
            model = Noting(self.rank).to(self.device)
            ddp = DDP(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with ddp.join():
                for step in range(self._own_steps(short)):
                    optimizer.zero_grad()
                    self.backward(ddp, step)
                    optimizer.step()
            last = 1 - short
            self.assertEqual(
                model.count.item(), 10.0 * self.STEPS[1] + last, "final buffer"
            )
            weights = [torch.empty_like(model.layer.weight) for _ in range(2)]
            dist.all_gather(weights, model.layer.weight.detach())
            self.assertEqual(
                weights[0], weights[1], "final weight of the other rank", atol=0, rtol=0
            )
            if self.rank == last:
                self.assertEqual(model.step, self.STEPS[1], "steps of the last rank")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_buffers_come_from_a_rank_that_goes_on(self):
        """Rank 0's buffers are stale once it has joined. Among several ranks that go
        on, the highest decides.
        """
        for short in (0, 1):
            model = Noting(self.rank).to(self.device)
            ddp = DDP(model)
            with ddp.join():
                for step in range(self._own_steps(short)):
                    self.backward(ddp, step)
            source = [1.0] * self.STEPS[0] + [float(1 - short)] * (
                self.STEPS[1] - self.STEPS[0]
            )
            # The rank that goes on sends the buffer of the last common step.
            expected = [0.0] + [
                10.0 * step + source[step] for step in range(1, self.STEPS[1])
            ]
            self.assertEqual(
                model.seen,
                expected[: len(model.seen)],
                f"buffer in forward, short {short}",
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_no_sync_of_ranks_that_go_on(self):
        """A joined rank learns which backwards reduce, and takes part only in those."""
        for short in (0, 1):
            ddp = DDP(self.net())
            reference = self.net()
            with ddp.join():
                for step in range(self._own_steps(short)):
                    with ddp.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                        self.backward(ddp, step)
                    if step % 2 and step < self.STEPS[0]:
                        self.backward(reference, 0)
                        self.backward(reference, 1)
                        found = {
                            name: each.clone()
                            for name, each in self.gradients(ddp.module).items()
                        }
                    if step % 2:
                        ddp.zero_grad()
            for name, average in self.averaged(reference).items():
                self.assertEqual(
                    found[name], average, f"gradient of {name}", atol=0, rtol=0
                )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_training_after_the_join(self):
        """The context leaves no state behind: the next steps reduce as if it had never
        existed.
        """
        ddp, reference = DDP(self.net()), self.net()
        with ddp.join():
            for step in range(self._own_steps(0)):
                self.backward(ddp, step)
        ddp.zero_grad()
        with ddp.join(enable=False):
            for each in (ddp, reference):
                self.backward(each, 9)
        self.assertEqual(
            self.gradients(ddp.module),
            self.averaged(reference),
            "gradients after the join",
            atol=0,
            rtol=0,
        )


if __name__ == "__main__":
    run_tests()
