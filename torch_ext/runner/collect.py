"""The tests that a loaded module defines, as unittest finds them.

Runs in a child of the module's zygote and in case processes.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_ext.world import access
from torch_ext.world.wire import Channel

__all__ = ["CollectOrder", "find_tests", "main"]


@dataclass(frozen=True)
class CollectOrder:
    """Which module's tests to tell."""

    module: str


def find_tests(module: str) -> list[unittest.TestCase]:
    """Return the tests of ``module``, which is loaded, in unittest's order; a ``load_tests`` function of its own is
    honoured.
    """
    return list(_flatten(unittest.defaultTestLoader.loadTestsFromModule(sys.modules[module])))


def _flatten(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _flatten(each)
        else:
            yield each


def main(order: CollectOrder, descriptors: Sequence[int]) -> int:
    """Target of a child: send ``(class, method)`` of every test on the channel."""
    access.start_no_ranks()
    channel = Channel.from_descriptor(descriptors[0])
    channel.send([(type(test).__name__, test._testMethodName) for test in find_tests(order.module)])
    return 0
