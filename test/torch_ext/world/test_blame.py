"""Who kept whom waiting, over scripted outcomes. See Note [Who is to blame for a hang]."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from torch_ext.world.blame import find_blame
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.protocol import Receipt, Said, Wait


def entry(group: str, number: int, name: str = "all_reduce", over: bool = False) -> dict[str, Any]:
    return {
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "collective_seq_id": number,
        "profiling_name": f"gloo:{name}",
        "input_sizes": [[3]],
        "input_dtypes": ["Float"],
        "retired": over,
    }


def hung(rank: int, *entries: dict[str, Any], waits: tuple[Wait, ...] = (), **groups: list[int]) -> Outcome:
    record = json.dumps({"entries": entries, "groups": {name[1:]: ranks for name, ranks in groups.items()}})
    return Outcome(rank, Ending.HUNG, -9, collectives=record, waits=waits)


def silent(rank: int, ending: Ending = Ending.HUNG) -> Outcome:
    return Outcome(rank, ending, -9)


def test_the_rank_that_did_not_call_is_to_blame() -> None:
    blame = find_blame([hung(0, entry("0", 1)), hung(1), hung(2, entry("0", 1))])
    assert blame is not None and blame.ranks == (1,)
    assert blame.sentence == (
        "ranks 0, 2 called #1 gloo:all_reduce([3] Float) in group 0 (default_pg), which rank 1 never called"
    )


def test_a_rank_that_waits_for_another_is_not_to_blame() -> None:
    """Rank 1 keeps rank 0 waiting because rank 2 keeps rank 1 waiting."""
    groups = {"g1": [0, 1], "g2": [1, 2]}
    blame = find_blame([hung(0, entry("1", 1), **groups), hung(1, entry("2", 1), **groups), hung(2, **groups)])
    assert blame is not None and blame.ranks == (2,)


def test_members_of_a_small_group_alone_are_waited_for() -> None:
    groups = {"g1": [0, 1]}
    blame = find_blame([hung(0, entry("1", 1), **groups), hung(1, **groups), hung(2, **groups)])
    assert blame is not None and blame.ranks == (1,)


def test_a_rank_whose_collective_ran_out_of_time_has_waited_in_it() -> None:
    """The record says that it has ended a moment later than the error is raised, so it may say so or not."""
    waits = (Wait("scatter() in test_a (test_a.py:3)", transport=True),)
    for ended in (False, True):
        failure = Receipt(Said.FAILED, 2.0, "RuntimeError: Timed out", transport=True, waits=waits)
        root = replace(
            hung(0, entry("0", 1, "scatter", over=ended), waits=waits), ending=Ending.FAILED, receipt=failure
        )
        blame = find_blame([root, hung(1), hung(2, entry("0", 1, "scatter", over=True), entry("0", 2, "barrier"))])
        assert blame is not None and blame.ranks == (1,), ended


OVER = (Wait("the barrier after its body", transport=True, over=True),)


def test_of_two_that_differ_the_one_whose_body_is_over_is_to_blame() -> None:
    blame = find_blame([hung(0, entry("0", 1)), hung(1, entry("0", 1, "barrier"), waits=OVER)])
    assert blame is not None and blame.ranks == (1,)
    assert blame.sentence.endswith("; rank 1 was over and waited for its peers")


def test_the_few_are_to_blame_though_the_others_are_over() -> None:
    over = [hung(rank, entry("0", 1, "barrier"), waits=OVER) for rank in (0, 1)]
    blame = find_blame([*over, hung(2, entry("0", 1))])
    assert blame is not None and blame.ranks == (2,)


def test_a_rank_that_took_another_group_is_to_blame_where_others_are_through() -> None:
    """Ranks 1 and 3 got what rank 0 sends to all, which waits for rank 2 alone."""
    groups = {"g1": [0, 1, 2, 3]}
    through = [replace(hung(rank, entry("0", 1, over=True), **groups), ending=Ending.PASSED) for rank in (1, 3)]
    blame = find_blame([hung(0, entry("0", 1), **groups), through[0], hung(2, entry("1", 1), **groups), through[1]])
    assert blame is not None and blame.ranks == (2,)


def test_of_a_deadlock_the_one_whose_body_is_over_is_to_blame() -> None:
    receives = (Wait("recv(peer 1)", (1,), transport=True),)
    blame = find_blame([hung(0, waits=receives), hung(1, entry("0", 1, "barrier"), waits=OVER)])
    assert blame is not None and blame.ranks == (1,)
    assert "cycle" in blame.sentence


def test_a_deadlock_over_groups_is_shown_as_its_cycle() -> None:
    groups = {"g1": [0, 1], "g2": [0, 1]}
    blame = find_blame([hung(0, entry("1", 1), **groups), hung(1, entry("2", 1), **groups)])
    assert blame is not None and set(blame.ranks) == {0, 1}
    assert "cycle" in blame.sentence
    assert "rank 0 waits in #1 gloo:all_reduce([3] Float) in group 1 (undefined) for rank 1" in blame.sentence


def test_a_rank_that_waits_in_another_group_than_most_is_to_blame() -> None:
    groups = {"g0": [0, 1, 2], "g1": [0, 1, 2]}
    others = [hung(rank, entry("0", 1), **groups) for rank in (0, 2)]
    blame = find_blame([others[0], hung(1, entry("1", 1), **groups), others[1]])
    assert blame is not None and blame.ranks == (1,)
    assert blame.cause.startswith("rank 1 waits in another collective than ranks 0, 2: rank 1 in all_reduce")


def test_the_first_line_says_where_the_others_wait_and_where_the_absent_rank_is() -> None:
    waits = (Wait("broadcast() in test_a (test_a.py:40)", transport=True),)
    here = replace(silent(0, Ending.TIMED_OUT), stacks='  File "/home/u/test_a.py", line 31 in test_a')
    ranks = [hung(rank, entry("0", 1, "broadcast"), waits=waits) for rank in (1, 2, 3)]
    blame = find_blame([here, *ranks])
    assert blame is not None and blame.ranks == (0,)
    assert blame.cause == (
        "rank 0 never called broadcast, which ranks 1-3 waited in (test_a.py:40); it was at test_a.py:31"
    )


def test_a_peer_that_does_not_send_is_to_blame() -> None:
    blame = find_blame([hung(0, waits=(Wait("recv(peer 1) in test_a", (1,), transport=True),)), hung(1)])
    assert blame is not None and blame.ranks == (1,)


def test_whoever_skips_the_creation_of_a_group_is_to_blame() -> None:
    creating = Wait("new_group() in test_a", everyone=True, transport=True)
    blame = find_blame([hung(0, waits=(creating,)), hung(1, entry("0", 1))])
    assert blame is not None and blame.ranks == (1,)
    assert "which needs every rank; rank 1 never came" in blame.sentence


def test_a_rank_that_cannot_answer_is_to_blame_if_the_others_wait_for_it() -> None:
    blame = find_blame([hung(0, entry("0", 1)), silent(1)])
    assert blame is not None and blame.ranks == (1,)


def test_a_rank_that_passed_and_told_nothing_is_not() -> None:
    assert find_blame([hung(0, entry("0", 1)), silent(1, Ending.PASSED)]) is None


def test_inputs_that_only_the_root_has_are_no_difference() -> None:
    root, other = entry("0", 1, "scatter"), entry("0", 1, "scatter")
    other["input_sizes"], other["input_dtypes"] = [], []
    assert find_blame([hung(0, root), hung(1, other)]) is None
    reduce = {**entry("0", 1), "input_sizes": [[4]]}
    blame = find_blame([hung(0, entry("0", 1)), hung(1, reduce)])
    assert blame is not None and blame.differ


def test_a_rank_that_died_in_the_collective_has_come() -> None:
    """gloo ends a process that is sent more than it expects; its peers see the connection close."""
    gather, more = entry("0", 1, "all_gather"), {**entry("0", 1, "all_gather"), "input_sizes": [[400]]}
    wait = Wait("all_gather_into_tensor() in test_a", transport=True)
    died = replace(silent(0, Ending.KILLED), collectives=json.dumps([gather]))
    blame = find_blame([died, hung(1, gather, waits=(wait,)), hung(2, more, waits=(wait,))])
    assert blame is not None and blame.ranks == ()
    assert "[3] Float by ranks 0, 1, [400] Float by rank 2; make the sizes equal" in blame.sentence


def test_whoever_is_elsewhere_is_to_blame() -> None:
    barrier, lock = Wait("barrier() in test_a", transport=True), Wait("test_a (test_a.py:7)")
    blame = find_blame([hung(0, waits=(barrier,)), hung(1, waits=(lock,))])
    assert blame is not None and blame.ranks == (1,)
    assert "rank 1 was in test_a (test_a.py:7)" in blame.sentence
