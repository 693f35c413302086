"""Which rank kept which waiting, over scripted outcomes. See Note [Who is to blame for a hang]."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_ext.world.blame import find_blame
from torch_ext.world.outcome import Collective, Ending, Outcome, first_mismatch, read_record
from torch_ext.world.protocol import RankStatus, Receipt, Wait


def entry(group, number, name="all_reduce", over=False, size=3):
    return {
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "collective_seq_id": number,
        "profiling_name": f"gloo:{name}",
        "input_sizes": [[size]] if size else [],
        "input_dtypes": ["Float"] if size else [],
        "retired": over,
    }


def hung(rank, *entries, waits=(), **groups):
    record = json.dumps({"entries": entries, "groups": {name[1:]: ranks for name, ranks in groups.items()}})
    return Outcome(rank, Ending.HUNG, -9, collectives=record, waits=waits)


def left(rank, *entries, destroyed):
    """A rank that has destroyed groups, by name with their lines."""
    record = json.dumps({"entries": entries, "groups": {"0": [0, 1]}, "destroyed": destroyed})
    return Outcome(rank, Ending.HUNG, -9, collectives=record)


def silent(rank, ending=Ending.HUNG, **more):
    return Outcome(rank, ending, -9, **more)


def out_of_time(rank, waits, **more):
    """A rank whose collective ran out of time. The record marks the collective as over a moment after the error."""
    failure = Receipt(RankStatus.FAILED, 2.0, "RuntimeError: Timed out", transport=True, waits=waits)
    return replace(hung(rank, entry("0", 1, "scatter", **more), waits=waits), ending=Ending.FAILED, receipt=failure)


A, B = entry("0", 1), entry("0", 1, "barrier")
OTHER, A_SECOND = entry("1", 1), entry("0", 2, over=True)
OVER = (Wait("the barrier after its body", transport=True, over=True),)
RECEIVES = (Wait("recv(peer 1) in test_a", (1,), transport=True),)
SCATTERS = (Wait("scatter() in test_a (test_a.py:3)", transport=True),)
BROADCASTS = (Wait("broadcast() in test_a (test_a.py:40)", transport=True),)
IN_BARRIER, AT_LOCK = (Wait("barrier() in test_a", transport=True),), (Wait("test_a (test_a.py:7)"),)
CREATING = (Wait("new_group() in test_a", everyone=True, transport=True),)
WAITS, PUTS = (
    (Wait(f"{name}_signal(channel 3) in group 0, called at /a/test_a.py:9", (1,), transport=True),)
    for name in ("wait", "put")
)
THROUGH = [hung(1), hung(2, entry("0", 1, "scatter", over=True), entry("0", 2, "barrier"))]
TWO, CHAIN, ALL = {"g1": [0, 1]}, {"g1": [0, 1], "g2": [1, 2]}, {"g1": [0, 1, 2, 3]}
PAIR, BOTH = {"g1": [0, 1], "g2": [0, 1]}, {"g0": [0, 1, 2], "g1": [0, 1, 2]}
# gloo ends a process that receives more than it expects; its peers see the connection close.
GATHER, MORE = entry("0", 1, "all_gather"), entry("0", 1, "all_gather", size=400)
GATHERS = (Wait("all_gather_into_tensor() in test_a", transport=True),)

# The outcomes, the ranks to blame, and words of the report.
CASES = {
    "the rank that did not call": (
        [hung(0, A), hung(1), hung(2, A)],
        (1,),
        "ranks 0, 2 called #1 gloo:all_reduce([3] Float) in group 0 (default_pg), which rank 1 never called",
    ),
    "the rank that puts no signal": (
        [hung(0, waits=WAITS), hung(1, waits=AT_LOCK)],
        (1,),
        "rank 1 never put a signal on channel 3 for rank 0, which waited in wait_signal (test_a.py:9)",
    ),
    "the rank that takes no signal": (
        [hung(0, waits=PUTS), hung(1, waits=AT_LOCK)],
        (1,),
        "rank 1 never waited on channel 3 for the last signal of rank 0, which waited in put_signal (test_a.py:9)",
    ),
    "not one that another keeps waiting": (
        [hung(0, OTHER, **CHAIN), hung(1, entry("2", 1), **CHAIN), hung(2, **CHAIN)],
        (2,),
        "",
    ),
    "of a small group a member": ([hung(0, OTHER, **TWO), hung(1, **TWO), hung(2, **TWO)], (1,), ""),
    "not one that ran out of time": ([out_of_time(0, SCATTERS), *THROUGH], (1,), ""),
    "nor if the record says that it is over": ([out_of_time(0, SCATTERS, over=True), *THROUGH], (1,), ""),
    "of two that differ the one that is over": (
        [hung(0, A), hung(1, B, waits=OVER)],
        (1,),
        "; rank 1 was over and waited for its peers",
    ),
    "the few though the others are over": ([hung(0, B, waits=OVER), hung(1, B, waits=OVER), hung(2, A)], (2,), ""),
    "one in another group where others got what rank 0 sends to all": (
        [
            hung(0, A, **ALL),
            replace(hung(1, entry("0", 1, over=True), **ALL), ending=Ending.PASSED),
            hung(2, OTHER, **ALL),
            replace(hung(3, entry("0", 1, over=True), **ALL), ending=Ending.PASSED),
        ],
        (2,),
        "",
    ),
    "of a deadlock the one that is over": ([hung(0, waits=RECEIVES), hung(1, B, waits=OVER)], (1,), "cycle"),
    "of a deadlock over groups both": (
        [hung(0, OTHER, **PAIR), hung(1, entry("2", 1), **PAIR)],
        (0, 1),
        "rank 0 waits in #1 gloo:all_reduce([3] Float) in group 1 (undefined) for rank 1",
    ),
    "one that waits in another group than most": (
        [hung(0, A, **BOTH), hung(1, OTHER, **BOTH), hung(2, A, **BOTH)],
        (1,),
        "rank 1 waits in another process group than ranks 0, 2: rank 1 in all_reduce",
    ),
    "one that leaves out the barrier of the host, and waits for the device": (
        [
            hung(0, B, **BOTH),
            hung(1, {**entry("0", 3), "process_group": ["0", "default_pg, sim"]}, **BOTH),
            hung(2, B, **BOTH),
        ],
        (1,),
        "rank 1 waits in another backend of the process group than ranks 0, 2: rank 1 in all_reduce",
    ),
    "one that waits in another group than the root of a broadcast and ranks that are a collective ahead": (
        [
            hung(0, A, **ALL),
            hung(1, entry("0", 1, over=True), entry("0", 2, "barrier"), **ALL),
            hung(2, OTHER, **ALL),
            hung(3, entry("0", 1, over=True), entry("0", 2, "barrier"), **ALL),
        ],
        (2,),
        "rank 2 waits in another process group than ranks 0, 1, 3",
    ),
    "an absent rank, with its place and that of the others": (
        [
            silent(0, Ending.TIMED_OUT, stacks='  File "/home/u/test_a.py", line 31 in test_a'),
            *(hung(rank, entry("0", 1, "broadcast"), waits=BROADCASTS) for rank in (1, 2, 3)),
        ],
        (0,),
        "rank 0 never called broadcast, which ranks 1-3 waited in (test_a.py:40); it was at test_a.py:31\n",
    ),
    "who never began work that a peer waits for, with the line of that wait": (
        [
            replace(
                hung(0, entry("0", 1, over=True), entry("0", 2, over=True)),
                ending=Ending.FAILED,
                receipt=Receipt(RankStatus.FAILED, 2.0, "closed by peer", transport=True, place="test_a.py:9"),
            ),
            replace(hung(1, entry("0", 1, over=True)), ending=Ending.PASSED),
        ],
        (1,),
        "rank 1 kept rank 0 waiting in a collective (test_a.py:9); its test was over",
    ),
    "a peer that does not send": ([hung(0, waits=RECEIVES), hung(1)], (1,), ""),
    "whoever skips the creation of a group": (
        [hung(0, waits=CREATING), hung(1, A)],
        (1,),
        "which needs every rank; rank 1 never came",
    ),
    "not one that waits elsewhere for another that does not come": (
        [
            hung(0, entry("0", 1, "scatter"), waits=SCATTERS),
            hung(1, waits=AT_LOCK),
            hung(2, entry("0", 1, "scatter", over=True), waits=CREATING),
        ],
        (1,),
        "which needs every rank; rank 1 never came",
    ),
    "one that cannot answer, if the others wait for it": ([hung(0, A), silent(1)], (1,), ""),
    "nobody who came, of inputs that differ": ([hung(0, A), hung(1, entry("0", 1, size=4))], (), "called different"),
    "nobody who died in the collective": (
        [
            silent(0, Ending.KILLED, collectives=json.dumps([GATHER])),
            hung(1, GATHER, waits=GATHERS),
            hung(2, MORE, waits=GATHERS),
        ],
        (),
        "[3] Float by ranks 0, 1, [400] Float by rank 2; make the sizes equal",
    ),
    "who has destroyed the group that a cycle goes through": (
        [hung(0, OTHER, **TWO), left(1, B, destroyed={"1": "test_a.py:9"})],
        (1,),
        "rank 1 destroyed the process group at test_a.py:9, while rank 0 was in all_reduce",
    ),
    "who did not end though nobody waits any more": (
        [replace(hung(0, entry("0", 1, over=True), A_SECOND), ending=Ending.PASSED), hung(1, entry("0", 1, over=True))],
        (1,),
        "rank 1 did not end",
    ),
    "whoever is elsewhere": (
        [hung(0, waits=IN_BARRIER), hung(1, waits=AT_LOCK)],
        (1,),
        "rank 1 was in test_a (test_a.py:7)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_to_blame_is(case):
    outcomes, ranks, phrase = CASES[case]
    blame = find_blame(outcomes)
    assert tuple(sorted(blame.ranks)) == ranks
    assert phrase in f"{blame.cause}\n{blame.sentence}\n"


@pytest.mark.parametrize(
    "outcomes",
    [
        [hung(0, A), silent(1, Ending.PASSED)],  # the rank passed without a record
        [hung(0, entry("0", 1, "scatter")), hung(1, entry("0", 1, "scatter", size=0))],  # only the root has inputs
    ],
)
def test_nobody_is_to_blame(outcomes):
    assert find_blame(outcomes) is None


# Reading records, and the first mismatch in them


def call(sequence, operation="gloo:all_reduce", group="0 (default_pg)", over=True):
    return Collective(group, sequence, operation, "[3] Float", over)


def test_record_is_read_without_point_to_point_operations():
    entry = {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 4,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[3], [2, 2]],
        "input_dtypes": ["Float", "Long"],
        "state": "scheduled",
        "retired": True,
    }
    found = read_record(json.dumps([entry, {**entry, "is_p2p": True}]))
    assert found == [Collective("0 (default_pg)", 4, "gloo:all_reduce", "[3] Float, [2, 2] Long", True)]
    assert str(found[0]) == "#4 gloo:all_reduce([3] Float, [2, 2] Long) in group 0 (default_pg)"


def test_record_of_a_torch_that_writes_less_is_read_too():
    assert read_record("") == []
    assert read_record("[{}]") == [Collective("?", 0, "?", "", False)]


def test_odd_one_out_is_guilty_and_halves_are_not():
    odd = first_mismatch({0: [call(1)], 1: [call(1, "gloo:broadcast")], 2: [call(1)]})
    assert odd.ranks == (1,)
    halves = first_mismatch({0: [call(1)], 1: [call(1, "gloo:broadcast")]})
    assert halves.ranks == ()
    assert first_mismatch({0: [call(1, group="3 (sub)")], 1: []}) is None, "rank 1 may be no member"
    assert first_mismatch({0: [call(1), call(2), call(3)], 1: [call(3)]}) is None, "the ring buffer dropped the others"


@given(
    length=st.integers(0, 8),
    world_size=st.integers(2, 6),
    guilty=st.integers(0, 5),
    at=st.integers(1, 8),
)
def test_same_program_on_every_rank_matches_and_one_that_stops_early_is_found(length, world_size, guilty, at):
    program = [call(number) for number in range(1, length + 1)]
    records = {rank: list(program) for rank in range(world_size)}
    assert first_mismatch(records) is None
    rank = guilty % world_size
    records[rank] = program[: at - 1]
    mismatch = first_mismatch(records)
    assert (mismatch is not None) == (at <= length)
    assert mismatch is None or (mismatch.ranks == (rank,) and f"#{at} " in mismatch.sentence)
