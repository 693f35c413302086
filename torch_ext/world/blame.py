"""Finds the rank to blame, and writes the first line of a report. Pure functions.

Note [Who is to blame for a hang]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that waits is rarely at fault. In this order:

1. Ranks that create a process group need all ranks: blame the absent ranks, except those that wait for another absent
   rank.
2. Ranks that called different collectives as number *n* of one group disagree. Blame the minority. Without a minority,
   blame the ranks whose body is over while their peers' is not: they wait in the harness's own collective.
3. A rank in an unfinished collective waits for every member of the group that has not called it, and a rank in ``recv``
   for its peer. These waits are the edges of a graph; a collective that raised an error counts as unfinished. Blame the
   ranks with incoming edges only. If their bodies are over, ignore a collective that only a few ranks have called and
   whose callers are awaited elsewhere. Without such ranks, report a deadlock and its cycle. In the cycle, blame a rank
   whose body is over, or the minority that waits in another group, or in another backend of the group.
4. If some ranks wait and the rest do something else, blame the rest, except a rank that ended in a collective.
5. If all ranks wait, blame a rank that runs a function for a peer's RPC, unless the function waits for another RPC.
6. Report different sizes in a collective that may require equal sizes, without blame.

A rank that holds the GIL or is stopped cannot send its record; the records of its peers decide then.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch_ext.world.outcome import (
    Collective,
    Ending,
    Mismatch,
    Outcome,
    destroyed_at,
    disagreement,
    first_mismatch,
    minority,
    ran_out_of_time,
    read_groups,
    read_record,
    uneven_sizes,
)
from torch_ext.world.wording import place_in_rpc, ranks_by, ranks_phrase

# Descriptions of a wait: "all_reduce() in test_a (test_a.py:12)", and the simulated device's form.
_WAIT = re.compile(r"(?P<call>.+?) in \S+ \((?P<line>[^()]+:\d+)\)$", re.DOTALL)
_WAIT_OF_DEVICE = re.compile(
    r"(?:#\d+ )?(?P<call>\w+(\(channel \d+\))?) in group \S+, called at (?:\S*/)?(?P<line>[^/\s]+:\d+)$"
)
# Calls of symmetric memory to which another call of the peer belongs.
_SIGNAL = re.compile(r"((?:wait|put)_signal)\((channel \d+)\)")
_COUNTERPARTS = {"wait_signal": "put a signal on {} for {}", "put_signal": "waited on {} for the last signal of {}"}
_NO_ARGUMENTS = re.compile(r"^(\w+)\(\)$")


_Outcomes = Sequence[Outcome]
_Records = Mapping[int, Sequence[Collective]]
_Ranks = Sequence[int]
_Call = tuple[str, str]  # an operation and the user's line that calls it; empty if unknown


@dataclass(frozen=True)
class _Edge:
    """Rank ``waiting`` waits for ``missing`` in the operation ``what``."""

    waiting: int
    missing: tuple[int, ...]
    what: str
    call: _Call  # the user's, and its line
    group: str = ""  # the process group of a collective, with its description, which tells its backends apart
    came: int = 1  # number of ranks that have called it


def find_blame(outcomes: _Outcomes) -> Mismatch | None:
    """Return where the ranks diverge and the ranks to blame; None if unknown. See Note [Who is to blame for a hang]."""
    records = {outcome.rank: read_record(outcome.collectives) for outcome in outcomes if outcome.collectives}
    found = (
        _creation(outcomes, records)
        or _difference(outcomes, records)
        or _waiting(outcomes, records)
        or _last_difference(outcomes, records)
        or _waits_elsewhere(outcomes, records)
        or _in_rpcs(outcomes)
        or uneven_sizes(records)
    )
    if found is None or not found.differ or found.cause:
        return found
    lines = {o.rank: line for o in outcomes if (line := _call_of(o)[1])}
    return replace(found, cause=_cause_of_calls(found.calls, found.ranks, lines))


def find_disagreement(failed: _Outcomes) -> Mismatch | None:
    """Return the disagreement of ranks in one collective, by the backend's errors in ``failed``; None if there is none.

    Each error has the rank's own call and one that differs from it. Blames the ranks whose body was over, else the
    smaller party.
    """
    reported: dict[int, _Call] = {}
    for outcome in failed:
        for rank, called, line in disagreement(outcome.reason):
            reported.setdefault(rank, (called, line))
    parties = ranks_by((call, rank) for rank, (call, _) in sorted(reported.items()))
    if len(parties) < 2:
        return None
    ranks = minority(parties.values())
    calls = tuple((tuple(party), call) for call, party in parties.items())
    lines = {rank: line for rank, (_, line) in reported.items() if line}
    lines |= {o.rank: o.receipt.place for o in failed if o.receipt and o.receipt.place and o.rank not in lines}
    over = tuple(o.rank for o in failed if o.rank in reported and any(wait.over for wait in o.waits))
    waiting = sorted(reported.keys() - set(over))
    if over and waiting:
        waiting_call = reported[waiting[0]][0], lines.get(waiting[0], "")
        return Mismatch("", over, True, calls, _never_called(failed, over, waiting, waiting_call))
    return Mismatch("", ranks, True, calls, _cause_of_calls(calls, ranks, lines))


def blame_absent(outcomes: _Outcomes, ranks: _Ranks, waiting: _Outcomes) -> Mismatch:
    """Blame ``ranks``, by a backend's message or because they did not wait, for keeping ``waiting`` ranks waiting."""
    call, who = _call_of(waiting[0]) if waiting else ("", ""), [o.rank for o in waiting]
    without_group = [o.rank for o in outcomes if o.rank in ranks and not read_groups(o.collectives)]
    destroyed = _destroyed(outcomes, without_group, who, "", call)
    return destroyed or Mismatch("", tuple(ranks), cause=_blocking(outcomes, ranks, who, call))


def _creation(outcomes: _Outcomes, records: _Records) -> Mismatch | None:
    creating = [o for o in outcomes if any(wait.everyone for wait in o.waits)]
    others = [o.rank for o in outcomes if o not in creating]
    if not creating or not others:
        return None
    awaited = _roots([edge for edge in _edges(outcomes, records) if edge.waiting in others])
    others = [rank for rank in others if rank in awaited] or others
    wait = next(wait for wait in creating[0].waits if wait.everyone)
    who = [o.rank for o in creating]
    if destroyed := _destroyed(outcomes, others, who, "", _split(wait.description)):
        return destroyed
    return Mismatch(
        f"{ranks_phrase(who)} waited in {wait.description}, which needs every rank; {ranks_phrase(others)} never came",
        tuple(others),
        cause=_never_called(outcomes, others, who, _split(wait.description)),
    )


def _destroyed(outcomes: _Outcomes, absent: _Ranks, waiting: _Ranks, group: str, call: _Call) -> Mismatch | None:
    """Blame the ranks of ``absent`` that destroyed ``group`` while ``waiting`` needed it; None if there are none."""
    lines = {o.rank: line for o in outcomes if o.rank in absent and (line := destroyed_at(o.collectives, group))}
    if not lines:
        return None
    ranks, verb = tuple(lines), "was" if len(waiting) == 1 else "were"
    sentence = (
        f"{ranks_phrase(ranks)} destroyed the process group at {lines[ranks[0]]}, while {ranks_phrase(waiting)} {verb} "
        f"in {_format_call(call)}"
    )
    return Mismatch(sentence, ranks, cause=sentence)


def _difference(outcomes: _Outcomes, records: _Records) -> Mismatch | None:
    found = first_mismatch(records)
    if found is None or not found.differ:
        return None
    return found if found.ranks else _blame_finished(found, outcomes, [o.rank for o in outcomes])


def _last_difference(outcomes: _Outcomes, records: _Records) -> Mismatch | None:
    """Return the first collective that some rank has not called, finished elsewhere or not."""
    found = first_mismatch(records)
    if found is None or found.differ:
        return found
    waiting = [o.rank for o in outcomes if o.rank not in found.ranks and o.ending is not Ending.PASSED]
    line = next((line for o in outcomes if o.rank in waiting and (line := _call_of(o)[1])), "")
    return replace(found, cause=_blocking(outcomes, found.ranks, waiting, ("a collective", line)))


def _blame_finished(found: Mismatch, outcomes: _Outcomes, ranks: _Ranks) -> Mismatch:
    """Blame the ranks whose body is over while their peers' is not. A pending transfer is the body's own call."""
    over = tuple(
        o.rank
        for o in outcomes
        if o.rank in ranks and any(wait.over for wait in o.waits) and not any(wait.peers for wait in o.waits)
    )
    if not over or len(over) == len(ranks):
        return found
    verb = "was over and waited for its peers" if len(over) == 1 else "were over and waited for their peers"
    waiting = [o.rank for o in outcomes if o.rank not in over and o.ending is not Ending.PASSED]
    first = next((o for o in outcomes if o.rank in waiting), outcomes[0])
    cause = _never_called(outcomes, over, waiting, _call_of(first))
    return replace(found, sentence=f"{found.sentence}; {ranks_phrase(over)} {verb}", ranks=over, cause=cause)


def _waiting(outcomes: _Outcomes, records: _Records) -> Mismatch | None:
    edges = _edges(outcomes, records)
    roots = _roots(edges)
    if roots and all(_is_over(outcomes, rank) for rank in roots):
        awaited = {rank for edge in edges for rank in edge.missing}
        edges = [edge for edge in edges if edge.came >= len(edge.missing) or edge.waiting not in awaited] or edges
        roots = _roots(edges)
    if roots:
        return _blame_roots(outcomes, edges, roots)
    for each in edges:  # none comes back to a group that it has destroyed
        if each.group and (left := _destroyed(outcomes, each.missing, [each.waiting], _name_of(each.group), each.call)):
            return left
    found = _cycle(edges) if edges else None
    return found and _blame_finished(found, outcomes, found.ranks)


def _edges(outcomes: _Outcomes, records: _Records) -> list[_Edge]:
    return [*_collective_edges(outcomes, records), *_peer_edges(outcomes)]


def _roots(edges: Sequence[_Edge]) -> tuple[int, ...]:
    """Return the ranks that have incoming edges only."""
    return tuple(sorted({rank for edge in edges for rank in edge.missing} - {edge.waiting for edge in edges}))


def _is_over(outcomes: _Outcomes, rank: int) -> bool:
    return any(o.rank == rank and (o.ending is Ending.PASSED or any(wait.over for wait in o.waits)) for o in outcomes)


def _blame_roots(outcomes: _Outcomes, edges: Sequence[_Edge], roots: tuple[int, ...]) -> Mismatch:
    edge = next(edge for edge in edges if set(edge.missing) & set(roots))
    alike = [each.waiting for each in edges if each.what == edge.what and each.missing == edge.missing]
    absent = [rank for rank in edge.missing if rank in roots]
    if signal := _SIGNAL.fullmatch(edge.call[0]):
        part = _COUNTERPARTS[signal[1]].format(signal[2], ranks_phrase(alike))
        sentence = f"{ranks_phrase(absent)} never {part}, which waited in {_format_call((signal[1], edge.call[1]))}"
        return Mismatch(sentence, roots, cause=sentence + _whereabouts(outcomes, absent))
    sentence = f"{ranks_phrase(alike)} called {edge.what}, which {ranks_phrase(absent)} never called"
    if not edge.group:
        return Mismatch(sentence, roots, cause=_blocking(outcomes, roots, alike, edge.call))
    return _destroyed(outcomes, absent, alike, _name_of(edge.group), edge.call) or Mismatch(
        sentence, roots, cause=_never_called(outcomes, roots, alike, edge.call)
    )


def _collective_edges(outcomes: _Outcomes, records: _Records) -> Iterable[_Edge]:
    groups: dict[str, list[int]] = {}
    for outcome in outcomes:
        groups.update(read_groups(outcome.collectives))
    silent = {o.rank for o in outcomes if not o.collectives and o.ending is not Ending.PASSED}
    failed_in = {o.rank: records[o.rank][-1] for o in outcomes if records.get(o.rank) and _failed_in_a_collective(o)}
    by_rank = {o.rank: o for o in outcomes}
    for rank, record in records.items():
        for each in record:
            if each.finished and each is not failed_in.get(rank):
                continue
            members = _members(each, groups, outcomes, records)
            came = {
                other
                for other in members
                if any(o.group == each.group and o.sequence >= each.sequence for o in records.get(other, ()))
            }
            unknown = {other for other in members if other not in records and other not in silent}
            absent = tuple(sorted(set(members) - came - unknown - {rank}))
            if absent:
                call = each.name, _call_of(by_rank[rank])[1]
                yield _Edge(rank, absent, str(each), call, each.group, len(members) - len(absent))


def _failed_in_a_collective(outcome: Outcome) -> bool:
    """Whether a collective raised the rank's failure: the record then shows it as finished."""
    failure = outcome.transport_failure
    if failure is None:
        return False
    if not failure.waits:  # a wait for work that another call began
        return ran_out_of_time(failure.reason)
    return any(wait.transport and not wait.peers and not wait.everyone for wait in failure.waits)


def _members(each: Collective, groups: Mapping[str, list[int]], outcomes: _Outcomes, records: _Records) -> list[int]:
    if (name := _name_of(each.group)) in groups:
        return groups[name]
    if "default_pg" in each.group:
        return [outcome.rank for outcome in outcomes]
    return [rank for rank, record in records.items() if any(other.group == each.group for other in record)]


def _name_of(group: str) -> str:
    return group.partition(" ")[0]


def _peer_edges(outcomes: _Outcomes) -> Iterable[_Edge]:
    for outcome in outcomes:
        for wait in outcome.waits:
            if wait.peers:
                peers = tuple(peer for peer in wait.peers if peer != outcome.rank)
                yield _Edge(outcome.rank, peers, wait.description, _split(wait.description))


def _cycle(edges: Sequence[_Edge]) -> Mismatch | None:
    """Follow the edges from the first one until a rank repeats; None if the path ends."""
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
    sentence = f"a deadlock; its cycle: {'; '.join(steps)}"
    parties = ranks_by((each.group, rank) for rank, each in sorted(after.items()))
    odd = minority(parties.values()) if all(each.group for each in after.values()) else ()
    ranks = odd or tuple(sorted(path))
    waits = [f"rank {r} in {_format_call(after[r].call)}" for r in (*ranks, *(p for p in path if p not in ranks))]
    others = ranks_phrase([rank for rank in after if rank not in odd])
    verb = "waits" if len(odd) == 1 else "wait"
    one = len({_name_of(each.group) for each in after.values()}) == 1
    where = "another backend of the process group" if one else "another process group"
    how = f"{verb} in {where} than {others}" if odd else "wait for each other"
    return Mismatch(sentence, ranks, cause=f"{ranks_phrase(ranks)} {how}: {', '.join(waits)}")


def _waits_elsewhere(outcomes: _Outcomes, records: _Records) -> Mismatch | None:
    waiting = [o for o in outcomes if any(wait.transport for wait in o.waits)]
    came = {rank for rank, record in records.items() if not all(each.finished for each in record)}
    others = [o for o in outcomes if o not in waiting and o.rank not in came and o.ending is not Ending.PASSED]
    if not waiting or not others:
        return None
    where = next(wait.description for wait in waiting[0].waits if wait.transport)
    doing = "; ".join(f"rank {o.rank} was in {o.waits[0].description}" for o in others if o.waits)
    ranks = [o.rank for o in others]
    sentence = f"{ranks_phrase([o.rank for o in waiting])} waited in {where}, {ranks_phrase(ranks)} did not"
    found = blame_absent(outcomes, ranks, waiting)
    return replace(found, sentence=f"{sentence}; {doing}" if doing else sentence)


def _in_rpcs(outcomes: _Outcomes) -> Mismatch | None:
    places = {o.rank: place for o in outcomes if (place := place_in_rpc(o.stacks))}
    waiting = [o for o in outcomes if o.rank not in places and any(wait.transport for wait in o.waits)]
    if not places or not waiting or len(waiting) + len(places) < len(outcomes):
        return None
    ranks = tuple(places)
    verb = "was" if len(ranks) == 1 else "were"
    kept = _blocking([], ranks, [o.rank for o in waiting], _call_of(waiting[0]))
    return Mismatch("", ranks, cause=f"{kept}; a function that an RPC had called {verb} {places[ranks[0]]}")


def _cause_of_calls(calls: Sequence[tuple[tuple[int, ...], str]], guilty: _Ranks, lines: Mapping[int, str]) -> str:
    """Return the calls of the ranks, the guilty ones first."""
    first = [(ranks, call) for ranks, call in calls if set(ranks) <= set(guilty)]
    others = [(ranks, call) for ranks, call in calls if (ranks, call) not in first]

    def phrase(ranks: _Ranks, call: str, place: str) -> str:
        line = next((lines[rank] for rank in ranks if rank in lines), "")
        return f"{ranks_phrase(ranks)} called {call}{place.format(line) if line else ''}"

    if not first:
        everyone = ranks_phrase(sorted(rank for ranks, _ in calls for rank in ranks))
        return f"{everyone} called different collectives: {'; '.join(phrase(*each, ' at {}') for each in others)}"
    rest = "; ".join(phrase(*each, " ({})") for each in others)
    return f"{', '.join(phrase(*each, ' at {}') for each in first)}, where {rest}"


def _never_called(outcomes: _Outcomes, absent: _Ranks, waiting: _Ranks, call: _Call) -> str:
    where = f" ({call[1]})" if call[1] else ""
    sentence = f"{ranks_phrase(absent)} never called {call[0]}, which {ranks_phrase(waiting)} waited in{where}"
    return sentence + _whereabouts(outcomes, absent)


def _blocking(outcomes: _Outcomes, absent: _Ranks, waiting: _Ranks, call: _Call) -> str:
    kept = f"kept {ranks_phrase(waiting)} waiting in {_format_call(call)}" if waiting else "did not end"
    sentence = f"{ranks_phrase(absent)} {kept}"
    return sentence + _whereabouts(outcomes, absent) if outcomes else sentence


def _whereabouts(outcomes: _Outcomes, absent: _Ranks) -> str:
    """Describe the first absent rank's activity, as the end of a sentence; empty if unknown."""
    outcome = next(o for o in outcomes if o.rank == absent[0])
    who = "it" if len(absent) == 1 else f"rank {absent[0]}"
    if any(wait.over for wait in outcome.waits) or outcome.ending in (Ending.PASSED, Ending.SKIPPED):
        return f"; its {outcome.task} was over" if len(absent) == 1 else f"; the {outcome.task} of {who} was over"
    if any("stopped by a signal" in wait.description for wait in outcome.waits):
        return f"; {who} was stopped by a signal"
    if outcome.ending is Ending.FAILED:
        return f"; {who} {outcome.describe()}"
    return f"; {who} was {outcome.place}" if outcome.place else ""


def _call_of(outcome: Outcome) -> _Call:
    """Return the operation that a rank waits in, and its line."""
    call, line = _split(next((wait.description for wait in outcome.waits if wait.transport and not wait.over), ""))
    return call, line or (outcome.receipt.place if outcome.receipt is not None else "")


def _split(words: str) -> _Call:
    """Split the description of a wait into call and line.

    >>> _split("all_reduce() in test_a (test_a.py:12)"), _split("the barrier after its body")
    (('all_reduce', 'test_a.py:12'), ('the barrier after its body', ''))
    """
    found = _WAIT.match(words) or _WAIT_OF_DEVICE.match(words)
    call, line = (found["call"], found["line"]) if found else (words, "")
    return _NO_ARGUMENTS.sub(r"\1", call), line


def _format_call(call: _Call) -> str:
    name, line = call
    return f"{name or 'a collective'} ({line})" if line else name or "a collective"
