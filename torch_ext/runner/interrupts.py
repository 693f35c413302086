"""SIGINT, raised as ``KeyboardInterrupt`` where that does no harm. Standard library only.

Runs in the supervisor and in class processes, on the main thread.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["Interrupts", "held"]

_current: Interrupts | None = None


class Interrupts:
    """Takes SIGINT over, until :meth:`give_back`.

    Inside :meth:`held` an interrupt waits for the end of the block: what the block does is done as a whole or not at
    all. A process that ignores SIGINT goes on ignoring it.

    Args:
        once: after the first interrupt, take no other: whoever cleans up is left in peace.
    """

    def __init__(self, *, once: bool = False) -> None:
        self._once = once
        self._held = 0
        self._waiting = False
        self._over = False
        self._before: Any = None
        with contextlib.suppress(ValueError):  # not on the main thread: nobody interrupts it
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                self._before = signal.signal(signal.SIGINT, self._take)
        global _current
        self._outer, _current = _current, self

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            return
        if self._held:
            self._waiting = True
            return
        self._over = self._once
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have interrupts wait until the block is left."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if self._waiting and not self._held:
                self._waiting = False
                self._take(signal.SIGINT, None)

    def give_back(self) -> None:
        """Put the handler back that was there before; after an interrupt that was to be the only one, ignore SIGINT.

        Else one more would end a process by the signal that is about to leave with a code of its own.
        """
        if self._over and self._before is not None:
            self._before = signal.SIG_IGN
        global _current
        _current = self._outer
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


def held() -> contextlib.AbstractContextManager[None]:
    """Have interrupts wait until the block is left, if this process takes them by :class:`Interrupts` at all."""
    return contextlib.nullcontext() if _current is None else _current.held()
