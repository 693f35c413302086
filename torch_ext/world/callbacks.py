"""Files with what is to be called when one of them can be read. Standard library only."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable
from typing import Any

from torch_ext.world._os import monotonic

__all__ = ["Callbacks"]

_NEVER = float("inf")


class Callbacks:
    """Calls back when files can be read, and when the ``deadline_s`` of one that has any is over.

    A file is a descriptor, or has a ``fileno()``.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def __len__(self) -> int:
        """How many files are watched; 0 once this is closed."""
        return len(self._selector.get_map() or ())

    def fileno(self) -> int:
        """A descriptor that can be read whenever one of the files can."""
        return self._selector.fileno()

    @property
    def files(self) -> list[Any]:
        """The files that are watched; none once this is closed."""
        return [key.fileobj for key in (self._selector.get_map() or {}).values()]

    def is_open(self) -> bool:
        """Whether this has not been closed."""
        return self._selector.get_map() is not None

    def watch(self, file: Any, callback: Callable[[], object]) -> None:
        """Call ``callback`` whenever ``file`` can be read."""
        self._selector.register(file, selectors.EVENT_READ, callback)

    def unwatch(self, file: Any) -> None:
        """Call back for ``file`` no longer. Does nothing if it is not watched, or has been closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def watches(self, file: Any) -> bool:
        """Whether ``file`` is watched."""
        with contextlib.suppress(KeyError, ValueError):
            return self._selector.get_key(file) is not None
        return False

    def call(self, timeout_s: float | None = None, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Call back for the files that can be read. If none can, wait for at most ``timeout_s``; without limit if None.

        A callback may unwatch and close files, and close this too. Once ``stop`` returns True the rest is not called.
        """
        late_s = min((getattr(file, "deadline_s", _NEVER) for file in self.files), default=_NEVER)
        if late_s < _NEVER:
            left_s = max(0.0, late_s - monotonic())
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        ready = [key for key, _ in self._selector.select(timeout_s)]
        if late_s <= monotonic():
            ready += [key for key in self._selector.get_map().values() if _is_late(key.fileobj) and key not in ready]
        for key in ready:
            # An earlier callback of this round may have unwatched it.
            if not stop() and (self._selector.get_map() or {}).get(key.fd) == key:
                key.data()

    def close(self) -> None:
        """Watch nothing more. Idempotent."""
        self._selector.close()


def _is_late(file: object) -> bool:
    return bool(getattr(file, "deadline_s", _NEVER) <= monotonic())
