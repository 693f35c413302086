"""How a test case takes over its test method, so that the instance on which ``setUp`` ran waits for the ranks."""

from __future__ import annotations

import types
import unittest
from collections.abc import Callable
from functools import wraps
from typing import Any

__unittest = True

__all__ = ["bring_parent_half", "chosen_method", "parent_half_of", "take_over", "waits_or_runs"]

_DEFAULT = "runTest"
_PARENT_HALF = "_torch_ext_parent_half"


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


def bring_parent_half(method: Callable[..., Any], parent_half: Callable[[Any, Any], None]) -> None:
    """Have ``parent_half(case, method)`` run beside the ranks of test method ``method`` instead of merely waiting.

    Decorators that copy attributes, as :func:`functools.wraps` does, carry it on.
    """
    setattr(method, _PARENT_HALF, parent_half)


def parent_half_of(method: Any) -> Callable[[Any, Any], None] | None:
    """Return what a test method brings for its parent half, if anything."""
    found: Callable[[Any, Any], None] | None = getattr(method, _PARENT_HALF, None)
    return found
