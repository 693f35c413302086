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
from typing import Any

from torch_ext.runner.cluster.link import Link, LinkLostError, RankEnds
from torch_ext.runner.cluster.messages import Clock, Line, Origin, RankStream
from torch_ext.runner.loop import Pause, Task
from torch_ext.world.channel import Callbacks, Channel, ChannelClosedError, channel_pair, close_all
from torch_ext.world.files import Capture, open_ends
from torch_ext.world.follow import ask_zygote
from torch_ext.world.protocol import OWNER_VARIABLE, Ended, Order, Progress, Receipt, Start, Started
from torch_ext.world.settings import ADDRESS_VARIABLE, INTERFACE_VARIABLES, interface_variables
from torch_ext.world.tree import ZygoteClient

__all__ = ["FarRanks"]

# What a machine says of itself, and a class does not.
_OF_THE_MACHINE = {"TMPDIR", OWNER_VARIABLE, ADDRESS_VARIABLE, *INTERFACE_VARIABLES}


@dataclass
class _FarRank:
    """A rank: what connects it with this process, and how much of what it has printed was told."""

    ends: RankEnds
    capture: Capture
    told: str = ""


@dataclass
class _FarWorld:
    number: int
    group: Channel
    ranks: list[_FarRank] = field(default_factory=list)
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
        self._worlds: dict[int, _FarWorld] = {}
        self._callbacks.watch(link, self._on_link)
        link.send(Clock(time.monotonic()))

    def serve(self) -> Task[None]:
        """A task that obeys until host 0 closes the link, and then ends what lives."""
        try:
            with contextlib.suppress(LinkLostError):
                while True:
                    yield Pause((self._callbacks.fileno(),))
                    self._callbacks.call(0)
        finally:
            for world in list(self._worlds.values()):
                self._abandon(world)
            self._callbacks.close()

    # Host 0

    def _on_link(self) -> None:
        line = self._link.receive()
        if isinstance(line, Origin):
            self._origin = line
        elif isinstance(line.payload, Start):
            self._start(line.world, line.payload)
        elif world := self._worlds.get(line.world):  # else it was abandoned meanwhile
            if line.stream is not RankStream.GROUP:
                world.ranks[line.index].ends.write(line.stream, line.payload)
            elif line.payload is None:
                self._abandon(world)
            else:
                with contextlib.suppress(ChannelClosedError, OSError):
                    world.group.send(line.payload)

    def _start(self, number: int, request: Start) -> None:
        group, theirs = channel_pair()
        world = self._worlds[number] = _FarWorld(number, group)
        orders: list[Order] = []
        inherited: list[int] = []
        for index, order in enumerate(request.orders):
            own = self._open_rank(world, index, order)
            inherited += own
            orders.append(replace(order, payload=self._moved(order.payload), descriptors=len(own)))
        try:
            start = replace(request, orders=tuple(orders), environment=orders[0].payload.environment)
            self._zygote.channel.send(start, [theirs.fileno(), *inherited])
        except ChannelClosedError as error:
            raise LinkLostError("the zygote here is gone") from error
        finally:
            theirs.close()
            close_all(inherited)
        self._callbacks.watch(group, lambda: self._on_group(world))

    def _open_rank(self, world: _FarWorld, index: int, order: Order) -> list[int]:
        """Open this side of a rank that is yet to start; return the descriptors that it inherits."""
        rank = order.payload
        ends, inherited = open_ends(rank.rank, False, order.descriptors - 4 - rank.has_page - bool(rank.address))
        pipes: dict[RankStream | int, int] = {RankStream.STACKS: ends.stacks}
        for number, connection in enumerate(ends.connections):
            pipes[number] = os.dup(connection.fileno())
            connection.close()
        opened = RankEnds(ends.channel, pipes, self._callbacks, partial(self._on_rank, world, index))
        world.ranks.append(_FarRank(opened, ends.capture))
        opened.watch(*pipes)
        return inherited

    def _moved(self, rank: Any) -> Any:
        """Return the order of a rank for this machine: its environment differs from ours as it does from host 0's."""
        environment, before, now = dict(self._environment), self._origin.environment, rank.environment
        for name in (before.keys() | now.keys()) - _OF_THE_MACHINE:
            if name not in now:
                environment.pop(name, None)
            elif before.get(name) != now[name]:
                environment[name] = now[name]
        here = os.getcwd()
        own = os.path.normpath(os.path.join(here, os.path.relpath(rank.directory, self._origin.directory)))
        place = own if os.path.isdir(own) else here
        return replace(rank, environment=environment, directory=place, has_page=False, address="")

    def _abandon(self, world: _FarWorld) -> None:
        del self._worlds[world.number]
        self._callbacks.unwatch(world.group)
        world.group.close()  # the zygote ends and reaps those that still live
        for rank in world.ranks:
            rank.ends.close()
            rank.capture.close()

    # The ranks

    def _on_rank(self, world: _FarWorld, index: int, stream: RankStream | int, payload: Any) -> None:
        if payload is None and isinstance(stream, RankStream):
            return  # how the rank has ended is told later
        if isinstance(payload, Receipt):  # the test may be judged on it, so what the rank has printed comes first
            self._tell_output(world, index)
        if isinstance(payload, Progress) and payload.blocked and not payload.among_ranks:
            others = ask_zygote(self._zygote.channel, world.pids)  # host 0 cannot see them
            payload = replace(payload, blocked=not others, may_act=others)
        self._link.send(Line(world.number, stream, payload, index))

    def _tell_output(self, world: _FarWorld, index: int) -> None:
        rank = world.ranks[index]
        tail = rank.capture.tail()
        if tail != rank.told:
            new = tail.removeprefix(rank.told) if rank.told else tail
            rank.told = tail
            self._link.send(Line(world.number, RankStream.OUTPUT, new.encode(), index))

    def _on_group(self, world: _FarWorld) -> None:
        try:
            message, _ = world.group.receive()
        except ChannelClosedError as error:
            raise LinkLostError("the zygote here was killed") from error
        if isinstance(message, Started):
            world.pids = message.pids
        elif isinstance(message, Ended):
            world.ranks[message.index].ends.drain()
            self._tell_output(world, message.index)
        self._link.send(Line(world.number, RankStream.GROUP, message))
