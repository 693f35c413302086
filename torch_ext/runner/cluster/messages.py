"""Every message between the driver, a machine's actor and the supervisors. Standard library and own layer only.

======================  =======================================================================
from -> to              messages
======================  =======================================================================
actor -> supervisor     the user's options first, then a :class:`RunClass` with a channel each
supervisor -> actor     the number of its devices
======================  =======================================================================

On the channel of a class, the supervisor sends an :data:`Event`, and None at the end of the class. None from the
actor ends the class. :class:`Line` goes to the supervisor of another host, through the actors of both machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch_ext.results import Began, Over, Stalled, TestResult, Tick
from torch_ext.runner.schedule import Batch


@dataclass(frozen=True)
class RunClass:
    """Run the tests of a class as its host 0, or some of its ranks as another host."""

    number: int  # identifies this run of the class on all of its hosts
    batch: Batch  # the class, with its need of this machine. Paths of its file are relative to the shipped folder.
    host: int = 0  # the number of this machine among the hosts of the class
    address: str = ""  # of this machine, for the other hosts
    names: tuple[str, ...] = ()  # of the machine of each host, for the report; empty for a class on one host


@dataclass(frozen=True)
class Joined:
    """The machine has loaded the class's file, and can start ranks for its host 0."""


@dataclass(frozen=True)
class HostFailed:
    """The machine cannot run its ranks of the class, or has ``lost`` them."""

    why: str
    lost: bool = False


Event = Began | Over | TestResult | Tick | Stalled | Joined | HostFailed


class RankStream(Enum):
    """The connections of ranks to their zygote and to their parent half, besides the numbered pipes of their task."""

    GROUP = "the group channel of the world"
    CHANNEL = "messages"
    OUTPUT = "standard output and error"
    STACKS = "stacks"


@dataclass(frozen=True)
class Line:
    """A message between host 0 of class ``number`` and another host."""

    number: int
    source: int
    to: int
    sequence: int  # counts the messages between the two; Ray's threads overtake each other
    now_s: float  # the sender's `time.monotonic`, whose zero differs between machines
    world: int  # the world, by its number on host 0
    stream: RankStream | int  # a connection of rank `index`, by its number on the other host
    # A message of a channel, or bytes of a pipe; None: its end. On the stream of a group a message of
    # `world/protocol.py`; `Start` comes with the environment of the class on host 0.
    payload: Any
    index: int = 0
