"""What ran when: the works of one rank, and questions about them. All times are nanoseconds of virtual time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torch_ext.sim._name import NAME

_KINDS = {"kernel", "copy", "collective", "transfer", "host"}
_NAMES = {"all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "reduce_scatter"}
_NAMES |= {"scatter", "send", "recv", "sleep", "wait"}


class Work(NamedTuple):
    """Something that took time."""

    kind: str  # kernel, copy, collective, transfer, or host: a wait
    name: str  # of the operator, or of the operation without its variants: all_gather, reduce_scatter
    device: int  # -1: the host
    stream: int  # -1: the lane of its group
    group: str
    peer: int  # of a transfer; of a collective, the rank that was ready last; otherwise -1
    bytes: int  # that a collective sends from this rank, that a copy moves, that a kernel reads and writes
    ready: int  # when its stream and the host would have let it start
    start: int
    end: int
    after: int  # number of the work whose end made it ready; -1: the start of the program, or a launch
    module: str = ""  # of a program, that launched the kernel or copy; or its optimizer

    @property
    def lane(self) -> str:
        """The row of a timeline that the work belongs to."""
        if self.kind == "host":
            return "host"
        return f"stream {self.stream}" if self.stream >= 0 else f"group {self.group}"


class Step(NamedTuple):
    """A part of a critical path."""

    name: str  # of the work or its module; "host": launches; "rank N": a wait for that rank to take part
    time: int


@dataclass
class Trace:
    """The works of one rank, in the order of their launches."""

    begin: int = 0
    end: int = 0
    first: int = 0  # number of the first of `works`
    works: list[Work] = field(default_factory=list)

    @property
    def time(self) -> int:
        """The length of the whole."""
        return self.end - self.begin

    def select(self, name: str) -> list[Work]:
        """Return the works of a name (``all_gather``, ``aten::mm``, also for ``aten::mm_``) or a kind (``kernel``).

        Raises:
            ValueError: neither the trace nor torch has an operation of this name. All questions below raise it.
        """
        base = name.removesuffix("_")  # torch runs most operators in place by others
        found = [work for work in self.works if name == work.kind or base == work.name.removesuffix("_")]
        if not found and not _is_known(name):
            had = ", ".join(sorted({work.name for work in self.works} | _KINDS))
            raise ValueError(f"Got {name!r}, which is no operation. This trace has {had}.")
        return [work for work in found if work.start >= 0]

    def busy(self, name: str) -> int:
        """Return the time in which a work of this name or kind runs."""
        return _length(self.select(name))

    def overlap(self, one: str, other: str) -> int:
        """Return the time in which works of both names or kinds run."""
        return self.busy(one) + self.busy(other) - _length(self.select(one) + self.select(other))

    def exposed(self, name: str) -> int:
        """Return the time in which a work of this name or kind runs, and no kernel does."""
        return self.busy(name) - self.overlap(name, "kernel")

    def idle(self, stream: torch.Stream | tuple[int, int]) -> int:
        """Return the time in which nothing runs on ``stream``, which a pair names by its device and id.

        Raises:
            ValueError: it is a pair that ran nothing, or a stream of another kind of device.
        """
        where = (stream.device_index, stream.stream_id) if isinstance(stream, torch.Stream) else stream
        had = sorted({(work.device, work.stream) for work in self.works if work.stream >= 0})
        if where not in had and not (isinstance(stream, torch.Stream) and stream.device.type == NAME):
            raise ValueError(f"Got the stream {stream}. This trace has {', '.join(map(str, had)) or 'none'}.")
        return self.time - _length(work for work in self.works if (work.device, work.stream) == where)

    def sent(self, name: str) -> int:
        """Return the bytes of the works of this name or kind: of collectives, those that leave this rank."""
        return sum(work.bytes for work in self.select(name))

    def critical_path(self) -> list[Step]:
        """Return the chain of works that the length depends on, from the begin to the end. Their times add up to
        :attr:`time`. If one of the steps takes less, the whole may.
        """
        steps: list[Step] = []
        ends = [(work.end, number) for number, work in enumerate(self.works) if work.kind != "host"]
        at, number = self.end, max(ends)[1] if ends else None
        while number is not None:
            work = self.works[number]
            self._add(steps, "host", at - work.end)
            self._add(steps, work.module or work.name, work.end - work.start)
            at, number = work.start, work.after - self.first if work.after >= self.first else None
            if work.start > work.ready:
                held_up = self._ahead(work)
                if held_up is None:
                    self._add(steps, f"rank {work.peer}", work.start - work.ready)
                    at = work.ready
                else:
                    number = held_up
        self._add(steps, "host", at - self.begin)
        return steps[::-1]

    def digest(self) -> str:
        """Return a hash of everything that ran and when."""
        rows = (repr((*work[:4], *work[5:])) for work in self.works)  # names of groups may be drawn
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()

    def _ahead(self, work: Work) -> int | None:
        """Return the work that ``work``, which was ready, has waited for on the lane of its group or at its engine."""
        for number, other in enumerate(self.works):
            same = other.group == work.group if work.group else other.kind == "copy" and other.device == work.device
            if same and other.end == work.start and other is not work and other.start >= 0:
                return number
        return None

    @staticmethod
    def _add(steps: list[Step], name: str, time: int) -> None:
        if time > 0:
            if steps and steps[-1].name == name:
                time += steps.pop().time
            steps.append(Step(name, time))


def _is_known(name: str) -> bool:
    namespace, _, operator = name.rpartition("::")
    return name in _KINDS | _NAMES or (bool(namespace) and hasattr(getattr(torch.ops, namespace), operator))


def _length(works: Iterable[Work]) -> int:
    """Return the time in which any of ``works`` runs."""
    length = until = 0
    for start, end in sorted((work.start, work.end) for work in works if work.start >= 0):
        length += max(0, end - max(start, until))
        until = max(until, end)
    return length
