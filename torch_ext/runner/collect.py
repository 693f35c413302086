"""The tests that a loaded module defines, as unittest finds them.

Runs in a child of the module's zygote and in class processes.
"""

from __future__ import annotations

import faulthandler
import sys
import unittest
from collections.abc import Iterator, Sequence

from torch_ext.runner.messages import CollectOrder, TestNames
from torch_ext.world import provider
from torch_ext.world.channel import Channel
from torch_ext.world.protocol import STACK_SIGNAL

__all__ = ["find_tests", "main"]


def find_tests(module: str) -> list[unittest.TestCase]:
    """Return the tests of ``module``, which is loaded, in unittest's order. Its ``load_tests`` function, if it has one,
    is honored.
    """
    return list(_flatten(unittest.defaultTestLoader.loadTestsFromModule(sys.modules[module])))


def _flatten(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _flatten(each)
        else:
            yield each


def main(order: CollectOrder, descriptors: Sequence[int]) -> int:
    """Target of a child: send the names of every test.

    Descriptors: the channel to the supervisor, a pipe for stacks.
    """
    faulthandler.register(STACK_SIGNAL, descriptors[1], all_threads=True)
    provider.never_start_ranks()
    names = tuple((type(test).__name__, test._testMethodName) for test in find_tests(order.module))
    Channel.from_descriptor(descriptors[0]).send(TestNames(names))
    return 0
