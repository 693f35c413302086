# Owner(s): ["oncall: distributed"]
"""The plans of pipeline schedules, executed by a simulation of ranks that exchange
messages in order; and the cutting of batches into microbatches.
"""

import collections
import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
from types import SimpleNamespace

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._schedule_visualizer import (
    add_schedule_op_spacing,
    get_schedule_ops,
)
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
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _add_send_recv,
    _add_unshard_reshard,
    _ComputationType,
    _defer_recv_ops,
    _dump_chrometrace,
    _format_pipeline_order,
    _merge_bw,
    _PipelineScheduleRuntime,
    _simulate_comms_compute,
    _validate_schedule,
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

# The plans of torch 2.13, one rank | another: a word is a step, a dot an idle one.
# A plan that changes is meant to, or wrong.
# (a;b) computes a and b at the same time.
PLANS = {
    ("GPipe", 2, 3, 1): """
        0F0 0F1 0F2 0B0 0B1 0B2 0REDUCE_GRAD |
        1F0 1F1 1F2 1B0 1B1 1B2 1REDUCE_GRAD""",
    ("LoopedBFS", 2, 2, 2): """
        0F0 0F1 2F0 2F1 . . 2B1 2B0 0B1 0B0 |
        . 1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0""",
    ("Interleaved1F1B", 2, 4, 2): """
        0F0 0F1 2F0 2F1 . . 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 . 2B2 . 2B3 . 0B2 . 0B3 |
        . 1F0 1F1 . 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 . 1B2 . 1B3""",
    ("Interleaved1F1B", 3, 3, 2): """
        0F0 0F1 0F2 3F0 3F1 3F2 . . . . . 3B0 . 3B1 . 3B2 . 0B0 . 0B1 . 0B2 |
        . 1F0 1F1 1F2 4F0 4F1 . . 4F2 4B0 . 4B1 . 4B2 . 1B0 . 1B1 . 1B2 |
        . . 2F0 2F1 2F2 . 5F0 5B0 5F1 5B1 5F2 5B2 . 2B0 . 2B1 . 2B2""",
    ("InterleavedZeroBubble", 2, 4, 2): """
        0F0 0F1 2F0 . 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3
        2W3 0I2 0W2 0I3 0W3 |
        . 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2
        1I2 3W3 1I3 1W2 1W3""",
    ("InterleavedZeroBubble", 3, 3, 2): """
        0F0 0F1 0F2 3F0 3F1 . . 3F2 3I0 3W0 3I1 3W1 3I2 3W2 0I0 0W0 0I1 0W1 0I2 0W2 |
        . 1F0 1F1 1F2 4F0 . 4F1 4I0 4F2 4I1 4W0 4I2 4W1 1I0 4W2 1I1 1W0 1I2 1W1 1W2 |
        . . 2F0 2F1 2F2 5F0 5I0 5F1 5I1 5F2 5I2 5W0 2I0 5W1 2I1 5W2 2I2 2W0 2W1 2W2""",
    ("ZBVZeroBubble", 2, 2, 2): """
        0F0 0F1 . 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 . . . 0I1 0W1 . . |
        . 1F0 2F0 1F1 2F1 2I0 2W0 . 1I0 1W0 . 2I1 2W1 1I1 . . 1W1 . .""",
    ("ZBVZeroBubble", 2, 4, 2): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3
        0I2 0W2 0I3 0W3 |
        . 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2
        2I3 1I3 1W2 2W3 1W3""",
    ("DualPipeV", 3, 6, 2): """
        0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 (0F5;5B2) (5F3;0B0) 5B3
        (5F4;0B1) 5B4 (5F5;0B2) 5B5 0I3 0W3 0I4 0W4 0I5 0W5 |
        1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 (1F4;4B1) (4F3;1B0) (1F5;4B2) (4F4;1B1) 4B3
        (4F5;1B2) 4B4 1B3 4I5 1I4 4W5 1I5 1W4 1W5 |
        2F0 3F0 2F1 3F1 2F2 3F2 2F3 3B0 (3F3;2B0) (2F4;3B1) (3F4;2B1) (2F5;3B2)
        (3F5;2B2) 3B3 2B3 3B4 2I4 3I5 2I5 2W4 3W5 2W5""",
}


def parsed(text):
    """Return the rows of a figure, as actions."""
    return [
        [None if each == "." else _Action.from_str(each) for each in line.split()]
        for line in text.replace(")", ")OVERLAP_F_B").split("|")
    ]


CUTS = {
    "args_chunk_spec": TensorChunkSpec.from_tuple((1,)),
    "kwargs_chunk_spec": TensorChunkSpec.from_dict({"key": 0}),
    "output_merge_spec": TensorChunkSpec(1),
}


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
                # assertEqual takes 0.1 ms, and there are many actions.
                self.assertTrue(rank_of[stage] == rank, f"rank of {action}, {where}")
                if name in ("UNSHARD", "RESHARD"):
                    self.assertTrue((name == "RESHARD") == (stage in unsharded), where)
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

    def test_plans_stay_as_written_out(self):
        for (kind, ranks, microbatches, per_rank), text in PLANS.items():
            found = get_schedule_ops(kind, ranks, microbatches, per_rank)
            self.assertEqual(found, parsed(text), f"{kind} of {ranks} ranks")

    def test_steps_have_what_they_need(self):
        """A rank computes after the step in which its input was computed."""
        for kind, (ranks, microbatches) in itertools.product(
            LOOPED, ((2, 4), (3, 3), (4, 8), (3, 2))
        ):
            if microbatches < ranks and kind is not ScheduleInterleavedZeroBubble:
                continue
            done = set()
            plans = get_schedule_ops(kind, ranks, microbatches)
            for actions in itertools.zip_longest(*plans):
                step = [each[:3] for each in actions if each]
                for stage, what, batch in step:
                    if what.value == "F" and stage:
                        text = f"{kind.__name__}, {ranks} ranks, {stage}F{batch}"
                        self.assertIn((stage - 1, what, batch), done, text)
                done.update(step)

    def test_defaults_of_plans(self):
        for kind in (*LOOPED, *V_SHAPED):
            self.assertEqual(
                get_schedule_ops(kind, 2, 4), get_schedule_ops(kind, 2, 4, 2)
            )
            name = kind.__name__.removeprefix("Schedule")
            self.assertIs(get_schedule_class(name.upper()), kind)
        for kind in SINGLE:
            self.assertEqual(
                get_schedule_ops(kind, 2, 4), get_schedule_ops(kind, 2, 4, 1)
            )
            self.assertIs(get_schedule_class(kind.__name__[8:]), kind)
        for kind in (PipelineScheduleMulti, PipelineScheduleSingle):
            self.assertIs(get_schedule_class(kind.__name__), kind)
        for kind, per_rank, text in (
            ("GPipe", 2, "to be 1, got 2"),
            ("LoopedBFS", 1, ">= 2, got 1"),
        ):
            with self.assertRaisesRegex(AssertionError, text):
                get_schedule_ops(kind, 2, 4, per_rank)
        # Idle steps at the ends of rows, and more stages than a rank keeps unsharded.
        row = parsed("0F0 . 2F0 4F0 6F0 6B0 4B0 2B0 0B0")[0]
        kept = [str(each) for each in _add_unshard_reshard(row, 2)]
        wanted = "0UNSHARD 2UNSHARD 0F0 0RESHARD 4UNSHARD 2F0 2RESHARD 6UNSHARD 4F0 6F0"
        wanted += (
            " 6B0 6RESHARD 2UNSHARD 4B0 4RESHARD 0UNSHARD 2B0 2RESHARD 0B0 0RESHARD"
        )
        self.assertEqual(" ".join(kept), wanted)
        both = _add_unshard_reshard(parsed("(0F1;3B0) 3B1")[0], 2)
        wanted = "0UNSHARD 3UNSHARD (0F1;3B0)OVERLAP_F_B 0RESHARD 3B1 3RESHARD"
        self.assertEqual(" ".join(map(str, both)), wanted)

    def test_actions_are_read_as_they_are_written(self):
        names = [each.value for each in _ComputationType]
        for name in names:
            action = _Action.from_str(f" 12{name}7 ") if name != "OVERLAP_F_B" else None
            if action:
                self.assertEqual(action, (12, _ComputationType(name), 7, None))
                self.assertEqual(str(action), f"12{name}7")
                self.assertEqual(action.is_compute_op, name in list("FIWB"), name)
        self.assertEqual(
            _Action.from_str("3UNSHARD"), (3, _ComputationType("UNSHARD"), None, None)
        )
        self.assertIsNone(_Action.from_str("  "))
        both = _Action.from_str("(0F1; 3B0)OVERLAP_F_B")
        parts = (_Action.from_str("0F1"), _Action.from_str("3B0"))
        self.assertEqual(both, (-1, _ComputationType("OVERLAP_F_B"), None, parts))
        self.assertEqual(
            (str(both), both.is_compute_op), ("(0F1;3B0)OVERLAP_F_B", True)
        )
        self.assertIsNone(_Action.from_str("()OVERLAP_F_B").sub_actions)
        with self.assertRaisesRegex(RuntimeError, "Invalid computation type X"):
            _Action.from_str("(0F1)X")
        with self.assertRaisesRegex(
            RuntimeError, "action string: F1, should be formatted"
        ):
            _Action.from_str("F1")

    def test_plan_as_text_and_as_a_trace(self):
        rows = parsed("0F0 . 0B0 | 1F0 (1F10;1B10)")
        rows[1].append(None)
        plan = dict(enumerate(rows))
        text = _format_pipeline_order(plan, error_step_number=1)
        self.assertEqual(
            [line.rstrip() for line in text.splitlines()],
            [
                "        Rank 0 Rank 1",
                "Step 0: 0F0    1F0",
                "Step 1:        (1F10;1B10)OVERLAP_F_B <-- ERROR HERE",
                "Step 2: 0B0",
            ],
        )
        self.assertNotIn("ERROR", _format_pipeline_order(plan))
        self.assertIsNone(plan[0][1], "the plan stays as it is")
        many = _format_pipeline_order({0: rows[0] * 4})
        self.assertIn("Step 00: ", many)
        self.assertIn("Step 11: 0B0", many)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            rows[0].append(_Action.from_str("0SEND_F0"))
            _dump_chrometrace(plan, path)
            with open(path) as file:
                events = json.load(file)["traceEvents"]
        found = [
            (e["pid"], e["tid"], e["ts"], e["dur"], e["ph"], e["name"]) for e in events
        ]
        expected = [
            (rank, rank, step, 1, "X", str(each))
            for rank, row in plan.items()
            for step, each in enumerate(row)
            if each
        ]
        self.assertEqual(found, expected)
        self.assertEqual(
            [e["cat"] for e in events[:3]], ["computation"] * 2 + ["communication"]
        )

    def test_rows_with_gaps_for_what_they_wait_for(self):
        """Gradients of inputs, of weights and overlapping pairs have their widths."""
        for rows, expected in (
            (
                "0F0 0F1 0I0 0W0 0I1 0W1 | 1F0 1I0 1W0 1F1 1I1 1W1",
                "0F0 0F1 . 0I0 0W0 . 0I1 0W1 | . 1F0 1I0 1W0 1F1 1I1 1W1 .",
            ),
            ("0F0 0B0 | 1F0 1B0", "0F0 . . . 0B0 | . 1F0 1B0 ."),
        ):
            with contextlib.redirect_stdout(io.StringIO()):
                found = add_schedule_op_spacing(parsed(rows))
            self.assertEqual(found, parsed(expected))
        self.assertEqual(add_schedule_op_spacing([]), [])
        with contextlib.redirect_stdout(io.StringIO()):
            both = add_schedule_op_spacing(parsed("0F0 0F1 3F0 (0F2;3B0) | 1F0 2F0"))
            self.assertEqual(both[0], parsed("0F0 0F1 . 3F0 (0F2;3B0)")[0])
            with self.assertRaisesRegex(RuntimeError, "possible deadlock"):
                add_schedule_op_spacing(parsed("0B0 0F0 | 1F0 1B0"))
            with self.assertRaisesRegex(RuntimeError, "Unknown computation type"):
                add_schedule_op_spacing(parsed("0F0 0REDUCE_GRAD"))

    def test_plans_that_cannot_be_lowered_are_refused(self):
        in_turn, late = (2).__rmod__, parsed("0F0 0B0 | 1F0 1B0")
        plan = dict(enumerate(late))
        for call, kind, text in (
            (
                lambda: _validate_schedule(plan, 3, 2, 1),
                AssertionError,
                "expected 3, actual 2",
            ),
            (
                lambda: _validate_schedule({0: late[0], 2: late[1]}, 2, 2, 1),
                AssertionError,
                "missing actions for rank 1",
            ),
            (
                lambda: _validate_schedule(plan, 2, 2, 2),
                AssertionError,
                "Got 1 .* microbatches for stage 0, expected 2",
            ),
            (
                lambda: _validate_schedule({0: late[0], 1: ["1F0"]}, 2, 2, 1),
                AssertionError,
                "Rank 1, step 0: Got an invalid action: 1F0",
            ),
            (
                lambda: _add_send_recv(
                    {0: parsed("0B0 0F0")[0], 1: late[1][:]}, in_turn, 2
                ),
                AssertionError,
                "Malformed compute schedule",
            ),
            (
                lambda: _defer_recv_ops({0: parsed("0RECV_B3 0F0")[0]}, in_turn),
                AssertionError,
                "rank 0: leftover RECV ops .*0RECV_B3",
            ),
            (
                lambda: _simulate_comms_compute(
                    {0: parsed("0SEND_F0 0F0")[0]}, in_turn, 2
                ),
                ValueError,
                "not progressing",
            ),
            (
                lambda: _simulate_comms_compute({0: parsed("0UNSHARD")[0]}, in_turn, 2),
                ValueError,
                "Unsupported action type 0UNSHARD",
            ),
            (
                lambda: generate_stage_to_rank_mapping(2, 4, "w"),
                ValueError,
                "Style w is not supported",
            ),
        ):
            with contextlib.redirect_stdout(io.StringIO()):
                with self.assertRaisesRegex(kind, text):
                    call()
        self.assertEqual(_validate_schedule(plan, 2, 2, 1), {0: 0, 1: 1})
        runtime = _PipelineScheduleRuntime(stub_stages(4), 2)
        with self.assertRaisesRegex(NotImplementedError, "'other' is not implemented"):
            runtime._load_csv("", format="other")
        bare = dict(enumerate(get_schedule_ops("LoopedBFS", 2, 2)))
        with self.assertRaisesRegex(NotImplementedError, "'other' is not implemented"):
            runtime._prepare_schedule_with_comms(bare, format="other")
        with self.assertRaisesRegex(AssertionError, "action to be not None"):
            runtime._prepare_schedule_with_comms(bare, format="compute_comms")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "plan.csv")
            with self.assertRaisesRegex(AssertionError, "got compute_comms"):
                PipelineScheduleMulti(stub_stages(4), 2)._load_csv(
                    path, "compute_comms"
                )
        for kind in (_ComputationType.SEND_F, _ComputationType.RECV_B):
            with self.assertRaisesRegex(ValueError, "Invalid computation type"):
                runtime.register_custom_function(kind, print)
        runtime.register_custom_function(_ComputationType.FORWARD, print)
        logger = "torch.distributed.pipelining.schedules"
        with self.assertLogs(logger, "WARNING") as logs:
            runtime.register_custom_function(_ComputationType.FORWARD, repr)
            PipelineScheduleMulti(stub_stages(4), 2, use_full_backward=True)
        self.assertIn("already registered", logs.output[0])
        self.assertIn("no longer supported", logs.output[1])
        stages = stub_stages(4)
        stages[0].submod = nn.Sequential(
            torch.compile(nn.Linear(1, 1), backend="eager")
        )
        for kind in (ScheduleInterleavedZeroBubble, *V_SHAPED):
            with self.assertRaisesRegex(
                RuntimeError, f"{kind.__name__} .* torch.compile"
            ):
                kind(stages, 4)

    def test_losses_are_those_of_the_step(self):
        last, inner = SimpleNamespace(is_last=True), SimpleNamespace(is_last=False)
        schedule = _PipelineScheduleRuntime(
            stub_stages(4), 2, loss_fn=lambda x, y, scale=1: (x - y) * scale
        )
        losses = ["of an earlier step"]
        for index, target in enumerate((3, 5)):
            for stage in (inner, last):
                schedule._maybe_compute_loss(stage, 10, [3, 5], index, {"scale": 2})
            self.assertIsNone(schedule._maybe_get_loss(inner, index))
            self.assertEqual(schedule._maybe_get_loss(last, index), 2 * (10 - target))
            if index == 0:
                with self.assertRaisesRegex(
                    RuntimeError, "Loss for microbatch 1 is not"
                ):
                    schedule._maybe_get_loss(last, 1)
                with self.assertRaisesRegex(
                    RuntimeError, "Loss for microbatch -1 is not"
                ):
                    schedule._maybe_get_loss(last, -1)
        schedule._update_losses([inner, last], losses)
        self.assertEqual((losses, schedule._internal_losses), ([14, 10], []))
        schedule._maybe_compute_loss(last, 1, [1], 0)
        with self.assertRaisesRegex(RuntimeError, "Expecting 2 losses but got 1"):
            schedule._update_losses(last, losses)
        schedule._update_losses([inner], losses)
        self.assertEqual((losses, schedule._internal_losses), ([14, 10], []))
        for name, wrong, kind, text in (
            (
                "arg_mbs",
                ((), ()),
                TypeError,
                "arg_mbs must be a list but got a .*tuple",
            ),
            ("kwarg_mbs", [{}], ValueError, "Expecting 2 kwarg_mbs but got 1"),
            ("target_mbs", [1] * 3, ValueError, "Expecting 2 target_mbs but got 3"),
            ("losses", {}, TypeError, "losses must be a list but got a .*dict"),
        ):
            with self.assertRaisesRegex(kind, text):
                schedule._check_inputs(**{name: wrong})
        given = {
            "arg_mbs": [1, 2],
            "kwarg_mbs": [3, 4],
            "target_mbs": [5, 6],
            "losses": [],
        }
        self.assertEqual(schedule._check_inputs(**given), ([1, 2], [3, 4]))
        self.assertEqual(schedule._check_inputs(), ([(), ()], [{}, {}]))
        self.assertEqual(schedule._split_inputs(()), ([(), ()], [{}, {}]))

    def test_options_reach_every_schedule(self):
        options = {"loss_fn": print, "output_merge_spec": TensorChunkSpec(1)}
        options |= {"scale_grads": False, "backward_requires_autograd": False}
        chunks = [torch.ones(2, 3), torch.zeros(2, 1)]
        for kind in (*LOOPED, *V_SHAPED):
            made = kind(stub_stages(4), 4, **options)
            self.assertEqual(made._merge_outputs(chunks), torch.cat(chunks, 1))
            found = made._loss_fn, made.scale_grads, made._backward_requires_autograd
            self.assertEqual(found, (print, False, False), kind.__name__)
            made = kind(stub_stages(4), 4, defer_pp_recv=True)
            plans = get_schedule_ops(kind, 2, 4, with_comms=True, defer_pp_recv=True)
            found = made.pipeline_order_with_comms
            self.assertEqual([found[rank] for rank in range(2)], plans, kind.__name__)
            found = made.scale_grads, made._backward_requires_autograd
            self.assertEqual(found, (True, True), kind.__name__)
            if kind is not ScheduleLoopedBFS:  # has no such options in torch 2.13
                self._test_cuts(kind(stub_stages(4), 4, **CUTS))
        for kind in SINGLE:
            self._test_cuts(kind(stub_stages(4)[0], 4, **CUTS))

    def _test_cuts(self, schedule):
        x = torch.arange(24.0).view(3, 8)
        args, kwargs = schedule._split_inputs((x,), {"key": x.T})
        self.assertEqual([each for (each,) in args], list(x.chunk(4, 1)))
        self.assertEqual([each["key"] for each in kwargs], list(x.T.chunk(4)))
        self.assertEqual(schedule._merge_outputs([x, x]), torch.cat((x, x), 1))

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
