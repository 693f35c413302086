"""Runs in a rank, around a test's body: a race between streams of the device fails the rank, process or thread."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch_ext import accelerator
from torch_ext.world import rank as world_rank
from torch_ext.world import wording

__unittest = True

__all__ = ["race_check", "race_check_of_threads"]


def race_check() -> AbstractContextManager[None]:
    """Return a context for the body of the test, or example, that this rank runs; see ``accelerator.race_check``.

    Rank 0 says which known races the test has not met.
    """
    rank = world_rank.current()
    if rank is None:
        return accelerator.race_check("", wording.announce)
    return accelerator.race_check(rank.test if rank.rank == 0 else "", rank.tell)


def race_check_of_threads() -> accelerator.RaceCheckOfThreads | None:
    """Begin the check of a test whose ranks are threads; None if the device has none."""
    rank = world_rank.current()
    return accelerator.race_check_of_threads(wording.announce if rank is None else rank.tell)
