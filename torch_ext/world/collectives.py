"""Reads which collectives ranks called last, and finds the first one that does not match. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_ext.world.phrases import ranks_phrase

__all__ = [
    "Collective",
    "Mismatch",
    "destroyed_at",
    "first_mismatch",
    "minority",
    "read_groups",
    "read_record",
    "uneven_sizes",
]


# What the recorder calls after the backend's method.
_PUBLIC = {
    "all_gather_base": "all_gather_into_tensor",
    "allgather_base": "all_gather_into_tensor",
    "reduce_scatter_base": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}


@dataclass(frozen=True)
class Collective:
    """One entry of a rank's record.

    Attributes:
        group: the process group's name, with its description.
        sequence: its number among the collectives of its group, from 1. Point-to-point operations are counted apart.
        operation: such as ``"gloo:all_reduce"``.
        shapes: input sizes and types, such as ``"[3] Float"``.
        finished: whether it has ended on this rank, with or without an error.
    """

    group: str
    sequence: int
    operation: str
    shapes: str
    finished: bool

    def __str__(self) -> str:
        return f"#{self.sequence} {self.operation}({self.shapes}) in group {self.group}"

    @property
    def name(self) -> str:
        """The operation as its callers know it, such as ``"all_gather_into_tensor"``."""
        name = self.operation.rpartition(":")[2].strip("_")
        return _PUBLIC.get(name, name)

    @property
    def words(self) -> str:
        return f"{self.name}({self.shapes})"

    @property
    def kind(self) -> tuple[str, str]:
        """What must be the same on all ranks; shapes count where the operation wants them equal."""
        name = self.operation.rpartition(":")[2].strip("_")
        uneven = name == "scatter" or any(part in name for part in ("gather", "to_all", "alltoall"))
        return self.operation, "" if uneven else self.shapes


@dataclass(frozen=True)
class Mismatch:
    """The first point at which ranks do not go together.

    Attributes:
        sentence: what it is.
        ranks: those that are to blame; empty if that cannot be told.
        differ: whether ranks called different collectives, rather than one of them none.
        calls: which ranks called what, if they differ.
        cause: the first line of a report: the ranks to blame, what they did and where, in words of the user's program.
    """

    sentence: str
    ranks: tuple[int, ...]
    differ: bool = False
    calls: tuple[tuple[tuple[int, ...], str], ...] = ()
    cause: str = ""


def read_record(record: str) -> list[Collective]:
    """Read a flight record as a rank sends it; point-to-point operations are left out.

    Empty input gives an empty list.
    """
    read = json.loads(record) if record else []
    entries = read.get("entries", []) if isinstance(read, dict) else read
    return [_read_entry(entry) for entry in entries if not entry.get("is_p2p")]


def read_groups(record: str) -> dict[str, list[int]]:
    """Return the ranks of each process group that a record tells of, by the group's name."""
    read = json.loads(record) if record else {}
    return dict(read.get("groups", {})) if isinstance(read, dict) else {}


def destroyed_at(record: str, group: str) -> str:
    """Return the line at which the rank destroyed ``group``, by the first word of its name; empty if it did not."""
    read = json.loads(record) if record else {}
    if not isinstance(read, dict) or group in read.get("groups", {}):
        return ""
    lines = read.get("destroyed", {})
    return str(lines.get(group) or lines.get("*") or "")


def _read_entry(entry: Mapping[str, Any]) -> Collective:
    name, description = [*entry.get("process_group", ["?"]), ""][:2]
    sizes, types = entry.get("input_sizes", []), entry.get("input_dtypes", [])
    shapes = ", ".join(f"{list(size)} {type_}" for size, type_ in zip(sizes, types, strict=False))
    finished = bool(entry.get("retired")) or entry.get("state") == "completed"
    group = f"{name} ({description})" if description else str(name)
    return Collective(
        group, int(entry.get("collective_seq_id", 0)), str(entry.get("profiling_name", "?")), shapes, finished
    )


def first_mismatch(records: Mapping[int, Sequence[Collective]]) -> Mismatch | None:
    """Return the first collective in which the ranks differ or wait for each other; None if there is none.

    Args:
        records: for each rank, its collectives, oldest first.
    """
    groups = dict.fromkeys(each.group for record in records.values() for each in record)
    found = (_mismatch_in({rank: _of(record, group) for rank, record in records.items()}) for group in groups)
    return next((mismatch for mismatch in found if mismatch is not None), None)


def minority(parties: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks that differ from more than half of all, by what each party of ranks did; empty if none do so.

    >>> minority([[0, 3], [1], [2, 4, 5]])
    ()
    >>> minority([[0, 2, 3], [1]])
    (1,)
    """
    ranked = sorted(parties, key=len)
    few = sorted(rank for party in ranked[:-1] for rank in party)
    return tuple(few) if ranked and len(ranked[-1]) > len(few) else ()


def uneven_sizes(records: Mapping[int, Sequence[Collective]]) -> Mismatch | None:
    """Return the first collective that has not ended and to which ranks brought inputs of different sizes.

    Only some backends take those, so nobody is to blame. Ranks without inputs, as those of a scatter, do not count.
    """
    for each in (each for record in records.values() for each in record if not each.finished):
        sizes: dict[str, list[int]] = {}
        for rank, record in records.items():
            for other in record:
                if (other.group, other.sequence, other.operation) == (each.group, each.sequence, each.operation):
                    sizes.setdefault(other.shapes, []).append(rank)
        sizes.pop("", None)
        if len(sizes) > 1:
            parts = ", ".join(f"{shapes} by {ranks_phrase(ranks)}" for shapes, ranks in sizes.items())
            called = f"#{each.sequence} {each.operation} in group {each.group}"
            return Mismatch(f"{called} was called with {parts}; make the sizes equal if it wants that", ())
    return None


def _of(record: Sequence[Collective], group: str) -> dict[int, Collective]:
    return {each.sequence: each for each in record if each.group == group}


def _mismatch_in(records: Mapping[int, Mapping[int, Collective]]) -> Mismatch | None:
    # Every rank belongs to the default group. Of any other group, the known members are those that called something.
    everyone = any("default_pg" in each.group for record in records.values() for each in record.values())
    members = {rank: record for rank, record in records.items() if record or everyone}
    for sequence in sorted({number for record in members.values() for number in record}):
        here = {rank: record[sequence] for rank, record in members.items() if sequence in record}
        missing = [rank for rank, record in members.items() if max(record, default=0) < sequence]
        kinds: dict[tuple[str, str], list[int]] = {}
        for rank, each in here.items():
            kinds.setdefault(each.kind, []).append(rank)
        shown = {each.kind: each for each in here.values()}
        if len(kinds) > 1:
            parts = [
                f"{ranks_phrase(ranks)} called {shown[kind].operation}({shown[kind].shapes})"
                for kind, ranks in kinds.items()
            ]
            calls = tuple((tuple(ranks), shown[kind].words) for kind, ranks in kinds.items())
            sentence = f"the ranks differ in collective #{sequence}: {', '.join(parts)}"
            return Mismatch(sentence, minority(kinds.values()), differ=True, calls=calls)
        if missing:
            called = next(iter(here.values()))
            sentence = f"{ranks_phrase(list(here))} called {called}, which {ranks_phrase(missing)} never called"
            return Mismatch(sentence, tuple(missing))
    return None
