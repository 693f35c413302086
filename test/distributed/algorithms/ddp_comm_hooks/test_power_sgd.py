# Owner(s): ["oncall: distributed"]
"""PowerSGD against its paper (https://arxiv.org/abs/1905.13727): a weight's gradient of
n x m elements is sent as two factors, n x r and m x r.

A step's result is the projection of the ranks' average onto the r columns of the first
factor, whatever these are. The second factors of a step start the next one's, which is
a power iteration. So most tests need not draw torch's random numbers again.
"""

import io
import math
import re
import sys
import warnings
from unittest import mock

import numpy as np
import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import CollectiveLog, DDPTest
from torch_ext.testing._internal.common_utils import TestCase, run_tests
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

# Weights of DDPTest's rows: two of the same shape, and one that is wider than high.
SHAPES = ((6, 4), (6, 6), (6, 6), (3, 6))
PLAIN_STEPS = 2


def net(device):
    torch.manual_seed(0)
    layers = [layer for n, m in SHAPES for layer in (nn.Linear(m, n), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(device)


def mended_orthogonalize(mends=True):
    """Return a context in which torch's function takes a single matrix too.

    Its matrices need a batch dimension since #75157, the batched hook's have none:
    docs/findings/ddp_options_that_always_fail.md
    """
    original = power_sgd._orthogonalize

    def mended(each, *args):
        return original(each.view(-1, *each.shape[-2:]), *args)

    return mock.patch.object(power_sgd, "_orthogonalize", mended if mends else original)


class PowerSGDTest(DDPTest):
    def net(self):
        return net(self.device)

    def _hooked(self, **options):
        options.setdefault("start_powerSGD_iter", PLAIN_STEPS)
        options.setdefault("min_compression_rate", 0)
        state = power_sgd.PowerSGDState(None, **options)
        ddp = DDP(self.net())
        ddp.register_comm_hook(state, power_sgd.powerSGD_hook)
        return state, ddp

    def _step(self, ddp, step=0):
        """Return the gradients of a step, and the number of elements of each of its
        all-reduces.
        """
        ddp.zero_grad()
        with CollectiveLog() as log:
            self.backward(ddp, step)
        sent = [each.numel for each in log.calls if each.dtype.is_floating_point]
        return {
            name: gradient.clone()
            for name, gradient in self.gradients(ddp.module).items()
        }, sent

    def _check_projection(self, found, average, rank, label):
        """Check that ``found`` is the part of ``average`` in ``rank`` directions."""
        found, average = (
            each.double().cpu().view(len(each), -1) for each in (found, average)
        )
        columns, sizes, _ = torch.linalg.svd(found, full_matrices=False)
        directions = int((sizes > 1e-4 * sizes[0]).sum())
        self.assertEqual(directions, rank, f"{label}: rank")
        columns = columns[:, :rank]
        self.assertEqual(
            found, columns @ (columns.T @ average), label, atol=1e-4, rtol=1e-4
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_steps_send_projections(self):
        """A weight's step is a projection of the averages, plus the earlier steps'
        errors if these are fed back. What two factors would not make small enough is
        averaged as it is. The factors' elements are all that is sent.
        """
        options = {
            "matrix_approximation_rank": (1, 2, 3),
            "min_compression_rate": (0, 1, 1.5),
            "use_error_feedback": (True, False),
            "warm_start": (True, False),
            "batch_tensors_with_same_shape": (False, True),
            "orthogonalization_epsilon": (0, 1e-10),
        }
        for row in pairwise(options):
            self._test_steps(**row)

    def _test_steps(self, **options):
        state, ddp = self._hooked(**options)
        reference, errors = self.net(), {}
        plain, left, right, counted = 0, 0, 0, [0, 0]
        ranks, gloo = {}, dist.get_backend() == "gloo"
        for name, each in reference.named_parameters():
            n, m = each.shape[0], each[0].numel()
            rank = min(n, m, options["matrix_approximation_rank"])
            factors = (n + m) * rank
            small = factors * options["min_compression_rate"] < n * m
            if small:
                ranks[name] = rank
                left, right = left + n * rank, right + m * rank
            else:
                plain += n * m
            counted = [counted[0] + n * m, counted[1] + (factors if small else n * m)]
        for step in range(PLAIN_STEPS + 3):
            found, sent = self._step(ddp, step)
            reference.zero_grad()
            self.backward(reference, step)
            compressed = step - PLAIN_STEPS + 1
            label = f"step {step} with {options}"
            if compressed > 0:
                # A log does not see what a thread of gloo's calls.
                expected = [plain, left, right][: len(sent) if gloo else None]
                self.assertEqual(sent, expected, f"{label}: elements sent")
                for name, each in self.gradients(reference).items():
                    each += errors.get(name, 0)
            else:
                self.assertEqual(len(sent), 1, f"{label}: all-reduces")
            for name, average in self.averaged(reference).items():
                where = f"{label}: gradient of {name}"
                if compressed > 0 and name in ranks:
                    matrices = (
                        each.view(len(each), -1) for each in (found[name], average)
                    )
                    self._check_projection(*matrices, ranks[name], where)
                else:
                    self.assertEqual(found[name], average, where)
                if options["use_error_feedback"] and compressed > 0:
                    errors[name] = reference.get_parameter(name).grad - found[name]
            rate, before, after = state.compression_stats()
            expected = [each * max(compressed, 0) for each in counted]
            self.assertEqual([before, after], expected, f"{label}: elements counted")
            self.assertEqual(rate, before / after if after else 0, label)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_warm_start_finds_the_best_approximation(self):
        """The same gradients, step after step, end at the truncated singular value
        decomposition of their average; without a warm start each step has a new
        projection.
        """
        for warm in (True, False):
            _, ddp = self._hooked(
                matrix_approximation_rank=1, use_error_feedback=False, warm_start=warm
            )
            for _ in range(PLAIN_STEPS):
                average, _ = self._step(ddp)
            steps = [self._step(ddp)[0]["2.weight"] for _ in range(25)]
            left, sizes, right = torch.linalg.svd(average["2.weight"].cpu())
            best = sizes[0] * torch.outer(left[:, 0], right[0])
            off = [(each.cpu() - best).norm() / best.norm() for each in steps]
            last = f"errors of each step, warm start {warm}: {off}"
            if warm:
                self.assertLess(off[-1], 1e-3, last)
                self.assertGreater(off[0], 1e-2, last)
            else:
                self.assertGreater(max(off[-5:]), 1e-2, last)
                self.assertNotEqual(steps[-1], steps[-2], last)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_seed_decides_the_first_projection(self):
        """The ranks draw the same without a word, and leave torch's own generator as
        it was.
        """
        first = {}
        for key, seed in (("one", 1), ("one again", 1), ("two", 2)):
            _, ddp = self._hooked(random_seed=seed)
            for step in range(PLAIN_STEPS + 1):
                torch.manual_seed(step + self.rank)
                before = torch.get_rng_state()
                x = self.rows(4, step)
                torch.set_rng_state(before)
                ddp.zero_grad()
                ddp(x).square().sum().backward()
                self.assertEqual(torch.get_rng_state(), before, "state of the CPU")
            first[key] = ddp.module[0].weight.grad.clone()
            everywhere = [torch.empty_like(first[key]) for _ in range(self.world_size)]
            dist.all_gather(everywhere, first[key])
            self.assertEqual(*everywhere, "of both ranks", atol=0, rtol=0)
        self.assertEqual(first["one"], first["one again"], atol=0, rtol=0)
        self.assertNotEqual(first["one"], first["two"], "gradients by another seed")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_saved_state_repeats_its_steps(self):
        """Errors, projections and the generator are part of a state, the group is not.

        A fresh DDP orders its first step's bucket otherwise, and errors then go to
        other weights: docs/findings/powersgd_resumes_in_another_order.md.
        """
        state, ddp = self._hooked(matrix_approximation_rank=1, warm_start=False)
        saved, expected = io.BytesIO(), []
        last = range(PLAIN_STEPS + 2, PLAIN_STEPS + 4)
        for step in range(last.stop):
            if step == last.start:
                torch.save(state, saved)
            expected.append(self._step(ddp, step)[0])
        saved.seek(0)
        restored = torch.load(saved, weights_only=False)
        self.assertIs(restored.process_group, dist.group.WORLD)
        state.__setstate__(restored.__getstate__())
        for step in last:
            found, _ = self._step(ddp, step)
            self.assertEqual(found, expected[step], f"step {step}", atol=0, rtol=0)
        self.assertEqual(state.iter, last.stop, "steps")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_steps_are_counted_once_for_all_buckets(self):
        hooks = power_sgd.powerSGD_hook, power_sgd.batched_powerSGD_hook
        for hook in hooks:
            state = power_sgd.PowerSGDState(None, start_powerSGD_iter=10)
            ddp = DDP(self.net(), bucket_cap_mb=1e-5)
            ddp.register_comm_hook(state, hook)
            sent = [len(self._step(ddp, step)[1]) for step in range(3)]
            self.assertEqual(sent, [1, 8, 8], "all-reduces: a bucket, then eight")
            self.assertEqual(state.iter, 3, "steps that the state counted")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_epsilon_lets_a_layer_have_no_gradient(self):
        """Without it, a gradient of zeros is divided by its norm."""
        for epsilon in (0, 1e-8):
            _, ddp = self._hooked(
                start_powerSGD_iter=PLAIN_STEPS, orthogonalization_epsilon=epsilon
            )
            for step in range(PLAIN_STEPS + 2):
                ddp.zero_grad()
                (ddp(self.rows(4, step)) * 0).sum().backward()
            found = ddp.module[0].weight.grad
            if epsilon:
                self.assertEqual(found, torch.zeros_like(found))
            else:
                self.assertTrue(found.isnan().all(), found)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_state_that_cannot_work_is_refused(self):
        """Buckets change after the first step, and a state by bucket would be lost."""
        for options in (
            {"use_error_feedback": True, "warm_start": False},
            {"use_error_feedback": False, "warm_start": True},
        ):
            for start in (0, 1):
                with self.assertRaisesRegex(ValueError, "start_powerSGD_iter"):
                    self._hooked(start_powerSGD_iter=start, **options)
        state, ddp = self._hooked(
            use_error_feedback=False, warm_start=False, start_powerSGD_iter=0
        )
        self._step(ddp)
        self.assertGreater(state.compression_stats()[1], 0, "elements compressed")


class Bucket:
    """Gradients in one buffer, like a bucket of DDP."""

    def __init__(self, gradients, index=0, last=True):
        self._shapes = [each.shape for each in gradients]
        self._buffer = torch.cat([each.flatten() for each in gradients])
        self._index, self._last = index, last

    def index(self):
        return self._index

    def is_last(self):
        return self._last

    def buffer(self):
        return self._buffer

    def gradients(self):
        parts = self._buffer.split([shape.numel() for shape in self._shapes])
        return [
            part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)
        ]


class ByHand:
    """All ranks' PowerSGD in double precision, one matrix after the other."""

    def __init__(self, dtype, rank, rate, feedback, warm, batches, epsilon, seed):
        self.dtype, self.rank, self.rate, self.epsilon = dtype, rank, rate, epsilon
        self.feedback, self.warm, self.batches = feedback, warm, batches
        self.seeds = np.random.RandomState(seed)
        self.errors, self.factors, self.sizes = {}, {}, [0, 0]

    def _orthonormal(self, matrix):
        matrix = matrix.clone()
        columns = matrix.shape[1]
        if columns > 2 and self.dtype in (torch.float32, torch.float64):
            return torch.linalg.qr(matrix).Q
        for i in range(columns):
            column = matrix[:, i]
            column /= column.norm() + self.epsilon
            for j in range(i + 1, columns):
                matrix[:, j] -= (column @ matrix[:, j]) * column
        return matrix

    def _draw(self, ranks, matrices):
        """Return first factors, which ranks draw alike, those of one shape together."""
        generator = torch.Generator().manual_seed(self.seeds.randint(1_000_000_000))
        by_shape, drawn = {}, {}
        for i in ranks:
            by_shape.setdefault(matrices[i].shape, []).append(i)
        for (_, m), group in by_shape.items():
            for some in [group] if self.batches else [[i] for i in group]:
                size = len(some), m, ranks[some[0]]
                factors = torch.randn(size, generator=generator, dtype=self.dtype)
                drawn.update(zip(some, factors.double(), strict=True))
        return drawn

    def step(self, index, shares):
        """Return what all ranks get for their ``shares``, a list of matrices each."""
        if self.feedback and index in self.errors:
            shares = [
                [own + error for own, error in zip(*each, strict=True)]
                for each in zip(shares, self.errors[index], strict=True)
            ]
        ranks = {}
        for i, matrix in enumerate(shares[0]):
            n, m = matrix.shape
            rank = min(n, m, self.rank)
            small = (n + m) * rank * self.rate < n * m
            if small:
                ranks[i] = rank
            self.sizes[0] += n * m
            self.sizes[1] += (n + m) * rank if small else n * m
        if not self.warm or index not in self.factors:
            self.factors[index] = self._draw(ranks, shares[0])
        results = []
        for i, each in enumerate(zip(*shares, strict=True)):
            result = sum(each) / len(each)
            if i in ranks:
                left = self._orthonormal(
                    sum(each) @ self._orthonormal(self.factors[index][i])
                )
                self.factors[index][i] = right = result.T @ left
                result = left @ right.T
            results.append(result)
        self.errors[index] = [
            [own - result for own, result in zip(each, results, strict=True)]
            for each in shares
        ]
        return results


# Buckets of several sizes, with equal shapes apart, vectors among and without matrices,
# and a weight whose factors of rank 1 have half of its elements.
BUCKETS = (
    ((5, 7), (6, 4), (6,), (5, 7), (3, 2, 2), (3, 6), (5, 7)),
    ((7, 5), (2, 9)),
    ((9,),),
)
TOLERANCES = {
    torch.float32: 1e-4,
    torch.float64: 1e-10,
    torch.bfloat16: 0.1,
    torch.float16: 0.02,
}


class PowerSGDByHandTest(DDPTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_every_option_equals_its_algorithm(self):
        """Any options, types and buckets, over the group of the state."""
        alone = [dist.new_group([rank]) for rank in range(self.world_size)][self.rank]
        options = {
            "dtype": tuple(TOLERANCES),
            "rank": (1, 2, 3),
            "rate": (0, 1, 2),
            "feedback": (True, False),
            "warm": (True, False),
            "batches": (False, True),
            "epsilon": (0, 0.25),
            "group": (None, dist.group.WORLD, alone),
        }
        for row in pairwise(options):
            self._test_hook(power_sgd.powerSGD_hook, **row)
        for name in ("rate", "batches", "epsilon"):
            options[name] = options[name][:1]
        with mended_orthogonalize():
            for row in pairwise(options):
                self._test_hook(power_sgd.batched_powerSGD_hook, **row)

    def _shares(self, shapes, dtype, where):
        """Return all ranks' gradients. Half precision must not overflow in products."""
        scale = 300 if dtype == torch.float16 else 1
        for rank in range(self.world_size):
            generator = torch.Generator().manual_seed(100 * where + rank)
            yield [
                (scale * torch.randn(shape, generator=generator)).to(dtype)
                for shape in shapes
            ]

    def _test_hook(self, hook, dtype, group, **options):
        batched = hook is power_sgd.batched_powerSGD_hook
        state = power_sgd.PowerSGDState(
            group,
            options["rank"],
            start_powerSGD_iter=PLAIN_STEPS,
            min_compression_rate=options["rate"],
            use_error_feedback=options["feedback"],
            warm_start=options["warm"],
            orthogonalization_epsilon=options["epsilon"],
            random_seed=5,
            batch_tensors_with_same_shape=options["batches"],
        )
        by_hand = ByHand(dtype, seed=5, **options)
        mine = slice(None)
        if group is not None and group.size() == 1:
            mine = slice(self.rank, self.rank + 1)
        before = torch.get_rng_state()
        sizes = [0, 0] if batched else by_hand.sizes
        for step in range(PLAIN_STEPS + 3):
            for index, shapes in enumerate(BUCKETS):
                where = (
                    f"bucket {index}, step {step}, {hook.__name__} {dtype} {options}"
                )
                everyone = list(self._shares(shapes, dtype, 10 * step + index))
                last = index == len(BUCKETS) - 1
                given = [each.to(self.device) for each in everyone[self.rank]]
                bucket = Bucket(given, index, last)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    result = hook(state, bucket).wait()
                self.assertEqual(result.dtype, dtype, where)
                self.assertEqual(result.data_ptr(), bucket.buffer().data_ptr(), where)
                flat = [
                    torch.cat([each.double().flatten() for each in own])
                    for own in everyone[mine]
                ]
                (size,) = flat[0].shape
                if batched:  # one square, padded
                    side = math.ceil(size**0.5)
                    pad = nn.functional.pad
                    shares = [
                        [pad(each, (0, side**2 - size)).view(side, side)]
                        for each in flat
                    ]
                else:
                    shares = [
                        [each.double().view(len(each), -1) for each in own]
                        for own in everyone[mine]
                    ]
                expected = sum(flat) / len(flat)
                largest = max(each.abs().max() for each in flat).item()
                close = {"rtol": 0, "atol": 3 * TOLERANCES[dtype] * largest}
                if step >= PLAIN_STEPS:
                    if batched:
                        sizes[0] += size
                        sizes[1] += 2 * side * options["rank"]
                    parts = by_hand.step(index, shares)
                    expected = torch.cat([each.flatten() for each in parts])[:size]
                    self.assertEqual(index in state.p_memory_dict, options["warm"])
                if step >= PLAIN_STEPS and options["feedback"]:
                    errors = by_hand.errors[index][self.rank if len(flat) > 1 else 0]
                    self.assertEqual(
                        state.error_dict[index].cpu().double(),
                        torch.cat([each.flatten() for each in errors]),
                        f"error, {where}",
                        **close,
                    )
                    self.assertEqual(state.error_dict[index].dtype, dtype, where)
                self.assertEqual(result.cpu().double(), expected, where, **close)
                self.assertEqual(state.iter, step + last, where)
        self.assertEqual(torch.get_rng_state(), before, "state of the generator")
        self.assertEqual([*state.compression_stats()[1:]], sizes, options)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_log_reports_what_is_compressed(self):
        """The sums of elements as often as asked, and what a bucket's state needs."""
        for frequency, hook in ((2, "powerSGD_hook"), (0, "batched_powerSGD_hook")):
            with (
                self.assertLogs(power_sgd.logger, "INFO") as log,
                mended_orthogonalize(hook.startswith("batched")),
            ):
                state = power_sgd.PowerSGDState(
                    None,
                    start_powerSGD_iter=2,
                    min_compression_rate=1,
                    compression_stats_logging_frequency=frequency,
                )
                for step in range(6):
                    (own, _) = self._shares([(6, 8), (10,)], torch.float32, step)
                    bucket = Bucket([each.to(self.device) for each in own])
                    getattr(power_sgd, hook)(state, bucket).wait()
            found = [
                (
                    record.msg.split()[0],
                    [
                        *map(
                            int,
                            re.findall(
                                r"(?<![.\d])\d+(?!\d|\.\d)", record.getMessage()
                            ),
                        )
                    ],
                )
                for record in log.records[1:]
            ]
            if frequency:
                reports = [[2, 58, 24], [4, 174, 72]]
                memory = "Allocating", [6, 8]
                zeros = "A", [58]
            else:
                reports = [
                    [step, 58 * (step - 1), 16 * (step - 1)] for step in range(2, 6)
                ]
                memory = "Initializing", [8, 1]
                zeros = "A", [64]
            first, *later = (("Compression", each) for each in reports)
            order = [zeros, first, memory] if frequency else [first, zeros, memory]
            self.assertEqual(found, [("Start", [2]), *order, *later], hook)
            config = log.records[0].getMessage()
            self.assertIn("matrix_approximation_rank = 1;", config)
            self.assertIn(f"logging_frequency = {frequency};", config)


class BatchedPowerSGDTest(DDPTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_batched_power_sgd(self):
        """The whole bucket is one square matrix, padded with zeros: averaged if its
        rank is full; else what is lost is added to the next step's.
        """
        for rank, warm in ((8, True), (8, False), (1, True)):
            state = power_sgd.PowerSGDState(
                None, rank, start_powerSGD_iter=2, warm_start=warm
            )
            self.assertEqual(state.compression_stats(), (0, 0, 0), "at the start")
            ddp = DDP(self.net())
            ddp.register_comm_hook(state, power_sgd.batched_powerSGD_hook)
            reference, received, owed = self.net(), 0, 0
            for step in range(5):
                for each in (ddp, reference):
                    each.zero_grad()
                with mended_orthogonalize():
                    self.backward(ddp, step)
                self.backward(reference, step)
                averages = self.averaged(reference)
                where = f"step {step}, rank {rank}, warm start {warm}"
                for name, average in averages.items() if rank == 8 else ():
                    found = ddp.module.get_parameter(name).grad
                    self.assertEqual(
                        found, average, f"{name}, {where}", atol=1e-4, rtol=1e-4
                    )
                self.assertEqual(warm and step >= 2, bool(state.p_memory_dict), where)
                if step >= 2:
                    received = received + ddp.module[0].weight.grad
                    owed = owed + averages["0.weight"]
                    (error,) = state.error_dict.values()
            # 51 elements are padded to 64, and those of the weight are the last.
            dist.all_reduce(error)
            self.assertEqual(error.numel(), 64, f"elements of the matrix, {where}")
            still_owed = (error / self.world_size)[27:51].view(6, 4)
            self.assertEqual(
                received + still_owed,
                owed,
                f"sent, {where}",
                atol=1e-3,
                rtol=0,
            )
            _, before, after = state.compression_stats()
            self.assertEqual((before, after), (51 * 3, 8 * rank * 2 * 3), where)


class TestOrthogonalize(TestCase):
    def test_columns_are_orthonormal_and_span_the_same(self):
        """Of each matrix of a batch, by Gram and Schmidt and by QR, in any type."""
        rows = {
            "dtype": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
            "columns": (1, 2, 3, 5),
            "batch": (1, 3),
            "epsilon": (0, 1e-12),
        }
        for row in pairwise(rows):
            torch.manual_seed(0)
            dtype, columns = row["dtype"], row["columns"]
            before = torch.randn(row["batch"], 5, columns).to(dtype)
            after = before.clone()
            power_sgd._orthogonalize(after, row["epsilon"])
            tolerance = {"atol": 16 * torch.finfo(dtype).eps ** 0.75, "rtol": 0}
            before, after = before.double(), after.double()
            products = after.transpose(1, 2) @ after
            unit = torch.eye(columns, dtype=torch.double).expand_as(products)
            self.assertEqual(products, unit, f"inner products, {row}", **tolerance)
            again = after @ (after.transpose(1, 2) @ before)
            self.assertEqual(again, before, f"projection, {row}", **tolerance)

    def test_wider_than_high_is_refused(self):
        for shape in ((1, 2, 3), (3, 2)):
            with self.assertRaises(AssertionError):
                power_sgd._orthogonalize(torch.ones(shape))


if __name__ == "__main__":
    run_tests()
