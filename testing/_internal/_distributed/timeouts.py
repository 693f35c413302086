"""Time limits of tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

__all__ = ["TIMEOUT_DEFAULT", "TIMEOUT_OVERRIDE", "get_timeout", "timeout_of", "with_timeout"]

_Test = TypeVar("_Test", bound=Callable[..., Any])

# In seconds.
TIMEOUT_DEFAULT = int(os.environ.get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "120"))
# By test name, in seconds. Test files may add to it.
TIMEOUT_OVERRIDE: dict[str, int] = {"test_ddp_uneven_inputs": 400, "test_DistributedDataParallel": 500}


def get_timeout(test_id: str) -> int:
    """Return the time limit in seconds that follows from a test's id; :func:`timeout_of` has the full rule."""
    return TIMEOUT_OVERRIDE.get(test_id.rpartition(".")[2], TIMEOUT_DEFAULT)


def with_timeout(seconds: float) -> Callable[[_Test], _Test]:
    """Give one test a time limit of its own, in seconds."""

    def decorator(function: _Test) -> _Test:
        function._timeout_s = seconds  # type: ignore[attr-defined]
        return function

    return decorator


def timeout_of(case: Any) -> float:
    """Return the time limit of the current test of ``case``, in seconds.

    The first of these that is set wins: ``TORCH_EXT_TIMEOUT`` (``--timeout``), :func:`with_timeout` on the test, the
    class attribute ``timeout`` (seconds or a ``timedelta``), ``TIMEOUT_OVERRIDE`` by test name, and
    ``DISTRIBUTED_TESTS_DEFAULT_TIMEOUT``. Otherwise it is 120 seconds.
    """
    asked = os.environ.get("TORCH_EXT_TIMEOUT", "")
    if asked:
        return float(asked)
    test_id = case.id()
    own = getattr(getattr(type(case), test_id.rpartition(".")[2], None), "_timeout_s", None)
    if own is None:
        own = getattr(type(case), "timeout", None)
    if isinstance(own, timedelta):
        return own.total_seconds()
    return float(own) if isinstance(own, (int, float)) else float(get_timeout(test_id))
