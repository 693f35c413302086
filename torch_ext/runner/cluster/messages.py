"""Every message between the driver, a machine's actor, its supervisor and those of other machines. Standard library
and own layer only.

======================  =============================================================
from -> to              messages
======================  =============================================================
actor -> supervisor     :class:`Settings` first, then :class:`RunClass` and
                        :class:`JoinClass`
supervisor -> actor     :class:`Ready` first, then :class:`Told`
host 0 -> another       on a link: :class:`FarStart`, :class:`ToRank`,
                        :class:`FarSignal`, :class:`Abandon`
another -> host 0       on a link: :class:`Clock` or :class:`Refusal` first, then
                        :class:`FarStarted`, :class:`FromRank`, :class:`FarEnded`
======================  =============================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch_ext.runner.options import Options
from torch_ext.runner.results import Began, Over, TestResult, Tick
from torch_ext.runner.schedule import Need
from torch_ext.world.protocol import Ended, RankOrder

__all__ = [
    "Abandon",
    "Clock",
    "Event",
    "FarEnded",
    "FarOrder",
    "FarSignal",
    "FarStart",
    "FarStarted",
    "FromRank",
    "HostLost",
    "JoinClass",
    "Listening",
    "Peer",
    "Ready",
    "Refusal",
    "RunClass",
    "Settings",
    "ShippedFile",
    "Stream",
    "ToRank",
    "Told",
]


@dataclass(frozen=True)
class Settings:
    """What the supervisor of a machine runs by.

    Attributes:
        options: what the user asked for.
        environment: variables that it adds to its own.
        cache: folder for what is kept between runs; empty: the machine's own.
    """

    options: Options
    environment: dict[str, str]
    cache: str = ""


@dataclass(frozen=True)
class Ready:
    """A supervisor takes classes. ``devices`` is how many devices its ranks must share, 0 where they need not."""

    devices: int


@dataclass(frozen=True)
class ShippedFile:
    """A test file, wherever a machine has unpacked what was shipped: paths are relative to that folder."""

    name: str
    path: str
    module: str
    import_root: str


@dataclass(frozen=True)
class RunClass:
    """Run these tests of one class.

    Attributes:
        number: tells this order from all others.
        need: what the class takes of this machine.
        address: where other machines reach this one.
        name: what the report calls this machine.
        peers: the machines that run ranks too, from host 1 on.
        token: what they recognize this machine by.
    """

    number: int
    file: ShippedFile
    cls: str
    methods: tuple[str, ...]
    need: Need
    address: str = ""
    name: str = ""
    peers: tuple[Peer, ...] = ()
    token: str = ""


@dataclass(frozen=True)
class Peer:
    """A machine that runs ranks of a class: where it listens, and what the report calls it."""

    address: str
    port: int
    name: str


@dataclass(frozen=True)
class JoinClass:
    """Run ranks of a class that another machine runs. It will connect to ``address``, and send ``token`` first."""

    number: int
    file: ShippedFile
    cls: str
    need: Need
    address: str
    token: str


@dataclass(frozen=True)
class Listening:
    """The machine waits at ``port`` for the one that runs the class."""

    port: int


@dataclass(frozen=True)
class HostLost:
    """Host ``host`` of a class, from 1 on, is out of reach, and ``why`` says how that was noticed; or it says that it
    cannot run the class, and why: then it is not ``gone``.
    """

    host: int
    why: str
    gone: bool = True


Event = Began | Over | TestResult | Tick | Listening | HostLost


@dataclass(frozen=True)
class Told:
    """Something happened in the class of order ``number``; ``event`` is None when nothing more comes of it.

    ``now_s`` is the machine's ``time.monotonic``, whose zero is its own.
    """

    number: int
    event: Event | None
    now_s: float


# On a link


@dataclass(frozen=True)
class Clock:
    """``time.monotonic`` of another host, whose zero is its own."""

    now_s: float


@dataclass(frozen=True)
class Refusal:
    """Another host cannot run ranks of the class; ``why`` is the reason in one line. Nothing follows."""

    why: str


@dataclass(frozen=True)
class FarOrder:
    """One rank for another host.

    Attributes:
        target: what it calls.
        rank: the order as the parent half has given it.
        changed: what its environment has that that of the class had not, or has otherwise; None: what it lacks.
        connections: how many pipes its task has.
    """

    target: str
    rank: RankOrder
    changed: Mapping[str, str | None]
    connections: int


@dataclass(frozen=True)
class FarStart:
    """Start these ranks as world ``world``. ``directory``: what they work in, below the folder that was shipped."""

    world: int
    orders: tuple[FarOrder, ...]
    directory: str
    interpreter: bool
    spares: int


@dataclass(frozen=True)
class FarStarted:
    """They exist; see :class:`~torch_ext.world.protocol.Started`."""

    world: int
    pids: tuple[int, ...]
    why_interpreter: str


@dataclass(frozen=True)
class FarEnded:
    """One has ended, and all that came of it is told. Indices are those of the order to its host."""

    world: int
    ended: Ended


@dataclass(frozen=True)
class FarSignal:
    """Send a signal to rank ``index`` of the order."""

    world: int
    index: int
    number: int


@dataclass(frozen=True)
class Abandon:
    """Nobody waits for this world any more: end what lives of it."""

    world: int


class Stream(Enum):
    """What connects a rank with its parent half, besides the pipes of its task."""

    CHANNEL = "messages"
    OUTPUT = "what it prints"
    STACKS = "where it is"


@dataclass(frozen=True)
class ToRank:
    """``payload`` for rank ``index``: a message of its channel, or bytes of pipe number ``stream``; None: its end."""

    world: int
    index: int
    stream: Stream | int
    payload: Any


@dataclass(frozen=True)
class FromRank:
    """The same in the other direction."""

    world: int
    index: int
    stream: Stream | int
    payload: Any
