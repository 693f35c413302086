"""Runs several tasks on one thread. A task is a generator that yields the files and the time that it waits for.

Runs in the supervisor, on the main thread. Starts no thread, so that a supervisor that is its own zygote can still
fork.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol, TypeVar

from torch_ext.world import _os
from torch_ext.world.channel import Channel
from torch_ext.world.settings import ProcessDeadline

__all__ = ["Loop", "Pause", "Task", "arrives"]

T = TypeVar("T")


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


class Pause(NamedTuple):
    """A task's wait: ends when one of ``files`` is readable, or when ``_os.monotonic()`` passes ``until_s`` or a file's
    ``deadline_s``.
    """

    files: tuple[_HasFileno | int, ...]
    until_s: float = float("inf")

    @property
    def end_s(self) -> float:
        """The end of the wait if no file becomes readable."""
        return min([self.until_s, *(getattr(file, "deadline_s", self.until_s) for file in self.files)])


Task = Generator[Pause, None, T]


def arrives(channel: Channel, limit_s: float, pid: int) -> Task[bool]:
    """Task: wait for ``channel`` and return whether it is readable. Gives up after ``limit_s`` seconds, unless process
    ``pid``, which writes to the channel, still computes then.
    """
    deadline = ProcessDeadline(limit_s, _os.monotonic())
    while not channel.poll():
        yield Pause((channel,), deadline.look_s)
        if not channel.poll() and deadline.is_over(_os.monotonic(), _os.cpu_time_s(pid)):
            return False
    return True


class Loop:
    """Runs tasks in turns. :meth:`close` ends unfinished tasks by ``GeneratorExit``.

    Args:
        tick: called at least every ``tick_s`` seconds while tasks wait.
    """

    def __init__(self, tick: Callable[[], None] = lambda: None, tick_s: float = float("inf")) -> None:
        self._tick, self._tick_s = tick, tick_s
        self._tasks: dict[Task[None], Pause] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: Task[None]) -> None:
        """Run ``task`` until its first wait."""
        self._advance(task)

    def turn(self) -> None:
        """Wait until a task can go on, and run every task that can. Also returns after a tick."""
        if not self._tasks:
            raise AssertionError("there is nothing to wait for")
        now_s = _os.monotonic()
        left_s = min(self._tick_s, min(wait.end_s for wait in self._tasks.values()) - now_s)
        ready = _readable([wait.files for wait in self._tasks.values()], max(0.0, left_s))
        now_s = _os.monotonic()
        for (task, wait), woken in zip(list(self._tasks.items()), ready, strict=True):
            if task in self._tasks and (woken or now_s >= wait.end_s):
                self._advance(task)
        self._tick()

    def _advance(self, task: Task[None]) -> None:
        self._tasks.pop(task, None)
        with contextlib.suppress(StopIteration):
            self._tasks[task] = next(task)

    def end(self, task: Task[None]) -> None:
        """End one task by ``GeneratorExit``, unless it is done."""
        if self._tasks.pop(task, None):
            task.close()

    def close(self) -> None:
        """End all tasks."""
        while self._tasks:
            self._tasks.popitem()[0].close()


def _readable(waits: list[tuple[_HasFileno | int, ...]], timeout_s: float) -> list[bool]:
    """Wait until a file of ``waits`` is readable; return for each wait whether one of its files is."""
    by_file: dict[int, list[int]] = {}
    for number, files in enumerate(waits):
        for file in files:
            by_file.setdefault(file if isinstance(file, int) else file.fileno(), []).append(number)
    ready = [False] * len(waits)
    with selectors.DefaultSelector() as selector:
        for descriptor, numbers in by_file.items():
            try:
                selector.register(descriptor, selectors.EVENT_READ, numbers)
            except (OSError, ValueError):  # another task has closed a file: wake the waiting task to check
                for number in numbers:
                    ready[number] = True
                timeout_s = 0.0
        for key, _ in selector.select(None if timeout_s == float("inf") else timeout_s):
            for number in key.data:
                ready[number] = True
    return ready
