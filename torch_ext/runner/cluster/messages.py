"""Every message between the driver, a machine's actor, its supervisor and those of other machines. Standard library
and own layer only.

======================  ====================================================================
from -> to              messages
======================  ====================================================================
actor -> supervisor     :class:`Settings` first, then :class:`RunClass`
supervisor -> actor     the number of its devices first, then :class:`Told`
host 0 -> another       on a link: :class:`Origin` first, then :class:`Line`
another -> host 0       on a link: :class:`Clock` or :class:`Refusal` first, then :class:`Line`
======================  ====================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch_ext.results import Began, Over, Stalled, TestResult, Tick
from torch_ext.runner.options import RunOptions
from torch_ext.runner.schedule import Batch

__all__ = [
    "Clock",
    "Event",
    "HostLost",
    "Line",
    "Listening",
    "Origin",
    "Peer",
    "RankStream",
    "Refusal",
    "RunClass",
    "Settings",
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

    options: RunOptions
    environment: dict[str, str]
    cache: str = ""


@dataclass(frozen=True)
class RunClass:
    """Run the tests of one class as its host 0, or ranks of it as another host.

    Attributes:
        number: tells this order from all others.
        batch: the class, with what it needs of this machine. Paths of its file are relative to the shipped folder.
        host: which of its hosts this machine is.
        address: where other machines reach this one.
        name: what the report calls this machine.
        peers: the machines that run ranks too, from host 1 on; of host 0 alone.
        token: what the machines of the class recognize one another by.
    """

    number: int
    batch: Batch
    host: int = 0
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


Event = Began | Over | TestResult | Tick | Stalled | Listening | HostLost


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
class Origin:
    """The environment of the class on host 0, and its working directory, before its tests change either."""

    environment: dict[str, str]
    directory: str


@dataclass(frozen=True)
class Clock:
    """``time.monotonic`` of another host, whose zero is its own."""

    now_s: float


@dataclass(frozen=True)
class Refusal:
    """Another host cannot run ranks of the class; ``why`` is the reason in one line. Nothing follows."""

    why: str


class RankStream(Enum):
    """What connects ranks with their zygote and with their parent half, besides the numbered pipes of their task."""

    GROUP = "the group channel of the world"
    CHANNEL = "messages"
    OUTPUT = "what it prints"
    STACKS = "where it is"


@dataclass(frozen=True)
class Line:
    """``payload`` of a stream of rank ``index``, as numbered on its host: a message of a channel, or bytes of a pipe;
    None: its end. On the stream of a group, the payload is a message of ``world/protocol.py``.
    """

    world: int
    stream: RankStream | int
    payload: Any
    index: int = 0
