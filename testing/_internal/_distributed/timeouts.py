"""How long a test may take. The rule itself is the world's, since the supervisor must know it too."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

from torch_ext.world.settings import (
    LIMIT_ATTRIBUTE,
    TIMEOUT_DEFAULT,
    TIMEOUT_OVERRIDE,
    get_timeout,
    seconds_of,
    timeout_of,
)

__all__ = [
    "TIMEOUT_DEFAULT",
    "TIMEOUT_OVERRIDE",
    "count_ranks",
    "get_timeout",
    "seconds_of",
    "timeout_of",
    "with_timeout",
]

_Test = TypeVar("_Test", bound=Callable[..., Any])


def with_timeout(seconds: float) -> Callable[[_Test], _Test]:
    """Give one test its own time limit, in seconds.

    Raises:
        ValueError: the limit is no finite number above 0.
    """
    seconds_of(seconds, "the limit of @with_timeout")

    def decorator(function: _Test) -> _Test:
        setattr(function, LIMIT_ATTRIBUTE, seconds)
        return function

    return decorator


def count_ranks(case: Any, world_size: Any = None) -> int:
    """Return how many ranks ``case`` asks for.

    Args:
        case: a test case, or its class.
        world_size: its world size; default: the attribute of that name.

    Raises:
        ValueError: this is no number of ranks.
    """
    found = case.world_size if world_size is None else world_size
    name = (case if isinstance(case, type) else type(case)).__name__
    if isinstance(found, bool) or not hasattr(type(found), "__index__") or found < 0:
        raise ValueError(f"world_size of {name} is {found!r}; expected the number of ranks as an int, such as 2")
    return operator.index(found)
