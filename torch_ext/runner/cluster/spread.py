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
from torch_ext.runner.cluster.link import Link, LinkLostError, RankEnds, connect, on_our_clock
from torch_ext.runner.cluster.messages import Clock, HostLost, Line, Origin, Peer, RankStream, Refusal
from torch_ext.runner.discovery import TestFile
from torch_ext.runner.loop import Pause, Task
from torch_ext.runner.schedule import Batch
from torch_ext.world.channel import Callbacks, Channel, ChannelClosedError, channel_pair, close_all
from torch_ext.world.protocol import AskOthers, Ended, Order, Signal, Start, Started
from torch_ext.world.settings import NUMBER_VARIABLE
from torch_ext.world.tree import ZygoteClient

__all__ = ["Spread", "SpreadZygotes"]

_Place = tuple[int, int]  # a rank's host, and its number among the ranks there


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
class _SpreadWorld:
    """The ranks that the parent half has asked for at once.

    Attributes:
        number: of the world.
        group: the channel on which the parent half waits for what becomes of the ranks.
        order: the place of each rank.
        here: the group channel of this host's ranks at its zygote; None if it has none of them.
        far: the ranks of other hosts that have not ended.
        started: the answer of each host that has started its ranks.
    """

    number: int
    group: Channel
    order: list[_Place]
    here: Channel | None = None
    far: dict[_Place, RankEnds] = field(default_factory=dict)
    started: dict[int, Started] = field(default_factory=dict)


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
        self._callbacks = Callbacks()
        self._worlds: dict[int, _SpreadWorld] = {}
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
            self._send(host, Origin(dict(environment), os.getcwd()))

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
            yield Pause((self._callbacks.fileno(), self._bell))  # whatever is watched from then on is waited for too
            if not self._callbacks.is_open():
                return
            self._callbacks.call(0, stop=lambda: self.lost is not None)

    def unless_lost(self, task: Task[Any]) -> Task[None]:
        """A task that runs ``task`` to its end, or ends it when a host is lost."""
        with contextlib.closing(task), contextlib.suppress(StopIteration):
            while self.lost is None:
                wait = next(task)
                yield Pause((*wait.files, self._bell), wait.until_s)

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
        world = _SpreadWorld(self._numbers, Channel.from_descriptor(descriptors[0]), [])
        self._worlds[world.number] = world
        self._callbacks.watch(world.group, lambda: self._on_group(world))
        for order in request.orders:
            host = int(order.payload.environment.get(NUMBER_VARIABLE, 0))
            own = [next(inherited) for _ in range(order.descriptors)]
            place = host, len(of_host.setdefault(host, []))
            of_host[host].append(order)
            world.order.append(place)
            if host:
                world.far[place] = self._taken(world, place, order, own)
            else:
                here += own
        for host, orders in of_host.items():
            share = replace(request, orders=tuple(orders), spares=min(request.spares, len(orders)))
            if host:
                self._send(host, Line(world.number, RankStream.GROUP, share))
                continue
            world.here, theirs = channel_pair()
            try:
                zygote.channel.send(share, [theirs.fileno(), *here])
            finally:
                theirs.close()
                close_all(here)
            self._callbacks.watch(world.here, lambda: self._on_here(world))

    def _taken(self, world: _SpreadWorld, place: _Place, order: Order, descriptors: Sequence[int]) -> RankEnds:
        """Take the descriptors of a rank that starts elsewhere; in the order of ``start._open_rank``."""
        host, index = place
        channel, output, second, stacks, *more = descriptors
        shared = order.payload.has_page + bool(order.payload.address)  # mean nothing on another machine
        close_all([second, *more[:shared]])
        os.set_blocking(stacks, False)  # stacks that nobody reads must not hold up the others
        numbered: dict[RankStream | int, int] = dict(enumerate(more[shared:]))

        def tell(stream: RankStream | int, payload: Any) -> None:
            self._send(host, Line(world.number, stream, payload, index))

        ends = RankEnds(
            Channel.from_descriptor(channel),
            {RankStream.OUTPUT: output, RankStream.STACKS: stacks, **numbered},
            self._callbacks,
            tell,
        )
        ends.watch(*numbered)
        return ends

    def _on_group(self, world: _SpreadWorld) -> None:
        try:
            message, _ = world.group.receive()
        except ChannelClosedError:
            self._abandon(world)
            return
        if isinstance(message, Signal):
            host, index = world.order[message.index]
            message = replace(message, index=index)
            if host:
                self._send(host, Line(world.number, RankStream.GROUP, message))
            elif world.here is not None:
                with contextlib.suppress(ChannelClosedError):
                    world.here.send(message)

    def _abandon(self, world: _SpreadWorld) -> None:
        del self._worlds[world.number]
        for host in {host for host, _ in world.order if host}:
            if self.lost is None:
                self._send(host, Line(world.number, RankStream.GROUP, None))
        for rank in world.far.values():
            rank.close()
        for channel in (world.group, world.here):
            if channel is not None and not channel.closed:
                self._callbacks.unwatch(channel)
                channel.close()

    # The ranks

    def _on_here(self, world: _SpreadWorld) -> None:
        if world.here is None:
            return
        try:
            self._told(world, 0, world.here.receive()[0])
        except ChannelClosedError:  # the zygote was killed, and the parent half with it, or all have ended
            self._callbacks.unwatch(world.here)

    def _on_link(self, host: int) -> None:
        try:
            message = self._links[host].receive()
        except LinkLostError as error:
            self._lose(HostLost(host, str(error)))
            return
        if isinstance(message, Refusal):
            self._lose(HostLost(host, message.why, gone=False))
        elif isinstance(message, Clock):
            self._shift_s[host] = time.monotonic() - message.now_s
        elif world := self._worlds.get(message.world):  # else it was abandoned meanwhile
            place = host, message.index
            if message.stream is RankStream.GROUP:
                self._told(world, host, message.payload)
            elif place in world.far:
                world.far[place].write(message.stream, on_our_clock(message.payload, self._shift_s.get(host, 0.0)))

    def _told(self, world: _SpreadWorld, host: int, message: Started | Ended) -> None:
        """Pass on what a zygote says of its ranks, when the parent half can understand it."""
        told: Started | Ended
        if isinstance(message, Started):
            world.started[host] = message
            if len(world.started) < len({host for host, _ in world.order}):
                return
            told = Started(
                tuple(world.started[host].pids[index] for host, index in world.order),
                next((each.why_interpreter for each in world.started.values() if each.why_interpreter), ""),
                tuple(self._names[host] for host, _ in world.order),
            )
        else:
            if rank := world.far.pop((host, message.index), None):
                rank.close()

            def moved(index: int) -> int:
                return world.order.index((host, index))

            left = tuple(replace(each, index=moved(each.index)) for each in message.left_behind)
            time_s = message.time_s + self._shift_s.get(host, 0.0)
            told = replace(message, index=moved(message.index), left_behind=left, time_s=time_s)
        with contextlib.suppress(ChannelClosedError):
            world.group.send(told)
