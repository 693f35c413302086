# Owner(s): ["oncall: distributed"]
"""Tensor parallel styles: a module that is split over ranks computes and learns what
the whole module does, in whatever layout its inputs come and its outputs go.
"""

import copy
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.input_reshard import input_reshard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, world_mesh
from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

LAYOUTS = (Replicate(), Shard(0), Shard(1), Shard(-1))
OPTIONS = {
    "style": (ColwiseParallel, RowwiseParallel),
    "kind": ("linear", "linear without bias", "embedding"),
    "source": (None, *LAYOUTS),
    "target": (None, *LAYOUTS),
    "use_local_output": (True, False),
    "gives_dtensor": (False, True),
}
FIRST, WIDTH, OUT = 4, 8, 12  # rows of four positions, of as many features


def works(row):
    # An embedding's input has no features; without a layout, rows expect parts of them.
    source = row.get("source", Replicate())
    parts = source in (Shard(1), Shard(-1))
    parts |= source is None and row.get("style") is not ColwiseParallel
    return not (row.get("kind") == "embedding" and parts)


class TensorParallelStyleTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _part(self, whole, layout):
        if isinstance(layout, Replicate):
            return whole
        return whole.chunk(self.world_size, layout.dim)[self.rank]

    def _check(self, module, reference, where):
        """Check that the gradients of ``module`` are those of ``reference``."""
        for name, whole in reference.named_parameters():
            found = module.get_parameter(name).grad
            found = found.full_tensor() if isinstance(found, DTensor) else found
            self.assertEqual(found, whole.grad, f"gradient of {name}, {where}")

    def _values(self, *shape, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(self.device)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_layouts_of_inputs_and_outputs(self):
        for row in pairwise(OPTIONS, works):
            self._test_layouts(**row)

    def _test_layouts(
        self, style, kind, source, target, use_local_output, gives_dtensor
    ):
        where = f"{style.__name__} of {kind}, {source} to {target}, {use_local_output}"
        mesh, options = world_mesh(2), {"use_local_output": use_local_output}
        torch.manual_seed(0)
        if kind == "embedding":
            reference = nn.Embedding(WIDTH, OUT).to(self.device)
            x = torch.arange(FIRST * 4, device=self.device).view(FIRST, 4) * 3 % WIDTH
        else:
            reference = nn.Linear(WIDTH, OUT, bias=kind == "linear").to(self.device)
            x = self._values(FIRST, 4, WIDTH).requires_grad_()
        if source is not None:
            options["input_layouts"] = source
        elif style is RowwiseParallel:
            source = Shard(-1)
        if target is not None:
            options["output_layouts"] = target
        source = source or Replicate()
        target = target or (Shard(-1) if style is ColwiseParallel else Replicate())
        model = parallelize_module(copy.deepcopy(reference), mesh, style(**options))
        expected = reference(x)
        factor = self._values(*expected.shape, seed=1)
        (expected * factor).sum().backward()
        part = self._part(x.detach(), source).clone()
        part.requires_grad_(x.requires_grad)
        given = DTensor.from_local(part, mesh, [source]) if gives_dtensor else part
        found = model(given)
        self.assertEqual(isinstance(found, DTensor), not use_local_output, where)
        local = found if use_local_output else found.to_local()
        self.assertEqual(local, self._part(expected, target), f"output, {where}")
        (local * self._part(factor, target)).sum().backward()
        self._check(model, reference, where)
        if x.requires_grad:
            wanted = self._part(x.grad, source)
            self.assertEqual(part.grad, wanted, f"gradient of the input, {where}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_prepared_inputs_and_outputs(self):
        """A module gets and gives the given layouts, by position or by name; what has
        no layout passes as it is.
        """
        mesh, whole = world_mesh(2), self._values(FIRST, 6)
        rows, columns, all_ = Shard(0), Shard(1), Replicate()

        class Module(nn.Module):
            def forward(self, x, other, *, key):
                test.assertEqual(other, "as it is")
                for each in (x, key):
                    is_local = not isinstance(each, DTensor)
                    test.assertEqual(is_local, use_local)
                    each = each if is_local else each.to_local()
                    test.assertEqual(each, test._part(whole, columns), "prepared")
                return x, key

        test = self
        for use_local in (False, True):
            inputs = {
                "input_layouts": (rows, None),
                "desired_input_layouts": (columns, None),
                "input_kwarg_layouts": {"key": all_},
                "desired_input_kwarg_layouts": {"key": columns},
            }
            outputs = {
                "output_layouts": (columns, columns),
                "desired_output_layouts": (rows, all_),
            }
            both = PrepareModuleInputOutput(
                **inputs, use_local_input=use_local, **outputs
            )
            prepared = parallelize_module(Module(), mesh, both)
            one = parallelize_module(
                Module(), mesh, PrepareModuleInput(**inputs, use_local_output=use_local)
            )
            one = parallelize_module(one, mesh, PrepareModuleOutput(**outputs))
            for module in (prepared, one):
                x, key = module(self._part(whole, rows), "as it is", key=whole)
                self.assertEqual(x, self._part(whole, rows), "output")
                self.assertEqual(key, whole, "output")
        with self.assertRaisesRegex(ValueError, "length|same|should"):
            one(self._part(whole, rows), key=whole)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_training_of_a_block(self):
        """Norms on parts of the sequence, a feed-forward network split over ranks, and
        a loss of logits that stay split: three steps as without ranks.
        """
        mesh = world_mesh(2)
        self.run_subtests(
            {"reduction": ["mean", "sum", "none"], "weighted": [False, True]},
            lambda **row: self._test_training(mesh, **row),
        )

    def _test_training(self, mesh, reduction, weighted):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(WIDTH)
                self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
                self.rms, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 10)

            def forward(self, x):
                x = x + self.down(torch.tanh(self.up(self.norm(x))))
                return self.head(self.rms(x))

        torch.manual_seed(0)
        reference = Block().to(self.device)
        split = Shard(1)
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=split),
            "d*n": RowwiseParallel(output_layouts=split),
            "rms": SequenceParallel(use_local_output=True),
            "head": ColwiseParallel(input_layouts=split, use_local_output=False),
        }
        model = parallelize_module(copy.deepcopy(reference), mesh, plan)
        input_reshard(model.down, mesh, 0)
        optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)
        ]
        weight = torch.rand(10).to(self.device) if weighted else None
        for step in range(3):
            where = f"step {step}, {reduction}, weighted {weighted}"
            x = self._values(FIRST, 4, WIDTH, seed=step)
            target = torch.arange(FIRST * 4, device=self.device) * (step + 3) % 10
            if not weighted:  # an ignored target and a weight together raise
                target[step] = -100
            options = {"reduction": reduction, "weight": weight}
            expected = F.cross_entropy(reference(x).flatten(0, 1), target, **options)
            expected.sum().backward()
            with loss_parallel():
                logits = model(self._part(x, split)).flatten(0, 1)
                loss = F.cross_entropy(logits, target, **options)
                loss.sum().backward()
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            self.assertEqual(loss, expected, f"loss of {where}")
            self._check(model, reference, where)
            for each in optimizers:
                each.step()
                each.zero_grad()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_plans_that_cannot_work_are_refused(self):
        mesh = world_mesh(2)
        for style, module in (
            (ColwiseParallel(), nn.LayerNorm(4)),
            (RowwiseParallel(), nn.LayerNorm(4)),
        ):
            with self.assertRaisesRegex(NotImplementedError, "nn.Linear and nn.Embed"):
                parallelize_module(module, mesh, style)
        with self.assertRaisesRegex(TypeError, "for parallelize_plan"):
            parallelize_module(nn.Linear(2, 2), mesh, ["up"])
        with self.assertWarnsRegex(UserWarning, "could not be resolved"):
            parallelize_module(nn.Linear(2, 2), mesh, {"none": ColwiseParallel()})


if __name__ == "__main__":
    run_tests()
