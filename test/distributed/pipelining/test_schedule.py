# Owner(s): ["oncall: distributed"]
"""The plans of pipeline schedules, executed by a simulation of ranks that exchange
messages in order; and the cutting of batches into microbatches.
"""

import collections
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
from torch.distributed.pipelining.schedules import get_schedule_class

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


class Ranks:
    """Executes plans with communication; fails where ranks wait for each other."""

    def __init__(self, test, where, plans, rank_of):
        self.test, self.where, self.rank_of = test, where, rank_of
        self.done = collections.Counter()
        self.sent = collections.defaultdict(collections.deque)  # by pair of ranks
        self.unsharded = set()
        self.held = collections.Counter()  # activations of each rank
        self.most = collections.Counter()
        left = [collections.deque(plan) for plan in plans]
        while any(left):
            before = sum(map(len, left))
            for rank, plan in enumerate(left):
                while plan and self._run(rank, plan[0]):
                    plan.popleft()
            stuck = [str(plan[0]) for plan in left if plan]
            test.assertLess(sum(map(len, left)), before, f"{where}: {stuck} wait")
        unread = [*filter(None, self.sent.values())]
        test.assertEqual(unread, [], f"messages without a receive, {where}")

    def _run(self, rank, action):
        """Run ``action`` and return True, or return False if it has to wait."""
        for stage, kind, batch, _ in action.sub_actions or (action,):
            self.test.assertEqual(self.rank_of[stage], rank, f"rank of {action}")
            name = kind.value
            if name in ("UNSHARD", "RESHARD"):
                self.unsharded ^= {stage}
            elif "_" not in name:
                self._compute(rank, stage, name, batch, action)
            elif name.startswith("RECV") and not self._receive(
                rank, stage, name, batch
            ):
                return False
            elif name.startswith("SEND"):
                made = "F" if name == "SEND_F" else "I"
                self.test.assertTrue(self.done[made, stage, batch], f"early {action}")
                other = stage + (1 if made == "F" else -1)
                self.sent[rank, self.rank_of[other]].append((name[-1], other, batch))
            elif name == "REDUCE_GRAD":
                self.done[name, stage] += 1
        return True

    def _receive(self, rank, stage, name, batch):
        other = stage - (1 if name == "RECV_F" else -1)
        if not (sent := self.sent[self.rank_of[other], rank]):
            return False
        expected = name[-1], stage, batch
        self.test.assertEqual(sent.popleft(), expected, f"message, {self.where}")
        self.done[name, stage, batch] += 1
        return True

    def _compute(self, rank, stage, name, batch, action):
        self.done[name, stage, batch] += 1
        before = {"F": ("F", -1), "B": ("I", 1), "I": ("I", 1), "W": ("I", 0)}[name]
        needs = [("I", stage), ("F", stage)][name in "BI" :][:1] if name != "F" else []
        if name != "W" and 0 <= stage + before[1] < len(self.rank_of):
            other = stage + before[1]
            is_here = self.rank_of[other] == rank
            received = "RECV_F" if name == "F" else "RECV_B"
            needs.append((before[0], other) if is_here else (received, stage))
        for what, where in needs:
            self.test.assertTrue(self.done[what, where, batch], f"{action} is early")
        self.test.assertIn(stage, self.unsharded, f"unsharded for {action}")
        self.done["I", stage, batch] += name == "B"
        self.done["weights", stage, batch] += name in "BW"
        self.held[rank] += (name == "F") - (name in "BW")
        self.most[rank] = max(self.most[rank], self.held[rank])


class TestSchedulePlan(TestCase):
    def test_plans_run_every_microbatch_once_and_hold_few(self):
        for kind, ranks, per_rank, microbatches in CASES:
            where = f"{kind.__name__}, {ranks} ranks, {per_rank} of {microbatches}"
            stages, is_v = ranks * per_rank, kind in V_SHAPED
            indices = range(stages)
            rank_of = [each % ranks for each in indices]
            if is_v:
                rank_of = [min(each, stages - 1 - each) for each in indices]
            # Of schedules whose ranks exchange both kinds of messages in one
            # direction, torch 2.13 defers receives into another order than the sends.
            can_defer = not is_v and kind is not ScheduleInterleavedZeroBubble
            for defers in {False, can_defer} if per_rank > 1 else ():
                plans = get_schedule_ops(
                    kind,
                    ranks,
                    microbatches,
                    per_rank,
                    with_comms=True,
                    defer_pp_recv=defers,
                )
                found = Ranks(self, where, plans, rank_of)
                once = [
                    found.done[what, stage, batch]
                    for what in ("F", "I", "weights")
                    for stage in indices
                    for batch in range(microbatches)
                ]
                self.assertEqual(set(once), {1}, f"runs of each, {where}")
                reductions = [found.done["REDUCE_GRAD", stage] for stage in indices]
                self.assertEqual(reductions, [1] * stages, f"reductions, {where}")
                self.assertEqual(found.unsharded, set(), f"left, {where}")
                for rank in range(ranks):
                    # A published bound of each: how many activations a rank may hold.
                    bound = {
                        ScheduleLoopedBFS: microbatches * per_rank,
                        ScheduleInterleaved1F1B: (per_rank - 1) * ranks
                        + 2 * (ranks - rank - 1)
                        + 1,
                        ScheduleZBVZeroBubble: 2 * ranks,
                        ScheduleDualPipeV: 2 * ranks + 1,
                    }.get(kind, stages + ranks)
                    self.assertLessEqual(found.most[rank], bound, f"held, {where}")

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
