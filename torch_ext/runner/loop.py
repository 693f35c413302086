"""Runs several tasks on one thread. A task is a generator that yields the files and the time that it waits for.

Runs in the supervisor, on the main thread. Starts no thread, so that a supervisor that is its own zygote can still
fork.
"""

from __future__ import annotations

import contextlib
import math
import select
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol, TypeVar

from torch_ext.world import _os
from torch_ext.world.settings import ProcessDeadline

T = TypeVar("T")


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


class _Source(_HasFileno, Protocol):
    def poll(self) -> bool: ...


class Pause(NamedTuple):
    """A task's wait: ends when one of ``files`` is readable, or when ``_os.monotonic()`` passes ``until_s``."""

    files: tuple[_HasFileno | int, ...]
    until_s: float = float("inf")

    @property
    def descriptors(self) -> set[int]:
        """The descriptors of the files; -1: closed."""
        return {file if isinstance(file, int) else file.fileno() for file in self.files}


Task = Generator[Pause, None, T]


def arrives(source: _Source, limit_s: float, pid: int) -> Task[bool]:
    """Task: wait for ``source``, such as a channel, and return whether it is ready. Gives up after ``limit_s`` seconds,
    unless process ``pid``, which writes to it, still computes then.
    """
    deadline = ProcessDeadline(limit_s, _os.monotonic())
    while not source.poll():
        yield Pause((source,), deadline.look_s)
        if not source.poll() and deadline.is_over(_os.monotonic(), _os.cpu_time_s(pid)):
            return False
    return True


class Loop:
    """Runs tasks in turns, and calls ``tick`` at least every ``tick_s`` seconds while they wait."""

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
        waits = [(task, wait.descriptors, wait.until_s) for task, wait in self._tasks.items()]
        left_s = min(self._tick_s, min(until_s for *_, until_s in waits) - _os.monotonic())
        ready = _readable(set().union(*(descriptors for _, descriptors, _ in waits)), max(0.0, left_s))
        now_s = _os.monotonic()
        for task, descriptors, until_s in waits:
            if task in self._tasks and (descriptors & ready or now_s >= until_s):
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


def _readable(descriptors: set[int], timeout_s: float) -> set[int]:
    """Wait until one of ``descriptors`` is readable; return those that are, or that another task has closed."""
    closed, selector = descriptors & {-1}, select.poll()
    for descriptor in descriptors - closed:
        selector.register(descriptor, select.POLLIN)
    timeout_ms = 0 if closed else None if timeout_s == float("inf") else math.ceil(timeout_s * 1000)
    return closed | {descriptor for descriptor, _ in selector.poll(timeout_ms)}
