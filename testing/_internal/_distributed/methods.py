"""How a test case takes over its test method, so that the instance on which ``setUp`` ran waits for the ranks."""

from __future__ import annotations

import types
import unittest
from collections.abc import Callable
from functools import wraps
from typing import Any

__unittest = True

__all__ = ["chosen_method", "take_over", "waits_or_runs"]

_DEFAULT = "runTest"


def chosen_method(method_name: str, methodName: str) -> str:
    """Return the method that a test case was made for: unittest passes it by position or as ``methodName``."""
    return methodName if methodName != _DEFAULT else method_name


def take_over(case: unittest.TestCase, name: str, replacement: Callable[[Any], Any], asked: str) -> None:
    """Put ``replacement(method)`` in the place of method ``name`` on this instance.

    Raises:
        ValueError: the caller asked for a method by keyword (``asked``) that the class does not have. Made without
            a name, as pytest does when it collects, a case is of no use and no harm.
    """
    method = getattr(case, name, None)
    if method is not None:
        setattr(case, name, replacement(method))
    elif asked != _DEFAULT:
        raise ValueError(f"{type(case).__name__} has no test method {name!r}")


def waits_or_runs(case: Any, method: Callable[[], Any], parent_rank: int, wait: Callable[[Any], None]) -> Any:
    """Return a method of ``case`` that calls ``wait(case)`` on the parent half and ``method()`` in a rank."""

    @wraps(method)
    def wrapper(self: Any) -> None:
        if self.rank == parent_rank:
            wait(self)
        else:
            method()

    return types.MethodType(wrapper, case)
