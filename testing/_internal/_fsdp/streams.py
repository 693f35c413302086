"""The order of work on streams: races, and which work may overlap. The streams' clocks
answer, so no result depends on time.

Only the simulated accelerator has such clocks. Elsewhere :func:`check_races` checks
nothing, and :class:`StreamOrder` skips.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from torch_ext.testing._internal._fsdp import device

__all__ = ["StreamOrder", "check_races"]

_MOST_MARKS = 256


def _checker() -> Any:
    """Return the module that finds races on the device under test, or None."""
    if not device.is_accelerator():
        return None
    return getattr(torch.get_device_module(device.get_devtype().type), "races", None)


def check_races() -> AbstractContextManager[None]:
    """Return a context that raises at its end if streams raced in its body, with the
    wait that was missing.

    Does nothing on a device without a checker.
    """
    checker = _checker()
    return nullcontext() if checker is None else checker.check()


class StreamOrder:
    """Finds marked moments of a program that may overlap, because no wait orders their
    streams.

    Use it within :meth:`watching`. Each mark writes its cell on the current
    stream and reads those of earlier marks there. A read that races with a write shows
    two moments that nothing orders.

    Attributes:
        names: what was marked, in the order of the calls.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._overlapping: set[tuple[str, str]] = set()

    @contextmanager
    def watching(self) -> Iterator[StreamOrder]:
        """Watch the body. A race of the body itself is an error, as with
        :func:`check_races`.

        Raises:
            unittest.SkipTest: the device has no race checker.
        """
        self._checker = _checker()
        if self._checker is None:
            raise unittest.SkipTest(
                "only the simulated accelerator tells which streams wait for each other"
            )
        self._cells = torch.zeros(_MOST_MARKS, device=device.compute_device())
        torch.accelerator.synchronize()
        with check_races():
            yield self

    def mark(self, name: str) -> None:
        """Mark this moment of the current stream.

        Raises:
            RaceError: the program itself has raced since the last mark.
            IndexError: there are too many marks.
        """
        if races := self._checker.found():
            raise self._checker.RaceError(races)
        with torch.no_grad():
            for index, earlier in enumerate(self.names):
                self._cells[index].clone()
                if self._checker.found():
                    self._overlapping.add((earlier, name))
            self._cells[len(self.names)].fill_(1)
        self.names.append(name)

    def relation(self, earlier: str, later: str) -> str:
        """Return how two moments relate: the first ``overlaps`` the second, ``comes
        before`` it, or was ``issued after`` it by the host.

        Raises:
            ValueError: nothing of that name was marked.
        """
        if self.names.index(earlier) > self.names.index(later):
            return "issued after"
        return "overlaps" if (earlier, later) in self._overlapping else "comes before"
