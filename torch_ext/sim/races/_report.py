"""Renders races as text: both accesses, and the edge that would order them."""

from __future__ import annotations

import os

import torch.distributed as dist

from torch_ext.sim.races._findings import Access, Race, Stack, place

_MOST_RACES = 20
# Innermost frames of the user's, and of an access that no line of the user's has called.
_MOST_FRAMES, _LIBRARY_FRAMES = 6, 2


def render(races: list[Race]) -> str:
    """Return the report of ``races``, of which there is at least one."""
    number = len(races)
    heading = f"{number} race{'s' * (number > 1)}{_on_rank(races)}{'; the first' * (number > 1)}: {missing(races[0])}"
    parts = [heading, *(_race(number, race) for number, race in enumerate(races[:_MOST_RACES], start=1))]
    if len(races) > _MOST_RACES:
        parts.append(f"and {len(races) - _MOST_RACES} more")
    return "\n\n".join(parts)


def _on_rank(races: list[Race]) -> str:
    ranks = {race.later.rank for race in races}
    if ranks == {None} and dist.is_available() and dist.is_initialized():
        ranks = {dist.get_rank()}
    return f" on rank {ranks.pop()}" if len(ranks) == 1 and None not in ranks else ""


def _race(number: int, race: Race) -> str:
    times = f" ({race.count} times)" if race.count > 1 else ""
    summary = f"{_name(race.earlier)} {_verb(race.earlier)} what {_name(race.later)} {_verb(race.later)}"
    lines = [
        f"race {number}: {summary}{times}",
        f"  missing  {missing(race)}",
        *_access("earlier", race.earlier),
        *_access("later", race.later),
        f"  memory   {_memory(race)}",
    ]
    return "\n".join(lines)


def missing(race: Race) -> str:
    """Return the edge that would order a race, as advice."""
    edge = _missing_edge(race)
    earlier, later = race.earlier, race.later
    if race.is_between_ranks:
        return (
            f"rank {later.rank} must know that rank {earlier.rank} is past {_at(earlier)} before {_at(later)}: "
            f"put_signal there after it and wait_signal here, or a barrier of both"
        )
    if earlier.rank == later.rank or None in (earlier.rank, later.rank):
        return edge
    return f"{edge}; and rank {later.rank} must know that rank {earlier.rank} has come to {_at(earlier)}"


def _missing_edge(race: Race) -> str:
    earlier, later = race.earlier, race.later
    between = _between(earlier, later)
    if earlier.lane_kind == "communication":
        return _missing_wait(race, between)
    if race.reused and earlier.lane_kind != "host":
        return (
            f"the tensor was freed{_where(race.freed)} while {earlier.lane} could still use it: call "
            f"record_stream() with that stream before, or have the stream it was allocated on wait for {earlier.lane}"
        )
    if later.lane_kind == "host":
        return f"the host must wait for {earlier.lane} {between}: synchronize the stream or an event"
    if later.lane_kind == "communication":
        return f"the stream that is current at {_at(later)} must wait for {earlier.lane} before that"
    return f"{later.lane} must wait for {earlier.lane} {between}"


def _missing_wait(race: Race, between: str) -> str:
    # Programs have no handle of a group's lane: they order it by the works of its operations.
    work, later = f"the work of {_name(race.earlier)}", race.later
    if race.reused:
        return (
            f"the tensor was freed{_where(race.freed)} while {_name(race.earlier)} could still use it: keep it until "
            "wait() was called on that work, with the stream current that the tensor was allocated on"
        )
    if later.lane_kind == "host":
        return f"call wait() on {work}, and synchronize the stream that is current there, {between}"
    if later.lane_kind == "communication":
        return f"call wait() on {work} with the stream current that is current at {_at(later)}, {between}"
    return f"call wait() on {work} with {later.lane} current, {between}"


def _memory(race: Race) -> str:
    if race.symmetric_of is not None:
        return f"bytes {race.begin} to {race.end} of the symmetric memory of rank {race.symmetric_of}"
    kind = "pinned memory" if race.pinned else "device memory"
    life = ", handed out again since the earlier access" if race.reused else ""
    made = f", allocated{_where(race.allocated)}" if race.allocated else ""
    return f"bytes {race.begin} to {race.end} of a block of {kind}{made}{life}"


def _access(side: str, access: Access) -> list[str]:
    tensor = f"{access.dtype.removeprefix('torch.')} [{', '.join(map(str, access.sizes))}]"
    made = f" (made{_where(access.lane_stack)})" if access.lane_stack else ""
    in_backward = f" in {access.node}" if access.node else ""
    of_rank = "" if access.rank is None else f" of rank {access.rank}"
    lines = [f"  {side:<8} {_name(access)}{in_backward}{of_rank} {_verb(access)} {tensor} on {access.lane}{made}"]
    frames = [frame for frame in access.stack if not frame.is_library][:_MOST_FRAMES]
    lines += [f"             {frame}" for frame in frames or access.stack[:_LIBRARY_FRAMES]]
    return lines


def _name(access: Access) -> str:
    return access.operator if access.sequence is None else f"{access.operator} number {access.sequence}"


def _verb(access: Access) -> str:
    return "writes" if access.writes else "reads"


def _between(earlier: Access, later: Access) -> str:
    if earlier.place and later.place:
        return f"between {_at(earlier)} and {_at(later)}"
    return f"after {_at(earlier)} and before {_at(later)}"


def _at(access: Access) -> str:
    # Threads of autograd's engine have no Python frames.
    return os.path.basename(access.place.at) if access.place else f"backward's {access.node or access.operator}"


def _where(stack: Stack | None) -> str:
    frame = place(stack)
    return "" if frame is None else f" at {os.path.basename(frame.at)}"
