"""The actor that Ray keeps on each machine: it starts the machine's supervisor, and passes on what that is told and
tells. Runs in a worker of Ray; standard library and own layer only.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator

from torch_ext.runner.cluster.messages import RunClass, Settings, Told
from torch_ext.world.channel import ChannelClosedError, channel_pair

__all__ = ["Node", "SupervisorDiedError"]


class SupervisorDiedError(RuntimeError):
    """The supervisor of a machine ended by itself, or was killed."""


class Node:
    """One machine. Its methods are called on threads of Ray's, several at a time."""

    def __init__(self, settings: Settings) -> None:
        self._channel, theirs = channel_pair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        program = [sys.executable, "-m", "torch_ext.runner.cluster.supervisor", str(theirs.fileno())]
        self._process = subprocess.Popen(
            program, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        theirs.close()
        self._sending = threading.Lock()
        self._queues: dict[int, queue.SimpleQueue[Told | None]] = {}
        self._over = False
        self._channel.send(settings)

    def ready(self) -> int:
        """Wait until the supervisor takes classes; return how many devices its ranks must share, 0 where they need not.
        Call once, before any other method.

        Raises:
            SupervisorDiedError: it cannot load what it needs; its own words are in Ray's log of this machine.
        """
        try:
            devices: int = self._channel.receive()[0]
        except ChannelClosedError:
            raise SupervisorDiedError(f"its supervisor ended with code {self._process.wait()} as it began") from None
        threading.Thread(target=self._listen, name="torch_ext supervisor", daemon=True).start()
        return devices

    def run(self, order: RunClass) -> Iterator[Told]:
        """Run a class, or ranks of one; yield what happens, as it does.

        Raises:
            SupervisorDiedError: that ended before the class was over.
        """
        told: queue.SimpleQueue[Told | None] = queue.SimpleQueue()
        with self._sending:
            self._queues[order.number] = told
            if not self._over:
                try:
                    self._channel.send(order)
                except ChannelClosedError:
                    told.put(None)
        while not self._over or not told.empty():
            message = told.get()
            if message is None:
                break
            yield message
            if message.event is None:
                del self._queues[order.number]
                return
        raise SupervisorDiedError("its supervisor ended")

    def end(self) -> None:
        """End the supervisor with all that it has started, and wait until it is gone."""
        with self._sending, contextlib.suppress(OSError):
            self._channel.shut()
        self._process.wait()

    def _listen(self) -> None:
        try:
            while True:
                message, _ = self._channel.receive()
                with contextlib.suppress(KeyError):  # nobody waits for it any more
                    self._queues[message.number].put(message)
        except (ChannelClosedError, OSError):
            with self._sending:
                self._over = True
                for waiting in self._queues.values():
                    waiting.put(None)
