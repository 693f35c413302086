"""The outcome of one rank: its ending, and the flight record of its collectives. Pure functions.

Glossary
~~~~~~~~
- *world*: the set of ranks of one test. *World size*: their number.
- *rank*: one of these processes (or threads), and its number.
- *task*: the function that a rank runs. *Body*: the test method that it calls.
- *receipt*: the rank's statement about its body, submitted before the rank ends.
- *ending*: how the rank ended, by its receipt and its process.
- *outcome*: everything known about one rank. *Verdict*: the judgement over all outcomes of a world.
- *supervisor*: the process that the user started. It loads no torch. *Zygote*: a process that has loaded the modules
  of the ranks and forks them.
- *parent half*: the part of a test that runs in the *class process*, beside the ranks, and waits for them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch_ext.world._os import signal_name
from torch_ext.world.protocol import Phase, RankStatus, Receipt, Wait
from torch_ext.world.wording import place_in, place_of_death, ranks_by, ranks_phrase


class Ending(Enum):
    """How a rank ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    EXITED = "exited"
    KILLED = "killed"
    SILENT = "exited early"
    TIMED_OUT = "timed out"
    HUNG = "hung"
    STOPPED = "stopped"


# The name of an exception.
_EXCEPTION = re.compile(r"[^\W\d][\w.<>]*")


@dataclass
class Outcome:
    """Everything known about one rank at its end. Times are those of ``time.monotonic``."""

    rank: int
    ending: Ending
    exit_code: int | None = None  # of the process; negative for a signal; None if never started
    time_s: float = 0.0  # the end, by the rank's receipt, else as the harness saw it
    receipt: Receipt | None = None
    phase: Phase | None = Phase.RUNNING  # None if the rank had not loaded the modules of its task
    stacks: str = ""  # Python stacks of its threads, taken before the rank was stopped
    waits: tuple[Wait, ...] = ()  # of its threads at the end
    collectives: str = ""  # its flight record, in the format of `Collectives`, taken at the same time
    output: str = ""  # the end of its stdout and stderr
    left_behind: list[str] = field(default_factory=list)  # command lines of processes that the rank left running
    task: str = "test"  # the word for its task in reports
    host: str = ""  # in words, if the test asked for several hosts
    out_of_memory: bool = False  # killed by SIGKILL while the kernel's out-of-memory killer was active
    delayed_s: float = 0.0  # seconds of the test for which the rank waited for a core, until it was stopped
    died_at: str = ""  # `place`, if `output` no longer shows it

    @property
    def transport_failure(self) -> Receipt | None:
        """The receipt, if a process group, a store or RPC raised the failure; else None."""
        return self.receipt if self.ending is Ending.FAILED and self.receipt and self.receipt.transport else None

    @property
    def reason(self) -> str:
        """The receipt's reason; empty without a receipt."""
        return self.receipt.reason if self.receipt is not None else ""

    @property
    def sub_tests(self) -> tuple[str, ...]:
        """The sub-tests that failed; if no part failed, those that skipped."""
        return tuple(part.sub_test for part in self.receipt.parts if part.sub_test) if self.receipt else ()

    @property
    def label(self) -> str:
        """The rank in words, with its host if there are several."""
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @property
    def was_stopped(self) -> bool:
        return self.ending in (Ending.TIMED_OUT, Ending.HUNG, Ending.STOPPED)

    @property
    def ok(self) -> bool:
        return self.ending in (Ending.PASSED, Ending.SKIPPED)

    @property
    def place(self) -> str:
        """The user's line where the rank ended or was stopped, such as ``"at test_a.py:31"``; empty if unknown."""
        if self.receipt is not None and self.receipt.status is RankStatus.FAILED:
            return f"at {self.receipt.place}" if self.receipt.place else ""
        died_at = place_of_death(self.output) if self.ending is Ending.KILLED else ""
        return self.died_at or place_in(self.stacks) or died_at

    def describe(self) -> str:
        """Describe the rank's ending and its place in the user's code.

        >>> Outcome(1, Ending.KILLED, exit_code=-11).describe()
        'was killed by SIGSEGV'
        >>> Outcome(0, Ending.EXITED, exit_code=3).describe()
        'exited with code 3 before its test was over'
        >>> Outcome(0, Ending.FAILED, receipt=Receipt(RankStatus.FAILED, 1.0, "ValueError: no", place="a:7")).describe()
        'raised ValueError at a:7: no'
        """
        if self.ending is Ending.PASSED:
            return "passed"
        if self.ending is Ending.SKIPPED:
            return f"skipped: {_shorten(self.reason)}"
        if self.ending is Ending.FAILED:
            return self._failure()
        place = f" {self.place}" if self.place else ""
        if self.ending is Ending.KILLED:
            by = ", most likely by the kernel's out-of-memory killer" if self.out_of_memory else ""
            return f"was killed by {signal_name(-(self.exit_code or 0))}{by}{place}{self._when('')}"
        if self.ending in (Ending.EXITED, Ending.SILENT):
            early = "by os._exit() or the like, before" if not self.exit_code and not place else "before"
            return f"exited with code {self.exit_code or 0}{place}{self._when(f'{early} its {self.task} was over')}"
        if self.ending in (Ending.TIMED_OUT, Ending.HUNG):
            importing = "while it was importing" if self.phase is None and self.receipt is None else ""
            return f"{self.ending.value}{place}{self._when(importing)}"
        return f"was stopped{place}{self._when(f'while its {self.task} was running')}"

    def _failure(self) -> str:
        reason = _shorten(self.reason)
        error, _, message = reason.partition(": ")
        if not _EXCEPTION.fullmatch(error):
            return f"failed: {reason}"
        where = f" {self.place}" if self.place else ""
        if error.startswith("torch_ext.world."):  # a name that users do not know
            return f"failed{where}: {message}"
        error = error.rpartition(".")[2] if error.startswith("torch_ext.") else error
        return f"raised {error}{where}: {message}" if message else f"raised {error}{where}"

    def _when(self, otherwise: str) -> str:
        """Describe the progress of the test, after a space."""
        if self.receipt is not None:
            return f" after its {self.task} had {self.receipt.status.value}"
        if self.phase is Phase.SETTLING:
            return f" after its {self.task} had ended, in a thread or an exit function that it had left"
        return f" {otherwise}" if otherwise else ""


def may_be_expected(outcomes: Iterable[Outcome]) -> bool:
    """Whether these endings fit a test that is expected to fail: one failure is enough. A rank may hang only in a wait
    for its peers. No rank may die or skip alone, and no cleanup or thread may fail.

    >>> may_be_expected([Outcome(0, Ending.PASSED), Outcome(1, Ending.FAILED)])
    True
    >>> may_be_expected([Outcome(0, Ending.FAILED), Outcome(1, Ending.SKIPPED)])
    False
    """
    outcomes = list(outcomes)
    skips_alone = len({outcome.ending is Ending.SKIPPED for outcome in outcomes}) > 1
    return not skips_alone and all(map(_may_be_expected, outcomes))


def _may_be_expected(outcome: Outcome) -> bool:
    if outcome.ending is Ending.FAILED:
        return outcome.receipt is None or all(part.expectable for part in outcome.receipt.parts)
    if outcome.ending is Ending.HUNG:
        return bool(outcome.waits) and all(wait.transport for wait in outcome.waits)
    return outcome.ending in (Ending.PASSED, Ending.SKIPPED)


def _shorten(text: str, limit: int = 200) -> str:
    """Cut a long line, at first the folders of files with a line number; the traceback has all of it.

    >>> _shorten("send at /home/me/train.py:41 before recv", 30)
    'send at train.py:41 before rec...'
    """
    if len(text) > limit:
        text = re.sub(r"(?<!\S)/\S+/(?=[^\s/]+:\d)", "", text)
    return text if len(text) <= limit else text[:limit].rstrip() + "..."


# Operations that the recorder names after the backend's method.
_PUBLIC = {
    "all_gather_base": "all_gather_into_tensor",
    "allgather_base": "all_gather_into_tensor",
    "reduce_scatter_base": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}


@dataclass(frozen=True)
class Collective:
    """One entry of a rank's record."""

    group: str  # the process group's name, with its description
    sequence: int  # number within the group, from 1, without point-to-point operations
    operation: str  # such as "gloo:all_reduce"
    shapes: str  # input sizes and types, such as "[3] Float"
    finished: bool  # ended on this rank, with or without an error

    def __str__(self) -> str:
        return f"#{self.sequence} {self.operation}({self.shapes}) in group {self.group}"

    @property
    def name(self) -> str:
        """The public name of the operation, such as ``"all_gather_into_tensor"``."""
        name = self.operation.rpartition(":")[2].strip("_")
        return _PUBLIC.get(name, name)

    @property
    def description(self) -> str:
        return f"{self.name}({self.shapes})"

    @property
    def kind(self) -> tuple[str, str]:
        """The part that must match on all ranks; includes shapes if the operation requires equal ones."""
        name = self.operation.rpartition(":")[2].strip("_")
        uneven = name == "scatter" or any(part in name for part in ("gather", "to_all", "alltoall"))
        return self.operation, "" if uneven else self.shapes


@dataclass(frozen=True)
class Mismatch:
    """The first point at which ranks diverge, in a sentence."""

    sentence: str
    ranks: tuple[int, ...]  # to blame; empty if unknown
    differ: bool = False  # ranks called different collectives; False: some ranks called none
    calls: tuple[tuple[tuple[int, ...], str], ...] = ()  # if they differ, the ranks and their call
    cause: str = ""  # first line of a report, in the user's terms: the ranks to blame, their action and its place


def read_record(record: str) -> list[Collective]:
    """Read the collectives of a rank's flight record, without point-to-point operations."""
    return [_read_entry(entry) for entry in _parsed(record).get("entries", []) if not entry.get("is_p2p")]


def read_groups(record: str) -> dict[str, list[int]]:
    """Return the ranks of each process group in a record, by the group's name."""
    return dict(_parsed(record).get("groups", {}))


def destroyed_at(record: str, group: str) -> str:
    """Return the line at which the rank destroyed ``group`` (the first word of its name); empty if it did not."""
    lines = {} if group in read_groups(record) else _parsed(record).get("destroyed", {})
    return str(lines.get(group) or lines.get("*") or "")


def _parsed(record: str) -> dict[str, Any]:
    read = json.loads(record or "{}")
    return read if isinstance(read, dict) else {"entries": read}


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
    """Return the first collective in which the ranks differ or wait for each other; None if there is none. ``records``
    has each rank's collectives, oldest first.
    """
    groups = dict.fromkeys(each.group for record in records.values() for each in record)
    for group in groups:
        calls = {
            rank: {each.sequence: each for each in record if each.group == group} for rank, record in records.items()
        }
        if (found := _mismatch_in(calls)) is not None:
            return found
    return None


def minority(parties: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks outside the party with more than half of all ranks; empty if there is no such party.

    >>> minority([[0, 3], [1], [2, 4, 5]])
    ()
    >>> minority([[0, 2, 3], [1]])
    (1,)
    """
    ranked = sorted(parties, key=len)
    few = sorted(rank for party in ranked[:-1] for rank in party)
    return tuple(few) if ranked and len(ranked[-1]) > len(few) else ()


def uneven_sizes(records: Mapping[int, Sequence[Collective]]) -> Mismatch | None:
    """Return the first unfinished collective whose ranks have inputs of different sizes. Blames no rank, since some
    backends accept that. Ignores ranks without inputs, as in a scatter.
    """
    for each in (each for record in records.values() for each in record if not each.finished):
        called = each.group, each.sequence, each.operation
        sizes = ranks_by(
            (other.shapes, rank)
            for rank, record in records.items()
            for other in record
            if (other.group, other.sequence, other.operation) == called and other.shapes
        )
        if len(sizes) > 1:
            parts = ", ".join(f"{shapes} by {ranks_phrase(ranks)}" for shapes, ranks in sizes.items())
            what = f"#{each.sequence} {each.operation} in group {each.group}"
            return Mismatch(f"{what} was called with {parts}; make the sizes equal if it requires that", ())
    return None


def _mismatch_in(records: Mapping[int, Mapping[int, Collective]]) -> Mismatch | None:
    # Every rank belongs to the default group. Of any other group, only the callers are known members.
    everyone = any("default_pg" in each.group for record in records.values() for each in record.values())
    members = {rank: record for rank, record in records.items() if record or everyone}
    for sequence in sorted({number for record in members.values() for number in record}):
        here = {rank: record[sequence] for rank, record in members.items() if sequence in record}
        missing = [rank for rank, record in members.items() if max(record, default=0) < sequence]
        kinds = ranks_by((each.kind, rank) for rank, each in here.items())
        shown = {each.kind: each for each in here.values()}
        if len(kinds) > 1:
            parts = [
                f"{ranks_phrase(ranks)} called {shown[kind].operation}({shown[kind].shapes})"
                for kind, ranks in kinds.items()
            ]
            calls = tuple((tuple(ranks), shown[kind].description) for kind, ranks in kinds.items())
            sentence = f"the ranks differ in collective #{sequence}: {', '.join(parts)}"
            return Mismatch(sentence, minority(kinds.values()), differ=True, calls=calls)
        if missing:
            called = next(iter(here.values()))
            sentence = f"{ranks_phrase(list(here))} called {called}, which {ranks_phrase(missing)} never called"
            return Mismatch(sentence, tuple(missing))
    return None


# A transport's timeout, which identifies the waiting rank, not the guilty one.
_LIMIT = re.compile(r"tim(e|ed)[ -]?out|wait timeout|deadline|failed to pass monitoredBarrier", re.IGNORECASE)
# A backend's report of different collectives: from `simccl`, and from torch's threaded group with our additions.
_DISAGREE = re.compile(r"ranks (?:disagree in|differ in a collective)")
_CALLED = re.compile(
    r"\brank (\d+)(?: \([^)]*\))? called (.+?)(?: at (\S+:\d+))?(?=; |\.(?: |$)|$)",
)


def disagreement(reason: str) -> Iterator[tuple[int, str, str]]:
    """Yield rank, call and line for each call in ``reason``, if ``reason`` reports a disagreement of ranks.

    >>> list(disagreement("ranks disagree in the root: rank 0 called b, root 0 at /a/t.py:3; rank 1 called b, root 1."))
    [(0, 'b, root 0', 't.py:3'), (1, 'b, root 1', '')]
    """
    if _DISAGREE.search(reason):
        for rank, call, line in _CALLED.findall(reason):
            yield int(rank), call, os.path.basename(line)


def ran_out_of_time(reason: str) -> bool:
    """Whether ``reason`` is the message of a transport's own timeout, because peers did not call."""
    return bool(_LIMIT.search(reason))
