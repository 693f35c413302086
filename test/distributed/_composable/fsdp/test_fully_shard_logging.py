# Owner(s): ["oncall: distributed"]
"""FSDP2's log of a step: each hook, with the name of its module in the root."""

import logging
import sys

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, ThreeUnits
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class LoggingTests(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fsdp_logging(self):
        model = ThreeUnits().to(self.device)
        for unit in (model.first, model.second, model):
            fully_shard(unit)
        with self.assertLogs(
            "torch.distributed.fsdp.fully_shard", logging.DEBUG
        ) as logs:
            model(
                torch.ones(2, 4, device=self.device, requires_grad=True)
            ).sum().backward()
        self.assertExpectedInline(
            "\n".join(record.getMessage() for record in logs.records),
            """\
FSDP::root_pre_forward
FSDP::pre_forward
FSDP::pre_forward (first)
FSDP::post_forward (first)
FSDP::pre_forward (second)
FSDP::post_forward (second)
FSDP::post_forward
FSDP::pre_backward
FSDP::pre_backward (second)
FSDP::post_backward (second)
FSDP::pre_backward (first)
FSDP::post_backward (first)
FSDP::post_backward
FSDP::root_post_backward""",
        )


if __name__ == "__main__":
    run_tests()
