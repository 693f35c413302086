"""Who kept whom waiting: found from what each rank called, and from what its threads wait for. Pure functions.

Note [Who is to blame for a hang]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that waits is rarely the one at fault. In this order:

1. Ranks that create a process group need everyone: those who never came are to blame.
2. Ranks that called different collectives as number *n* of one group disagree; the few are to blame, if there are few,
   else those whose body is over, if the others' is not: what they wait in is the harness's.
3. A rank in an unfinished collective waits for every member of the group that has not called it, a rank in ``recv``
   waits for its peer, and one that waits for what processes hold waits for those of them that are ranks. These are the
   edges of a graph; a collective that raised an error has not ended in this sense. Those that are waited for and wait
   for nobody are to blame. If there are none, the ranks are in a deadlock, and its cycle is shown; in it, a rank whose
   body is over is to blame.
4. Where some ranks wait for others and the rest does something else, the rest is to blame. One that was in a collective
   when it ended has come, whatever it did then.
5. Sizes that differ in a collective which may want them equal are told, and nobody is blamed.

A rank that holds the GIL or has been stopped cannot tell what it called; then the others' word counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch_ext.world.collectives import (
    Collective,
    Mismatch,
    first_mismatch,
    read_groups,
    read_record,
    uneven_sizes,
)
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.phrases import ranks_phrase
from torch_ext.world.transport_errors import ran_out_of_time

__all__ = ["find_blame"]


@dataclass(frozen=True)
class _Edge:
    """Rank ``waiting`` needs ``missing``; ``what`` is the operation, in words. It is not one that all of them call if
    they hold what is waited for.
    """

    waiting: int
    missing: tuple[int, ...]
    what: str
    held: bool = False


def find_blame(outcomes: Sequence[Outcome]) -> Mismatch | None:
    """Return what the ranks did not agree on, and the ranks that are to blame; None if they show nothing.

    See Note [Who is to blame for a hang].
    """
    records = {outcome.rank: read_record(outcome.collectives) for outcome in outcomes if outcome.collectives}
    return (
        _creation(outcomes)
        or _difference(outcomes, records)
        or _waiting(outcomes, records)
        or first_mismatch(records)
        or _elsewhere(outcomes, records)
        or uneven_sizes(records)
    )


def _creation(outcomes: Sequence[Outcome]) -> Mismatch | None:
    creating = [o for o in outcomes if any(wait.everyone for wait in o.waits)]
    others = [o.rank for o in outcomes if o not in creating]
    if not creating or not others:
        return None
    where = next(wait.words for wait in creating[0].waits if wait.everyone)
    who = ranks_phrase([o.rank for o in creating])
    return Mismatch(
        f"{who} waited in {where}, which needs every rank; {ranks_phrase(others)} never came", tuple(others)
    )


def _difference(outcomes: Sequence[Outcome], records: Mapping[int, Sequence[Collective]]) -> Mismatch | None:
    found = first_mismatch(records)
    if found is None or not found.differ:
        return None
    return found if found.ranks else _for_those_that_are_over(found, outcomes, [o.rank for o in outcomes])


def _for_those_that_are_over(found: Mismatch, outcomes: Sequence[Outcome], ranks: Sequence[int]) -> Mismatch:
    """Blame those of ``ranks`` whose body is over, if it is not so for all of them: their peers wait for more."""
    over = tuple(o.rank for o in outcomes if o.rank in ranks and any(wait.over for wait in o.waits))
    if not over or len(over) == len(ranks):
        return found
    verb = "was over and waited for its peers" if len(over) == 1 else "were over and waited for their peers"
    return replace(found, sentence=f"{found.sentence}; {ranks_phrase(over)} {verb}", ranks=over)


def _waiting(outcomes: Sequence[Outcome], records: Mapping[int, Sequence[Collective]]) -> Mismatch | None:
    edges = [*_collective_edges(outcomes, records), *_peer_edges(outcomes)]
    waiting = {edge.waiting for edge in edges}
    missing = sorted({rank for edge in edges for rank in edge.missing})
    roots = tuple(rank for rank in missing if rank not in waiting)
    if roots:
        edge = next(edge for edge in edges if set(edge.missing) & set(roots))
        alike = [each.waiting for each in edges if each.what == edge.what and each.missing == edge.missing]
        absent = [rank for rank in edge.missing if rank in roots]
        if edge.held:
            return Mismatch(f"{ranks_phrase(alike)} waited in {edge.what} for {ranks_phrase(absent)}", roots)
        return Mismatch(f"{ranks_phrase(alike)} called {edge.what}, which {ranks_phrase(absent)} never called", roots)
    found = _cycle(edges) if missing else None
    return found and _for_those_that_are_over(found, outcomes, found.ranks)


def _collective_edges(outcomes: Sequence[Outcome], records: Mapping[int, Sequence[Collective]]) -> Iterable[_Edge]:
    groups: dict[str, list[int]] = {}
    for outcome in outcomes:
        groups.update(read_groups(outcome.collectives))
    silent = {o.rank for o in outcomes if not o.collectives and o.ending is not Ending.PASSED}
    failed_in = {o.rank: records[o.rank][-1] for o in outcomes if records.get(o.rank) and _failed_in_a_collective(o)}
    for rank, record in records.items():
        for each in record:
            if each.finished and each is not failed_in.get(rank):
                continue
            members = _members(each, groups, outcomes, records)
            came = {other for other in members if _has_come(records.get(other, ()), each)}
            unknown = {other for other in members if other not in records and other not in silent}
            absent = tuple(sorted(set(members) - came - unknown - {rank}))
            if absent:
                yield _Edge(rank, absent, str(each))


def _failed_in_a_collective(outcome: Outcome) -> bool:
    """Whether a collective raised what the rank failed with, of which the record soon says that it has ended."""
    failure = outcome.transport_failure
    if failure is None:
        return False
    if not failure.waits:  # nothing is known of a wait for work that was begun elsewhere
        return ran_out_of_time(failure.reason)
    return any(wait.transport and not wait.peers and not wait.everyone for wait in failure.waits)


def _members(
    each: Collective,
    groups: Mapping[str, list[int]],
    outcomes: Sequence[Outcome],
    records: Mapping[int, Sequence[Collective]],
) -> list[int]:
    name = each.group.partition(" ")[0]
    if name in groups:
        return groups[name]
    if "default_pg" in each.group:
        return [outcome.rank for outcome in outcomes]
    return [rank for rank, record in records.items() if any(other.group == each.group for other in record)]


def _has_come(record: Sequence[Collective], each: Collective) -> bool:
    return max((other.sequence for other in record if other.group == each.group), default=0) >= each.sequence


def _peer_edges(outcomes: Sequence[Outcome]) -> Iterable[_Edge]:
    for outcome in outcomes:
        for wait in outcome.waits:
            if wait.peers:
                peers = tuple(peer for peer in wait.peers if peer != outcome.rank)
                yield _Edge(outcome.rank, peers, wait.words, bool(wait.enders))


def _cycle(edges: Sequence[_Edge]) -> Mismatch | None:
    """Follow the edges from the first one until a rank comes up again."""
    after = {edge.waiting: edge for edge in reversed(edges)}
    path = [edges[0].waiting]
    while True:
        edge = after.get(path[-1])
        if edge is None or not edge.missing:
            return None
        if edge.missing[0] in path:
            path = path[path.index(edge.missing[0]) :]
            break
        path.append(edge.missing[0])
    steps = [f"rank {rank} waits in {after[rank].what} for rank {after[rank].missing[0]}" for rank in path]
    return Mismatch(f"a deadlock; its cycle: {'; '.join(steps)}", tuple(path))


def _elsewhere(outcomes: Sequence[Outcome], records: Mapping[int, Sequence[Collective]]) -> Mismatch | None:
    waiting = [o for o in outcomes if any(wait.transport for wait in o.waits)]
    came = {rank for rank, record in records.items() if not all(each.finished for each in record)}
    others = [o for o in outcomes if o not in waiting and o.rank not in came and o.ending is not Ending.PASSED]
    if not waiting or not others:
        return None
    where = next(wait.words for wait in waiting[0].waits if wait.transport)
    doing = "; ".join(f"rank {o.rank} was in {o.waits[0].words}" for o in others if o.waits)
    sentence = (
        f"{ranks_phrase([o.rank for o in waiting])} waited in {where}, {ranks_phrase([o.rank for o in others])} did not"
    )
    return Mismatch(f"{sentence}; {doing}" if doing else sentence, tuple(o.rank for o in others))
