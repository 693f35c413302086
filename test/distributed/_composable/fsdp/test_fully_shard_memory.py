# Owner(s): ["oncall: distributed"]
"""FSDP2's device memory: shards between steps, at most two unsharded groups at once, no
leaks.

Bounds are in bytes of the model's tensors, as a device with memory statistics reports
them.
"""

import sys
import time
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, skip_without_accelerator
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

# Large compared with allocators' rounding, and small enough for a test.
WIDTH, LAYERS = 256, 6
LAYER_BYTES = WIDTH * WIDTH * 4
MODEL_BYTES = LAYERS * LAYER_BYTES
# Activations of a batch of 8, losses and indices: far less than one shard of a layer.
SLACK = LAYER_BYTES // 4
# How long to wait for memory to be freed. Only a failure waits this long.
PATIENCE_S = 5.0


class TestFullyShardMemory(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _model(self, **options: Any) -> nn.Sequential:
        skip_without_accelerator(
            "the plain host does not account for the memory of tensors"
        )
        torch.manual_seed(0)
        model = nn.Sequential(
            *(
                nn.Linear(WIDTH, WIDTH, bias=False, device=self.device)
                for _ in range(LAYERS)
            )
        )
        self.base = self.allocated_bytes() - MODEL_BYTES
        for layer in model:
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    def _held(self) -> int:
        """Return how many bytes the model and its training use now."""
        return self.allocated_bytes() - self.base

    def _peak_of(self, body: Any) -> int:
        """Run ``body`` and return its peak memory in bytes."""
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        body()
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated() - self.base

    def _inputs(self) -> torch.Tensor:
        return torch.ones(8, WIDTH, device=self.device)

    def assertHeld(self, expected: float, label: str) -> None:
        """Check that ``expected`` bytes are in use, once the process group's threads
        have released finished work.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not expected - SLACK <= (held := self._held()) <= expected + SLACK:
            if time.monotonic() > deadline:
                self.fail(
                    f"{label}: {held / LAYER_BYTES:.2f} layers are held, expected "
                    f"{expected / LAYER_BYTES:.2f}"
                )
            time.sleep(0.001)

    @skip_if_lt_x_gpu(2)
    @parametrize("reshard_after_forward", [True, False])
    def test_training_step(self, reshard_after_forward):
        model = self._model(reshard_after_forward=reshard_after_forward)
        shards = MODEL_BYTES / 2
        self.assertHeld(shards, "after sharding")

        outputs: list[torch.Tensor] = []
        peak = self._peak_of(lambda: outputs.append(model(self._inputs()).sum()))
        if reshard_after_forward:
            # The current group, and the outputs of its own all-gather and of the next.
            self.assertLess(peak, shards + 3 * LAYER_BYTES + SLACK, "peak of forward")
            self.assertHeld(shards, "after forward")
        else:
            self.assertGreater(peak, shards + MODEL_BYTES, "peak of forward")
            self.assertHeld(shards + MODEL_BYTES, "after forward")

        held = self._held()
        peak = self._peak_of(lambda: outputs.pop().backward())
        # Unsharded gradients of the current group and of the one that is being reduced.
        self.assertLess(
            peak,
            held + (shards if reshard_after_forward else 0) + 3 * LAYER_BYTES + SLACK,
            "peak of backward",
        )
        self.assertHeld(2 * shards, "after backward: shards and their gradients")

        optim = torch.optim.Adam(model.parameters(), foreach=True)
        optim.step()
        self.assertHeld(4 * shards, "after the first step: two more states")
        optim.zero_grad()
        self.assertHeld(3 * shards, "after zero_grad")

    @skip_if_lt_x_gpu(2)
    def test_second_step_needs_no_more_than_the_first(self):
        model = self._model()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        peaks = []
        for _ in range(4):
            peaks.append(self._peak_of(lambda: model(self._inputs()).sum().backward()))
            optim.step()
            optim.zero_grad()
        # A thread of the process group may release one layer late. A leak would grow
        # with every step.
        self.assertLessEqual(
            max(peaks[1:]) - peaks[0], LAYER_BYTES, f"peaks of four steps: {peaks}"
        )

    @skip_if_lt_x_gpu(2)
    @parametrize("offload_policy", [OffloadPolicy(), CPUOffloadPolicy()])
    def test_offload(self, offload_policy):
        model = self._model(offload_policy=offload_policy)
        offloads = isinstance(offload_policy, CPUOffloadPolicy)
        shards = 0 if offloads else MODEL_BYTES / 2
        if offloads:
            model.cpu()
        self.assertHeld(shards, "after sharding")
        model(self._inputs()).sum().backward()
        self.assertHeld(2 * shards, "after backward")

    @skip_if_lt_x_gpu(2)
    def test_unshard_and_reshard(self):
        model = self._model()
        model(self._inputs())
        model.reshard()
        shards = MODEL_BYTES / 2
        self.assertHeld(shards, "after a forward")
        model[2].unshard()
        self.assertHeld(shards + LAYER_BYTES, "one layer gathered by hand")
        model[2].reshard()
        self.assertHeld(shards, "and freed again")

    @skip_if_lt_x_gpu(2)
    def test_deleting_the_model_frees_all(self):
        model = self._model()
        model(self._inputs()).sum().backward()
        self.assertHeld(MODEL_BYTES, "shards and gradients")
        del model
        self.assertHeld(0, "after deletion")


instantiate_parametrized_tests(TestFullyShardMemory)

if __name__ == "__main__":
    run_tests()
