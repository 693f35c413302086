# Owner(s): ["oncall: distributed"]
"""FSDP1 with a model that is float16 throughout: cast before it is wrapped,
or after.
"""

import sys

import torch
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    FSDPTest,
    StepLog,
    ThreeUnits,
    get_full_params,
    skip_parameter_offload,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

HALF = torch.float16


class TestPureFP16(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_pure_fp16_training(self):
        """Gradients are those of an unsharded model in float16, up to rounding."""
        self.run_subtests(
            {
                "half_before": [True, False],
                "use_orig_params": [True, False],
                "cpu_offload": [CPUOffload(False), CPUOffload(True)],
                "sharding_strategy": [
                    ShardingStrategy.FULL_SHARD,
                    ShardingStrategy.NO_SHARD,
                ],
            },
            self._test_pure_fp16_training,
        )

    def _test_pure_fp16_training(
        self, half_before: bool, cpu_offload: CPUOffload, **fsdp_kwargs: object
    ) -> None:
        skip_parameter_offload(cpu_offload)
        reference, module = Chain(device=self.device).half(), Chain(device=self.device)
        model = FSDP(
            module.half() if half_before else module,
            device_id=self.device,
            cpu_offload=cpu_offload,
            **fsdp_kwargs,
        )
        model = model if half_before else model.half()
        for each, rank in ((reference, None), (model, self.rank)):
            optim = torch.optim.SGD(each.parameters(), lr=0.5)
            output = each(Chain.rows(self.device, self.world_size, rank).half())
            self.assertEqual(output.dtype, HALF, "type of the output")
            output.square().mean().backward()
            optim.step()
        found, expected = get_full_params(model), list(reference.parameters())
        self.assertEqual(
            {param.dtype for param in found}, {HALF}, "types of parameters"
        )
        # An element of size one has a step of 1e-3 to its neighbours.
        self.assertEqual(found, expected, "parameters after a step", rtol=0, atol=2e-3)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fp16_dtypes(self):
        """FSDP gathers, computes and reduces in float16, whichever way the model was
        cast.
        """
        self.run_subtests(
            {"half_before": [True, False], "use_orig_params": [True, False]},
            self._test_fp16_dtypes,
        )

    def _test_fp16_dtypes(self, half_before: bool, use_orig_params: bool) -> None:
        units = ThreeUnits().to(self.device)
        log = StepLog(units)
        model = FSDP(
            units.half() if half_before else units,
            device_id=self.device,
            use_orig_params=use_orig_params,
        )
        model = model if half_before else model.half()
        with log.of("step"):
            model(torch.ones(2, 4, device=self.device, dtype=HALF)).sum().backward()
        types = {
            name: dtype
            for name, dtype in log.dtypes.items()
            if name in ("all-gather", "reduce-scatter")
        }
        self.assertEqual(
            types, {"all-gather": HALF, "reduce-scatter": HALF}, "types of collectives"
        )
        gradients = {
            param.grad.dtype for param in model.parameters() if param.grad is not None
        }
        self.assertEqual(gradients, {HALF}, "types of gradients")


if __name__ == "__main__":
    run_tests()
