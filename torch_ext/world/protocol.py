"""What a zygote and its clients say to each other. Standard library only.

Note [Zygote protocol]
~~~~~~~~~~~~~~~~~~~~~~
A *client* holds a command channel to the zygote. It asks for a *brood*, a set of children with one fate, by sending
:class:`Start` with the descriptor of a fresh channel, the brood's own, and of whatever the children inherit. On the
brood's channel the zygote answers :class:`Started` and later one :class:`Ended` a child; the client may send
:class:`Send` to signal a child. Closing the channel abandons the brood: its children are killed and reaped. Closing the
first command channel ends the zygote with all its children.

Every child, forked or executed, begins in :func:`child_main`: it waits on its own socket for one order and then calls
the order's target. A *spare* is such a child that was forked before anyone asked; it has done nothing but wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["AddClient", "Ended", "LeftBehind", "Order", "Send", "Start", "Started"]


@dataclass(frozen=True)
class Order:
    """What one child is to do: call ``target`` (``"module:function"``) with ``payload`` and its descriptors."""

    target: str
    payload: Any
    descriptors: int


@dataclass(frozen=True)
class Start:
    """Ask for a brood. Descriptors: the brood's channel, then those of each order in turn.

    Attributes:
        orders: one a child.
        environment: the environment of the children, as it is now; the zygote compares it with the one it was started
            with.
        interpreter: give every child an interpreter of its own.
        spares: how many children to fork ahead of the next request.
    """

    orders: tuple[Order, ...]
    environment: dict[str, str]
    interpreter: bool = False
    spares: int = 0


@dataclass(frozen=True)
class AddClient:
    """Serve another command channel, whose descriptor comes along. Its end does not end the zygote."""


@dataclass(frozen=True)
class Started:
    """The brood's children exist.

    ``why_interpreter`` says why they could not be forked; empty if they were, or if it was asked for.
    """

    pids: tuple[int, ...]
    why_interpreter: str


@dataclass(frozen=True)
class LeftBehind:
    """A process that child ``index`` started and left running. The zygote has ended it."""

    index: int
    pid: int
    command: str


@dataclass(frozen=True)
class Ended:
    """Child ``index`` was reaped at ``time_s`` (of ``time.monotonic``); ``exit_code`` is negative for a signal, as in
    multiprocessing.

    ``left_behind`` comes with the last child of a brood, for the whole brood: until then a stranger may still be in
    use.
    """

    index: int
    exit_code: int
    time_s: float
    left_behind: tuple[LeftBehind, ...] = ()


@dataclass(frozen=True)
class Send:
    """Send signal ``number`` to child ``index`` of the brood; ignored if it has ended."""

    index: int
    number: int
