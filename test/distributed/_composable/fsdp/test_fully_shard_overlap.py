# Owner(s): ["oncall: distributed"]
"""What FSDP2 lets overlap, and what it must wait for. Both are asked of the streams' clocks, never of time."""

import contextlib
import sys

import torch
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    ALL_GATHER,
    REDUCE_SCATTER,
    FourRankTest,
    StreamOrder,
    ThreeUnits,
    TwoRankTest,
    check_races,
    patch_all_gather,
    patch_reduce_scatter,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class WatchedUnits:
    """A sharded ``ThreeUnits`` that marks when each unit has been computed, is gathered and is reduced.

    In forward, units are gathered in the order last (the root's), first, second. A moment is called
    ``"0 forward: gather second"``, with the number of the step.
    """

    def __init__(self, device, **options):
        self.model = ThreeUnits().to(device)
        self.order, self.phase = StreamOrder(), ""
        self._rows = torch.ones(2, 4, device=device, requires_grad=True)
        self._names = {unit.weight.numel(): name for name, unit in self.model.named_children()}
        for name, unit in self.model.named_children():
            unit.register_forward_hook(self._note_compute(name))
        for unit in (self.model.first, self.model.second, self.model):
            fully_shard(unit, mesh=world_mesh(2), **options)

    def mark(self, what):
        self.order.mark(f"{self.phase}: {what}")

    def _note_compute(self, name):
        def note(module, args, output):
            self.mark(f"computed {name}")
            if output.requires_grad:
                args[0].register_hook(lambda _: self.mark(f"computed {name}"))

        return note

    @contextlib.contextmanager
    def watching(self):
        gather, reduce = getattr(dist, ALL_GATHER), getattr(dist, REDUCE_SCATTER)

        def marking(what, collective, whole):
            def call(*args, **kwargs):
                tensor = kwargs[whole] if whole in kwargs else args[whole == "input"]
                self.mark(f"{what} {self._names[tensor.numel()]}")
                return collective(*args, **kwargs)

            return call

        with (
            self.order.watching(),
            patch_all_gather(marking("gather", gather, "output")),
            patch_reduce_scatter(marking("reduce", reduce, "input")),
        ):
            yield

    def run_step(self, number):
        """Run forward and backward, and mark what an optimizer would come after."""
        self.phase = f"{number} forward"
        loss = self.model(self._rows).sum()
        self.phase = f"{number} backward"
        loss.backward()
        self.mark("optimizer")

    def relations(self, *pairs):
        """Return a line for each pair of moments."""
        return "\n".join(f"{first} {self.order.relation(first, second)} {second}" for first, second in pairs)


class TestFullyShardOverlap(TwoRankTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fully_shard_training_overlap(self):
        """All-gathers overlap the compute before them, and reductions the compute after them. Nothing else does."""
        watched = WatchedUnits(self.device, reshard_after_forward=True)
        with watched.watching():
            for step in range(2):
                watched.run_step(step)
        self.assertExpectedInline(
            watched.relations(
                ("1 forward: computed first", "1 forward: gather second"),
                ("1 forward: gather first", "1 forward: computed first"),
                ("1 forward: gather second", "1 forward: computed second"),
                ("1 forward: gather first", "1 forward: gather second"),
                ("1 backward: gather second", "1 backward: computed last"),
                ("1 backward: gather first", "1 backward: computed second"),
                ("1 backward: gather last", "1 backward: computed last"),
                ("1 backward: gather second", "1 backward: computed second"),
                ("1 backward: gather first", "1 backward: computed first"),
                ("1 backward: computed second", "1 backward: reduce second"),
                ("1 backward: reduce second", "1 backward: computed first"),
                ("1 backward: computed first", "1 backward: reduce first"),
                ("1 backward: reduce second", "1 backward: reduce first"),
            ),
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
        """The optimizer comes after every reduction, and the next forward's all-gathers after the optimizer."""
        watched = WatchedUnits(self.device)
        with watched.watching():
            for step in range(2):
                watched.run_step(step)
        pairs = [
            *((f"1 backward: reduce {unit}", "1 backward: optimizer") for unit in ThreeUnits.UNITS),
            *(("0 backward: optimizer", f"1 forward: gather {unit}") for unit in ThreeUnits.UNITS),
        ]
        self.assertExpectedInline(
            watched.relations(*pairs),
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
        """All-gathers wait for the event, and for nothing that comes after it. One event serves one forward."""
        watched = WatchedUnits(self.device)
        with watched.watching():
            for step in range(3):
                watched.run_step(step)
                if not step:
                    event = torch.accelerator.current_stream().record_event()
                    watched.model.set_post_optim_event(event)
                watched.mark("log")
        pairs = [
            (f"{step} backward: {moment}", f"{step + 1} forward: gather {unit}")
            for step in range(2)
            for moment in ("optimizer", "log")
            for unit in ("last", "first")
        ]
        self.assertExpectedInline(
            watched.relations(*pairs),
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
        watched = WatchedUnits(self.device)
        with watched.watching():
            for step, is_last in enumerate((False, True)):
                watched.model.set_is_last_backward(is_last)
                watched.run_step(step)
        self.assertExpectedInline(
            watched.relations(*((f"{step} backward: reduce last", f"{step} backward: optimizer") for step in range(2))),
            """\
0 backward: reduce last overlaps 0 backward: optimizer
1 backward: reduce last comes before 1 backward: optimizer""",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_forward_prefetch_overlaps_more(self):
        """Both prefetched modules are gathered while none has been computed, and each overlaps what comes before it."""
        watched = WatchedUnits(self.device)
        watched.model.set_modules_to_forward_prefetch([watched.model.first, watched.model.second])
        with watched.watching():
            watched.run_step(0)
        self.assertExpectedInline(
            watched.relations(
                ("0 forward: gather second", "0 forward: computed first"),
                ("0 forward: gather first", "0 forward: computed first"),
                ("0 forward: gather second", "0 forward: computed second"),
            ),
            """\
0 forward: gather second overlaps 0 forward: computed first
0 forward: gather first comes before 0 forward: computed first
0 forward: gather second comes before 0 forward: computed second""",
        )


class TestFullyShardStreams(FourRankTest):
    """Steps under the race checker: a wait that is missing fails, whatever the timing."""

    LAYOUTS = {
        "1D": {},
        "1D, resharding to two": {"reshard_after_forward": 2},
        "hybrid": {"mesh_shape": (2, 2)},
        "low precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "hybrid in low precision": {"mesh_shape": (2, 2), "mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
        "offloaded": {"offload_policy": CPUOffloadPolicy()},
    }

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_no_races_in_training(self):
        skip_without_accelerator("the host has no streams")
        self.run_subtests({"layout": list(self.LAYOUTS)}, self._test_no_races_in_training)

    def _test_no_races_in_training(self, layout):
        options = dict(self.LAYOUTS[layout])
        mesh_shape = options.pop("mesh_shape", (4,))
        model = ThreeUnits()
        for unit in (model.first, model.second, model):
            fully_shard(unit, mesh=world_mesh(*mesh_shape), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with check_races():
            for step in range(3):
                micros = 1 + step % 2
                for micro in range(micros):
                    model.set_requires_all_reduce(micro == micros - 1)
                    model(torch.full((2, 4), step + 1.0, device=self.device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    run_tests()
