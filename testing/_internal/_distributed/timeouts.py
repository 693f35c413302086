"""How long a test may take. The rule itself is the world's, since the supervisor must know it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch_ext.world.limits import LIMIT_ATTRIBUTE, TIMEOUT_DEFAULT, TIMEOUT_OVERRIDE, get_timeout, timeout_of

__all__ = ["TIMEOUT_DEFAULT", "TIMEOUT_OVERRIDE", "get_timeout", "timeout_of", "with_timeout"]

_Test = TypeVar("_Test", bound=Callable[..., Any])


def with_timeout(seconds: float) -> Callable[[_Test], _Test]:
    """Give one test a time limit of its own, in seconds."""

    def decorator(function: _Test) -> _Test:
        setattr(function, LIMIT_ATTRIBUTE, seconds)
        return function

    return decorator
