# Owner(s): ["oncall: distributed"]
"""The plans of pipeline schedules, executed by a simulation of ranks that exchange
messages in order; and the cutting of batches into microbatches.
"""

import collections
import contextlib
import io
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
from torch.distributed.pipelining._utils import (
    generate_rank_to_stage_mapping,
    generate_stage_to_rank_mapping,
)
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    _Replicate,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from torch.distributed.pipelining.schedules import (
    _Action,
    _merge_bw,
    _PipelineScheduleRuntime,
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


# Of a forward, a gradient of inputs, one of weights and a whole backward.
DURATIONS = {"F": 1, "I": 1, "W": 1, "B": 2}


def stub_stages(stages):
    """Return what a schedule asks of the stages of rank 0 of two."""
    stage = SimpleNamespace(group_rank=0, group_size=2, num_stages=stages, submod=None)
    return [stage] * (stages // 2)


def starts_of(plans, stages):
    """Return when each rank starts each of its computations, and when all end, if a
    rank starts the next as soon as what that needs has ended. Messages take no time.
    """
    ends, free, starts = {}, [0] * len(plans), [[] for _ in plans]
    left = [
        [part for each in plan if each for part in each.sub_actions or (each,)]
        for plan in plans
    ]
    while any(left):
        before = len(ends)
        for rank, plan in enumerate(left):
            while plan:
                stage, kind, batch, _ = plan[0]
                if kind.value == "REDUCE_GRAD":
                    plan.pop(0)
                    continue
                needs = {"F": (stage - 1, "F"), "W": (stage, "I")}.get(
                    kind.value, (stage + 1, "I")
                )
                needs = [needs] if 0 <= needs[0] < stages else []
                needs += [(stage, "F")] if kind.value in "BI" else []
                if not all((*each, batch) in ends for each in needs):
                    break
                start = max([free[rank], *(ends[(*each, batch)] for each in needs)])
                starts[rank].append((start, plan.pop(0)))
                free[rank] = start + DURATIONS[kind.value]
                ends[stage, kind.value.replace("B", "I"), batch] = free[rank]
        if len(ends) == before:
            raise AssertionError(f"no rank goes on: {left}")
    return starts, max(free)


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

    def test_ranks_idle_as_little_as_the_papers_say(self):
        """With a backward of twice a forward, the first rounds of p ranks leave 3(p-1)
        idle; where gradients of weights fill in, p-1 are left.
        """
        for kind, ranks, per_rank, microbatches in CASES:
            if kind is Schedule1F1B:
                continue  # its plan in torch 2.13 is not what it runs
            where = f"{kind.__name__}, {ranks} ranks, {per_rank} of {microbatches}"
            plans = get_schedule_ops(kind, ranks, microbatches, per_rank)
            _, total = starts_of(plans, ranks * per_rank)
            splits = kind is ScheduleInterleavedZeroBubble or kind in V_SHAPED
            bubble = (ranks - 1) * (1 if splits else 3)
            self.assertEqual(total, 3 * microbatches * per_rank + bubble, where)

    def test_spaced_plan_shows_when_each_computation_starts(self):
        for kind, ranks, per_rank, microbatches in CASES:
            # Torch 2.13 refuses reductions here, and shows the rest of a plan in
            # another rank's row once a rank of a lower number has ended.
            if kind not in (ScheduleLoopedBFS, ScheduleInterleaved1F1B):
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                options = {"add_spacing": True}
                spaced = get_schedule_ops(
                    kind, ranks, microbatches, per_rank, **options
                )
            plans = get_schedule_ops(kind, ranks, microbatches, per_rank)
            expected, _ = starts_of(plans, ranks * per_rank)
            for rank, (row, starts) in enumerate(zip(spaced, expected, strict=True)):
                now, found = 0, []
                for each in row:
                    found += [(now, each)] if each else []
                    now += DURATIONS[each.computation_type.value] if each else 1
                self.assertEqual(found, starts, f"rank {rank}, {kind.__name__}")
        with self.assertRaisesRegex(ValueError, "spacing and view comms"):
            get_schedule_ops("GPipe", 2, 4, add_spacing=True, with_comms=True)

    def test_options_reach_every_schedule(self):
        options = {"loss_fn": print, "output_merge_spec": TensorChunkSpec(1)}
        options |= {"scale_grads": False, "backward_requires_autograd": False}
        chunks = [torch.ones(2, 3), torch.zeros(2, 1)]
        for kind in (*LOOPED, *V_SHAPED):
            made = kind(stub_stages(4), 4, **options)
            self.assertEqual(made._merge_outputs(chunks), torch.cat(chunks, 1))
            found = made._loss_fn, made.scale_grads, made._backward_requires_autograd
            self.assertEqual(found, (print, False, False), kind.__name__)

    def test_gradients_of_inputs_and_weights_in_a_row_are_one_backward(self):
        row = "0F0,0I0,,0W0,0I1,0I2,0W1,0W2,1I3,0W3,,1I4,1W4,"
        found = _merge_bw([_Action.from_str(each) for each in row.split(",")])
        expected = "0F0,0B0,0I1,0I2,0W1,0W2,1I3,0W3,1B4"
        self.assertEqual(",".join(map(str, found)), expected)

    def test_places_of_stages(self):
        """In turn, or there and back again."""
        for ranks, stages in ((2, 4), (3, 9), (4, 4), (2, 8)):
            there = [*range(ranks)]
            for style, turn in (("loop", there), ("v", there + there[::-1])):
                line = (turn * stages)[:stages]
                found = generate_stage_to_rank_mapping(ranks, stages, style)
                self.assertEqual(found, dict(enumerate(line)), style)
                owned = generate_rank_to_stage_mapping(ranks, stages, style)
                places = [[i for i in range(stages) if line[i] == r] for r in there]
                self.assertEqual(owned, dict(enumerate(places)), style)
        with self.assertRaisesRegex(ValueError, "evenly divisible"):
            generate_stage_to_rank_mapping(2, 5, "v")

    def test_plans_that_miss_or_misplace_a_computation_are_refused(self):
        rows = "0F0,0F1,2F0,2F1,2I0,2W0,2B1,0B0,0B1", "1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1"
        for old, new, text in (
            ("2F0,", "", "without first running Forward"),
            (",0B1", "", "stage 0: expected 2 total backwards"),
            ("2I0,2W0", "2W0,2I0", "without first running Backward Input"),
            ("2I0,2W0", "2I0", "I and W must have equal counts"),
            ("0F0,0F1", "0F1,0B0,0F0", "step 1: Running Full Backward for stage 0"),
            ("2F0,2F1,2I0", "2I0,2F0,2F1", "Running Backward Input for stage 2"),
            ("0F0", "0F0,1F0", "Stage 1 is assigned to both rank 1 and rank 0"),
            ("0F0", "0F0,0SEND_F0", "compute-only schedule but found .*'0SEND_F0'"),
            ("0F0", "0F0,X", "Invalid action string: X"),
        ):
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "plan.csv")
                with open(path, "w") as file:
                    file.write("\n".join([rows[0].replace(old, new, 1), rows[1]]))
                schedule = _PipelineScheduleRuntime(stub_stages(4), 2)
                with self.assertRaisesRegex(Exception, text):
                    schedule._load_csv(path)

    def test_plan_survives_a_file(self):
        for kind in (*LOOPED, *V_SHAPED):
            made = [kind(stub_stages(4), 4) for _ in range(2)]
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
