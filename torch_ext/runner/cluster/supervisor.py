"""The process that runs classes on one machine of a cluster: ``python -m torch_ext.runner.cluster.supervisor FD``.

Ray's workers have threads and cannot fork ranks; the supervisor has one thread, and loads neither torch nor Ray. It
starts each order at once, since Ray has reserved the room. When its actor ends, it ends its children, removes its
temporary folder and exits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_ext.runner.class_runner import ClassRunner
from torch_ext.runner.cluster.hosts import RankProxy, RemoteRanks
from torch_ext.runner.cluster.messages import Event, HostFailed, Joined, Line, RunClass
from torch_ext.runner.loop import Loop, Pause, Task
from torch_ext.runner.names import TestFile
from torch_ext.runner.options import RunOptions
from torch_ext.runner.places import Machine, Place
from torch_ext.runner.schedule import Batch, Slots, slots_of
from torch_ext.runner.zygotes import RunZygotes
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.settings import ADDRESS_VARIABLE, interface_variables
from torch_ext.world.tree import LoadError, ZygoteDiedError

_IDLE_FILES = 3  # the most that stay imported without a running class


def main() -> int:
    """Serve until the channel closes; its first message has the user's options."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends the run
    channel = Channel.from_descriptor(int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    folder = tempfile.mkdtemp(prefix="te-")  # short: socket addresses are limited in length
    try:
        options, _ = channel.receive()
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        _Supervisor(channel, options, folder).serve()
    except ChannelClosedError:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _received(channel: Channel) -> Task[tuple[Any, list[int]] | None]:
    """Task: return the next message with its descriptors; None at the end of the channel."""
    while not channel.poll():
        yield Pause((channel,))
    with contextlib.suppress(ChannelClosedError):
        return channel.receive()
    return None


class _Supervisor:
    def __init__(self, channel: Channel, options: RunOptions, folder: str) -> None:
        self._channel = channel
        self._options = replace(options, root=Path.cwd(), show_output=False)
        environment = self._options.environment()
        self._zygotes = RunZygotes(self._options, environment, folder)
        here = TestFile("", Path.cwd(), "", Path.cwd())
        devices = self._zygotes.count_devices(here)
        self._machine = Machine(folder, environment, devices, self._options.slots)
        self._slots = Slots(self._machine.slots) if devices.number else None
        self._loop = Loop()
        self._over = False
        self._host_ranks: dict[int, RankProxy | RemoteRanks] = {}
        self._used: dict[str, int] = {}  # file -> number of running classes, least recently used first
        channel.send(devices.number)

    def serve(self) -> None:
        """Run orders until the channel closes."""
        try:
            self._loop.add(self._take_orders())
            while not self._over:
                self._loop.turn()
        finally:
            self._loop.close()
            self._zygotes.close()

    def _take_orders(self) -> Task[None]:
        while received := (yield from _received(self._channel)):
            order, descriptors = received
            self._loop.add(self._listen(order, Channel.from_descriptor(descriptors[0])))
        self._over = True

    def _listen(self, order: RunClass, channel: Channel) -> Task[None]:
        """Task: run a class and pass it its other hosts' messages, until the actor ends it or closes its channel."""
        run = self._execute(order, channel.try_send)
        self._loop.add(run)
        while (received := (yield from _received(channel))) and (line := received[0]):
            if ranks := self._host_ranks.get(order.number):  # otherwise the class has just ended
                ranks.handle(line)
        self._loop.end(run)
        channel.close()

    def _execute(self, order: RunClass, send: Callable[[Event | Line | None], None]) -> Task[None]:
        here, file, need = Path.cwd(), order.batch.file, order.batch.need
        file = replace(file, path=here / file.path, import_root=here / file.import_root)
        batch = order.batch._replace(file=file)
        acquired = self._slots.acquire(slots_of(need, self._slots.number)) if self._slots else ()
        self._used[file.name] = self._used.pop(file.name, 0) + 1
        try:
            with self._machine.place(acquired, packed=not need.alone) as place:
                if order.host:
                    yield from self._join(order, batch, place, send)
                    return
                if order.names:
                    environment = {**place.environment, ADDRESS_VARIABLE: order.address}
                    self._host_ranks[order.number] = proxy = RankProxy(order.names, environment, order.number, 0, send)
                    self._loop.add(proxy.serve())
                    place = place._replace(environment=environment, add_client=proxy.add_client)
                yield from ClassRunner(self._zygotes, place, batch, self._options, send).run()
        finally:
            if ranks := self._host_ranks.pop(order.number, None):
                ranks.close()
            if self._slots:
                self._slots.release(acquired)
            self._used[file.name] -= 1
            idle = [name for name, running in self._used.items() if not running and name != file.name]
            for name in idle[:-_IDLE_FILES]:
                del self._used[name]
                self._zygotes.forget(TestFile(name, Path(), "", Path()))
            send(None)

    def _join(self, order: RunClass, batch: Batch, place: Place, send: Callable[[Event | Line], None]) -> Task[None]:
        """Task: run ranks of a class whose host 0 is another machine."""
        try:
            zygote = yield from self._zygotes.copy_of(batch.file)
        except (LoadError, ZygoteDiedError) as error:
            send(HostFailed(str(error).rstrip().rpartition("\n")[2]))
            return
        environment = {**place.environment, **interface_variables(order.address, place.environment)}
        ranks = RemoteRanks(
            zygote, environment, lambda why: send(HostFailed(why, lost=True)), order.number, order.host, send
        )
        self._host_ranks[order.number] = ranks
        send(Joined())
        with contextlib.closing(zygote):
            yield from ranks.serve()


if __name__ == "__main__":
    raise SystemExit(main())
