# Owner(s): ["oncall: distributed"]
"""Operations that FSDP2 overlaps, and its waits. The tests query the streams' clocks,
never the time.
"""

import sys
from functools import partial

import torch
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    SlowUnit,
    ThreeUnits,
    WatchedUnits,
    check_races,
    shard_units,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TestFullyShardOverlap(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _watched(self, **options):
        shard = partial(shard_units, mesh=world_mesh(2), **options)
        return WatchedUnits(self.device, shard)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fully_shard_training_overlap(self):
        """All-gathers overlap the compute before them, and reductions the compute after
        them. Nothing else does.
        """
        watched = self._watched(reshard_after_forward=True)
        watched.run_steps(2)
        watched.check(
            self,
            """\
1 forward: computed first overlaps 1 forward: gather second
1 forward: gather first comes before 1 forward: computed first
1 forward: gather second comes before 1 forward: computed second
1 forward: gather first comes before 1 forward: gather second
1 backward: gather second overlaps 1 backward: computed last
1 backward: gather first overlaps 1 backward: computed second
1 backward: gather last comes before 1 backward: computed last
1 backward: gather second comes before 1 backward: computed second
1 backward: gather first comes before 1 backward: computed first
1 backward: computed second comes before 1 backward: reduce second
1 backward: reduce second overlaps 1 backward: computed first
1 backward: computed first comes before 1 backward: reduce first
1 backward: reduce second comes before 1 backward: reduce first""",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_backward_and_optimizer_are_ordered(self):
        """The optimizer comes after every reduction, and the next forward's all-gathers
        after the optimizer.
        """
        watched = self._watched()
        watched.run_steps(2)
        watched.check(
            self,
            """\
1 backward: reduce first comes before 1 backward: optimizer
1 backward: reduce second comes before 1 backward: optimizer
1 backward: reduce last comes before 1 backward: optimizer
0 backward: optimizer comes before 1 forward: gather first
0 backward: optimizer comes before 1 forward: gather second
0 backward: optimizer comes before 1 forward: gather last""",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fully_shard_post_optim_event_overlap(self):
        """All-gathers wait for the event, and for nothing that comes after it. One
        event serves one forward.
        """
        watched = self._watched()
        with watched.watching():
            for step in range(3):
                watched.run_step(step)
                if not step:
                    event = torch.accelerator.current_stream().record_event()
                    watched.model.set_post_optim_event(event)
                watched.mark("log")
        watched.check(
            self,
            """\
0 backward: optimizer comes before 1 forward: gather last
0 backward: optimizer comes before 1 forward: gather first
0 backward: log overlaps 1 forward: gather last
0 backward: log overlaps 1 forward: gather first
1 backward: optimizer comes before 2 forward: gather last
1 backward: optimizer comes before 2 forward: gather first
1 backward: log comes before 2 forward: gather last
1 backward: log comes before 2 forward: gather first""",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_backward_that_is_not_the_last_does_not_wait(self):
        """The root's reduction, which comes last, may still run."""
        watched = self._watched()
        with watched.watching():
            for step, is_last in enumerate((False, True)):
                watched.model.set_is_last_backward(is_last)
                watched.run_step(step)
        watched.check(
            self,
            """\
0 backward: reduce last overlaps 0 backward: optimizer
1 backward: reduce last comes before 1 backward: optimizer""",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_forward_prefetch_overlaps_more(self):
        """Both prefetched modules are gathered while none has been computed, and each
        overlaps what comes before it.
        """
        watched = self._watched()
        watched.model.set_modules_to_forward_prefetch(
            [watched.model.first, watched.model.second]
        )
        watched.run_steps(1)
        watched.check(
            self,
            """\
0 forward: gather second overlaps 0 forward: computed first
0 forward: gather first comes before 0 forward: computed first
0 forward: gather second comes before 0 forward: computed second""",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_asynchronous_unshard_uses_no_stream_of_its_own(self):
        """All-gathers are prepared on the stream that computes, in the order of the
        calls. Only explicit prefetching overlaps them.
        """
        watched = self._watched()
        watched.model._set_unshard_async_op(True)
        watched.model.set_modules_to_forward_prefetch([watched.model.first])
        watched.run_steps(2)
        watched.check(
            self,
            """\
1 forward: gather first comes before 1 forward: computed first
1 forward: computed first comes before 1 forward: gather second
1 backward: computed last comes before 1 backward: gather first
1 backward: reduce second overlaps 1 backward: computed first""",
        )


class TestFullyShardExposed(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_prefetching_hides_all_gathers(self):
        """The host waits for each of five units. All-gathers take 200 ns each."""
        clock = getattr(torch.get_device_module(self.device), "clock", None)
        if clock is None:
            self.skipTest("the device has no virtual time")
        for depth, exposed in ((0, 1000), (1, 200), (2, 200)):
            model = torch.nn.Sequential(*(SlowUnit() for _ in range(5)))
            model = model.to(self.device)
            for unit in model:
                fully_shard(unit, mesh=world_mesh(2))
            fully_shard(model, mesh=world_mesh(2))
            for index, unit in enumerate(model):
                ahead = model[index + 1 : index + 1 + depth]
                unit.set_modules_to_forward_prefetch(list(ahead))
            x = torch.ones(100, device=self.device)
            model(x)  # the first forward initializes
            with clock.measure("unit") as trace:
                model(x)
            # To the hundred: other kernels last 1 ns each.
            self.assertEqual(round(trace.exposed("all_gather"), -2), exposed)
            self.assertEqual(round(trace.time, -2), 5000 + exposed)


class TestFullyShardStreams(FSDPTest):
    """Steps under the race checker: a wait that is missing fails, whatever
    the timing.
    """

    LAYOUTS = {
        "1D": {},
        "1D, resharding to two": {"reshard_after_forward": 2},
        "hybrid": {"mesh_shape": (2, 2)},
        "low precision": {
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        },
        "hybrid in low precision": {
            "mesh_shape": (2, 2),
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16),
        },
        "offloaded": {"offload_policy": CPUOffloadPolicy()},
        "columns": {"shard_placement_fn": lambda _: Shard(1)},
        "asynchronous": {"set": lambda model: model._set_unshard_async_op(True)},
        "prefetching": {"set": lambda model: prefetch_all(model)},
    }

    @property
    def world_size(self):
        return 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_no_races_in_training(self):
        skip_without_accelerator("the host has no streams")
        self.run_subtests(
            {"layout": list(self.LAYOUTS)}, self._test_no_races_in_training
        )

    def _test_no_races_in_training(self, layout):
        options = dict(self.LAYOUTS[layout])
        mesh_shape = options.pop("mesh_shape", (4,))
        setting = options.pop("set", None)
        model = shard_units(ThreeUnits(), world_mesh(*mesh_shape), **options)
        if setting is not None:
            setting(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = self.allocated_bytes()
        with check_races():
            for step in range(3):
                micros = 1 + step % 2
                for micro in range(micros):
                    model.set_requires_all_reduce(micro == micros - 1)
                    model(
                        torch.full((2, 4), step + 1.0, device=self.device)
                    ).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        held = self.allocated_bytes() - before
        self.assertEqual(held, 0, "bytes that training leaves behind")


def prefetch_all(model):
    model.set_modules_to_forward_prefetch([model.first, model.second])
    model.set_modules_to_backward_prefetch([model.second, model.first])


if __name__ == "__main__":
    run_tests()
