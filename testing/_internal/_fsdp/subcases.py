"""Sub-cases of one test, with those that are left out counted and named."""

from __future__ import annotations

import functools
import unittest
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.fsdp import CPUOffload

from torch_ext.testing._internal._fsdp import device
from torch_ext.testing._internal.common_distributed import run_subtests

__all__ = ["SubcaseTally", "leave_out_parameter_offload", "leave_out_without_accelerator", "run_and_tally"]


def leave_out_without_accelerator(reason: str) -> None:
    """Leave out the sub-case that calls this where the device under test is the plain host.

    Raises:
        unittest.SkipTest: there is no accelerator; inside ``run_subtests`` that costs this sub-case alone.
    """
    if not device.is_accelerator():
        raise unittest.SkipTest(reason)


def leave_out_parameter_offload(cpu_offload: CPUOffload | None) -> None:
    """Leave out the sub-case if ``cpu_offload`` offloads parameters and there is no accelerator, as above."""
    if cpu_offload is not None and cpu_offload.offload_params:
        leave_out_without_accelerator("CPUOffload(offload_params=True) needs an accelerator to offload from")


@dataclass
class SubcaseTally:
    """How many sub-cases of a test ran to their end, why others were left out, and what some did not check.

    A check counts once for each sub-case that it is missing from.
    """

    ran: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    unchecked: Counter[str] = field(default_factory=Counter)
    _missing_here: set[str] = field(default_factory=set)

    def counting(self, test_fn: Callable[..., Any]) -> Callable[..., None]:
        """Return ``test_fn`` with a skip that it raises counted rather than passed on."""

        @functools.wraps(test_fn)
        def counted(*args: Any, **kwargs: Any) -> None:
            self._missing_here.clear()
            try:
                test_fn(*args, **kwargs)
            except unittest.SkipTest as skip:
                self.left_out[str(skip)] += 1
            else:
                self.ran += 1
                self.unchecked.update(self._missing_here)

        return counted

    def miss_check(self, what: str) -> None:
        """Note that the running sub-case does not check ``what``."""
        self._missing_here.add(what)

    def summary(self) -> str:
        """Return one line that counts and explains all that is missing, empty if nothing is.

        >>> SubcaseTally(ran=1, left_out=Counter({"offload needs an accelerator": 2})).summary()
        '2 of 3 sub-cases left out: 2 x offload needs an accelerator'
        """
        left_out = self.left_out.total()
        parts = (
            [f"{left_out} of {self.ran + left_out} sub-cases left out: {_listed(self.left_out)}"] if left_out else []
        )
        parts += [f"checks left out: {_listed(self.unchecked)}"] if self.unchecked else []
        return "; ".join(parts)


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common())


def run_and_tally(
    case: Any, config: dict[str, list[Any]], test_fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> SubcaseTally:
    """Run ``test_fn`` over the grid ``config`` like ``run_subtests``; a sub-case that skips leaves the others to run.

    What was left out goes to ``case.announce`` on rank 0. Ranks must agree on it, as they must on anything that ends a
    sub-case early. While sub-cases run, their tally is ``case.subcase_tally``.

    Raises:
        unittest.SkipTest: every sub-case was left out.
    """
    tally = case.subcase_tally = SubcaseTally()
    run_subtests(case, config, tally.counting(test_fn), *args, **kwargs)
    if tally.left_out and not tally.ran:
        raise unittest.SkipTest(tally.summary())
    if case.rank == 0 and (summary := tally.summary()):
        case.announce(f"{case.id()}: {summary}")
    return tally
