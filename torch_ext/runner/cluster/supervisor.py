"""The process that runs classes on one machine of a cluster: ``python -m torch_ext.runner.cluster.supervisor FD``.

A worker of Ray has threads, and cannot fork ranks; this process has one, and loads neither torch nor Ray. It runs what
it is told to at once, since Ray has seen to it that there is room. It ends when the actor in front of it does, with all
that it started and with its temporary folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from torch_ext.runner.class_runner import ClassRunner
from torch_ext.runner.cluster.messages import Ready, RunClass, Settings, ShippedFile, Told
from torch_ext.runner.discovery import TestFile
from torch_ext.runner.loop import Loop, Task, Wait
from torch_ext.runner.places import Machine, ask_for_devices, shared_environment
from torch_ext.runner.results import Sink, TestName
from torch_ext.runner.schedule import Batch, Slots
from torch_ext.runner.schedule.slots import slots_of
from torch_ext.runner.zygotes import RunZygotes
from torch_ext.world.channel import Channel, ChannelClosedError

__all__ = ["main"]

# How many files stay imported of which no class runs.
_IDLE_FILES = 3


def main() -> int:
    """Serve until the channel closes; its first message is :class:`Settings`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends the run
    channel = Channel.from_descriptor(int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    folder = tempfile.mkdtemp(prefix="te-")  # short, for the addresses of sockets
    try:
        settings, _ = channel.receive()
        os.environ.update(settings.environment, TMPDIR=folder)
        if settings.cache:
            os.environ["TORCH_EXT_CACHE"] = settings.cache
        tempfile.tempdir = None
        _Supervisor(channel, settings, folder).serve()
    except ChannelClosedError:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


class _Supervisor:
    def __init__(self, channel: Channel, settings: Settings, folder: str) -> None:
        self._channel = channel
        self._options = replace(settings.options, root=Path.cwd(), show_output=False)
        environment = shared_environment(self._options.environment())
        self._zygotes = RunZygotes(self._options, environment, folder)
        self._zygotes.copies = True
        here = TestFile("", Path.cwd(), "", Path.cwd())
        devices = ask_for_devices(self._zygotes.root(here), environment)
        self._machine = Machine(folder, environment, devices, self._options.slots)
        self._slots = Slots(self._machine.slots) if devices.number else None
        self._loop = Loop()
        self._over = False
        self._used: dict[str, int] = {}  # file -> how many of its classes run, the one that was used last at the end
        channel.send(Ready(devices.number))

    def serve(self) -> None:
        """Take orders, and run what they say, until the channel closes."""
        try:
            self._loop.add(self._take_orders())
            while not self._over:
                self._loop.turn()
        finally:
            self._loop.close()
            self._zygotes.close()

    def _take_orders(self) -> Task[None]:
        while True:
            while not self._channel.poll():
                yield Wait((self._channel,))
            try:
                order, _ = self._channel.receive()
            except ChannelClosedError:
                self._over = True
                return
            self._loop.add(self._run(order))

    def _run(self, order: RunClass) -> Task[None]:
        file = _unpacked(order.file)
        tests = tuple(TestName(file.name, order.cls, method) for method in order.methods)
        batch = Batch(file, order.cls, tests, order.need)
        taken = self._slots.take(slots_of(order.need, self._slots.number)) if self._slots else ()
        place = self._machine.place(taken, packed=not order.need.alone)
        self._used[file.name] = self._used.pop(file.name, 0) + 1
        try:
            yield from ClassRunner(self._zygotes, place, batch, self._options, self._sink_of(order.number)).run()
        finally:
            self._zygotes.leave(batch)
            place.leave()
            if self._slots:
                self._slots.give_back(taken)
            self._used[file.name] -= 1
            self._forget_files(order.file)
        self._channel.send(Told(order.number, None, time.monotonic()))

    def _sink_of(self, number: int) -> Sink:
        return lambda event: self._channel.send(Told(number, event, time.monotonic()))

    def _forget_files(self, last: ShippedFile) -> None:
        idle = [name for name, running in self._used.items() if not running and name != last.name]
        for name in idle[:-_IDLE_FILES]:
            del self._used[name]
            self._zygotes.forget(TestFile(name, Path(), "", Path()))


def _unpacked(file: ShippedFile) -> TestFile:
    here = Path.cwd()
    return TestFile(file.name, here / file.path, file.module, here / file.import_root)


if __name__ == "__main__":
    raise SystemExit(main())
