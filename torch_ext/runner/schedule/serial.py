"""One class at a time, in the order of the plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch_ext.runner.schedule.plan import Batch

__all__ = ["Serial"]


class Serial:
    """See :class:`~torch_ext.runner.schedule.base.Policy`."""

    keeps_order = True

    def order(self, batches: Sequence[Batch]) -> list[Batch]:
        return list(batches)

    def choose(self, ready: Sequence[Batch], running: Sequence[Batch], free: int, slots: int) -> Batch | None:
        return ready[0] if ready and not running else None
