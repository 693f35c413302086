# Owner(s): ["oncall: distributed"]
"""Operations that FSDP1 overlaps, and its waits. The tests query the streams' clocks,
never the time.
"""

import sys

import torch
from torch import distributed as dist
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    SlowUnit,
    ThreeUnits,
    WatchedUnits,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


def watched_units(device: torch.device, **options: object) -> WatchedUnits:
    def shard(model: ThreeUnits) -> torch.nn.Module:
        model.first, model.second = (
            FSDP(unit, device_id=device, **options)
            for unit in (model.first, model.second)
        )
        return FSDP(model, device_id=device, **options)

    return WatchedUnits(device, shard)


class TestForwardOverlapWorldSizeOne(FSDPTest):
    @property
    def world_size(self) -> int:
        return 1

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_forward_overlap(self):
        """A rank alone gathers nothing, so forward has no wait."""
        watched = watched_units(self.device)
        watched.run_steps(1)
        self.assertEqual(
            [name for name in watched.names if "gather" in name],
            [],
            "gathers of a rank alone",
        )


class TestForwardOverlapWorldSizeTwo(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_forward_overlap(self):
        """A unit is gathered, and before that cast or copied from the host, while the
        one before it is computed.
        """
        self.run_subtests(
            {
                "options": [
                    {},
                    {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
                    {"cpu_offload": CPUOffload(offload_params=True)},
                ]
            },
            self._test_forward_overlap,
        )

    def _test_forward_overlap(self, options):
        watched = watched_units(self.device, **options)
        watched.run_steps(2)
        watched.check(
            self,
            """\
1 forward: computed first overlaps 1 forward: gather second
1 forward: gather first comes before 1 forward: computed first
1 forward: gather second comes before 1 forward: computed second
1 forward: gather first comes before 1 forward: gather second""",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_forward_prefetch(self):
        """From the second step on, a unit is gathered before the one before it has been
        issued.
        """
        watched = watched_units(self.device, forward_prefetch=True)
        watched.run_steps(2)
        watched.check(
            self,
            """\
0 forward: gather second issued after 0 forward: computed first
1 forward: gather second overlaps 1 forward: computed first
1 forward: gather first comes before 1 forward: computed first
1 forward: gather second comes before 1 forward: computed second""",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_backward_overlap(self):
        """With each kind of prefetching, a unit is gathered as early as asked.
        Reductions overlap what comes after.
        """
        kinds = {
            BackwardPrefetch.BACKWARD_PRE: (
                "gather second overlaps 1 backward: computed last",
                "gather first overlaps 1 backward: computed second",
            ),
            BackwardPrefetch.BACKWARD_POST: (
                "gather second issued after 1 backward: computed last",
                "gather first overlaps 1 backward: computed second",
            ),
            None: (
                "gather second issued after 1 backward: computed last",
                "gather first issued after 1 backward: computed second",
            ),
        }
        for backward_prefetch, (second, first) in kinds.items():
            watched = watched_units(self.device, backward_prefetch=backward_prefetch)
            watched.run_steps(2)
            watched.check(
                self,
                f"""\
1 backward: {second}
1 backward: {first}
1 backward: gather second comes before 1 backward: computed second
1 backward: gather first comes before 1 backward: computed first
1 backward: reduce second overlaps 1 backward: computed first
1 backward: reduce second comes before 1 backward: reduce first""",
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_backward_and_optimizer_are_ordered(self):
        """The optimizer comes after every reduction, and the next forward's all-gathers
        after the optimizer.
        """
        watched = watched_units(self.device)
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
    def test_limit_all_gathers(self):
        """With the limit, the host waits until the unit two before has been freed; so
        memory for it is free.
        """
        for limited, relation in ((True, "comes before"), (False, "overlaps")):
            watched = watched_units(self.device, limit_all_gathers=limited)
            watched.run_steps(1)
            watched.check(
                self,
                f"""\
0 forward: computed first overlaps 0 forward: gather second
0 forward: computed first {relation} 0 backward: gather second
0 forward: computed second overlaps 0 backward: gather second""",
            )


class TestExposed(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_prefetching_hides_all_gathers(self):
        """The host waits for each of five units. All-gathers take 200 ns each."""
        clock = getattr(torch.get_device_module(self.device), "clock", None)
        if clock is None:
            self.skipTest("the device has no virtual time")
        for prefetches, exposed in ((False, 1000), (True, 200)):
            options = {"device_id": self.device, "forward_prefetch": prefetches}
            units = (FSDP(SlowUnit(), **options) for _ in range(5))
            model = FSDP(torch.nn.Sequential(*units), **options)
            x = torch.ones(100, device=self.device)
            for _ in range(2):  # the first step records the order of units
                model(x).sum().backward()
            with clock.measure("unit") as trace:
                model(x)
            # To the hundred: other kernels last 1 ns each.
            self.assertEqual(round(trace.exposed("all_gather"), -2), exposed)
            self.assertEqual(round(trace.time, -2), 5000 + exposed)


class TestHybridOverlap(FSDPTest):
    @property
    def world_size(self):
        return 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_all_reduce_overlap(self):
        """A unit's shards are all-reduced while the next unit is reduced, and the
        optimizer waits for both.
        """
        watched = watched_units(
            self.device,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=world_mesh(2, 2),
        )
        watched.run_steps(1)
        watched.check(
            self,
            """\
0 backward: reduce second comes before 0 backward: all-reduce second
0 backward: all-reduce second overlaps 0 backward: computed first
0 backward: all-reduce second overlaps 0 backward: reduce first
0 backward: reduce first comes before 0 backward: all-reduce first
0 backward: all-reduce second comes before 0 backward: all-reduce first
0 backward: all-reduce first comes before 0 backward: optimizer
0 backward: all-reduce last comes before 0 backward: optimizer""",
        )


if __name__ == "__main__":
    run_tests()
