"""Host 0 of a class whose ranks run on several machines: stands between its parent half and the zygotes of all.

Runs in the supervisor of that machine; standard library and own layer only. See Note [Several hosts].

The parent half asks for ranks as it would ask a zygote. The orders for host 0 go on to the zygote here, with their
descriptors; the others go out on links, and this end of their descriptors is read and written here. Messages of ranks
carry times by their machine's clock, which are told by the clock of this one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch_ext.runner.class_child import Zygotes
from torch_ext.runner.cluster.link import Link, LinkLostError, connect, read_part, write_all
from torch_ext.runner.cluster.messages import (
    Abandon,
    Clock,
    FarEnded,
    FarOrder,
    FarSignal,
    FarStart,
    FarStarted,
    FromRank,
    HostLost,
    Peer,
    Refusal,
    Stream,
    ToRank,
)
from torch_ext.runner.cluster.stand_in import StandIn, on_our_clock, taken
from torch_ext.runner.discovery import TestFile
from torch_ext.runner.loop import Task, Wait
from torch_ext.runner.schedule import Batch
from torch_ext.world.callbacks import Callbacks
from torch_ext.world.channel import Channel, ChannelClosedError, channel_pair, close_all
from torch_ext.world.hosts import NUMBER_VARIABLE
from torch_ext.world.protocol import AskOthers, Ended, Order, RankOrder, Signal, Start, Started
from torch_ext.world.tree import ZygoteClient

__all__ = ["Spread", "SpreadZygotes"]


class SpreadZygotes:
    """See :class:`~torch_ext.runner.class_child.Zygotes`. Class processes run here, ranks wherever ``spread`` says."""

    def __init__(self, here: Zygotes, spread: Spread) -> None:
        self._here = here
        self._spread = spread

    def module_of(self, file: TestFile) -> str:
        return self._here.module_of(file)

    def of_class(self, batch: Batch) -> Task[ZygoteClient]:
        here = yield from self._here.of_class(batch)
        return _Spreading(here, self._spread)

    def drop(self, batch: Batch, zygote: ZygoteClient | None) -> None:
        self._here.drop(batch, zygote.here if isinstance(zygote, _Spreading) else zygote)


class _Spreading(ZygoteClient):
    """A zygote whose clients get ranks on several hosts. What the supervisor itself starts in it runs here."""

    def __init__(self, here: ZygoteClient, spread: Spread) -> None:
        super().__init__(here.channel, here.pid)
        self.here = here
        self._spread = spread

    def add_client(self) -> int:
        return self._spread.add_client(self.here)


@dataclass
class _World:
    """What the parent half has asked for at once.

    Attributes:
        number: of the world.
        group: the channel on which it is told what becomes of the ranks.
        here: that of the ranks of this host, at its zygote; None if it has none of them.
        order: for each rank its host and its place among the ranks there.
        far: those of other hosts that have not ended, by host and place.
        pids: of those that exist, by host and place.
        waiting: hosts that have not started theirs.
    """

    number: int
    group: Channel
    here: Channel | None
    order: list[tuple[int, int]]
    far: dict[tuple[int, int], StandIn]
    waiting: set[int]
    pids: dict[tuple[int, int], int] = field(default_factory=dict)
    why: str = ""


class Spread:
    """The ranks of one class, on this machine and on ``peers``.

    Args:
        peers: the other machines, from host 1 on.
        token: what they know this one by.
        name: what the report calls this machine.
        environment: of the class, before its tests change it.

    Attributes:
        lost: the host that was lost, which may be one that cannot be reached at all; None while all are there.
    """

    def __init__(self, peers: Sequence[Peer], token: str, name: str, environment: Mapping[str, str]) -> None:
        self.lost: HostLost | None = None
        self._names = [f"host {number} ({each})" for number, each in enumerate((name, *(peer.name for peer in peers)))]
        self._environment = dict(environment)
        self._directory = os.getcwd()
        self._callbacks = Callbacks()
        self._worlds: dict[int, _World] = {}
        self._clients: list[Channel] = []
        self._numbers = 0
        self._links: dict[int, Link] = {}
        self._shift_s: dict[int, float] = {}  # from a host's clock to ours
        self._bell, self._rope = channel_pair()  # its other end is closed when a host is lost
        for host, peer in enumerate(peers, 1):
            try:
                self._links[host] = link = connect(peer.address, peer.port, token)
            except LinkLostError as error:
                self._lose(HostLost(host, str(error)))
                return
            self._callbacks.watch(link, partial(self._on_link, host))

    def add_client(self, zygote: ZygoteClient) -> int:
        """Return the descriptor of a new command channel, for a process that starts ranks.

        Args:
            zygote: starts those of this host.
        """
        ours, theirs = channel_pair()
        self._clients.append(ours)
        self._callbacks.watch(ours, lambda: self._on_client(ours, zygote))
        descriptor = os.dup(theirs.fileno())
        theirs.close()
        return descriptor

    def serve(self) -> Task[None]:
        """A task that passes on what comes, until :meth:`close`, or until a host is lost."""
        while self.lost is None and self._callbacks.is_open():
            yield Wait((self._callbacks.fileno(), self._bell))  # whatever is watched from then on is waited for too
            if not self._callbacks.is_open():
                return
            self._callbacks.call(0, stop=lambda: self.lost is not None)

    def unless_lost(self, task: Task[Any]) -> Task[None]:
        """A task that runs ``task`` to its end, or ends it when a host is lost."""
        with contextlib.closing(task), contextlib.suppress(StopIteration):
            while self.lost is None:
                wait = next(task)
                yield Wait((*wait.files, self._bell), wait.until_s)

    def close(self) -> None:
        """Let go of all ranks, and of the other machines. Idempotent."""
        for world in list(self._worlds.values()):
            self._abandon(world)
        for channel in self._clients:
            channel.close()
        for link in self._links.values():
            link.close()
        self._callbacks.close()
        self._bell.close()
        self._rope.close()

    # Plumbing

    def _lose(self, lost: HostLost) -> None:
        if self.lost is None:
            self.lost = lost
            self._rope.close()

    def _send(self, host: int, message: Any) -> None:
        try:
            self._links[host].send(message)
        except LinkLostError as error:
            self._lose(HostLost(host, str(error)))

    # The parent half

    def _on_client(self, client: Channel, zygote: ZygoteClient) -> None:
        try:
            message, descriptors = client.receive()
        except ChannelClosedError:
            self._callbacks.unwatch(client)
            client.close()
            return
        if isinstance(message, AskOthers):  # here; each other host answers for itself, see far.py
            with contextlib.suppress(ChannelClosedError):
                zygote.channel.send(message, descriptors)
            close_all(descriptors)
            return
        if not isinstance(message, Start):
            close_all(descriptors)
            raise AssertionError(f"got {type(message).__name__} of a class on several hosts, expected Start")
        try:
            self._start(message, descriptors, zygote)
        except ChannelClosedError:  # the zygote is gone: so is the class, which learns it from the zygote itself
            self._callbacks.unwatch(client)
            client.close()

    def _start(self, request: Start, descriptors: list[int], zygote: ZygoteClient) -> None:
        self._numbers += 1
        inherited = iter(descriptors[1:])
        of_host: dict[int, list[Order]] = {}
        here: list[int] = []
        far: dict[tuple[int, int], StandIn] = {}
        order: list[tuple[int, int]] = []
        for each in request.orders:
            host = int(each.payload.environment.get(NUMBER_VARIABLE, 0))
            own = [next(inherited) for _ in range(each.descriptors)]
            place = host, len(of_host.setdefault(host, []))
            of_host[host].append(each)
            order.append(place)
            if host:
                far[place] = taken(*place, each.payload, own)
            else:
                here += own
        group_here: Channel | None = None
        world = _World(self._numbers, Channel.from_descriptor(descriptors[0]), None, order, far, waiting=set(of_host))
        self._worlds[world.number] = world
        self._callbacks.watch(world.group, lambda: self._on_group(world))
        for (host, index), rank in far.items():
            self._watch_rank(world, rank, host, index)
        if 0 in of_host:
            group_here, theirs = channel_pair()
            try:
                local = replace(request, orders=tuple(of_host[0]), spares=min(request.spares, len(of_host[0])))
                zygote.channel.send(local, [theirs.fileno(), *here])
            finally:
                theirs.close()
                close_all(here)
            world.here = group_here
            self._callbacks.watch(group_here, lambda: self._on_here(world))
        for host, orders in of_host.items():
            if host:
                directory = os.path.relpath(orders[0].payload.directory, self._directory)
                sent = tuple(self._far_order(each) for each in orders)
                spares = min(request.spares, len(orders))
                self._send(host, FarStart(world.number, sent, directory, request.interpreter, spares))

    def _far_order(self, order: Order) -> FarOrder:
        rank: RankOrder = order.payload
        before, now = self._environment, rank.environment
        changed: dict[str, str | None] = {name: text for name, text in now.items() if before.get(name) != text}
        changed.update({name: None for name in before if name not in now})
        shared = 4 + rank.has_page + bool(rank.address)
        return FarOrder(order.target, replace(rank, environment={}), changed, order.descriptors - shared)

    def _watch_rank(self, world: _World, rank: StandIn, host: int, index: int) -> None:
        self._callbacks.watch(rank.channel, lambda: self._on_message(world, rank))
        for number, descriptor in rank.connections.items():
            self._callbacks.watch(descriptor, partial(self._on_bytes, world, rank, number))

    def _on_message(self, world: _World, rank: StandIn) -> None:
        try:
            message, _ = rank.channel.receive()
        except ChannelClosedError:
            self._callbacks.unwatch(rank.channel)
            message = None
        self._send(rank.host, ToRank(world.number, rank.index, Stream.CHANNEL, message))

    def _on_bytes(self, world: _World, rank: StandIn, number: int) -> None:
        descriptor = rank.connections[number]
        part = read_part(descriptor)
        if not part:
            self._callbacks.unwatch(descriptor)
        self._send(rank.host, ToRank(world.number, rank.index, number, part or None))

    def _on_group(self, world: _World) -> None:
        try:
            message, _ = world.group.receive()
        except ChannelClosedError:
            self._abandon(world)
            return
        if isinstance(message, Signal):
            host, index = world.order[message.index]
            if host:
                self._send(host, FarSignal(world.number, index, message.number))
            elif world.here is not None:
                with contextlib.suppress(ChannelClosedError):
                    world.here.send(Signal(index, message.number))

    def _abandon(self, world: _World) -> None:
        del self._worlds[world.number]
        for host in {host for host, _ in world.order if host}:
            if self.lost is None:
                self._send(host, Abandon(world.number))
        for place in list(world.far):
            self._close_far(world, place)
        for channel in (world.group, world.here):
            if channel is not None and not channel.closed:
                self._callbacks.unwatch(channel)
                channel.close()

    def _close_far(self, world: _World, place: tuple[int, int]) -> None:
        rank = world.far.pop(place, None)
        if rank is not None:
            self._callbacks.unwatch(rank.channel)
            for descriptor in rank.connections.values():
                self._callbacks.unwatch(descriptor)
            rank.close()

    # The ranks

    def _on_here(self, world: _World) -> None:
        channel = world.here
        if channel is None:
            return
        try:
            message, _ = channel.receive()
        except ChannelClosedError:  # the zygote was killed, and the parent half with it, or all have ended
            self._callbacks.unwatch(channel)
            return
        if isinstance(message, Started):
            self._started(world, 0, message.pids, message.why_interpreter)
        elif isinstance(message, Ended):
            self._ended(world, 0, message)

    def _on_link(self, host: int) -> None:
        try:
            for message in self._links[host].receive():
                if isinstance(message, Refusal):
                    self._lose(HostLost(host, message.why, gone=False))
                    return
                self._on_far(host, message)
        except LinkLostError as error:
            self._lose(HostLost(host, str(error)))

    def _on_far(self, host: int, message: Any) -> None:
        if isinstance(message, Clock):
            self._shift_s[host] = time.monotonic() - message.now_s
            return
        world = self._worlds.get(message.world)
        if world is None:
            return  # abandoned meanwhile
        if isinstance(message, FarStarted):
            self._started(world, host, message.pids, message.why_interpreter)
        elif isinstance(message, FarEnded):
            self._close_far(world, (host, message.ended.index))
            shift_s = self._shift_s.get(host, 0.0)
            self._ended(world, host, replace(message.ended, time_s=message.ended.time_s + shift_s))
        elif isinstance(message, FromRank):
            rank = world.far.get((host, message.index))
            if rank is not None:
                self._pass_on(world, rank, message)

    def _pass_on(self, world: _World, rank: StandIn, message: FromRank) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more
            if message.stream is Stream.CHANNEL:
                rank.channel.send(on_our_clock(message.payload, self._shift_s.get(rank.host, 0.0)))
            elif message.stream is Stream.OUTPUT:
                os.write(rank.output, message.payload)
            elif message.stream is Stream.STACKS:
                os.write(rank.stacks, message.payload)
            elif isinstance(message.stream, int) and message.stream in rank.connections:
                if message.payload is None:
                    descriptor = rank.connections.pop(message.stream)
                    self._callbacks.unwatch(descriptor)
                    os.close(descriptor)
                else:
                    write_all(rank.connections[message.stream], message.payload)

    def _started(self, world: _World, host: int, pids: Sequence[int], why: str) -> None:
        world.waiting.discard(host)
        world.pids.update({(host, index): pid for index, pid in enumerate(pids)})
        world.why = world.why or why
        if not world.waiting:
            told = Started(
                tuple(world.pids[place] for place in world.order),
                world.why,
                tuple(self._names[host] for host, _ in world.order),
            )
            self._tell(world, told)

    def _ended(self, world: _World, host: int, ended: Ended) -> None:
        def moved(index: int) -> int:
            return world.order.index((host, index))

        left = tuple(replace(each, index=moved(each.index)) for each in ended.left_behind)
        self._tell(world, replace(ended, index=moved(ended.index), left_behind=left))

    def _tell(self, world: _World, message: Any) -> None:
        with contextlib.suppress(ChannelClosedError):
            world.group.send(message)
