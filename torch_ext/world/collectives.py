"""Which collectives ranks have called, and how their transports failed: what a rank notes and tells, and what the
parent half reads from that. The functions for ranks touch torch only if it is loaded; all others are pure.
"""

from __future__ import annotations

import dis
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch_ext.world import frames
from torch_ext.world.wording import ranks_phrase

__all__ = [
    "ALL",
    "Collective",
    "Mismatch",
    "destroyed_at",
    "disagreement",
    "first_mismatch",
    "minority",
    "note_destroyed",
    "own_record",
    "own_summary",
    "raised_by_transport",
    "ran_out_of_time",
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


# In place of a group's name.
ALL = "*"
# Where the body has destroyed process groups, by the group's name.
_destroyed: dict[str, str] = {}


def note_destroyed(names: Sequence[str]) -> None:
    """Note the user's line that destroys these groups now; no names: all groups."""
    place = frames.place_here()
    if place:
        _destroyed.update(dict.fromkeys(names or [ALL], place))


def own_record() -> str:
    """Return the record as JSON, or an empty string: ``entries``, ``groups`` (ranks by the group's name) and
    ``destroyed`` (the line that destroyed a group, by its name; ``"*"`` for all).

    It is empty where torch is not loaded or has no recorder, and before the first process group exists.
    """
    if "torch" not in sys.modules:
        return ""
    try:
        from torch_ext.compat.c10d import _dump_fr_trace_json, ranks_of_groups

        entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
        return json.dumps({"entries": entries, "groups": ranks_of_groups(), "destroyed": _destroyed})
    except Exception:  # whatever a release of torch does here, it must not cost the rank its receipt
        return ""


def own_summary() -> str:
    """Return a text that changes whenever a collective begins or ends; empty if there is no record."""
    record = json.loads(own_record() or "{}")
    return json.dumps([[entry.get("record_id"), entry.get("retired")] for entry in record.get("entries", [])][-64:])


# Folders of torch whose Python code raises in the name of a process group, a store or RPC.
_THREADED_GROUP = "/multi_threaded_pg.py"
_FOLDERS = ("/torch/distributed/", "/torch/futures/", "/torch_ext/compat/", _THREADED_GROUP)
# How transports say that nobody came in time; such a failure shows who waited, not who is to blame.
_LIMIT = re.compile(r"tim(e|ed)[ -]?out|wait timeout|deadline|failed to pass monitoredBarrier", re.IGNORECASE)
# How backends say that ranks called different collectives: `simccl`, and torch's threaded group as we complete it.
_DISAGREE = re.compile(r"ranks (?:disagree in|differ in a collective)")
_CALLED = re.compile(
    r"\brank (\d+)(?: \([^)]*\))? called (.+?)(?: at (\S+:\d+))?(?=; |\.(?: |$)|$)",
)


def disagreement(reason: str) -> Iterator[tuple[int, str, str]]:
    """Yield the rank, the call and the line of each that ``reason`` names, if it says that ranks disagree.

    >>> list(disagreement("ranks disagree in the root: rank 0 called b, root 0 at /a/t.py:3; rank 1 called b, root 1."))
    [(0, 'b, root 0', 't.py:3'), (1, 'b, root 1', '')]
    """
    if _DISAGREE.search(reason):
        for rank, call, line in _CALLED.findall(reason):
            yield int(rank), call, os.path.basename(line)


def ran_out_of_time(reason: str) -> bool:
    """Whether the transport raised with ``reason`` because a limit of its own ended: the peers did not come."""
    return bool(_LIMIT.search(reason))


def raised_by_transport(error: BaseException) -> bool:
    """Whether ``error`` was raised by torch's C++ or by ``torch.distributed``, rather than by a test's own ``raise``.

    Words cannot tell: a test may raise ``ValueError("unexpected EOF")`` of its own. Where it was raised can.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    innermost = _innermost(error.__traceback__)
    if innermost is None:
        return False
    if isinstance(error, SystemExit):  # how torch's threaded group tells a rank that another one has failed
        return innermost.tb_frame.f_code.co_filename.endswith(_THREADED_GROUP)
    if not isinstance(error, (RuntimeError, ConnectionError, EOFError, TimeoutError)):
        return False
    in_torch = any(folder in innermost.tb_frame.f_code.co_filename for folder in _FOLDERS)
    return in_torch or not _is_raise(innermost)


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _is_raise(trace: TracebackType) -> bool:
    """Whether the exception was raised by a ``raise`` statement in this frame, not by what it called."""
    code = trace.tb_frame.f_code.co_code
    if not 0 <= trace.tb_lasti < len(code):
        return False
    return dis.opname[code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")
