"""How long each rank took for what: kept for whoever reports on the test. Runs in the parent half; standard library and
own layer only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from torch_ext.world.outcome import Outcome

__all__ = ["RankTimes", "keep", "take"]


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank of one world, with times by ``time.monotonic``; 0 for what it did not come to.

    Attributes:
        rank: its number.
        ending: how it ended, in words.
        started_s: when its world was asked for.
        began_s: when it began its body.
        met_s: when it began and finished to make its first process group.
        done_s: when its body was over, and what that had left to be done.
        ended_s: when its process had ended, or it was done with its test if it lives on.
    """

    rank: int
    ending: str
    started_s: float
    began_s: float = 0.0
    met_s: tuple[float, float] = (0.0, 0.0)
    done_s: float = 0.0
    ended_s: float = 0.0


# Where nobody asks, as under pytest, the oldest make room.
_kept: deque[RankTimes] = deque(maxlen=1024)


def keep(outcomes: Iterable[Outcome], started_s: float) -> None:
    """Keep what became of the ranks of a world that was asked for at ``started_s``."""
    for one in outcomes:
        told = one.receipt
        done_s = told.time_s if told else 0.0
        times = (told.began_s, told.met_s, done_s) if told else (0.0, (0.0, 0.0), 0.0)
        _kept.append(RankTimes(one.rank, one.describe(), started_s, *times, max(one.ended_s, done_s)))


def take() -> tuple[RankTimes, ...]:
    """Return what was kept since the last call."""
    taken = tuple(_kept)
    _kept.clear()
    return taken
