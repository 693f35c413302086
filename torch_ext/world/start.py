"""Starts ranks: gives each its order, its files and its connections. Runs in the parent half of a test; imports the
standard library and its own layer only.
"""

from __future__ import annotations

import errno
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch_ext.world import _os, provider, settings, threads
from torch_ext.world.channel import Channel, ChannelBrokenError, ChannelClosedError, close_all
from torch_ext.world.files import Live, RankProcess, open_rank
from torch_ext.world.protocol import Order, RankOrder, Start, Ticket
from torch_ext.world.tree import ZygoteClient


class ZygoteLostError(RuntimeError):
    """The zygote is gone, and with it the ranks and their outcomes. :func:`provider.zygote_for` starts another."""


@dataclass(frozen=True)
class RankTask:
    """The task of one rank, ``function(*args, *connections, **kwargs)`` with the rank's ends of its connections. It is
    pickled by reference, as in multiprocessing.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    connections: int = 0  # number of pipes
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the starting process's
    host: str = ""  # the rank's host in words, if there are several


def start_ranks(
    zygote: ZygoteClient,
    ticket: Ticket,
    show: bool | Live,
    name: str,
    own_address: bool,
    cores: int,
    tasks: Mapping[int, RankTask],
    spares: int = 0,
) -> tuple[Channel, list[RankProcess]]:
    """Start the ranks of ``tasks``, by number, as one child group, with ``cores`` threads each. Raises what
    :func:`.follow.start_world` raises.
    """
    address, reservation = threads.reserve() if own_address else ("", -1)
    inherited: list[list[int]] = []  # by rank; closed here after the ranks have received them
    processes: list[RankProcess] = []
    try:
        try:
            for rank, task in tasks.items():
                process, descriptors = open_rank(rank, f"{name} {rank}", show, task.connections, reservation)
                process.host = task.host
                processes.append(process)
                inherited.append(descriptors)
        except OSError as error:
            more = ", or let processes open more files (ulimit -n)" if error.errno == errno.EMFILE else ""
            raise OSError(
                error.errno, f"{error.strerror} for {len(tasks)} ranks, at rank {len(processes)}: start fewer{more}"
            ) from None
        counts = [len(descriptors) for descriptors in inherited]
        orders = _orders(processes, [*tasks.values()], ticket, address, counts, cores)
        request = Start(orders, dict(os.environ), settings.wants_interpreter(), spares)
        group = zygote.channel.connect(request, [*chain(*inherited)])
    except BaseException as error:
        for process in processes:
            process.detach()
        if isinstance(error, ChannelClosedError):
            why = _end_reason(zygote.channel)
            provider.forget(zygote)
            raise ZygoteLostError(f"{why}: no ranks can be started") from error
        raise
    finally:
        close_all([reservation, *chain(*inherited)])
    return group, processes


def _end_reason(zygote: Channel) -> str:
    try:
        while zygote.poll():  # a zygote that refuses a message sends the reason
            zygote.receive()
    except ChannelBrokenError as error:
        return f"the zygote took no more orders, because this process {error}"
    except ChannelClosedError:
        pass
    return "the zygote is gone"


def _orders(
    ranks: Sequence[RankProcess],
    tasks: Sequence[RankTask],
    ticket: Ticket,
    address: str,
    descriptors: Sequence[int],
    cores: int,
) -> tuple[Order, ...]:
    environment, directory, argv, umask = dict(os.environ), os.getcwd(), tuple(sys.argv), _os.umask()
    found = []
    for process, task, count in zip(ranks, tasks, descriptors, strict=True):
        pickled = pickle.dumps((task.function, task.args, dict(task.kwargs)))
        own = {**environment, **task.environment}
        of_page = process._page.descriptor >= 0, address
        order = RankOrder(process.rank, process.name, ticket, pickled, own, directory, umask, argv, cores, *of_page)
        found.append(Order("torch_ext.world.rank:main", order, count))
    return tuple(found)
