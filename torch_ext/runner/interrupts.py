"""Raises SIGINT, and in the supervisor SIGTERM and SIGHUP, as ``KeyboardInterrupt`` at safe points. Standard library
only.

Runs in the supervisor and in class processes, on the main thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

_current: Interrupts | None = None


class Interrupts:
    """Handles ``signals``, until :meth:`restore`; if ``once``, ignores more after the first, while the process cleans
    up. Inside :meth:`held`, an interrupt waits for the end of the block. A signal that the process ignores, as under
    nohup, stays ignored.
    """

    def __init__(self, *, once: bool = False, signals: Sequence[int] = (signal.SIGINT,)) -> None:
        self._once = once
        self.number = 0  # the last interrupting signal; 0 if none
        self._held = 0
        self._waiting = False
        self._over = False
        self._before: dict[int, Any] = {}
        with contextlib.suppress(ValueError):  # not on the main thread, where no signal arrives
            for number in signals:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        global _current
        self._outer, _current = _current, self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            return
        self.number = number
        if self._held:
            self._waiting = True
            return
        self._over = self._once
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Context: delay interrupts until the end of the block."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if self._waiting and not self._held:
                self._waiting = False
                self._handle(self.number, None)

    def restore(self) -> None:
        """Restore the handlers. After a one-shot interrupt, ignore more signals so that we exit with our own code."""
        global _current
        _current = self._outer
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._over else before)
        self._before = {}


def held() -> contextlib.AbstractContextManager[None]:
    """Context: delay interrupts until the end of the block, if this process handles them by :class:`Interrupts`."""
    return contextlib.nullcontext() if _current is None else _current.held()


def _leave_to_parent() -> None:
    """In a forked child, restore all handlers but SIGINT's, since children handle SIGINT too."""
    interrupts = _current
    while interrupts is not None:
        for number in interrupts._before.keys() - {signal.SIGINT}:
            signal.signal(number, interrupts._before[number])
        interrupts = interrupts._outer


os.register_at_fork(after_in_child=_leave_to_parent)
