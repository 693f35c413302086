"""Subtests: a test that runs once for each point of a grid. Points that skip are
counted and reported.
"""

from __future__ import annotations

import functools
import sys
import unittest
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import CPUOffload

from torch_ext.testing._internal._distributed.helpers import run_grid
from torch_ext.testing._internal._fsdp import device

if TYPE_CHECKING:
    from unittest import TestCase as _TestCase
else:
    _TestCase = object

__all__ = ["skip_parameter_offload", "skip_without_accelerator", "subtest_name"]


def skip_without_accelerator(reason: str) -> None:
    """Skip the running subtest, or the test if it has none, where the device under test
    is the host.

    Raises:
        unittest.SkipTest: there is no accelerator. Inside ``run_subtests`` this skips
        the running subtest only.
    """
    if not device.is_accelerator():
        raise unittest.SkipTest(reason)


def skip_parameter_offload(cpu_offload: CPUOffload | None) -> None:
    """Skip the running subtest if ``cpu_offload`` offloads parameters and there is no
    accelerator.

    Raises:
        unittest.SkipTest: as in :func:`skip_without_accelerator`.
    """
    if cpu_offload is not None and cpu_offload.offload_params:
        skip_without_accelerator(
            "CPUOffload(offload_params=True) needs an accelerator to offload from"
        )


@dataclass
class SubtestTally:
    """How many subtests of a test ran to the end, why others were skipped, and which
    checks were skipped in some.

    A skipped check counts once for each subtest.
    """

    ran: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    unchecked: Counter[str] = field(default_factory=Counter)
    _unchecked_here: set[str] = field(default_factory=set)

    def counting(self, test_fn: Callable[..., Any]) -> Callable[..., None]:
        """Return ``test_fn`` with its skips counted."""

        @functools.wraps(test_fn)
        def counted(*args: Any, **kwargs: Any) -> None:
            self._unchecked_here.clear()
            try:
                test_fn(*args, **kwargs)
            except unittest.SkipTest as skip:
                self.skipped[str(skip)] += 1
                raise
            self.ran += 1
            self.unchecked.update(self._unchecked_here)

        return counted

    def skip_check(self, what: str) -> None:
        """Record that the running subtest does not check ``what``."""
        self._unchecked_here.add(what)

    def summary(self) -> str:
        """Return one line that counts and explains what was skipped; empty if nothing
        was.

        >>> reasons = Counter({"offload needs an accelerator": 2})
        >>> SubtestTally(ran=1, skipped=reasons).summary()
        '2 of 3 subtests skipped: 2 x offload needs an accelerator'
        """
        parts = []
        if skipped := self.skipped.total():
            count = f"{skipped} of {self.ran + skipped}"
            parts.append(f"{count} subtests skipped: {_listed(self.skipped)}")
        if self.unchecked:
            parts.append(f"checks skipped: {_listed(self.unchecked)}")
        return "; ".join(parts)


def _listed(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common())


def run_subtests_with_tally(
    case: Any,
    config: dict[str, list[Any]],
    test_fn: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> SubtestTally:
    """Run ``test_fn`` over the grid ``config`` as ``run_subtests`` does; a subtest that
    skips does not stop the rest.

    Rank 0 reports what was skipped through ``case.announce``. All ranks must skip the
    same subtests. While subtests run, the tally is ``case.subtest_tally``.

    Raises:
        unittest.SkipTest: every subtest skipped.
    """
    tally = case.subtest_tally = SubtestTally()
    run_grid(case, config, tally.counting(test_fn), *args, **kwargs)
    if tally.skipped and not tally.ran:
        raise unittest.SkipTest(tally.summary())
    if case.rank == 0 and (summary := tally.summary()):
        case.announce(f"{case.id()}: {summary}")
    return tally


class SubtestMixin(_TestCase):
    """Adds subtests that may skip to a test case."""

    subtest_tally: SubtestTally

    def run_subtests(
        self,
        subtest_config: dict[str, list[Any]],
        test_fn: Callable[..., Any],
        *test_args: Any,
        **test_kwargs: Any,
    ) -> None:
        """Run ``test_fn`` once for each combination of values in ``subtest_config``,
        all in the same ranks.

        A combination that skips is counted, and the test run prints the count with the
        reasons. The test skips only if every combination does.
        """
        run_subtests_with_tally(
            self, subtest_config, test_fn, *test_args, **test_kwargs
        )

    def skip_check(self, what: str) -> None:
        """Have the test run print that the running subtest does not check ``what``.
        Call it within ``run_subtests``.
        """
        self.subtest_tally.skip_check(what)

    def announce(self, text: str) -> None:
        """Have the test run print ``text``, whether or not the test passes."""
        print(f"torch_ext: {text}", file=sys.stderr, flush=True)


def subtest_name(test_name_mapping: Mapping[str, str], *args: Any) -> str:
    """Join the names that ``test_name_mapping`` gives to ``str`` of each argument;
    ``None`` is named ``none``.

    >>> subtest_name({"True": "offload", "False": "on_device"}, True, None)
    'offload_none'
    """
    return "_".join(
        "none" if arg is None else test_name_mapping[str(arg)] for arg in args
    )
