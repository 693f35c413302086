"""Subtests: a test that runs once for each point of a grid. Points may skip."""

from __future__ import annotations

import math
import unittest
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import CPUOffload

from torch_ext.testing._internal._distributed.helpers import run_grid
from torch_ext.testing._internal._fsdp import device
from torch_ext.world import rank as world_rank
from torch_ext.world import wording

if TYPE_CHECKING:
    from torch_ext.testing._internal.common_utils import TestCase as _TestCase
else:
    _TestCase = object

__all__ = ["skip_parameter_offload", "skip_without_accelerator", "subtest_name"]


def skip_without_accelerator(reason: str) -> None:
    """Skip the running subtest, or the test if it has none, on the host."""
    if not device.is_accelerator():
        raise unittest.SkipTest(reason)


def skip_parameter_offload(cpu_offload: CPUOffload | None) -> None:
    """Likewise, if ``cpu_offload`` offloads parameters."""
    if cpu_offload is not None and cpu_offload.offload_params:
        why = "CPUOffload(offload_params=True) needs an accelerator to offload from"
        skip_without_accelerator(why)


class SubtestMixin(_TestCase):
    """Adds subtests that may skip to a test case."""

    rank: int

    def run_subtests(
        self,
        subtest_config: dict[str, list[Any]],
        test_fn: Callable[..., Any],
        *test_args: Any,
        **test_kwargs: Any,
    ) -> None:
        """Run ``test_fn`` once for each combination of values in ``subtest_config``,
        all in the same ranks.

        All ranks must skip the same ones, whose number the run prints with the reasons.
        The test skips if all combinations do.
        """
        number = math.prod(map(len, subtest_config.values()))
        reasons = run_grid(self, subtest_config, test_fn, *test_args, **test_kwargs)
        if not reasons:
            return
        listed = ", ".join(f"{n} x {why}" for why, n in Counter(reasons).most_common())
        summary = f"{len(reasons)} of {number} subtests skipped: {listed}"
        if len(reasons) == number:
            raise unittest.SkipTest(summary)
        if self.rank == 0:
            # The output of a rank is shown only if the test fails.
            process = world_rank.current()
            announce = process.notify if process else wording.announce
            announce(f"{self.id()}: {summary}")


def subtest_name(test_name_mapping: Mapping[str, str], *args: Any) -> str:
    """Join the names that ``test_name_mapping`` gives to ``str`` of each argument.

    >>> subtest_name({"True": "offload", "False": "on_device"}, True, None)
    'offload_none'
    """
    return "_".join(
        "none" if arg is None else test_name_mapping[str(arg)] for arg in args
    )
