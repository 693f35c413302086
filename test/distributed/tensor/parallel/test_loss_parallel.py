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
from torch.distributed.tensor.parallel.loss import _cast_to_dtensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, world_mesh
from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

CLASSES = 10  # four ranks have 3, 3, 3 and 1
OPTIONS = {
    # With four, gradients are those of other targets (torch 2.13): see
    # docs/findings/loss_parallel_of_images.md
    "shape": ((CLASSES,), (6, CLASSES), (4, CLASSES, 6)),
    # What the other dimension of the mesh cuts, if there is one.
    "cut": (None, Replicate(), Shard(0), Shard(2)),
    "is_first": (False, True),
    "reduction": ("mean", "sum", "none"),
    "ignored": (None, -100, 3),
    "weighted": (False, True),
    "is_dtensor": (False, True),
    "dtype": (torch.float32, torch.bfloat16),
}


def works(row):
    shape, cut = row.get("shape", OPTIONS["shape"][-1]), row.get("cut")
    # An ignored target below 0 and a weight together raise.
    raises = row.get("ignored") == -100 and row.get("weighted") is True
    raises |= cut is not None and row.get("reduction") == "mean"
    if isinstance(cut, Shard):
        raises |= cut.dim >= len(shape) or len(shape) == 1
        raises |= row.get("is_dtensor") is False
    return not raises


class LossParallelTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _case(self, shape, dtype=torch.float32):
        """Return logits, which are far from each other, targets and weights."""
        generator = torch.Generator().manual_seed(0)
        logits = 30 * torch.randn(shape, generator=generator)
        shape = [size for size in shape if size != CLASSES]
        target = torch.randint(CLASSES, shape, generator=generator)
        weight = torch.rand(CLASSES, generator=generator)
        values = logits.to(dtype), target, weight.to(dtype)
        return [each.to(self.device) for each in values]

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_losses_and_gradients(self):
        rows = [*pairwise(OPTIONS, works)]
        names = ("reduction", "ignored", "weighted")
        for values in itertools.product(*(OPTIONS[name] for name in names)):
            row = {name: each[0] for name, each in OPTIONS.items()}
            row["shape"] = OPTIONS["shape"][1]
            row |= zip(names, values, strict=True)
            rows += [row] if works(row) else []
        for row in rows:
            self._test_loss(f"{row}", row)

    def _test_loss(self, where, row):
        shape, cut, is_first, reduction, ignored, weighted, is_dtensor, dtype = (
            row[name] for name in OPTIONS
        )
        split, whole = Shard(shape.index(CLASSES)), Replicate()
        mesh = world_mesh(4) if cut is None else world_mesh(2, 2)
        source = (split,) if cut is None else (split, cut) if is_first else (cut, split)
        # Targets have no dimension of classes.
        moved = {split: whole, Shard(2): Shard(1)}
        layout = tuple(moved.get(each, each) for each in source)
        logits, target, weight = self._case(shape, dtype)
        options = {"reduction": reduction, "weight": weight if weighted else None}
        if ignored is not None:
            target.view(-1)[1::3] = options["ignore_index"] = ignored
        reference = logits.clone().requires_grad_()
        expected = F.cross_entropy(reference, target, **options)
        factor = torch.arange(1.0, expected.numel() + 1, device=self.device)
        factor = factor.to(dtype).view(expected.shape)
        (expected * factor).sum().backward()
        made = distribute_tensor(logits, mesh, source).requires_grad_()
        if is_dtensor:
            target = distribute_tensor(target, mesh, layout)
            if weighted:
                everywhere = [whole] * mesh.ndim
                options["weight"] = distribute_tensor(weight, mesh, everywhere)
        with loss_parallel():
            with CommDebugMode() as log:
                found = F.cross_entropy(made, target, **options)
            counts = {str(name): n for name, n in log.get_comm_counts().items()}
            self.assertEqual([*counts.values()], [3], f"{where}: {counts}")
            self.assertIn("all_reduce", *counts)
            sums = tuple(Partial() if each.is_shard() else each for each in layout)
            wanted = layout if reduction == "none" else sums
            self.assertEqual(found.placements, wanted, where)
            self.assertEqual(found.dtype, dtype, where)
            near = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
            self.assertEqual(found.full_tensor(), expected, f"loss, {where}", **near)
            # A gradient of losses may be whole where the losses are cut.
            factor = distribute_tensor(factor, mesh, [whole] * mesh.ndim)
            given = (factor,) if found.dim() else ()
            with CommDebugMode() as log:
                found.backward(*given)
            self.assertEqual(log.get_total_counts(), 0, where)
        self.assertFalse(made.grad.requires_grad, where)
        self.assertEqual(made.grad.placements, source, where)
        self.assertEqual(made.grad.dtype, dtype, where)
        self.assertEqual(made.grad.full_tensor(), reference.grad, where, **near)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_what_cannot_work_is_refused(self):
        mesh, split, whole = world_mesh(2, 2), Shard(1), Replicate()
        logits, target, _ = self._case((4, CLASSES))
        made = distribute_tensor(logits, mesh, (Shard(0), split))
        targets = distribute_tensor(target, mesh, (Shard(0), whole))
        others = distribute_tensor(target, mesh, (whole, whole))
        sums = DTensor.from_local(made.to_local(), mesh, (Partial(), split))
        both = distribute_tensor(logits, mesh, (split, split))
        for error, text, each, labels, reduction in (
            (NotImplementedError, "only supported on one-d", made, targets, "mean"),
            (ValueError, "requires a DTensor", made, target, "sum"),
            (RuntimeError, "Expected .* but got", made, others, "sum"),
            (ValueError, "or Replicate, got P.* at dim 0", sums, targets, "sum"),
            (ValueError, "with 2 such mesh dim", both, targets, "sum"),
        ):
            with loss_parallel(), self.assertRaisesRegex(error, text):
                F.cross_entropy(each, labels, reduction=reduction)
        few = torch.ones(4, device=self.device)
        with loss_parallel(), self.assertRaises(AssertionError):
            F.cross_entropy(made, targets, few, reduction="sum")
        with self.assertRaisesRegex(TypeError, "Unsupported type <class 'list'>"):
            _cast_to_dtensor([1], (whole, whole), mesh)
        # Outside of the context, ranks gather the logits.
        with CommDebugMode() as log:
            loss = F.cross_entropy(made, targets)
        self.assertIn("all_gather", str(log.get_comm_counts()))
        self.assertEqual(loss.full_tensor(), F.cross_entropy(logits, target))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_logits_of_half_precision(self):
        """Logarithms may be in single precision; gradients are as precise as logits."""
        mesh, (logits, target, _) = world_mesh(4), self._case((6, CLASSES))
        logits = logits.half()
        reference = logits.float().requires_grad_()
        expected = F.cross_entropy(reference, target)
        expected.backward()
        made = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            logs = torch._log_softmax(made, 1, True)
            self.assertEqual(logs.dtype, torch.float32)
            found = F.nll_loss(logs, target)
            self.assertEqual(found.full_tensor(), expected)
            found.backward()
            with torch.no_grad():
                quiet = F.log_softmax(made, 1), F.cross_entropy(made, target)
            self.assertEqual([each.requires_grad for each in quiet], [False] * 2)
            with self.assertRaises(AssertionError):
                torch._log_softmax(distribute_tensor(target, mesh, [Shard(0)]), 0, True)
            aten, empty = (
                torch.ops.aten,
                distribute_tensor(logits[:0], mesh, [Shard(1)]),
            )
            self.assertEqual(F.log_softmax(empty, 1).shape, empty.shape)
            for dtype in (torch.half, torch.float32):
                grad = aten._log_softmax_backward_data(logs, logs, 1, dtype)
                self.assertEqual(grad.dtype, dtype)
        self.assertEqual(made.grad.dtype, torch.half)
        # Half precision has 11 bits.
        near = {"rtol": 2**-10, "atol": 2**-12}
        self.assertEqual(made.grad.full_tensor().float(), reference.grad, **near)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_total_weights(self):
        """The operation returns the sum of the weights of what counts, in the type of
        the logits; there is none if it reduces no batch."""
        mesh, losses = world_mesh(4), {"none": 0, "mean": 1, "sum": 2}
        for shape, (reduction, number), ignored, weighted, dtype in itertools.product(
            OPTIONS["shape"], losses.items(), (-100, 3), (False, True), OPTIONS["dtype"]
        ):
            if weighted and ignored == -100:
                continue
            where = f"{shape}, {reduction}, {ignored}, {weighted}, {dtype}"
            logits, target, weight = self._case(shape, dtype)
            dim = shape.index(CLASSES)
            target.view(-1)[1::3] = ignored
            counts = (target != ignored).to(dtype)
            given = weight if weighted else None
            name = "nll_loss2d_forward" if len(shape) == 3 else "nll_loss_forward"
            made = distribute_tensor(logits, mesh, [Shard(dim)])
            with loss_parallel():
                logs, labels = F.log_softmax(made, dim), target
                if len(shape) == 3:
                    logs, labels = logs.unsqueeze(2), target.unsqueeze(1)
                options = labels, given, number, ignored
                loss, total = getattr(torch.ops.aten, name)(logs, *options)
            expected = (weight[target.clamp(0)] * counts).sum() if weighted else None
            expected = counts.sum() if expected is None else expected
            if reduction == "none" and len(shape) > 1:
                expected = torch.zeros_like(expected)
            self.assertEqual(total, expected, where)
            self.assertEqual(total.dtype, dtype, where)
            whole = F.log_softmax(logits, dim)
            options = {"ignore_index": ignored, "reduction": reduction}
            expected = F.nll_loss(whole, target, given, **options)
            near = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
            found = loss.full_tensor().view(expected.shape)
            self.assertEqual(found, expected, where, **near)


if __name__ == "__main__":
    run_tests()
