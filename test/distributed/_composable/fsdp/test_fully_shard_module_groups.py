# Owner(s): ["oncall: distributed"]
"""Several modules in one call of FSDP2's ``fully_shard``: one group, gathered and
reduced as one.
"""

import copy
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    StepLog,
    ThreeUnits,
    average_gradients,
    check_sharded_parity,
    check_train_parity,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's. Shapes: indices ``(*,)`` to
    scores ``(*, 6)``.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle, self.head = (
            nn.Embedding(6, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 6, bias=False),
        )
        self.head.weight = self.embedding.weight

    def forward(self, indices):
        return self.head(torch.relu(self.middle(self.embedding(indices))))


class Trunk(nn.Module):
    """Layers of which forward leaves the last to its caller, unless ``runs_head``.

    Shapes: ``(*, 4)`` to itself, or to ``(*, 3)``.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = (
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 3),
        )
        self.runs_head = False

    def forward(self, x):
        hidden = self.norm(self.first(x))
        return self.head(hidden) if self.runs_head else hidden


class TestFullyShardModuleGroups(FSDPTest):
    @property
    def world_size(self):
        return 2

    def grouped(self, **options):
        """Return three units, of which the first two are one group."""
        model = ThreeUnits().to(self.device)
        fully_shard([model.first, model.second], mesh=world_mesh(2), **options)
        fully_shard(model, mesh=world_mesh(2), **options)
        return model

    def kinds(self, *modules):
        return [
            "sharded" if isinstance(module.weight, DTensor) else "gathered"
            for module in modules
        ]

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_modules_share_a_state(self):
        model = ThreeUnits().to(self.device)
        modules = [model.first, model.second]
        self.assertIs(fully_shard(modules), modules)
        for module in modules:
            self.assertIsInstance(module, FSDPModule)
        self.assertIs(fully_shard.state(model.first), fully_shard.state(model.second))
        model.second.unshard()
        self.assertEqual(
            self.kinds(*modules), ["gathered"] * 2, "after unshard() of one"
        )
        model.first.reshard()
        self.assertEqual(
            self.kinds(*modules), ["sharded"] * 2, "after reshard() of the other"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_module_group_is_gathered_and_reduced_together(self):
        """The group's 16 and 48 elements travel together, before its first module and
        after the backward of all.
        """
        model = self.grouped()
        log = StepLog(model)
        for _ in range(2):
            log.lines.clear()
            with log.of("forward"):
                loss = model(self.rows(4).requires_grad_()).square().sum()
            with log.of("backward"):
                loss.backward()
            self.assertExpectedInline(
                log.text(),
                """\
forward:
  all-gather last
  all-gather 64
  forward first
  forward second
  forward last
backward:
  backward last
  all-gather 64
  backward second
  backward first
  reduce-scatter 64
  reduce-scatter last""",
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parameters_of_a_group_are_freed_after_its_last_module(self):
        self.run_subtests(
            {"reshard_after_forward": [True, False]}, self._test_freed_after_last
        )

    def _test_freed_after_last(self, reshard_after_forward):
        model = self.grouped(reshard_after_forward=reshard_after_forward)
        modules = (model.first, model.second)
        seen = []
        for module in modules:
            module.register_forward_hook(lambda *_: seen.append(self.kinds(*modules)))
        for _ in range(2):
            seen.clear()
            loss = model(self.rows(4)).square().sum()
            after = "sharded" if reshard_after_forward else "gathered"
            self.assertEqual(
                seen, [["gathered"] * 2, [after] * 2], "after first and after second"
            )
            loss.backward()
            self.assertEqual(
                self.kinds(*modules, model.last), ["sharded"] * 3, "after backward"
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_train_parity(self):
        self.run_subtests(
            {"reshard_after_forward": [True, False]}, self._test_train_parity
        )

    def _test_train_parity(self, reshard_after_forward):
        check_train_parity(
            self,
            ThreeUnits().to(self.device),
            self.grouped(reshard_after_forward=reshard_after_forward),
            [self.rows(4, step) for step in range(2)],
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_train_parity_with_tied_parameters(self):
        """A parameter of two modules of a group is one parameter, with the gradients of
        both uses.
        """
        model = Tied()
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device)
        fully_shard([model.embedding, model.head])
        fully_shard(model)
        self.assertIs(model.embedding.weight, model.head.weight)

        def loss_of(each, rows):
            return F.cross_entropy(
                each(rows[:, 0].abs().mul(10).long() % 6),
                rows[:, 1].abs().mul(10).long() % 6,
            )

        check_train_parity(
            self,
            reference,
            model,
            [self.rows(2, step) for step in range(2)],
            loss_of=loss_of,
        )
        self.assertIs(model.embedding.weight, model.head.weight)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_inputs_and_outputs_of_all_modules_are_cast(self):
        model = ThreeUnits().to(self.device)
        model.last.double()
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, output_dtype=torch.float64
        )
        fully_shard([model.first, model.second], mp_policy=policy)
        fully_shard(model)
        found = []
        for module in (model.first, model.second):
            module.register_forward_pre_hook(
                lambda module, args: found.append(args[0].dtype)
            )
            module.register_forward_hook(
                lambda module, args, output: found.append(output.dtype)
            )
        model(self.rows(4))
        expected = [torch.bfloat16, torch.float64, torch.bfloat16, torch.float64]
        self.assertEqual(found, expected, "types of inputs and outputs")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_loss_in_chunks(self):
        """The head of a group runs alone, chunk by chunk, each with its own backward;
        the trunk's comes last.
        """
        model = Trunk()
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device)
        fully_shard([model.norm, model.head])
        fully_shard(model)
        for step in range(2):
            for each in (reference, model):
                each.zero_grad()
                hidden = each(self.rows(4, step, count=4))
                detached = hidden.detach().requires_grad_()
                for chunk in detached.chunk(2):
                    each.head(chunk).square().sum().backward()
                    if each is model:  # the gradient may be read at once
                        each.head.weight.grad.clone()
                hidden.backward(detached.grad)
            average_gradients(reference)
            check_sharded_parity(self, reference, model)
            self.assertEqual(
                self.kinds(model.norm, model.head), ["sharded"] * 2, "after backward"
            )
        found = []
        model.norm.register_forward_hook(
            lambda *_: found.extend(self.kinds(model.head))
        )
        model.runs_head = True
        model(self.rows(4)).sum().backward()
        self.assertEqual(
            found, ["gathered"], "head after norm, in a step that runs both"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_only_some_modules_of_a_group_run(self):
        """A step without the head leaves the head without a gradient, and the next step
        with it is whole.
        """
        model = Trunk()
        reference = copy.deepcopy(model).to(self.device)
        model.to(self.device)
        fully_shard([model.norm, model.head])
        fully_shard(model)
        for step, uses_head in enumerate((False, True, False)):
            for each in (reference, model):
                each.zero_grad()
                out = each(self.rows(4, step))
                if each is model:
                    kinds = self.kinds(model.norm, model.head)
                    self.assertEqual(
                        kinds, ["sharded"] * 2, f"step {step}: after forward"
                    )
                (each.head(out) if uses_head else out).pow(4).sum().backward()
            average_gradients(reference)
            check_sharded_parity(self, reference, model)


if __name__ == "__main__":
    run_tests()
