"""Private names of unittest: how a test case runs its method and its cleanups. The same on Python 3.10 to 3.14."""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import IsolatedAsyncioTestCase, case  # imported on use otherwise, in every rank

__unittest = True


def run_test_method(
    test: Any, result: unittest.TestResult, method: Callable[[], Any], check: Callable[[Any, str], None]
) -> None:
    """Make unittest run ``method`` instead of the test method of ``test``, and then the cleanups of ``test``.

    No fixture runs. May be called while the test already runs, from within its method. A coroutine that ``method``
    returns is run if ``test`` is an ``IsolatedAsyncioTestCase``. ``result`` receives unittest's reports. ``check`` is
    called with the return value and the name of the method or cleanup; an error that it raises counts as theirs.
    """

    def call() -> Any:
        returned = method()
        if hasattr(returned, "__await__") and isinstance(test, IsolatedAsyncioTestCase):
            return test._callMaybeAsync(_await, returned)  # type: ignore[attr-defined]
        check(returned, test._testMethodName)
        return returned

    def clean_up(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        if isinstance(test, IsolatedAsyncioTestCase):
            test._callMaybeAsync(function, *args, **kwargs)  # type: ignore[attr-defined]
        else:
            check(function(*args, **kwargs), f"the cleanup {getattr(function, '__name__', function)}")

    def state() -> Any:
        # Of a test that is pickled, as those that send their methods to peers by RPC are: without what runs it here.
        given = getattr(type(test), "__getstate__", vars)(test)
        if not isinstance(given, dict):  # the test's own
            return given
        kept = {name: value for name, value in given.items() if name not in replaced}
        return kept | {"_outcome": None, "_subtest": None, "_cleanups": []}

    replaced = {
        "_callSetUp": lambda: None,
        "_callTearDown": lambda: None,
        "_callTestMethod": lambda _: unittest.TestCase._callTestMethod(test, call),  # type: ignore[attr-defined]
        "_callCleanup": clean_up,
        "__getstate__": state,
        "_cleanups": [] if test._outcome is not None else test._cleanups,
    }
    names = (*replaced, "_outcome", "_subtest")
    before = {name: vars(test)[name] for name in names if name in vars(test)}
    vars(test).update(replaced)
    try:
        with _event_loop(test):
            unittest.TestCase.run(test, result)
    finally:
        for name in names:
            vars(test).pop(name, None)
        vars(test).update(before)


async def _await(coroutine: Any) -> Any:
    return await coroutine


@contextlib.contextmanager
def _event_loop(test: Any) -> Iterator[None]:
    """Give ``test`` an event loop in this block, if its class needs one and it has none."""
    if not isinstance(test, IsolatedAsyncioTestCase) or vars(test).get("_outcome") is not None:
        yield
        return
    suffix = "Runner" if hasattr(test, "_setupAsyncioRunner") else "Loop"  # Loop: Python 3.10
    getattr(test, f"_setupAsyncio{suffix}")()
    try:
        yield
    finally:
        getattr(test, f"_tearDownAsyncio{suffix}")()


def name_of_sub_test(test: Any) -> str:
    """Return the description of a sub-test, such as ``[message] (x=1)``; empty for a test case."""
    describe = getattr(test, "_subDescription", None)
    return str(describe()) if describe is not None else ""


def forget_class_cleanups(cls: type[unittest.TestCase]) -> None:
    """Drop the class and module cleanups registered so far: the process that registered them runs them."""
    cls._class_cleanups.clear()  # type: ignore[attr-defined]
    case._module_cleanups.clear()  # type: ignore[attr-defined]


def run_class_cleanups(cls: type[unittest.TestCase]) -> list[BaseException]:
    """Run the cleanups of ``cls``, and then those of its module; return what they raised, except for skips."""
    cls.doClassCleanups()
    raised = [error for _, error, _ in cls.tearDown_exceptions]  # type: ignore[attr-defined]
    registered: list[Any] = case._module_cleanups  # type: ignore[attr-defined]
    pending = registered[:]
    registered.clear()
    while pending:
        registered.append(pending.pop())  # one by one, since doModuleCleanups() raises only the first error
        try:
            unittest.doModuleCleanups()
        except Exception as error:
            raised.append(error)
    return [error for error in raised if not isinstance(error, unittest.SkipTest)]
