"""Sub-cases of one test, with those that are left out counted and named."""

from __future__ import annotations

import functools
import sys
import unittest
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch_ext.testing._internal.common_distributed import run_subtests

__all__ = ["SubcaseTally", "run_and_tally"]


@dataclass
class SubcaseTally:
    """How many sub-cases of a test ran to their end, and why others were left out."""

    ran: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def counting(self, test_fn: Callable[..., Any]) -> Callable[..., None]:
        """Return ``test_fn`` with a skip that it raises counted rather than passed on."""

        @functools.wraps(test_fn)
        def counted(*args: Any, **kwargs: Any) -> None:
            try:
                test_fn(*args, **kwargs)
            except unittest.SkipTest as skip:
                self.left_out[str(skip)] += 1
            else:
                self.ran += 1

        return counted

    def summary(self) -> str:
        """Return one line such as ``16 of 32 sub-cases left out: 16 x offload needs an accelerator``."""
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.left_out.most_common())
        left_out = self.left_out.total()
        return f"{left_out} of {self.ran + left_out} sub-cases left out: {reasons}"


def run_and_tally(
    case: Any, config: dict[str, list[Any]], test_fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> SubcaseTally:
    """Run ``test_fn`` over the grid ``config`` like ``run_subtests``; a sub-case that skips leaves the others to run.

    Rank 0 prints what was left out. Ranks must agree on it, as they must on anything that ends a sub-case early.

    Raises:
        unittest.SkipTest: every sub-case was left out.
    """
    tally = SubcaseTally()
    run_subtests(case, config, tally.counting(test_fn), *args, **kwargs)
    if not tally.left_out:
        return tally
    if not tally.ran:
        raise unittest.SkipTest(tally.summary())
    if case.rank == 0:
        print(f"{case.id()}: {tally.summary()}", file=sys.stderr, flush=True)
    return tally
