# Owner(s): ["oncall: distributed"]
"""Bytes on the device: shards alone at rest, and in a step no more groups gathered than there must be.

Bounds are in units of a layer, chosen large against everything else that a step allocates. The plain host accounts no
memory, so all of this is left out there; the simulated accelerator counts every byte.
"""

import gc
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from torch_ext.testing._internal._fsdp.beside import BesideTest
from torch_ext.testing._internal._fsdp.four_ranks import mesh_of
from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import get_devtype, leave_out_without_accelerator
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

WIDTH, LAYERS = 256, 6
LAYER = WIDTH * WIDTH * 4  # bytes of one layer, whole
SHARD = LAYER // 4

# Activations of three rows, scalars and the allocator's rounding: below a quarter of a shard.
SLACK = SHARD // 4


class TestFullyShardMemory(BesideTest):
    def setUp(self):
        leave_out_without_accelerator("the plain host accounts no memory of a device")
        super().setUp()

    @property
    def _memory(self):
        return torch.get_device_module(get_devtype())

    def _allocated(self):
        gc.collect()
        self._memory.synchronize()
        return self._memory.memory_allocated()

    def _peak_of(self, run):
        """Return by how many bytes ``run`` exceeded at most what was there before it, and what it left behind."""
        before = self._allocated()
        self._memory.reset_peak_memory_stats()
        result = run()
        self._memory.synchronize()
        return self._memory.max_memory_allocated() - before, self._memory.memory_allocated() - before, result

    def _model(self, *, on_device=True, mesh=None, reshard_after_forward=True, **options):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        model = model.to(self.device) if on_device else model
        for module in (*model, model):
            fully_shard(module, mesh=mesh or mesh_of(4), reshard_after_forward=reshard_after_forward, **options)
        return model

    def _between(self, what, found, low, high):
        self.assertGreaterEqual(found, low, what)
        self.assertLessEqual(found, high, what)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_sharding_keeps_shards_alone(self):
        """The whole parameters are freed as soon as they are sharded, on one mesh dimension or two."""
        for mesh, ranks in ((mesh_of(4), 4), (mesh_of(2, 2), 2)):
            before = self._allocated()
            model = self._model(mesh=mesh)
            held = self._allocated() - before
            self._between(f"{ranks} shards", held, LAYERS * LAYER // ranks, LAYERS * LAYER // ranks + SLACK)
            del model
            self._between("after deletion", self._allocated() - before, 0, SLACK)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_forward_gathers_few_layers_at_a_time(self):
        """With resharding: the layer in use and the one before it whose memory is not yet free, each with its copy."""
        model = self._model()
        with torch.no_grad():
            peak, left, _ = self._peak_of(lambda: model(self.rows(WIDTH)))
        self._between("peak", peak, LAYER, 4 * LAYER + SLACK)
        self._between("left", left, 0, SLACK)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_forward_without_reshard_keeps_all_layers(self):
        model = self._model(reshard_after_forward=False)
        peak, left, loss = self._peak_of(lambda: model(self.rows(WIDTH)).sum())
        self._between("left", left, LAYERS * LAYER, LAYERS * LAYER + 2 * LAYER)
        loss.backward()
        del loss
        # What remains of the layers is a gradient shard of each.
        before_gradients = LAYERS * SHARD
        model.zero_grad()
        _, left, _ = self._peak_of(lambda: self._step(model))
        self._between("a step's gradients", left, before_gradients - SLACK, before_gradients + 2 * LAYER)

    def _step(self, model):
        model(self.rows(WIDTH)).sum().backward()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_step_peaks_lower_with_reshard(self):
        """Resharding saves the layers that would wait for their backward; both leave shards and gradient shards."""
        peaks = {}
        for reshard in (True, False):
            model = self._model(reshard_after_forward=reshard)
            self._step(model)
            model.zero_grad()
            peaks[reshard], left, _ = self._peak_of(lambda model=model: self._step(model))
            self._between(f"left with {reshard}", left, LAYERS * SHARD - SLACK, LAYERS * SHARD + LAYER)
            del model
        self.assertLess(peaks[True], peaks[False])
        self._between("with", peaks[True], LAYER, (LAYERS + 2) * LAYER)
        self._between("without", peaks[False], LAYERS * LAYER, (LAYERS + 6) * LAYER)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_steps_do_not_accumulate_memory(self):
        """From the second step on, each ends with as much as the one before."""
        model = self._model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ends = []
        for step in range(4):
            model(self.rows(WIDTH, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(self._allocated())
        self.assertEqual(ends[1:], ends[1:2] * 3)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_optimizer_state_is_sharded(self):
        model = self._model()
        optimizer = torch.optim.Adam(model.parameters())
        self._step(model)
        _, left, _ = self._peak_of(optimizer.step)
        self._between("two moments", left, 2 * LAYERS * SHARD, 2 * LAYERS * SHARD + SLACK)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_unshard_and_reshard(self):
        model = self._model()
        before = self._allocated()
        model[0].unshard()
        self._between("gathered", self._allocated() - before, LAYER, 2 * LAYER + SLACK)
        model[0].reshard()
        self._between("resharded", self._allocated() - before, 0, LAYER + SLACK)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_cpu_offload_keeps_nothing_on_the_device(self):
        """Neither parameters at rest, nor gradients after backward, nor the optimizer's state."""
        before = self._allocated()
        model = self._model(on_device=False, offload_policy=CPUOffloadPolicy())
        self._between("parameters", self._allocated() - before, 0, SLACK)
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(2):
            peak, _, _ = self._peak_of(lambda: self._step(model))
            self._between(f"peak of step {step}", peak, LAYER, (LAYERS + 2) * LAYER)
            optimizer.step()
            optimizer.zero_grad()
        # The last group's buffers are kept until the next step needs them.
        self._between("after steps", self._allocated() - before, 0, 2 * LAYER + SLACK)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_fully_shard_del_memory(self):
        """A model that goes takes all its memory along, also after steps and with no garbage collection forced."""
        before = self._allocated()
        model = self._model()
        self._step(model)
        del model
        self._between("after deletion", self._allocated() - before, 0, SLACK)


if __name__ == "__main__":
    run_tests()
