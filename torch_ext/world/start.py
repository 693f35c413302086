"""Starting the ranks of a world through a zygote. Runs wherever a test's parent half runs; imports the standard library
and its own layer only.
"""

from __future__ import annotations

import errno
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

from torch_ext import machine_memory
from torch_ext.world import _os, settings, transports
from torch_ext.world.channel import Channel, ChannelBrokenError, ChannelClosedError, channel_pair, close_all
from torch_ext.world.files import Capture, Live, open_capture
from torch_ext.world.follow import RankProcess, World, ZygoteLostError
from torch_ext.world.protocol import Order, RankOrder, Start, Ticket
from torch_ext.world.wait_page import WaitPage

__all__ = ["Ends", "RankTask", "open_ends", "start_world"]


@dataclass(frozen=True)
class RankTask:
    """What one rank runs: ``function(*args, **kwargs)``, pickled by reference as in multiprocessing.

    ``connections`` pipes are made for it. The rank finds its ends where ``args`` hold
    :class:`~torch_ext.world.protocol.Inherited`. ``environment`` is added to that of the process which starts it, and
    ``host`` says in words where it runs, if there are several.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    connections: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = ""


@_os.with_room
def start_world(
    zygote: Channel,
    tasks: Sequence[RankTask],
    *,
    interpreter: bool = False,
    spares: int = 0,
    show: bool | Live = False,
    name: str = "process",
    test: str = "",
    own_address: bool = True,
) -> World:
    """Start one rank per task and return when all their processes exist.

    The ranks get the environment, working directory, umask and ``sys.argv`` that this process has now.

    Args:
        zygote: a command channel to the zygote that has loaded what the tasks need.
        interpreter: give every rank a fresh interpreter instead of forking it.
        spares: how many processes the zygote forks ahead for the next call.
        show: pass the ranks' output through, each line with its rank in front or as said, as well as keeping it.
        name: each process is called this with its rank.
        test: id of the test that the ranks run first; receipts must name it.
        own_address: see Note [An address for each world]; not for ranks that meet over a network.

    Raises:
        ZygoteLostError: the zygote is gone.
        OSError: the system refuses what so many ranks need, such as open files.
    """
    machine_memory.share()
    address, reservation = transports.reserve() if own_address else ("", -1)
    ranks: list[tuple[RankProcess, list[int]]] = []
    try:
        ranks += (_open_rank(rank, f"{name} {rank}", task, show, reservation) for rank, task in enumerate(tasks))
    except OSError as error:
        for process, descriptors in ranks:
            process.let_go()
            close_all(descriptors)
        close_all([reservation] if address else [])
        raise OSError(
            error.errno, f"{error.strerror} for {len(tasks)} ranks, at rank {len(ranks)}: start fewer{_more(error)}"
        ) from None
    group, theirs = channel_pair()
    world = World(zygote, group, [process for process, _ in ranks], Ticket(test))
    inherited = [descriptors for _, descriptors in ranks]
    try:
        request = Start(_orders(ranks, tasks, world.ticket, address), dict(os.environ), interpreter, spares)
        zygote.send(request, [theirs.fileno(), *(each for descriptors in inherited for each in descriptors)])
    except ChannelClosedError as error:
        world.close()
        raise ZygoteLostError(f"{_why_gone(zygote)}: no ranks can be started") from error
    except BaseException:
        world.close()
        raise
    finally:
        theirs.close()
        for descriptors in [*inherited, [reservation] if address else []]:
            close_all(descriptors)  # the ranks keep the reservation
    world.wait_started()
    return world


def _more(error: OSError) -> str:
    return ", or let processes open more files (ulimit -n)" if error.errno == errno.EMFILE else ""


def _why_gone(zygote: Channel) -> str:
    try:
        while zygote.poll():  # a zygote that refuses what it was sent says so
            zygote.receive()
    except ChannelBrokenError as error:
        return f"the zygote took no more orders, because this process {error}"
    except ChannelClosedError:
        pass
    return "the zygote is gone"


def _orders(
    ranks: Sequence[tuple[RankProcess, list[int]]], tasks: Sequence[RankTask], ticket: Ticket, address: str
) -> tuple[Order, ...]:
    environment, directory, argv = dict(os.environ), os.getcwd(), tuple(sys.argv)
    umask = _os.umask()
    threads = settings.threads_per_rank(len(tasks))
    return tuple(
        Order(
            "torch_ext.world.rank:main",
            RankOrder(
                process.rank,
                process.name,
                ticket,
                _pickled(task),
                {**environment, **task.environment},
                directory,
                umask,
                argv,
                threads,
                process.has_page,
                address,
            ),
            len(descriptors),
        )
        for (process, descriptors), task in zip(ranks, tasks, strict=True)
    )


def _pickled(task: RankTask) -> bytes:
    return pickle.dumps((task.function, task.args, dict(task.kwargs)))


def _open_rank(
    rank: int, name: str, task: RankTask, show: bool | Live, reservation: int
) -> tuple[RankProcess, list[int]]:
    """Return our side of a rank that is yet to start, and the descriptors that it inherits (see ``rank.main``)."""
    page = WaitPage()
    shared = [descriptor for descriptor in (page.descriptor, reservation) if descriptor >= 0]
    ends, inherited = open_ends(rank, show, task.connections, shared)
    process = RankProcess(rank, name, ends.channel, ends.capture, ends.stacks, page)
    process.host = task.host
    process.connections += ends.connections
    return process, inherited


class Ends(NamedTuple):
    """Our side of what connects us with a rank: messages, what it prints, where it is, and the pipes of its task."""

    channel: Channel
    capture: Capture
    stacks: int
    connections: list[Connection]


def open_ends(rank: int, show: bool | Live, connections: int, shared: Sequence[int] = ()) -> tuple[Ends, list[int]]:
    """Return our side of a rank that is yet to start, and the descriptors that it inherits (see ``rank.main``).

    Args:
        show: see :func:`start_world`.
        connections: how many pipes its task has.
        shared: descriptors of ours that it inherits too.
    """
    ours, theirs = channel_pair()
    stacks, stacks_writer = os.pipe()
    capture, output = open_capture(rank, show)
    inherited = [os.dup(theirs.fileno()), output, os.dup(output), stacks_writer, *map(os.dup, shared)]
    theirs.close()
    here: list[Connection] = []
    for _ in range(connections):
        own, other = Pipe()
        here.append(own)
        inherited.append(os.dup(other.fileno()))
        other.close()
    return Ends(ours, capture, stacks, here), inherited
