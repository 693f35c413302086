"""The order of work on streams: races, and which work may overlap. The clocks of the
simulated accelerator's streams answer, so no result depends on time. Elsewhere
:func:`check_races` checks nothing, and :class:`WatchedUnits` skips.
"""

from __future__ import annotations

import re
import unittest
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn

from torch_ext.testing._internal._fsdp.device import get_devtype, is_accelerator
from torch_ext.testing._internal._fsdp.step_log import (
    Collective,
    StepLog,
    ThreeUnits,
)

__all__ = ["SlowUnit", "WatchedUnits", "check_races"]

_MAX_MARKS = 256
# The names of FSDP's collectives in moments.
_NAMES = {"all-gather": "gather", "reduce-scatter": "reduce"}
_RELATION = re.compile("(.+) (?:overlaps|comes before|issued after) (.+)")


def _race_checker() -> Any:
    """Return the module that finds races on the device under test, or None."""
    if not is_accelerator():
        return None
    return getattr(torch.get_device_module(get_devtype().type), "races", None)


def check_races() -> AbstractContextManager[None]:
    """Return a context that raises at its end if streams raced in its body, with the
    wait that was missing. Does nothing on a device without a checker.
    """
    checker = _race_checker()
    return nullcontext() if checker is None else checker.check()


class SlowUnit(torch.nn.Module):
    """Computes for 1,000 ns, for which the host waits. Has 400 bytes of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = torch.get_device_module(x.device)
        device._sleep(1000)
        device.synchronize()
        return x * self.weight


class WatchedUnits(StepLog):
    """A sharded :class:`ThreeUnits` that marks when each unit is computed, gathered,
    reduced and all-reduced, and finds marked moments that may overlap, because no wait
    orders their streams.

    A moment is called ``"0 forward: gather second"``, with the number of the step. Each
    mark writes its cell on the current stream and reads those of earlier marks there. A
    read that races with a write shows two moments that nothing orders.

    Args:
        device: where the model is made.
        shard: shards the units ``first`` and ``second`` each on their own, then the
            model, which it returns.

    Attributes:
        names: the marked moments, in the order of the calls.
    """

    def __init__(
        self, device: torch.device, shard: Callable[[ThreeUnits], nn.Module]
    ) -> None:
        units = ThreeUnits().to(device)
        super().__init__(units)
        self.names: list[str] = []
        self.phase = ""
        self._overlapping: set[tuple[str, str]] = set()
        self._cells = torch.zeros(_MAX_MARKS, device=device)
        self._rows = torch.ones(2, 4, device=device)
        self.model = shard(units)

    def mark(self, event: str) -> None:
        """Mark this moment of the current stream.

        Raises:
            RaceError: the program itself has raced since the last mark.
            IndexError: there are too many marks.
        """
        checker, name = _race_checker(), f"{self.phase}: {event}"
        if races := checker.found():
            raise checker.RaceError(races)
        with torch.no_grad():
            for index, earlier in enumerate(self.names):
                self._cells[index].clone()
                if checker.found():
                    self._overlapping.add((earlier, name))
            self._cells[len(self.names)].fill_(1)
        self.names.append(name)

    def note(self, call: Collective) -> None:
        unit = self._units.get(call.numel) or self._units[2 * call.numel]
        self.mark(f"{_NAMES.get(call.name, call.name)} {unit}")

    def _forward_hook(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.mark(f"computed {name}")
            if output.requires_grad:
                args[0].register_hook(lambda _: self.mark(f"computed {name}"))

        return note

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps of the body; skip on a device without a race checker. A race
        of the body itself is an error, as with :func:`check_races`.
        """
        if _race_checker() is None:
            why = "needs the race checker of the simulated accelerator"
            raise unittest.SkipTest(why)
        torch.accelerator.synchronize()
        with check_races(), self:
            yield

    def run_step(self, number: int) -> None:
        """Run forward and backward, and mark what an optimizer would come after."""
        self.phase = f"{number} forward"
        # A new leaf in each step: hooks stay on a tensor.
        loss = self.model(self._rows.detach().requires_grad_()).sum()
        self.phase = f"{number} backward"
        loss.backward()
        self.mark("optimizer")

    def run_steps(self, number: int) -> None:
        """Watch ``number`` steps."""
        with self.watching():
            for step in range(number):
                self.run_step(step)

    def check(self, case: Any, relations: str) -> None:
        """Check with ``case``'s assertion that moments relate as ``relations`` says, in
        a line for each pair: the first ``overlaps`` the second, ``comes before`` it, or
        was ``issued after`` it by the host.

        Raises:
            AssertionError: two moments relate otherwise; the message shows both lines.
            ValueError: a line states no relation, or a moment that was not marked.
        """
        actual = map(self._actual_relation, relations.splitlines())
        case.assertMultiLineEqual(relations, "\n".join(actual))

    def _actual_relation(self, line: str) -> str:
        match = _RELATION.fullmatch(line)
        if match is None:
            expected = "'A overlaps B', 'A comes before B' or 'A issued after B'"
            raise ValueError(f"Got {line!r}, expected {expected}.")
        first, second = match.groups()
        relation = "comes before"
        if self.names.index(first) > self.names.index(second):
            relation = "issued after"
        elif (first, second) in self._overlapping:
            relation = "overlaps"
        return f"{first} {relation} {second}"
