# Owner(s): ["oncall: distributed"]
"""Losses of logits whose classes are split over ranks equal those of whole logits, with
their gradients; no rank gathers the logits.
"""

import itertools
import sys

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, world_mesh
from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

CLASSES = 10  # four ranks have 3, 3, 3 and 1
OPTIONS = {
    # Of four dimensions, gradients are those of other positions (torch 2.13): the last
    # two are exchanged between the targets and the logits.
    "shape": ((CLASSES,), (6, CLASSES), (4, CLASSES, 5)),
    "reduction": ("mean", "sum", "none"),
    # An ignored target below 0 and a weight together raise.
    "ignored": (None, -100, 3),
    "weighted": (False, True),
    "is_dtensor": (False, True),
    "dtype": (torch.float32, torch.bfloat16),
}


def works(row):
    return not (row.get("ignored") == -100 and row.get("weighted"))


class LossParallelTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _case(self, shape, dtype=torch.float32):
        """Return logits, which are far from each other, targets and weights."""
        generator = torch.Generator().manual_seed(0)
        logits = 30 * torch.randn(shape, generator=generator)
        classes = shape.index(CLASSES)
        shape = shape[:classes] + shape[classes + 1 :]
        target = torch.randint(CLASSES, shape, generator=generator)
        weight = torch.rand(CLASSES, generator=generator)
        values = logits.to(dtype), target, weight.to(dtype)
        return [each.to(self.device) for each in values]

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_losses_and_gradients(self):
        mesh = world_mesh(4)
        for row in pairwise(OPTIONS, works):
            self._test_loss(mesh, row)

    def _test_loss(self, mesh, row):
        shape, dtype = row["shape"], row["dtype"]
        logits, target, weight = self._case(shape, dtype)
        if row["ignored"] is not None:
            target.view(-1)[1::3] = row["ignored"]
        options = {"reduction": row["reduction"]}
        if row["ignored"] not in (None, -100):
            options["ignore_index"] = row["ignored"]
        whole = logits.clone().requires_grad_()
        given = dict(options, weight=weight) if row["weighted"] else options
        expected = F.cross_entropy(whole, target, **given)
        factor = torch.arange(1, expected.numel() + 1).to(expected).view(expected.shape)
        (expected * factor).sum().backward()
        split = Shard(shape.index(CLASSES))
        made = distribute_tensor(logits, mesh, [split]).requires_grad_()
        if row["is_dtensor"]:
            target, weight, factor = (
                distribute_tensor(each, mesh, [Replicate()])
                for each in (target, weight, factor)
            )
        given = dict(options, weight=weight) if row["weighted"] else options
        with loss_parallel():
            with CommDebugMode() as log:
                found = F.cross_entropy(made, target, **given)
            self.assertEqual(found.placements, (Replicate(),), f"{row}")
            counts = {str(name): n for name, n in log.get_comm_counts().items()}
            self.assertEqual([*counts.values()], [3], f"{row}: {counts}")
            self.assertIn("all_reduce", *counts)
            with CommDebugMode() as log:
                if found.dim() and not row["is_dtensor"]:
                    factor = distribute_tensor(factor, mesh, [Replicate()])
                (found * factor).sum().backward()
            self.assertEqual(log.get_total_counts(), 0, f"{row}")
        near = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
        self.assertEqual(found.dtype, dtype, f"{row}")
        self.assertEqual(found.to_local(), expected, f"loss, {row}", **near)
        self.assertEqual(made.grad.placements, (split,), f"{row}")
        self.assertEqual(made.grad.dtype, dtype, f"{row}")
        self.assertEqual(made.grad.full_tensor(), whole.grad, f"{row}", **near)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_batches_that_are_split_too(self):
        """On a mesh of two dimensions one may split rows or positions."""
        mesh, split = world_mesh(2, 2), Shard(1)
        cases = {
            (Shard(0), split): (Shard(0), Replicate()),
            (split, Shard(0)): (Replicate(), Shard(0)),
            (Shard(2), split): (Shard(1), Replicate()),
            (split, Replicate()): (Replicate(), Replicate()),
        }
        for (source, layout), reduction, weighted in itertools.product(
            cases.items(), ("sum", "none"), (False, True)
        ):
            where = f"{source}, {reduction}, weighted {weighted}"
            logits, target, weight = self._case((4, CLASSES, 6))
            options = {"reduction": reduction, "weight": weight if weighted else None}
            whole = logits.clone().requires_grad_()
            expected = F.cross_entropy(whole, target, **options)
            factor = torch.arange(1, expected.numel() + 1).to(expected)
            factor = factor.view(expected.shape)
            (expected * factor).sum().backward()
            made = distribute_tensor(logits, mesh, source).requires_grad_()
            targets = distribute_tensor(target, mesh, layout)
            with loss_parallel():
                loss = F.cross_entropy(made, targets, **options)
                wanted = layout
                if reduction == "sum":
                    sums = {True: Partial(), False: Replicate()}
                    wanted = tuple(sums[each.is_shard()] for each in layout)
                self.assertEqual(loss.placements, wanted, where)
                self.assertEqual(loss.full_tensor(), expected, f"loss, {where}")
                if reduction == "none":
                    loss = loss * distribute_tensor(factor, mesh, [Replicate()] * 2)
                loss.sum().backward()
            self.assertEqual(made.grad.placements, source, where)
            self.assertEqual(made.grad.full_tensor(), whole.grad, where)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_what_cannot_work_is_refused(self):
        mesh, split, whole = world_mesh(2, 2), Shard(1), Replicate()
        logits, target, _ = self._case((4, CLASSES))
        made = distribute_tensor(logits, mesh, (Shard(0), split))
        targets = distribute_tensor(target, mesh, (Shard(0), whole))
        sums = DTensor.from_local(made.to_local(), mesh, (Partial(), split))
        both = distribute_tensor(logits, mesh, (split, split))
        for error, text, each, labels, reduction in (
            (NotImplementedError, "only supported on one-d", made, targets, "mean"),
            (ValueError, "requires a DTensor", made, target, "sum"),
            (RuntimeError, "Expected .* but got", made, target, "sum"),
            (ValueError, "to be Shard or Replicate", sums, targets, "sum"),
            (ValueError, "with 2 such mesh dim", both, targets, "sum"),
        ):
            if error is RuntimeError:
                labels = distribute_tensor(target, mesh, (whole, whole))
            with loss_parallel(), self.assertRaisesRegex(error, text):
                F.cross_entropy(each, labels, reduction=reduction)
        # Outside of the context, ranks gather the logits.
        with CommDebugMode() as log:
            loss = F.cross_entropy(made, targets)
        self.assertIn("all_gather", str(log.get_comm_counts()))
        self.assertEqual(loss.full_tensor(), F.cross_entropy(logits, target))


if __name__ == "__main__":
    run_tests()
