"""Another host of a class whose ranks run on several machines: starts ranks here, and tells host 0 all that they do.

Runs in the supervisor of that machine; standard library and own layer only. See Note [Several hosts].

To a rank, this process is its parent half: it holds the other end of its channel and pipes, and keeps what it prints.
It takes no decision: it obeys the link, and passes on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torch_ext.runner.cluster.link import Link, LinkLostError, read_part, write_all
from torch_ext.runner.cluster.messages import (
    Abandon,
    Clock,
    FarEnded,
    FarOrder,
    FarSignal,
    FarStart,
    FarStarted,
    FromRank,
    Stream,
    ToRank,
)
from torch_ext.runner.loop import Task, Wait
from torch_ext.world.callbacks import Callbacks
from torch_ext.world.channel import Channel, ChannelClosedError, channel_pair, close_all, readable
from torch_ext.world.hosts import ADDRESS_VARIABLE, INTERFACE_VARIABLES, interface_variables
from torch_ext.world.output import Capture
from torch_ext.world.processes import ask_zygote
from torch_ext.world.protocol import OWNER_VARIABLE, Ended, Order, Progress, Receipt, Signal, Start, Started
from torch_ext.world.start import open_ends
from torch_ext.world.tree import ZygoteClient

__all__ = ["FarRanks"]

# What a machine says of itself, and a class does not.
_OF_THE_MACHINE = {"TMPDIR", OWNER_VARIABLE, ADDRESS_VARIABLE, *INTERFACE_VARIABLES}


@dataclass
class _Rank:
    """One rank: what connects it with this process, and how much of what it has printed was told."""

    channel: Channel
    capture: Capture
    stacks: int
    connections: dict[int, Connection]
    told: str = ""

    def close(self) -> None:
        self.channel.close()
        self.capture.close()
        close_all([self.stacks])
        for connection in self.connections.values():
            connection.close()


@dataclass
class _World:
    number: int
    group: Channel
    ranks: list[_Rank] = field(default_factory=list)
    pids: tuple[int, ...] = ()


class FarRanks:
    """The ranks of one class on this machine.

    Args:
        link: to host 0.
        zygote: has loaded the class's file.
        environment: of the class on this machine.
        address: where other hosts reach this one.
    """

    def __init__(self, link: Link, zygote: ZygoteClient, environment: Mapping[str, str], address: str) -> None:
        self._link = link
        self._zygote = zygote
        self._environment = {**environment, **interface_variables(address, environment)}
        self._callbacks = Callbacks()
        self._worlds: dict[int, _World] = {}
        self._callbacks.watch(link, self._on_link)
        link.send(Clock(time.monotonic()))

    def serve(self) -> Task[None]:
        """A task that obeys until host 0 closes the link, and then ends what lives."""
        try:
            with contextlib.suppress(LinkLostError):
                while True:
                    yield Wait((self._callbacks.fileno(),))
                    self._callbacks.call(0)
        finally:
            for world in list(self._worlds.values()):
                self._abandon(world)
            self._callbacks.close()

    # Host 0

    def _on_link(self) -> None:
        for message in self._link.receive():
            if isinstance(message, FarStart):
                self._start(message)
                continue
            world = self._worlds.get(message.world)
            if world is None:
                continue  # abandoned meanwhile
            if isinstance(message, ToRank):
                self._hand_over(world.ranks[message.index], message)
            elif isinstance(message, FarSignal):
                with contextlib.suppress(ChannelClosedError, OSError):
                    world.group.send(Signal(message.index, message.number))
            elif isinstance(message, Abandon):
                self._abandon(world)

    def _hand_over(self, rank: _Rank, message: ToRank) -> None:
        with contextlib.suppress(ChannelClosedError, OSError):  # it has ended, which is told already
            if isinstance(message.stream, int):
                connection = rank.connections.get(message.stream)
                if connection is not None and message.payload is None:
                    self._callbacks.unwatch(connection)
                    rank.connections.pop(message.stream).close()
                elif connection is not None:
                    write_all(connection.fileno(), message.payload)
            elif message.payload is None:
                rank.channel.shut()
            else:
                rank.channel.send(message.payload)

    def _start(self, request: FarStart) -> None:
        group, theirs = channel_pair()
        world = _World(request.world, group)
        orders: list[Order] = []
        inherited: list[int] = []
        for order in request.orders:
            rank, own = _open_rank(order)
            world.ranks.append(rank)
            inherited += own
            orders.append(self._order(order, request.directory, len(own)))
        self._worlds[world.number] = world
        environment = orders[0].payload.environment
        try:
            start = Start(tuple(orders), environment, request.interpreter, request.spares)
            self._zygote.channel.send(start, [theirs.fileno(), *inherited])
        except ChannelClosedError as error:
            raise LinkLostError("the zygote here is gone") from error
        finally:
            theirs.close()
            close_all(inherited)
        self._callbacks.watch(group, lambda: self._on_group(world))
        for index in range(len(world.ranks)):
            self._watch_rank(world, index)

    def _order(self, order: FarOrder, directory: str, descriptors: int) -> Order:
        environment = dict(self._environment)
        for name, text in order.changed.items():
            if name in _OF_THE_MACHINE:
                continue
            if text is None:
                environment.pop(name, None)
            else:
                environment[name] = text
        own = os.path.normpath(os.path.join(os.getcwd(), directory))
        place = own if os.path.isdir(own) else os.getcwd()
        rank = replace(order.rank, environment=environment, directory=place, has_page=False, address="")
        return Order(order.target, rank, descriptors)

    def _abandon(self, world: _World) -> None:
        del self._worlds[world.number]
        self._callbacks.unwatch(world.group)
        world.group.close()  # the zygote ends and reaps those that still live
        for rank in world.ranks:
            for file in (rank.channel, rank.stacks, *rank.connections.values()):
                self._callbacks.unwatch(file)
            rank.close()

    # The ranks

    def _watch_rank(self, world: _World, index: int) -> None:
        rank = world.ranks[index]
        self._callbacks.watch(rank.channel, lambda: self._on_message(world, index))
        self._callbacks.watch(rank.stacks, lambda: self._on_stacks(world, index))
        for number, connection in rank.connections.items():
            self._callbacks.watch(connection, partial(self._on_bytes, world, index, number))

    def _tell(self, world: _World, index: int, stream: Stream | int, payload: Any) -> None:
        self._link.send(FromRank(world.number, index, stream, payload))

    def _on_message(self, world: _World, index: int) -> bool:
        rank = world.ranks[index]
        try:
            message, _ = rank.channel.receive()
        except (ChannelClosedError, OSError):
            self._callbacks.unwatch(rank.channel)
            return False
        if isinstance(message, Receipt):  # the test may be judged on it, so what the rank has printed comes first
            self._tell_output(world, index)
        if isinstance(message, Progress) and message.blocked and not message.among_ranks:
            others = ask_zygote(self._zygote.channel, world.pids)  # host 0 cannot see them
            message = replace(message, blocked=not others, may_act=others)
        self._tell(world, index, Stream.CHANNEL, message)
        return True

    def _tell_output(self, world: _World, index: int) -> None:
        rank = world.ranks[index]
        tail = rank.capture.tail()
        if tail != rank.told:
            new = tail.removeprefix(rank.told) if rank.told else tail
            rank.told = tail
            self._tell(world, index, Stream.OUTPUT, new.encode())

    def _on_stacks(self, world: _World, index: int) -> bool:
        return self._on_part(world, index, Stream.STACKS, world.ranks[index].stacks)

    def _on_bytes(self, world: _World, index: int, number: int) -> bool:
        connection = world.ranks[index].connections[number]
        goes_on = self._on_part(world, index, number, connection.fileno())
        if not goes_on:
            self._tell(world, index, number, None)
        return goes_on

    def _on_part(self, world: _World, index: int, stream: Stream | int, descriptor: int) -> bool:
        part = read_part(descriptor)
        if part:
            self._tell(world, index, stream, part)
        else:
            self._callbacks.unwatch(descriptor)
        return bool(part)

    def _on_group(self, world: _World) -> None:
        try:
            message, _ = world.group.receive()
        except ChannelClosedError as error:
            raise LinkLostError("the zygote here was killed") from error
        if isinstance(message, Started):
            world.pids = message.pids
            self._link.send(FarStarted(world.number, message.pids, message.why_interpreter))
        elif isinstance(message, Ended):
            self._drain(world, message.index)
            self._link.send(FarEnded(world.number, message))

    def _drain(self, world: _World, index: int) -> None:
        """Tell what a rank that has ended had sent before."""
        rank = world.ranks[index]
        while not rank.channel.closed and rank.channel.poll() and self._on_message(world, index):
            pass
        while self._callbacks.watches(rank.stacks) and readable(rank.stacks) and self._on_stacks(world, index):
            pass
        for number, connection in list(rank.connections.items()):
            while self._callbacks.watches(connection) and readable(connection.fileno()):
                if not self._on_bytes(world, index, number):
                    break
        self._tell_output(world, index)


def _open_rank(order: FarOrder) -> tuple[_Rank, list[int]]:
    """Return this side of a rank that is yet to start, and the descriptors that it inherits (see ``rank.main``)."""
    ends, inherited = open_ends(order.rank.rank, False, order.connections)
    return _Rank(ends.channel, ends.capture, ends.stacks, dict(enumerate(ends.connections))), inherited
