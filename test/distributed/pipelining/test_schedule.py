# Owner(s): ["oncall: distributed"]
"""The plans of pipeline schedules, executed by a simulation of ranks that exchange
messages in order; and the cutting of batches into microbatches.
"""

import collections
import itertools
import os
import sys
import tempfile
from types import SimpleNamespace

import torch
from torch import distributed as dist
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    _Replicate,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from torch.distributed.pipelining.schedules import (
    _simulate_comms_compute,
    get_schedule_class,
)

from torch_ext.testing._internal.common_utils import TestCase, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

SINGLE = (ScheduleGPipe, Schedule1F1B)
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
LOOPED = (ScheduleLoopedBFS, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
CASES = [
    (kind, ranks, stages, microbatches)
    for kinds, per_rank in ((SINGLE, (1,)), (LOOPED, (2, 3)), (V_SHAPED, (2,)))
    for kind in kinds
    for ranks, microbatches in ((2, 4), (2, 6), (4, 8))
    for stages in per_rank
]


def messages_of(plans, rank_of, verb, sign):
    """Return the messages of each pair of ranks that send and receive, in order."""
    found = collections.defaultdict(list)
    for rank, plan in enumerate(plans):
        for stage, kind, batch, _ in plan:
            what, _, way = kind.value.partition("_")
            if what == verb:
                other = stage + sign * (1 if way == "F" else -1)
                pair = (rank, rank_of[other])[::sign]
                found[pair].append((way, other if sign > 0 else stage, batch))
    return found


class TestSchedulePlan(TestCase):
    def test_plans_run_every_microbatch_once_and_hold_few(self):
        """No rank waits for ever; each receives from another in the order in which that
        sends, and computes with what is unsharded.
        """
        for kind, ranks, per_rank, microbatches in CASES:
            is_v = kind in V_SHAPED
            # Of schedules whose ranks exchange both kinds of messages in one
            # direction, torch 2.13 defers receives into another order than the sends.
            can_defer = not is_v and kind is not ScheduleInterleavedZeroBubble
            for defers in {False, can_defer} if per_rank > 1 else ():
                self._test_plan(kind, ranks, per_rank, microbatches, defers)

    def _test_plan(self, kind, ranks, per_rank, microbatches, defers):
        where = f"{kind.__name__}, {ranks} ranks, {per_rank} of {microbatches}"
        stages = ranks * per_rank
        rank_of = [each % ranks for each in range(stages)]
        if kind in V_SHAPED:
            rank_of = [min(each, stages - 1 - each) for each in range(stages)]
        options = {"with_comms": True, "defer_pp_recv": defers}
        plans = [
            [part for action in plan for part in action.sub_actions or (action,)]
            for plan in get_schedule_ops(kind, ranks, microbatches, per_rank, **options)
        ]
        bare, runs = {}, collections.Counter()
        for rank, plan in enumerate(plans):
            unsharded, held, most, bare[rank] = set(), 0, 0, []
            for action in plan:
                stage, name = action.stage_index, action.computation_type.value
                self.assertEqual(rank_of[stage], rank, f"rank of {action}, {where}")
                if name in ("UNSHARD", "RESHARD"):
                    self.assertEqual(name == "RESHARD", stage in unsharded, where)
                    unsharded ^= {stage}
                    continue
                runs[stage, name, action.microbatch_index] += 1
                if name == "REDUCE_GRAD":
                    continue
                bare[rank].append(action)
                if "_" not in name:
                    self.assertIn(stage, unsharded, f"for {action}, {where}")
                    held += (name == "F") - (name in "BW")
                    most = max(most, held)
            # How many activations a rank may hold.
            interleaved = (per_rank - 1) * ranks + 2 * (ranks - rank - 1) + 1
            bound = {
                ScheduleLoopedBFS: microbatches * per_rank,
                ScheduleInterleaved1F1B: interleaved,
                ScheduleZBVZeroBubble: 2 * ranks,
                ScheduleDualPipeV: 2 * ranks + 1,
            }.get(kind, stages + ranks)
            self.assertLessEqual(most, bound, f"activations, {where}")
            self.assertEqual((unsharded, held), (set(), 0), f"at the end, {where}")
        for stage, batch in itertools.product(range(stages), range(microbatches)):
            one = [runs[stage, name, batch] for name in ("F", "B", "I", "W")]
            self.assertIn(one, ([1, 1, 0, 0], [1, 0, 1, 1]), f"runs, {where}")
            reductions = sum(runs[stage, "REDUCE_GRAD", each] for each in (None, -1, 0))
            self.assertEqual(reductions, 1, f"reductions of {stage}, {where}")
        sent = messages_of(plans, rank_of, "SEND", 1)
        self.assertEqual(messages_of(plans, rank_of, "RECV", -1), sent, where)
        timed = _simulate_comms_compute(bare, rank_of.__getitem__, stages)
        for rank, plan in bare.items():
            self.assertEqual([each for each in timed[rank] if each], plan, where)

    def test_one_forward_one_backward_holds_few(self):
        for ranks, microbatches in ((2, 4), (4, 8), (4, 5)):
            for kind in SINGLE:
                for rank, plan in enumerate(
                    get_schedule_ops(kind, ranks, microbatches)
                ):
                    held, most, names = 0, 0, []
                    for action in filter(None, plan):
                        names.append(action.computation_type.value)
                        held += {"F": 1, "B": -1}.get(names[-1], 0)
                        most = max(most, held)
                    bound = ranks - rank if kind is Schedule1F1B else microbatches
                    where = f"{kind.__name__} of {ranks}, rank {rank}"
                    self.assertEqual((held, most), (0, bound), where)
                    counts = [names.count(each) for each in "FB"]
                    self.assertEqual(counts, [microbatches] * 2, where)

    def test_plan_survives_a_file(self):
        for kind in (*LOOPED, *V_SHAPED):
            made = []
            for _ in range(2):
                stage = SimpleNamespace(
                    group_rank=0, group_size=2, num_stages=4, submod=None
                )
                made.append(kind([stage, stage], 4))
            for form in ("compute_only", "compute_comms"):
                with tempfile.TemporaryDirectory() as folder:
                    path = os.path.join(folder, "plan.csv")
                    made[0]._dump_csv(path, format=form)
                    made[1].pipeline_order = {}
                    made[1]._load_csv(path, format=form)
                orders = [
                    {rank: [*map(str, plan)] for rank, plan in order.items()}
                    for order in (each.pipeline_order_with_comms for each in made)
                ]
                self.assertEqual(orders[1], orders[0], f"{kind.__name__}, {form}")

    def test_what_cannot_be_scheduled_is_refused(self):
        self.assertIs(get_schedule_class("interleaved1f1b"), ScheduleInterleaved1F1B)
        refused = (
            (lambda: get_schedule_class("none"), "Unknown schedule"),
            (lambda: get_schedule_ops("1F1B", 4, 3), "must be greater"),
            (lambda: get_schedule_ops("DualPipeV", 2, 3), "at least as many"),
            (lambda: get_schedule_ops("ZBVZeroBubble", 2, 4, 3), "exactly 2 stages"),
            (lambda: get_schedule_ops("Interleaved1F1B", 2, 5), "requires|divi|multip"),
        )
        for call, text in refused:
            with self.assertRaisesRegex(ValueError, text):
                call()


class MicrobatchTests(TestCase):
    def test_split_and_merge(self):
        """Tensors are cut along their dimension, into nearly equal parts; other values
        reach every microbatch.
        """
        wide, long = torch.arange(28.0).view(4, 7), torch.arange(22.0).view(11, 2)
        specs = {"long": TensorChunkSpec(0), "number": _Replicate()}
        args, kwargs = split_args_kwargs_into_chunks(
            (wide, {"long": long, "number": 3}),
            {"key": long},
            3,
            (TensorChunkSpec(1), specs),
        )
        for index, each in enumerate(zip(args, kwargs, strict=True)):
            (part, nested), keywords = each
            self.assertEqual(part, wide.tensor_split(3, 1)[index])
            rows = long.tensor_split(3)[index]
            self.assertEqual((nested["long"], nested["number"]), (rows, 3))
            self.assertEqual(keywords["key"], rows)
        merged = merge_chunks([each[0] for each in args], TensorChunkSpec(1))
        self.assertEqual(merged, wide)
        self.assertEqual(merge_chunks(kwargs, None)["key"], long)
        only, _ = split_args_kwargs_into_chunks((wide, "text"), None, 2)
        self.assertEqual([each[1] for each in only], ["text"] * 2)
        fewer, _ = split_args_kwargs_into_chunks((wide,), None, 5)
        self.assertEqual(
            [each[0].tolist() for each in fewer], [[row] for row in wide.tolist()]
        )


if __name__ == "__main__":
    run_tests()
