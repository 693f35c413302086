"""Faults in a rank's communication, planted at the k-th call of a group.

A plan of faults connects here: see Note [Seams] in csrc/transport/transport.cpp. Each function plants one fault in the
calling process, for groups that exist and groups to come::

    from torch_ext.sim import faults

    if rank == 1:
        faults.delay(at=3, by=timedelta(seconds=2))

``at`` counts the calls of a group on this rank from 1, collectives and transfers alike; a coalesced operation is a call
for each of its tensors. ``group`` names one group (``ProcessGroup.group_name``); ``None`` means every group. A fault
happens once in each group, and stays planted until :func:`clear`.
"""

from __future__ import annotations

from datetime import timedelta

from torch_ext.sim import _native


def delay(at: int, by: timedelta, group: str | None = None) -> None:
    """Make the launching thread sleep for ``by`` before the call."""
    _plant("delay", at, group, by)


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
    """Forget every fault that was planted."""
    _native.clear_faults()


def _plant(kind: str, at: int, group: str | None, duration: timedelta = timedelta(0)) -> None:
    if isinstance(at, bool) or not isinstance(at, int) or at < 1:
        raise ValueError(f"at={at!r}: calls are counted from 1")
    if duration < timedelta(0):
        raise ValueError(f"by={duration}: expected a duration that is not negative")
    _native.plant_fault(kind, at, group or "", duration)
