"""The tests that a loaded module defines, as unittest finds them.

Runs in a child of the module's zygote and in class processes.
"""

from __future__ import annotations

import faulthandler
import sys
import unittest
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch_ext.results import Needs
from torch_ext.runner.messages import CollectOrder, TestNames
from torch_ext.world import provider
from torch_ext.world.channel import Channel
from torch_ext.world.protocol import STACK_SIGNAL
from torch_ext.world.settings import hosts_of

__all__ = ["find_tests", "main", "needs_of"]

# Ranks of its tests are threads of one process.
_THREADED = "MultiThreadedTestCase"


def find_tests(module: str) -> list[tuple[str, unittest.TestCase]]:
    """Return the tests of ``module``, which is loaded, in unittest's order, each with the name of its class.

    Its ``load_tests`` function, if it has one, is honored. Of several classes that call themselves the same, each one
    that the module knows by another name goes by that.
    """
    found = sys.modules[module]
    tests = list(_flatten(unittest.defaultTestLoader.loadTestsFromModule(found)))
    names = _class_names({type(test) for test in tests}, vars(found))
    return [(names[type(test)], test) for test in tests]


def _class_names(classes: Collection[type], known: Mapping[str, object]) -> dict[type, str]:
    """Return the name of each class.

    >>> one, other = type("TestA", (), {}), type("TestA", (), {})
    >>> names = _class_names([one, other], {"TestA": one, "TestB": other})
    >>> names[one], names[other]
    ('TestA', 'TestB')
    """
    shared = Counter(cls.__name__ for cls in classes)
    bound = {value: name for name, value in known.items() if isinstance(value, type)}
    return {cls: cls.__name__ if shared[cls.__name__] == 1 else bound.get(cls, cls.__name__) for cls in classes}


def _flatten(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _flatten(each)
        else:
            yield each


def needs_of(test: unittest.TestCase) -> Needs:
    """Return what ``test`` asks for, by its class's ``world_size`` and by the decorators of its method.

    >>> case = type("TestA", (unittest.TestCase,), {"world_size": 3, "test_b": lambda self: None})
    >>> needs_of(case("test_b"))
    Needs(world_size=3, processes=3, devices=0, alone=False, hosts=1)
    """
    method = getattr(type(test), test._testMethodName, None)
    required = _count(getattr(method, "_required_world_size", 0))
    try:
        ranks = required or _count(getattr(test, "world_size", 0))
    except Exception:  # a property of the project's own, which may want what only a rank has
        ranks = 0
    threads = any(base.__name__ == _THREADED for base in type(test).__mro__)
    devices = max(required, _count(getattr(method, "_required_devices", 0)))
    alone = getattr(test, "alone", False) is True or getattr(method, "alone", False) is True
    return Needs(ranks, 1 if threads else max(1, ranks), devices, alone, 1 if threads else hosts_of(test))


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def main(order: CollectOrder, descriptors: Sequence[int]) -> int:
    """Target of a child: send the names of every test.

    Descriptors: the channel to the supervisor, a pipe for stacks.
    """
    faulthandler.register(STACK_SIGNAL, descriptors[1], all_threads=True)
    provider.never_start_ranks()
    # A load_tests function may name one twice, which runs once.
    tests = list({(cls, test._testMethodName): (cls, test) for cls, test in find_tests(order.module)}.values())
    names = tuple((cls, test._testMethodName) for cls, test in tests)
    accelerator = sys.modules.get("torch_ext.accelerator")  # not imported here, since the supervisor reads this file
    device = accelerator.device_type() if accelerator is not None else ""
    needs = tuple(needs_of(test) for _, test in tests)
    Channel.from_descriptor(descriptors[0]).send(TestNames(names, needs, device))
    return 0
