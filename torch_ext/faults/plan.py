"""A fault plan: what goes wrong on which rank, and when. Its text form, and random plans. Standard library only.

.. code-block:: text

    rank 1: kill at all_reduce #3; rank 0: delay 2s at #5 of group dp; every rank: slow 3x
    rank 2: raise ValueError at forward of layers.1 #2; ranks 0, 3: fail allocation #7

==========================  ====================================================================================
kind                        what happens on the rank, just before the call that its point names
==========================  ====================================================================================
``raise [TYPE]``            an exception: :class:`InjectedFault`, or TYPE of builtins or a module
``kill [SIGNAL]``           the process gets SIGKILL, or SIGNAL
``exit [CODE]``             the process ends by ``os._exit(1)``, or with CODE
``hang``                    the thread waits for ever
``stop 2s``                 the process gets SIGSTOP, and after the time SIGCONT
``delay 2s``                the thread sleeps
``drop``                    the call never happens. Its peers wait; a lost send is over at once
``duplicate``               a send, or a call of a function, is made twice
``corrupt [element N]``     a bit of what the call sends is flipped (``[bit N]``), or of what it receives or returns
``slow 3x``                 from this point on, the rank takes three times the CPU time between its calls
``split 0, 1``              from this point on, calls of groups with ranks on both sides are dropped
``fail allocation #7``      the 7th allocation on a simulated device finds no memory
``fill disk``               from this point on, this rank's writes to files fail with ENOSPC; ``fill disk after 4096``:
                            bytes that are still written; of the folder that a point ``write to FOLDER`` names
==========================  ====================================================================================

A point is ``all_reduce #3`` (variants count as one: ``_coalesced``, ``_into_tensor``), ``collective #3``, ``send #3``,
or ``#3``: any call; each may end with ``of group NAME``. Others: ``forward of MODULE #3``, ``backward of MODULE #3``,
``step #3`` of an optimizer, ``phase NAME #3`` of :func:`points.phase`, ``call of package.function #3``, ``write to
FOLDER #3`` of a file below it. A rank counts its calls from 1, from the moment the plan is armed. ``#3+`` means the
third and all later ones. ``virtual time 5ms`` is the first of these, but for functions and writes, at which the host of
the rank has reached that time.

After a restart of ranks, a fault strikes only in the generation that its point ends with, ``in generation 2`` or ``in
every generation``. Without it that is generation 0, so that no fault strikes what recovers from it.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

# The families of c10d's calls, a longer name before its beginning.
_FAMILIES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all",
    "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv",
)  # fmt: skip
TRANSFERS = ("send", "recv")
COLLECTIVE = "collective"
_DURATION, _FACTOR, _RANKS = r"(\d+(?:\.\d+)?)(ms|s)", r"\d+(?:\.\d+)?x", r"\d+(?:\s*,\s*\d+)*"
# The kinds, with a pattern of their value.
KINDS = {
    "raise": r"([A-Za-z_][\w.]*)?",
    "kill": r"(SIG[A-Z0-9]+)?",
    "exit": r"\d*",
    "hang": "",
    "stop": _DURATION,
    "delay": _DURATION,
    "drop": "",
    "duplicate": "",
    "corrupt": r"(element \d+)?\s*(bit \d+)?",
    "slow": _FACTOR,
    "split": _RANKS,
    "fail": "allocation",
    "fill": r"disk(\s+after \d+)?",
}
# A point in virtual time, and the units of one in nanoseconds.
TIME = "virtual time"
_UNITS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
_OF = {"forward": " of", "backward": " of", "call": " of", "write": " to"}
# Kinds that change the call itself, so that its point must be a call.
OF_A_CALL = ("drop", "duplicate", "corrupt", "split")
_FAULT = re.compile(r"(?:ranks?\s+(?P<ranks>[\d,\s]+?)|every rank)\s*:\s*(?P<kind>[a-z]+)\s*(?P<rest>.*)", re.DOTALL)
_POINT = re.compile(
    r"(?:(?P<where>forward|backward|phase|step|call|write|virtual time)\b(?:\s+(?:of|to)\b)?\s*)?"
    r"(?P<name>[\w./<>-]*)\s*"
    r"(?:#(?P<number>[1-9]\d*)(?P<onwards>\+?))?(?:\s*of group (?P<group>\S+))?"
    r"(?:\s*in (?:generation (?P<generation>\d+)|(?P<every>every generation)))?"
)
EXAMPLE = "rank 1: kill at all_reduce #3"


@lru_cache(maxsize=256)
def family(name: str) -> str:
    """Return the family of a call by any of its names, or an empty string.

    >>> family("_allgather_base_"), family("all_gather_into_tensor_coalesced"), family("irecv"), family("mul")
    ('all_gather', 'all_gather', 'recv', '')
    """
    plain = name.replace("_", "").lower()
    plain = plain[1:] if plain in ("isend", "irecv") else plain
    return next((each for each in _FAMILIES if plain.startswith(each.replace("_", ""))), "")


@dataclass(frozen=True)
class Point:
    """A moment of a rank: the call with this number among those that fit."""

    where: str = ""  # "": a call of a process group; or forward, backward, phase, step, call (of a function), write
    name: str = ""  # of the operation's family, module, phase, function or folder; empty: any. Of virtual time: 5ms
    number: int = 1
    onwards: bool = False  # at later calls too
    group: str = ""  # the process group's name or description; empty: any
    generation: int | None = 0  # of the ranks, the number of restarts before it; None: every one

    @property
    def time_ns(self) -> float:
        """When it is, of a point in virtual time."""
        number, unit = re.findall(r"[\d.]+|[a-z]+", self.name)
        return float(number) * _UNITS[unit]

    def __str__(self) -> str:
        of = _OF.get(self.where, "") if self.name else ""
        number = "" if self.where == TIME else f"#{self.number}{'+' * self.onwards}"
        words = [self.where + of, self.name, number]
        every = " in every generation" if self.generation is None else ""
        later = f" in generation {self.generation}" if self.generation else every
        return " ".join(word for word in words if word) + (f" of group {self.group}" if self.group else "") + later


@dataclass(frozen=True)
class Fault:
    """One fault of a plan. Its text form is ``str()``."""

    kind: str
    value: str = ""
    point: Point = field(default_factory=Point)
    ranks: tuple[int, ...] = ()  # empty: every rank

    def __str__(self) -> str:
        who = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}" if self.ranks else "every rank"
        what = f"{self.kind} {self.value}".rstrip()
        if self.kind == "fail":
            return f"{who}: {what} {self.point}"
        return f"{who}: {what} at {self.point}"

    def strikes(self, rank: int) -> bool:
        """Whether the fault is one of ``rank``."""
        return not self.ranks or rank in self.ranks

    @property
    def seconds(self) -> float:
        """The duration of a delay or stop."""
        return float(self.value[:-1])

    @property
    def exit_code(self) -> int | None:
        """How the process ends, as :mod:`subprocess` has it; None if it does not end by this fault."""
        if self.kind == "kill":
            return -signal.Signals[self.value or "SIGKILL"]
        return int(self.value or "1") if self.kind == "exit" else None


@dataclass(frozen=True)
class Plan:
    """Faults, in the order of their text."""

    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults))

    @property
    def needs_clock(self) -> bool:
        """Whether it has points in virtual time."""
        return any(fault.point.where == TIME for fault in self.faults)

    @property
    def ranks(self) -> set[int]:
        """The ranks that the plan names."""
        return {rank for fault in self.faults for rank in fault.ranks}


def parse(text: str) -> Plan:
    """Read a plan: faults that are separated by ``;`` or lines, comments after ``#`` and a space. Raises ValueError.

    >>> str(parse("rank 0: delay 500ms at #5 of group dp; every rank:slow 3x"))
    'rank 0: delay 0.5s at #5 of group dp; every rank: slow 3x at #1'
    """
    lines = [re.sub(r"(^|\s)#\s.*", "", line) for line in text.splitlines()]
    faults = tuple(_fault(part.strip()) for line in lines for part in line.split(";") if part.strip())
    if not faults:
        raise ValueError(f"the fault plan {text!r} has no fault; expected one, such as {EXAMPLE!r}")
    return Plan(faults)


def read(given: str) -> Plan:
    """Parse a plan, or the file of that name."""
    if os.path.isfile(given):
        with open(given, encoding="utf-8") as file:
            return parse(file.read())
    return parse(given)


def _fault(text: str) -> Fault:
    found = _FAULT.fullmatch(text)
    if found is None:
        raise ValueError(f"the fault {text!r} is not one; expected RANK: KIND at POINT, such as {EXAMPLE!r}")
    kind, rest = found["kind"], found["rest"].strip()
    if kind not in KINDS:
        raise ValueError(f"{text!r}: there is no kind {kind!r} of fault; expected one of {', '.join(KINDS)}")
    value, at, where = rest.partition("at ") if rest.startswith("at ") else rest.partition(" at ")
    if kind == "fail":
        value, _, number = rest.partition("#")
        value, where = value.strip(), f"#{number or 1}"
    value = value.strip()
    if not re.fullmatch(KINDS[kind], value):
        raise ValueError(f"{text!r}: {kind!r} cannot take {value!r}; expected something like {_LIKE[kind]!r}")
    ranks = tuple(sorted({int(each) for each in re.findall(r"\d+", found["ranks"] or "")}))
    fault = Fault(kind, _plain(kind, value, text), _point(where.strip() if at or kind == "fail" else "", text), ranks)
    if kind in OF_A_CALL and fault.point.where not in ("", "call"):
        raise ValueError(f"{text!r}: {kind!r} is for a call, of a process group or a function")
    if kind in ("split", "slow") and fault.point.where in ("call", "write", TIME):
        raise ValueError(f"{text!r}: {kind!r} is for calls of process groups")
    if kind == "raise" and fault.point.where == "write":
        raise ValueError(f"{text!r}: a write cannot raise; 'fill disk' makes it fail")
    return fault


_LIKE = {
    **{kind: kind for kind in KINDS},
    "raise": "raise ValueError",
    "kill": "kill SIGTERM",
    "exit": "exit 3",
    "stop": "stop 2s",
    "delay": "delay 500ms",
    "corrupt": "corrupt element 7 bit 3",
    "slow": "slow 3x",
    "split": "split 0, 1",
    "fail": "fail allocation #7",
    "fill": "fill disk after 4096",
}


def _plain(kind: str, value: str, text: str) -> str:
    """Return the value in the form that is printed."""
    if kind == "kill" and value and value not in signal.Signals.__members__:
        raise ValueError(f"{text!r}: there is no signal {value}")
    if duration := re.fullmatch(_DURATION, value) if kind in ("stop", "delay") else None:
        return f"{float(duration[1]) / (1000 if duration[2] == 'ms' else 1):g}s"
    if kind == "split":
        return ", ".join(re.findall(r"\d+", value))
    return " ".join(value.split())


def _point(text: str, of: str) -> Point:
    found = _POINT.fullmatch(text)
    if found is None:
        raise ValueError(f"{of!r}: {text!r} is no point; expected one like 'all_reduce #3', 'forward of layers.1 #2'")
    where, name = found["where"] or "", found["name"]
    if where == TIME and (found["number"] or not re.fullmatch(r"\d+(\.\d+)?(ns|us|ms|s)", name)):
        raise ValueError(f"{of!r}: expected a time and no number, such as 'virtual time 5ms'")
    if where in ("phase", "call") and not name:
        raise ValueError(f"{of!r}: expected a name, as in 'phase save' and 'call of torch.save'")
    if where == "step" and name:
        raise ValueError(f"{of!r}: steps have numbers only, such as 'step #3'")
    if where and found["group"]:
        raise ValueError(f"{of!r}: only calls of process groups are of a group")
    if not where and name:
        name = COLLECTIVE if name == COLLECTIVE else family(name)
        if not name:
            expected = ", ".join((COLLECTIVE, *_FAMILIES))
            raise ValueError(f"{of!r}: there is no operation {found['name']!r}; expected {expected}")
    generation = None if found["every"] else int(found["generation"] or 0)
    return Point(where, name, int(found["number"] or 1), bool(found["onwards"]), found["group"] or "", generation)


def draw(seed: int, calls: Mapping[int, int], kinds: Sequence[str]) -> Plan:
    """Return a plan of one fault: a kind of ``kinds`` (with its value, as in a plan) at some collective of some rank.
    Equal arguments give equal plans. ``calls``: how many collectives each rank makes.
    """
    chosen = random.Random(seed)
    places = [(rank, number) for rank, count in sorted(calls.items()) for number in range(1, count + 1)]
    if not places:
        raise ValueError("the undisturbed run made no collective, so there is no place for a fault")
    rank, number = chosen.choice(places)
    return parse(f"rank {rank}: {chosen.choice(kinds)} at {COLLECTIVE} #{number}")


def simpler(plan: Plan) -> list[Plan]:
    """Return plans that are simpler by one change, the simplest first: with a fault less, or an earlier one."""
    fewer = [Plan(plan.faults[:at] + plan.faults[at + 1 :]) for at in range(len(plan.faults)) if len(plan.faults) > 1]
    return fewer + [
        Plan((*plan.faults[:at], replace(fault, point=replace(fault.point, number=number)), *plan.faults[at + 1 :]))
        for at, fault in enumerate(plan.faults)
        for number in sorted({1, fault.point.number // 2, fault.point.number - 1})
        if 0 < number < fault.point.number
    ]
