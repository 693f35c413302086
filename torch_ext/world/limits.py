"""How long a test, its ranks and a process that may have hung get. No clock. Standard library and own layer only: the
supervisor knows these limits too.
"""

from __future__ import annotations

import math
import numbers
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch_ext.world import settings

__all__ = [
    "LIMIT_ATTRIBUTE",
    "MORE_S",
    "TIMEOUT_DEFAULT",
    "TIMEOUT_OVERRIDE",
    "Limits",
    "Patience",
    "get_timeout",
    "seconds_of",
    "timeout_of",
]

# In seconds.
TIMEOUT_DEFAULT = int(os.environ.get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "120"))
# By test name, in seconds. Test files add to it.
TIMEOUT_OVERRIDE: dict[str, int] = {"test_ddp_uneven_inputs": 400, "test_DistributedDataParallel": 500}

# Where a test method carries its own limit, in seconds.
LIMIT_ATTRIBUTE = "_timeout_s"


@dataclass(frozen=True)
class Limits:
    """How long to wait for what, in seconds.

    Attributes:
        test_s: from the start until every rank has ended.
        grace_s: from the first rank's failure or death until its peers are stopped; they may fail by themselves and
            tell how. Those that wait for a core get a little more.
        exit_s: from the receipt of the last rank until the last process has ended. Ranks that still compute then get
            more; see :class:`~torch_ext.world.limits.Patience`.
        hang_s: from the last progress until a provable hang is found; 0: it is not looked for.
        endless_s: a wait for a lock counts as endless if its own limit is at least so far away. By default it must lie
            past ``test_s``; where a test may take for ever, no limit would.
        raises_later_s: the same for an operation of torch's, which raises at its limit.
        end_hangs: a hang ends its ranks. Otherwise it is reported, and they go on.
    """

    test_s: float
    grace_s: float = 1.0
    exit_s: float = 15.0
    hang_s: float = 0.0
    endless_s: float = float("inf")
    raises_later_s: float = float("inf")
    end_hangs: bool = True


def get_timeout(test_id: str) -> int:
    """Return the seconds that the test with this id may take by its name alone; :func:`timeout_of` has the whole
    rule.
    """
    return TIMEOUT_OVERRIDE.get(test_id.rpartition(".")[2], TIMEOUT_DEFAULT)


def timeout_of(case: Any) -> float:
    """Return the seconds that the current test of ``case``, a test case of unittest's, may take.

    The first of these that is set wins: ``TORCH_EXT_TIMEOUT`` (``--timeout``); ``@with_timeout`` on the test; the class
    attribute ``timeout`` (seconds or a ``timedelta``); ``TIMEOUT_OVERRIDE`` by the test's name;
    ``DISTRIBUTED_TESTS_DEFAULT_TIMEOUT``; 120 seconds.

    Raises:
        ValueError: it is no finite time above 0.
    """
    asked = settings.time_limit_s()
    if asked is not None:
        return asked
    test_id = case.id()
    name = getattr(case, "_testMethodName", test_id.rpartition(".")[2])  # which may have dots
    own = getattr(getattr(type(case), name, None), LIMIT_ATTRIBUTE, None)
    if own is None:
        own = getattr(case, "timeout", None)
        own = None if callable(own) else own
    return seconds_of(get_timeout(test_id) if own is None else own, f"the time limit of {test_id}")


def seconds_of(limit: Any, what: str) -> float:
    """Return a time limit in seconds.

    Args:
        limit: a number of seconds, or a ``timedelta``.
        what: which limit it is, in words.

    Raises:
        ValueError: it is neither, or no finite time above 0.

    >>> seconds_of(timedelta(minutes=1), "the limit"), seconds_of(2, "the limit")
    (60.0, 2.0)
    >>> seconds_of(float("nan"), "the limit of TestA")
    Traceback (most recent call last):
    ValueError: the limit of TestA is nan; expected a finite number of seconds above 0, or a timedelta
    """
    number = limit.total_seconds() if isinstance(limit, timedelta) else limit
    if isinstance(number, bool) or not isinstance(number, numbers.Real) or not 0 < float(number) < math.inf:
        raise ValueError(f"{what} is {limit!r}; expected a finite number of seconds above 0, or a timedelta")
    return float(number)


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
