"""How long a test may take."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

__all__ = ["TIMEOUT_DEFAULT", "TIMEOUT_OVERRIDE", "get_timeout", "timeout_of", "with_timeout"]

_Test = TypeVar("_Test", bound=Callable[..., Any])

# In seconds.
TIMEOUT_DEFAULT = int(os.environ.get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "120"))
# By test name, in seconds; test files add to it.
TIMEOUT_OVERRIDE: dict[str, int] = {"test_ddp_uneven_inputs": 400, "test_DistributedDataParallel": 500}


def get_timeout(test_id: str) -> int:
    """Return the seconds that the test with this id may take by its name alone; see :func:`timeout_of` for the whole
    rule.
    """
    return TIMEOUT_OVERRIDE.get(test_id.rpartition(".")[2], TIMEOUT_DEFAULT)


def with_timeout(seconds: float) -> Callable[[_Test], _Test]:
    """Give one test its own time limit."""

    def decorator(function: _Test) -> _Test:
        function._timeout_s = seconds  # type: ignore[attr-defined]
        return function

    return decorator


def timeout_of(case: Any) -> float:
    """Return the seconds that the current test of ``case`` may take.

    The first that is set wins: ``TORCH_EXT_TIMEOUT`` (``--timeout``), :func:`with_timeout` on the test, the class
        attribute ``timeout`` (seconds
    or a ``timedelta``), ``TIMEOUT_OVERRIDE`` by test name, ``DISTRIBUTED_TESTS_DEFAULT_TIMEOUT``, 120 seconds.
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
