"""How a test case replaces its test method, so that the instance on which ``setUp`` ran waits for the ranks."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import sys
import textwrap
import types
import unittest
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest import IsolatedAsyncioTestCase  # it is imported on use otherwise, in every rank

from torch_ext.testing._internal._distributed.sub_tests import name_sub_tests
from torch_ext.world.calls import check_ran
from torch_ext.world.notes import add_note

# unittest hides its own frames and ours. pytest shows all of them if none is left: there, the one that waits stays.
__unittest = "_pytest.unittest" not in sys.modules

__all__ = [
    "body_has_ended",
    "call_with_cleanups",
    "chosen_method",
    "expect_no_more",
    "forget_body",
    "parent_half_of",
    "set_parent_half",
    "take_over",
    "waits_or_runs",
]

_DEFAULT = "runTest"
_PARENT_HALF = "_torch_ext_parent_half"
_ended_in = 0  # the process in which a test method has run to its end


def chosen_method(method_name: str, methodName: str) -> str:
    """Return the name of a case's test method, which unittest passes by position or as ``methodName``."""
    return methodName if methodName != _DEFAULT else method_name


def take_over(case: unittest.TestCase, name: str, replacement: Callable[[Any], Any], asked: str) -> None:
    """Replace method ``name`` of this instance by ``replacement(method)``.

    Raises:
        ValueError: the class does not have the method that was asked for by keyword (``asked``). Without a name, as
            when pytest collects, there is nothing to replace.
    """
    method = getattr(case, name, None)
    if method is not None:
        setattr(case, name, replacement(method))
    elif asked != _DEFAULT:
        raise ValueError(f"{type(case).__name__} has no test method {name!r}")


def waits_or_runs(case: Any, method: Callable[[], Any], parent_rank: int, wait: Callable[[Any], None]) -> Any:
    """Return a method of ``case`` that calls ``wait(case)`` in the parent half and ``method()`` in a rank."""

    @wraps(method)
    def wrapper(self: Any) -> None:
        if self.rank == parent_rank:
            wait(self)
        else:
            _run_body(self, method)

    return types.MethodType(wrapper, case)


def _run_body(case: Any, method: Callable[[], Any]) -> None:
    """Call a test method as unittest would: a coroutine is run where the class is made for that, and nowhere else.

    Raises:
        SystemExit: the method called :func:`sys.exit` with another code than 0, or before its last statement.
    """
    name_sub_tests(case)
    try:
        returned = method()
    except SystemExit as stop:
        if stop.code not in (0, None) or not _is_at_the_end(method, stop):
            raise
        returned = None
    if isinstance(case, IsolatedAsyncioTestCase) and inspect.iscoroutine(returned):
        returned = asyncio.run(returned)
    check_ran(returned, getattr(method, "__name__", "the test"))
    _note_ended(os.getpid())


def _is_at_the_end(method: Callable[[], Any], stop: SystemExit) -> bool:
    """Whether ``stop`` comes from the last statement of ``method``, under no condition: it has run to its end."""
    trace = stop.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = getattr(inspect.unwrap(method), "__code__", None)
    if trace is None or trace.tb_frame.f_code is not code:
        return False
    try:
        source = textwrap.dedent("".join(inspect.getsourcelines(code)[0]))
        (function,) = ast.parse(source).body
    except (OSError, SyntaxError, ValueError):
        return False  # no source, or none that stands alone
    last = function.body[-1] if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    line = trace.tb_lineno - code.co_firstlineno + 1
    return isinstance(last, (ast.Expr, ast.Raise)) and last.lineno <= line <= (last.end_lineno or last.lineno)


def _note_ended(pid: int) -> None:
    global _ended_in
    _ended_in = pid


def forget_body() -> None:
    """Take no body that has run in this rank so far for that of the next test."""
    _note_ended(0)


def body_has_ended() -> bool:
    """Whether a test method has run to its end in this rank since the last :func:`forget_body`, whoever called it."""
    return _ended_in == os.getpid()


def call_with_cleanups(case: Any, body: Callable[[], Any]) -> None:
    """Call ``body``, then what it has registered with ``addCleanup`` or ``enterContext``, the last first.

    Raises:
        Exception: what the body raised, with a note for each cleanup that failed too; what the first cleanup to fail
            raised, if the body had passed or skipped.
    """
    try:
        body()
    except BaseException as error:
        for failed in _clean_up(case):
            if isinstance(error, (unittest.SkipTest, SystemExit)):
                raise failed from None  # a skip must not hide it
            add_note(error, f"a cleanup failed as well: {type(failed).__name__}: {failed}")
        raise
    for failed in _clean_up(case):
        raise failed


def _clean_up(case: Any) -> list[BaseException]:
    failed: list[BaseException] = []
    while case._cleanups:
        function, args, kwargs = case._cleanups.pop()
        try:
            check_ran(function(*args, **kwargs), f"the cleanup {getattr(function, '__name__', function)}")
        except BaseException as error:
            failed.append(error)
    return failed


def expect_no_more(case: unittest.TestCase) -> None:
    """Have what ``case`` is about to raise count as a failure also if it was expected to fail: not in this way."""
    outcome = getattr(case, "_outcome", None)
    if outcome is not None:
        outcome.expecting_failure = False


def set_parent_half(method: Callable[..., Any], parent_half: Callable[[Any, Any], None]) -> None:
    """Have the parent half of ``method`` call ``parent_half(case, method)``, where by default it waits for the ranks.

    Decorators that copy attributes, as :func:`functools.wraps` does, preserve this.
    """
    setattr(method, _PARENT_HALF, parent_half)


def parent_half_of(method: Any) -> Callable[[Any, Any], None] | None:
    """Return what :func:`set_parent_half` has set on a test method, if anything."""
    found: Callable[[Any, Any], None] | None = getattr(method, _PARENT_HALF, None)
    return found
