"""The ranks of a class on several machines. See Note [Several hosts].

Runs in the supervisors of these machines; standard library and own layer only.

:class:`RankProxy`, on host 0, is a zygote to the parent half. It passes orders for host 0 to the zygote there, with
their descriptors. It sends orders for other hosts as messages, and reads and writes this end of their descriptors.
:class:`RemoteRanks`, on each other host, holds the other ends, executes the messages of host 0, and reports to it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch_ext.runner.cluster.messages import Line, RankStream
from torch_ext.runner.loop import Pause, Task
from torch_ext.world.channel import Callbacks, Channel, ChannelClosedError, channel_pair, close_all, readable
from torch_ext.world.follow import query_zygote
from torch_ext.world.protocol import (
    OWNER_VARIABLE,
    Ended,
    Order,
    Progress,
    QueryProcesses,
    RankOrder,
    Receipt,
    Signal,
    Start,
    Started,
)
from torch_ext.world.settings import ADDRESS_VARIABLE, INTERFACE_VARIABLES, NUMBER_VARIABLE
from torch_ext.world.tree import ZygoteClient

_Stream = RankStream | int
_Place = tuple[int, int]  # a rank's host, and its index among the ranks there
_PART_BYTES = 1 << 16
_TIMES: dict[type, tuple[str, ...]] = {Receipt: ("time_s",), Progress: ("until_s", "raises_s")}
_NUMBERS = itertools.count(1)  # of worlds
# Variables specific to a machine, which are not copied to another.
_OF_THE_MACHINE = {"TMPDIR", OWNER_VARIABLE, ADDRESS_VARIABLE, *INTERFACE_VARIABLES}


def _files_of(channel: Channel, output: int, stacks: int, numbered: Iterable[int]) -> dict[_Stream, Channel | int]:
    return {
        RankStream.CHANNEL: channel, RankStream.OUTPUT: output, RankStream.STACKS: stacks, **dict(enumerate(numbered))
    }  # fmt: skip


class _RankEnds:
    """This machine's ends of the channel and pipes of one rank. Calls ``report`` with their messages and bytes, and
    with None at the end of a stream.
    """

    def __init__(
        self,
        files: dict[_Stream, Channel | int],
        callbacks: Callbacks,
        report: Callable[[_Stream, Any], None],
        watched: Iterable[_Stream],
    ) -> None:
        self._files, self._callbacks, self._report = files, callbacks, report
        for stream in watched:
            callbacks.watch(files[stream], partial(self._pass_on, stream))

    def _pass_on(self, stream: _Stream) -> None:
        file, payload = self._files[stream], None
        with contextlib.suppress(OSError):
            payload = file.receive()[0] if isinstance(file, Channel) else os.read(file, _PART_BYTES) or None
        if payload is None:
            self._callbacks.unwatch(file)
        self._report(stream, payload)

    def drain(self, *streams: _Stream) -> None:
        """Report all pending data of these streams; by default of all watched streams."""
        for stream in streams or tuple(self._files):
            file = self._files[stream]
            while file in self._callbacks.files and (file.poll() if isinstance(file, Channel) else readable(file)):
                self._pass_on(stream)

    def write(self, stream: _Stream, payload: Any) -> None:
        """Write a message or bytes from the other machine; None closes the stream. Blocks while a pipe is full."""
        with contextlib.suppress(OSError, KeyError):  # the rank has closed the stream
            file = self._files[stream]
            if isinstance(file, Channel) and payload is None:
                file.shut()
            elif isinstance(file, Channel):
                file.send(payload)
            elif payload is None:
                self._callbacks.unwatch(file)
                del self._files[stream]
                os.close(file)
            else:
                while payload:
                    payload = payload[os.write(file, payload) :]

    def close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            self._callbacks.unwatch(file)
        close_all(files.values())


class HostRanks:
    """The base of both kinds of host: worlds by number, and messages of ``host`` for order ``number`` to others."""

    def __init__(self, number: int, host: int, send: Callable[[Line], None]) -> None:
        self._callbacks = Callbacks()
        self._worlds: dict[int, Any] = {}
        self._number, self._host, self._send_line = number, host, send
        self._sent, self._taken = Counter[int](), Counter[int]()  # by the other host
        self._early: dict[tuple[int, int], Line] = {}

    def serve(self) -> Task[None]:
        """Task: forward the messages of the ranks here, until :meth:`close`."""
        while self._callbacks.is_open():
            yield Pause((self._callbacks.fileno(),))
            if self._callbacks.is_open():
                self._callbacks.call(0)

    def handle(self, line: Line) -> None:
        """Handle a message of another host, in the order in which that host has sent its messages."""
        self._early[line.source, line.sequence] = line
        while next_line := self._early.pop((line.source, self._taken[line.source]), None):
            self._taken[line.source] += 1
            self._receive(next_line)

    def _receive(self, line: Line) -> None:
        raise NotImplementedError

    def send(self, to: int, world: int, stream: _Stream, payload: Any, index: int = 0) -> None:
        """Send a message to another host."""
        sequence, self._sent[to] = self._sent[to], self._sent[to] + 1
        line = Line(self._number, self._host, to, sequence, time.monotonic(), world, stream, payload, index)
        self._send_line(line)

    def close(self) -> None:
        """Abandon all ranks. Idempotent."""
        for world in list(self._worlds.values()):
            self._abandon(world)
        close_all(self._callbacks.files)
        self._callbacks.close()

    def _abandon(self, world: Any) -> None:
        raise NotImplementedError


@dataclass
class _ProxyWorld:
    """The ranks of one request of the parent half."""

    number: int  # of the world
    group: Channel  # the parent half's group channel
    order: list[_Place]  # the place of each rank
    here: Channel | None = None  # the zygote's group channel of this host's ranks; None without such ranks
    remote: dict[_Place, _RankEnds] = field(default_factory=dict)  # the running ranks of other hosts
    started: dict[int, Started] = field(default_factory=dict)  # the answer of each host


class RankProxy(HostRanks):
    """The ranks of one class, on host 0. ``names``: of the machine of each host, for the report; ``environment``: of
    the class, before its tests change it.
    """

    def __init__(self, names: Sequence[str], environment: Mapping[str, str], *more: Any) -> None:
        super().__init__(*more)
        self._names = [f"host {number} ({name})" for number, name in enumerate(names)]
        self._origin = dict(environment)
        self._shift_s: dict[int, float] = {}  # our clock minus the host's

    def add_client(self, zygote: ZygoteClient) -> int:
        """Return the descriptor of a new command channel; ``zygote`` starts this host's ranks."""
        local, remote = channel_pair()
        self._callbacks.watch(local, lambda: self._on_client(local, zygote))
        return remote.detach()

    # The parent half

    def _on_client(self, client: Channel, zygote: ZygoteClient) -> None:
        try:
            message, descriptors = client.receive()
            if isinstance(message, QueryProcesses):  # for this host; RemoteRanks answers for each other host
                zygote.channel.try_send(message, descriptors)
                close_all(descriptors)
            else:
                self._start(message, descriptors, zygote)
        except ChannelClosedError:  # the parent half has ended, or the zygote has, along with the class
            self._callbacks.unwatch(client)
            client.close()

    def _start(self, request: Start, descriptors: list[int], zygote: ZygoteClient) -> None:
        inherited = iter(descriptors[1:])
        of_host: dict[int, list[Order]] = {}
        here: list[int] = []
        world = _ProxyWorld(next(_NUMBERS), Channel.from_descriptor(descriptors[0]), [])
        self._worlds[world.number] = world
        self._callbacks.watch(world.group, lambda: self._on_group(world))
        for order in request.orders:
            host = int(order.payload.environment.get(NUMBER_VARIABLE, 0))
            own = [next(inherited) for _ in range(order.descriptors)]
            place = host, len(of_host.setdefault(host, []))
            of_host[host].append(order)
            world.order.append(place)
            if host:
                world.remote[place] = self._take_over(world, place, order.payload, own)
            else:
                here += own
        for host, orders in of_host.items():
            share = replace(request, orders=tuple(orders), spares=min(request.spares, len(orders)))
            if host:
                self.send(host, world.number, RankStream.GROUP, (share, self._origin))
                continue
            try:
                world.here = zygote.channel.connect(share, here)
            finally:
                close_all(here)
            self._callbacks.watch(world.here, partial(self._on_here, world, world.here))

    def _take_over(self, world: _ProxyWorld, place: _Place, rank: RankOrder, descriptors: Sequence[int]) -> _RankEnds:
        """Return this end of a rank that starts elsewhere; ``descriptors`` in the order of ``files.open_rank``."""
        host, index = place
        channel, output, second, stacks, *more = descriptors
        shared = rank.has_page + bool(rank.address)  # no other machine can use these
        close_all([second, *more[:shared]])
        os.set_blocking(stacks, False)  # unread stacks must not block the loop
        files = _files_of(Channel.from_descriptor(channel), output, stacks, more[shared:])

        def report(stream: _Stream, payload: Any) -> None:
            self.send(host, world.number, stream, payload, index)

        return _RankEnds(files, self._callbacks, report, files.keys() - {RankStream.OUTPUT, RankStream.STACKS})

    def _on_group(self, world: _ProxyWorld) -> None:
        try:
            message, _ = world.group.receive()
        except ChannelClosedError:
            self._abandon(world)
            return
        if isinstance(message, Signal):
            host, index = world.order[message.index]
            message = replace(message, index=index)
            if host:
                self.send(host, world.number, RankStream.GROUP, message)
            elif world.here is not None:
                world.here.try_send(message)

    def _abandon(self, world: _ProxyWorld) -> None:
        del self._worlds[world.number]
        for host in {host for host, _ in world.order if host}:
            self.send(host, world.number, RankStream.GROUP, None)
        for rank in world.remote.values():
            rank.close()
        for channel in filter(None, (world.group, world.here)):
            self._callbacks.unwatch(channel)
            channel.close()

    # The ranks

    def _on_here(self, world: _ProxyWorld, here: Channel) -> None:
        try:
            self._pass_on(world, 0, here.receive()[0])
        except ChannelClosedError:  # the zygote was killed along with the parent half, or all ranks have ended
            self._callbacks.unwatch(here)

    def _receive(self, line: Line) -> None:
        shift_s = time.monotonic() - line.now_s  # the fastest message gives the best estimate
        shift_s = self._shift_s[line.source] = min(shift_s, self._shift_s.get(line.source, shift_s))
        if (world := self._worlds.get(line.world)) is None:  # the world was just abandoned
            return
        if line.stream is RankStream.GROUP:
            self._pass_on(world, line.source, line.payload)
        elif rank := world.remote.get((line.source, line.index)):
            rank.write(line.stream, _shift_times(line.payload, shift_s))

    def _pass_on(self, world: _ProxyWorld, host: int, message: Started | Ended) -> None:
        """Pass a zygote's message to the parent half; :class:`Started` once all hosts have started their ranks."""
        passed: Started | Ended
        if isinstance(message, Started):
            world.started[host] = message
            if len(world.started) < len({host for host, _ in world.order}):
                return
            passed = Started(
                tuple(world.started[host].pids[index] for host, index in world.order),
                next((each.why_interpreter for each in world.started.values() if each.why_interpreter), ""),
                tuple(self._names[host] for host, _ in world.order),
            )
        else:
            if rank := world.remote.pop((host, message.index), None):
                rank.close()
            left = tuple(replace(each, index=world.order.index((host, each.index))) for each in message.left_behind)
            index, time_s = world.order.index((host, message.index)), message.time_s + self._shift_s.get(host, 0.0)
            passed = replace(message, index=index, left_behind=left, time_s=time_s)
        world.group.try_send(passed)


@dataclass
class _RemoteWorld:
    number: int
    group: Channel
    ranks: list[_RankEnds] = field(default_factory=list)
    pids: tuple[int, ...] = ()
    ended: set[int] = field(default_factory=set)


class RemoteRanks(HostRanks):
    """The ranks of one class on a machine that is not its host 0. ``zygote`` has loaded the file of the class. Calls
    ``fail`` with a sentence when the ranks here are lost.
    """

    def __init__(
        self, zygote: ZygoteClient, environment: Mapping[str, str], fail: Callable[[str], None], *more: Any
    ) -> None:
        super().__init__(*more)
        self._zygote, self._environment, self._fail = zygote, environment, fail

    def _receive(self, line: Line) -> None:
        if isinstance(line.payload, tuple) and line.stream is RankStream.GROUP:
            self._start(line.world, *line.payload)
        elif world := self._worlds.get(line.world):  # otherwise the world was just abandoned
            if line.stream is not RankStream.GROUP:
                world.ranks[line.index].write(line.stream, line.payload)
            elif line.payload is None:
                self._abandon(world)
            else:
                world.group.try_send(line.payload)

    def _start(self, number: int, request: Start, origin: Mapping[str, str]) -> None:
        group, remote = channel_pair()
        world = self._worlds[number] = _RemoteWorld(number, group)
        self._callbacks.watch(group, lambda: self._on_group(world))
        orders: list[Order] = []
        inherited: list[int] = []
        for order in request.orders:
            own = self._open_rank(world, order)
            inherited += own
            localized = self._localized(order.payload, origin)
            orders.append(replace(order, payload=localized, descriptors=len(own)))
        start = replace(request, orders=tuple(orders), environment=orders[0].payload.environment)
        inherited.insert(0, remote.detach())
        self._zygote.channel.try_send(start, inherited)  # if the zygote is gone, the group's channel reports it
        close_all(inherited)

    def _open_rank(self, world: _RemoteWorld, order: Order) -> list[int]:
        """Open this side of a rank; return the rank's descriptors, in the parent half's order."""
        local, remote = channel_pair()
        output, output_writer = os.pipe()
        stacks, stacks_writer = os.pipe()
        inherited = [remote.detach(), output_writer, os.dup(output_writer), stacks_writer]
        shared = order.payload.has_page + bool(order.payload.address)
        pairs = [socket.socketpair() for _ in range(order.descriptors - len(inherited) - shared)]
        files = _files_of(local, output, stacks, [own.detach() for own, _ in pairs])
        report = partial(self._on_rank, world, len(world.ranks))
        world.ranks.append(_RankEnds(files, self._callbacks, report, files))
        return [*inherited, *(other.detach() for _, other in pairs)]

    def _localized(self, rank: RankOrder, origin: Mapping[str, str]) -> RankOrder:
        """Return a rank's order for this machine, whose environment gets the changes of host 0's."""
        environment, now = dict(self._environment), rank.environment
        for name in (origin.keys() | now.keys()) - _OF_THE_MACHINE:
            if name not in now:
                environment.pop(name, None)
            elif origin.get(name) != now[name]:
                environment[name] = now[name]
        return replace(rank, environment=environment, directory=os.getcwd(), has_page=False, address="")

    def _abandon(self, world: _RemoteWorld) -> None:
        del self._worlds[world.number]
        self._callbacks.unwatch(world.group)
        world.group.close()  # the zygote ends and reaps running ranks
        for rank in world.ranks:
            rank.close()

    # The ranks

    def _on_rank(self, world: _RemoteWorld, index: int, stream: _Stream, payload: Any) -> None:
        if payload is None and isinstance(stream, RankStream):
            return  # the zygote reports the end of the rank
        if isinstance(payload, Receipt):  # host 0 may judge the test on receipt, so the rank's output goes first
            world.ranks[index].drain(RankStream.OUTPUT)
        if isinstance(payload, Progress) and payload.blocked and not payload.among_ranks:
            others = query_zygote(self._zygote, world.pids)  # host 0 cannot see them
            payload = replace(payload, blocked=not others, may_act=others)
        self.send(0, world.number, stream, payload, index)

    def _on_group(self, world: _RemoteWorld) -> None:
        try:
            message, _ = world.group.receive()
        except ChannelClosedError:
            self._callbacks.unwatch(world.group)
            if len(world.ended) < len(world.ranks):
                self._fail("the zygote of its ranks was killed")
            return
        if isinstance(message, Started):
            world.pids = message.pids
        elif isinstance(message, Ended):
            world.ended.add(message.index)
            world.ranks[message.index].drain()
        self.send(0, world.number, RankStream.GROUP, message)


def _shift_times(message: Any, shift_s: float) -> Any:
    """Return a rank's message with its times by this machine's clock. A time of 0 is none."""
    times = {name: getattr(message, name) for name in _TIMES.get(type(message), ())}
    changed: dict[str, Any] = {name: time_s + shift_s for name, time_s in times.items() if time_s}
    return replace(message, **changed) if changed else message
