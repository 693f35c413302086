# Owner(s): ["oncall: distributed"]
"""Evaluation of models under FSDP2: inference mode before or between steps, over one
shard or two, along rows or columns; and where inputs are copied.
"""

import sys
import unittest

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    ThreeUnits,
    check_train_parity,
    fully_shard_units,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TestFullyShardInference(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("layout", ["rows", "columns", "one shard"])
    def test_inference_mode_between_steps(self, layout):
        self._test_inference_mode(layout, trains_first=True)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_inference_mode_before_training(self):
        self._test_inference_mode("rows", trains_first=False)

    # Through torch 2.13 FSDP asks for the version of memory that inference mode made.
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("layout", ["columns", "one shard"])
    @unittest.expectedFailure
    def test_inference_mode_before_training_of_other_layouts(self, layout):
        self._test_inference_mode(layout, trains_first=False)

    def _test_inference_mode(self, layout, trains_first):
        options = {"reshard_after_forward": True}
        if layout == "columns":
            options["shard_placement_fn"] = lambda _: Shard(1)
        mesh = world_mesh(2, 1) if layout == "one shard" else world_mesh(2)
        model = fully_shard_units(self, mesh, **options)
        reference = ThreeUnits().to(self.device)
        if trains_first:
            check_train_parity(self, reference, model, [self.rows(4)])
        for step in range(2):
            with torch.inference_mode():
                found, expected = (each(self.rows(4)) for each in (model, reference))
            self.assertEqual(found, expected, f"step {step}")
        if trains_first:
            check_train_parity(self, reference, model, [self.rows(4, 1)])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_inputs_are_copied_where_they_are_used(self):
        """On the stream that computes, which needs no wait for another."""
        skip_without_accelerator("the host has no streams")
        streams = []

        class Copies(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func is torch.ops.aten._to_copy.default:
                    streams.append(torch.accelerator.current_stream())
                return func(*args, **(kwargs or {}))

        model = fully_shard(ThreeUnits().to(self.device), mesh=world_mesh(2))
        rows = self.rows(4).cpu()
        with Copies():
            model(rows)
        self.assertEqual(streams, [torch.accelerator.current_stream()], "of the copy")


instantiate_parametrized_tests(TestFullyShardInference)

if __name__ == "__main__":
    run_tests()
