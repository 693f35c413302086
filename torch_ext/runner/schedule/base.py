"""What every policy can do: choose the class that begins next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch_ext.runner.schedule.plan import Batch

__all__ = ["Policy"]


class Policy(Protocol):
    """Chooses. It remembers nothing, so that a choice depends on what is asked alone.

    Called in the supervisor, on the main thread, whenever a class has ended or become ready. Must not block.

    Attributes:
        keeps_order: a class that is not ready holds up those that come after it.
    """

    @property
    def keeps_order(self) -> bool: ...

    def order(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return ``batches`` in the order in which they should become ready: their files are imported in it."""
        ...

    def choose(self, ready: Sequence[Batch], running: Sequence[Batch], free: int, slots: int) -> Batch | None:
        """Return which of ``ready`` begins now; None to wait until one of ``running`` has ended.

        With nothing running, one of ``ready`` has to begin.

        Args:
            ready: those that may begin, in the order of :meth:`order`.
            running: those that have begun and not ended.
            free: how many slots nobody holds.
            slots: how many there are.
        """
        ...
