"""Replaces helpers that need our engine by ones for upstream. Exported as source, never imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import Phase, settings

__all__ = ["across_ranks"]


def across_ranks(*, example_timeout_s: float = 10.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have every rank of a test draw the same examples for the ``@given`` method below, in the same order.

    Examples are derived from the test's name, not from a random seed or a database, and a failure is not shrunk: ranks
    that shrink apart would wait for each other in collectives.

    Args:
        example_timeout_s: for harnesses that limit single examples. This one limits the whole test.

    Raises:
        TypeError: the function was not made by ``@given``.
    """

    def decorator(test: Any) -> Callable[..., Any]:
        if not getattr(test, "is_hypothesis_test", False):
            raise TypeError(f"across_ranks() goes directly above @given(...), got {test!r} without it")
        test._hypothesis_internal_use_settings = settings(
            getattr(test, "_hypothesis_internal_use_settings", None),
            database=None,
            deadline=None,
            derandomize=True,
            phases=(Phase.explicit, Phase.generate),
        )
        return test

    return decorator
