"""How long to wait for a process that may have hung: until its limit, and while it still computes a little longer.

Pure: it is told the time, and for how long the process has computed. On a busy machine it may get a core too rarely to
compute much, so that time in which it waits for one counts as well.
"""

from __future__ import annotations

__all__ = ["MORE_S", "Patience"]

# A process that has computed for less than a twentieth of a second in the last one is taken to hang. If the sum has
# become smaller, one of several processes has ended, which is progress too.
_LOOK_S, _COMPUTES_S = 1.0, 0.05
# What computes at its limit, on a machine that has much else to do, gets this much more, in seconds.
MORE_S = 30.0


class Patience:
    """The limit of one process.

    Args:
        limit_s: how long it may take.
        now_s: when it began.
        more_s: how much longer, if it computes.
        computed_s: for how long it had computed when it began. If that is given, what has not computed since is over
            at its limit; else it is looked at twice from then on.

    Attributes:
        look_s: when to ask :meth:`is_over`, on the clock of the constructor's ``now_s``.

    >>> patience = Patience(limit_s=5, now_s=100)
    >>> patience.look_s, patience.is_over(105, computed_s=3.0), patience.look_s
    (105, False, 106.0)
    >>> patience.is_over(106, computed_s=3.9), patience.is_over(107, computed_s=3.9)
    (False, True)
    """

    def __init__(self, limit_s: float, now_s: float, more_s: float = MORE_S, computed_s: float | None = None) -> None:
        self.look_s = now_s + limit_s
        self._end_s = now_s + limit_s + more_s
        self._computed_s = computed_s

    def is_over(self, now_s: float, computed_s: float) -> bool:
        """Whether the process counts as hung, which has computed for ``computed_s`` seconds in all."""
        if now_s < self.look_s:
            return False
        before, self._computed_s = self._computed_s, computed_s
        if now_s >= self._end_s or (before is not None and abs(computed_s - before) < _COMPUTES_S):
            return True
        self.look_s = now_s + _LOOK_S
        return False
