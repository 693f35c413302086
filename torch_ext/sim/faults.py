"""Faults in a rank's communication, planted at the k-th call. :mod:`torch_ext.faults.plan` has more kinds.

Each function plants one fault in the calling process, for groups that exist and groups to come::

    from torch_ext.sim import faults

    if rank == 1:
        faults.delay(at=3, by=timedelta(seconds=2))

``at`` counts this rank's calls from 1 and from now on, collectives and transfers alike; a coalesced operation is a call
for each of its tensors. ``group`` names one group (``ProcessGroup.group_name``); ``None`` means every group. A fault
happens once, and stays planted until :func:`clear`.
"""

from __future__ import annotations

from datetime import timedelta

from torch_ext.faults.plan import Fault, Plan, Point
from torch_ext.faults.points import Armament

_planted: list[Armament] = []


def delay(at: int, by: timedelta, group: str | None = None) -> None:
    """Make the launching thread sleep for ``by`` before the call."""
    if by < timedelta(0):
        raise ValueError(f"by={by}: expected a duration that is not negative")
    _plant("delay", at, group, f"{by.total_seconds()}s")


def drop(at: int, group: str | None = None) -> None:
    """Lose the call. A send is over at once; anything else runs into its time limit, here and on the peers."""
    _plant("drop", at, group)


def corrupt(at: int, group: str | None = None) -> None:
    """Flip one bit of this rank's sent data in the call, or of its received data if the call sends none.

    The bit is one of the first element's sign or exponent. The rank's own input stays as it is.
    """
    _plant("corrupt", at, group)


def kill(at: int, group: str | None = None) -> None:
    """End this process by SIGKILL when it makes the call."""
    _plant("kill", at, group)


def clear() -> None:
    """Forget every fault that was planted here."""
    while _planted:
        _planted.pop().disarm()


def _plant(kind: str, at: int, group: str | None, value: str = "") -> None:
    if isinstance(at, bool) or not isinstance(at, int) or at < 1:
        raise ValueError(f"at={at!r}: calls are counted from 1")
    fault = Fault(kind, value, Point(number=at, group=group or ""))
    _planted.append(Armament(Plan((fault,)), rank=0, tell=lambda _: None))
