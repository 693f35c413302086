"""Runs in a rank, around a test's body: a race between streams of the device fails the rank."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch_ext import accelerator
from torch_ext.world import notices
from torch_ext.world import rank as world_rank

__unittest = True

__all__ = ["race_check"]


def race_check(test: str = "") -> AbstractContextManager[None]:
    """Return a context for the body of a test; see ``accelerator.race_check``.

    Args:
        test: as unittest names it, if the whole test is the body. Rank 0 says which known races it has not met.
    """
    rank = world_rank.current()
    tell = notices.announce if rank is None else rank.tell
    return accelerator.race_check(test if rank is not None and rank.rank == 0 else "", tell)
