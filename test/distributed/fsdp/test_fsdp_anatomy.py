# Owner(s): ["oncall: distributed"]
"""The structure of a model under FSDP1, and the steps of its training, written out in
full.

Parity with DDP does not show that parameters are gathered too often or gradients
reduced too early. These tests do.
"""

import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    StepLog,
    ThreeUnits,
    get_devtype,
    get_full_params,
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

    def _fsdp(self, module, **options):
        return FSDP(module, device_id=self.device, **options)


class TestSteps(AnatomyTest):
    def _sharded(self, **options):
        model = ThreeUnits().to(self.device)
        log = StepLog(model)
        model.first = self._fsdp(model.first, **options)
        model.second = self._fsdp(model.second, **options)
        return self._fsdp(model, **options), log

    def _step(self, **options):
        """Return the log of a second step, because FSDP learns the order of the units
        in the first.
        """
        model, log = self._sharded(**options)
        model(self._rows()).sum().backward()
        log.lines.clear()
        with log.of("step"):
            model(self._rows()).sum().backward()
        return log.text()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_full_shard(self):
        self.assertExpectedInline(
            self._step(),
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
  backward first
  reduce-scatter first
  reduce-scatter last""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_full_shard_with_late_backward_prefetch(self):
        self.assertExpectedInline(
            self._step(backward_prefetch=BackwardPrefetch.BACKWARD_POST),
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
  all-gather second
  all-gather first
  reduce-scatter second
  backward first
  reduce-scatter first
  reduce-scatter last""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_full_shard_with_forward_prefetch(self):
        self.assertExpectedInline(
            self._step(forward_prefetch=True),
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
  backward second
  all-gather first
  backward first
  reduce-scatter second
  reduce-scatter first
  reduce-scatter last""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_shard_grad_op(self):
        self.assertExpectedInline(
            self._step(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
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
  reduce-scatter first
  reduce-scatter last""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_hybrid_shard(self):
        mesh = world_mesh(2, 2)
        self.assertExpectedInline(
            self._step(
                sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh
            ),
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
  reduce-scatter first
  all-reduce shard of first
  reduce-scatter last
  all-reduce shard of last""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_no_sync(self):
        model, log = self._sharded()
        with log.of("without"), model.no_sync():
            model(self._rows()).sum().backward()
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
  reduce-scatter first
  reduce-scatter last""",
        )


class Buffered(nn.Module):
    """Records the types that its forward sees."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.seen = {}

    def forward(self, x):
        self.seen = {
            "input": x.dtype,
            "parameter": self.linear.weight.dtype,
            "buffer": self.scale.dtype,
        }
        return self.linear(x) * self.scale


class TestMixedPrecision(AnatomyTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_types_of_a_step(self):
        """Parameters, reduction and buffers each have their own type, so none can be
        mistaken for another.
        """
        module = Buffered()
        units = ThreeUnits()  # used only for its log
        precision = MixedPrecision(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float64,
            buffer_dtype=torch.float16,
        )
        model = self._fsdp(module.to(self.device), mixed_precision=precision)
        log = StepLog(units)
        with log.of("step"):
            output = model(self._rows())
            output.sum().backward()
        (flat,) = model.parameters()
        found = {
            **module.seen,
            "output": output.dtype,
            **log.dtypes,
            "stored": flat.dtype,
            "gradient": flat.grad.dtype,
        }
        found["saved buffer"] = model.state_dict()["scale"].dtype
        self.assertExpectedInline(
            "\n".join(f"{name}: {dtype}" for name, dtype in found.items()),
            """\
input: torch.bfloat16
parameter: torch.bfloat16
buffer: torch.float16
output: torch.float32
all-gather: torch.bfloat16
reduce-scatter: torch.float64
stored: torch.float32
gradient: torch.float32
saved buffer: torch.float32""",
        )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.relu(self.encoder(x)))


class TestStructure(AnatomyTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_tree_by_policy(self):
        model = nn.Sequential(
            nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Sequential(nn.Linear(3, 1))
        )
        model = self._fsdp(
            model.to(self.device), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
        )
        self.assertExpectedInline(
            str(model),
            """\
FullyShardedDataParallel(
  (_fsdp_wrapped_module): Sequential(
    (0): Sequential(
      (0): FullyShardedDataParallel(
        (_fsdp_wrapped_module): Linear(in_features=2, out_features=3, bias=True)
      )
      (1): ReLU()
    )
    (1): Sequential(
      (0): FullyShardedDataParallel(
        (_fsdp_wrapped_module): Linear(in_features=3, out_features=1, bias=True)
      )
    )
  )
)""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_layout(self):
        """A flat parameter of 21 elements is padded to 24: six for each rank,
        regardless of parameter boundaries.
        """
        model = self._fsdp(
            nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(self.device),
            use_orig_params=True,
        )
        self.assertExpectedInline(
            layout_over_ranks(dict(model.named_parameters())),
            """\
_fsdp_wrapped_module.0.weight: (6,) | (6,) | (0,) | (0,)
_fsdp_wrapped_module.0.bias: (0,) | (0,) | (4,) | (0,)
_fsdp_wrapped_module.1.weight: (0,) | (0,) | (2,) | (2,)
_fsdp_wrapped_module.1.bias: (0,) | (0,) | (0,) | (1,)""",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_shared_parameter_is_sharded_once(self):
        model = self._fsdp(Tied().to(self.device))
        numel = torch.tensor(
            sum(param.numel() for param in model.parameters()), device=self.device
        )
        dist.all_reduce(numel)
        self.assertEqual(
            numel.item(), 16, "elements in all shards of a shared weight of 4 x 4"
        )

        reference = Tied().to(self.device)
        for module, rows in ((model, self._rows()), (reference, self._all_rows())):
            optim = torch.optim.SGD(module.parameters(), lr=0.1)
            module(rows).square().mean().backward()
            optim.step()
        self.assertEqual(get_full_params(model), list(reference.parameters()))

    def _all_rows(self):
        rows = [torch.empty(3, 4, device=self.device) for _ in range(4)]
        dist.all_gather(rows, self._rows())
        return torch.cat(rows)


class TestGradScaler(AnatomyTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_overflow_in_one_shard_skips_the_step_on_all_ranks(self):
        model = self._fsdp(nn.Linear(4, 4).to(self.device))
        optim = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = ShardedGradScaler(device=get_devtype().type, init_scale=8.0)
        before = get_full_params(model)
        scaler.scale(model(self._rows()).sum()).backward()
        if self.rank == 1:
            next(model.parameters()).grad.fill_(float("inf"))
        scaler.step(optim)
        scaler.update()
        self.assertEqual(get_full_params(model), before)
        self.assertEqual(scaler.get_scale(), 4.0)


if __name__ == "__main__":
    run_tests()
