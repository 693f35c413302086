# Owner(s): ["oncall: distributed"]
"""The structure of a model under FSDP2, and the steps of its training, written out in
full.

Numerical parity does not show that parameters are gathered too often or gradients
reduced too early. These tests do.
"""

import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    StepLog,
    ThreeUnits,
    layout_over_ranks,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class AnatomyTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _rows(self):
        torch.manual_seed(self.rank)
        return torch.randn(3, 4, device=self.device)

    def _sharded(self, mesh=None, **options):
        model = ThreeUnits().to(self.device)
        log = StepLog(model)
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=mesh or world_mesh(4), **options)
        return model, log


class TestSteps(AnatomyTest):
    def _step(self, **options):
        model, log = self._sharded(**options)
        with log.of("step"):
            model(self._rows()).sum().backward()
        return log.text()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_reshard_after_forward(self):
        self.assertExpectedInline(
            self._step(reshard_after_forward=True),
            """\
step:
  all-gather last
  all-gather first
  forward first
  all-gather second
  forward second
  forward last
  backward last
  all-gather last
  all-gather second
  backward second
  all-gather first
  reduce-scatter second
  backward first
  reduce-scatter last
  reduce-scatter first""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_no_reshard_after_forward(self):
        self.assertExpectedInline(
            self._step(reshard_after_forward=False),
            """\
step:
  all-gather last
  all-gather first
  forward first
  all-gather second
  forward second
  forward last
  backward last
  backward second
  reduce-scatter second
  backward first
  reduce-scatter last
  reduce-scatter first""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_hybrid(self):
        self.assertExpectedInline(
            self._step(mesh=world_mesh(2, 2)),
            """\
step:
  all-gather last
  all-gather first
  forward first
  all-gather second
  forward second
  forward last
  backward last
  all-gather second
  backward second
  all-gather first
  reduce-scatter second
  all-reduce shard of second
  backward first
  reduce-scatter last
  all-reduce shard of last
  reduce-scatter first
  all-reduce shard of first""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_explicit_prefetch(self):
        model, log = self._sharded()
        model.set_modules_to_forward_prefetch([model.first, model.second])
        model.set_modules_to_backward_prefetch([model.second, model.first])
        with log.of("step"):
            model(self._rows()).sum().backward()
        self.assertExpectedInline(
            log.text(),
            """\
step:
  all-gather last
  all-gather first
  all-gather second
  forward first
  forward second
  forward last
  backward last
  all-gather second
  all-gather first
  backward second
  reduce-scatter second
  backward first
  reduce-scatter last
  reduce-scatter first""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_no_gradient_sync(self):
        model, log = self._sharded()
        model.set_requires_gradient_sync(False)
        with log.of("without"):
            model(self._rows()).sum().backward()
        model.set_requires_gradient_sync(True)
        with log.of("with"):
            model(self._rows()).sum().backward()
        self.assertExpectedInline(
            log.text(),
            """\
without:
  all-gather last
  all-gather first
  forward first
  all-gather second
  forward second
  forward last
  backward last
  all-gather second
  backward second
  all-gather first
  backward first
with:
  all-gather last
  all-gather first
  forward first
  all-gather second
  forward second
  forward last
  backward last
  all-gather second
  backward second
  all-gather first
  reduce-scatter second
  backward first
  reduce-scatter last
  reduce-scatter first""",
        )


class TestState(AnatomyTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_types_of_a_step(self):
        """Compute, reduction and output each have their own type, so none can be
        mistaken for another.
        """
        model = ThreeUnits().to(self.device)
        log = StepLog(model)
        types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float64}
        for unit in (model.first, model.second):
            fully_shard(unit, mp_policy=MixedPrecisionPolicy(**types))
        fully_shard(
            model, mp_policy=MixedPrecisionPolicy(**types, output_dtype=torch.float16)
        )
        seen = {}
        model.last.register_forward_hook(
            lambda module, args, output: seen.update(
                input=args[0].dtype, parameter=module.weight.dtype
            )
        )
        with log.of("step"):
            output = model(self._rows())
            output.sum().backward()
        seen |= {"output": output.dtype, "reduce-scatter": log.dtypes["reduce-scatter"]}
        seen |= {
            "stored": model.last.weight.dtype,
            "gradient": model.last.weight.grad.dtype,
        }
        self.assertExpectedInline(
            "\n".join(f"{name}: {dtype}" for name, dtype in seen.items()),
            """\
input: torch.bfloat16
parameter: torch.bfloat16
output: torch.float16
reduce-scatter: torch.float64
stored: torch.float32
gradient: torch.float32""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_layout(self):
        """Ranks get equal blocks of rows; if these run out, the last ranks get fewer
        rows, or none.
        """
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)).to(self.device)
        fully_shard(model)
        shards = {name: param.to_local() for name, param in model.named_parameters()}
        self.assertExpectedInline(
            layout_over_ranks(shards),
            """\
0.weight: (2, 3) | (2, 3) | (1, 3) | (0, 3)
0.bias: (2,) | (2,) | (1,) | (0,)
1.weight: (1, 5) | (0, 5) | (0, 5) | (0, 5)
1.bias: (1,) | (0,) | (0,) | (0,)""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_load_reaches_parameters_that_are_still_gathered(self):
        """The next forward must not use what an earlier one gathered and did not
        reshard.
        """
        model, _ = self._sharded(reshard_after_forward=False)
        rows = self._rows()
        self._check_load(model, rows)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_next_forward_uses_the_assigned_state(self):
        """As above, if the loaded tensors replace the sharded parameters."""
        model, _ = self._sharded()
        self._check_load(model, self._rows(), assign=True)

    def _check_load(self, model, rows, **options):
        """Load doubled values between two forwards. The second must use them."""
        reference = ThreeUnits().to(self.device)
        reference.load_state_dict(
            {name: 2 * tensor for name, tensor in reference.state_dict().items()}
        )
        with torch.no_grad():
            model(rows)
            doubled = {name: 2 * tensor for name, tensor in model.state_dict().items()}
            model.load_state_dict(doubled, **options)
            self.assertEqual(model(rows), reference(rows))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_shared_parameter_is_sharded_once(self):
        model = nn.Sequential(
            nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        ).to(self.device)
        model[1].weight = model[0].weight
        fully_shard(model)
        self.assertIs(model[1].weight, model[0].weight)
        self.assertEqual(
            sum(param.to_local().numel() for param in model.parameters()), 4
        )
        model(self._rows()).sum().backward()
        self.assertIs(model[1].weight, model[0].weight)


if __name__ == "__main__":
    run_tests()
