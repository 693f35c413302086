"""Property-based tests whose examples run on all ranks. A name of upstream's ``hypothesis_utils`` that is not defined
here is torch's own.

.. code-block:: python

    class TestSizes(FSDPTest):
        @across_ranks(example_timeout_s=10)
        @settings(max_examples=30)
        @given(sizes=st.lists(st.integers(0, 9)))
        def test_sizes(self, sizes): ...

See Note [Examples across ranks] in ``_distributed/examples.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_ext.compat.testing import upstream_module
from torch_ext.testing._internal._distributed.example_ranks import serve
from torch_ext.testing._internal._distributed.examples import ExampleRun
from torch_ext.testing._internal._distributed.methods import bring_parent_half

__unittest = True

__all__ = ["across_ranks"]

_NOT_TAKEN_OVER = frozenset({"__wrapped__"})


def across_ranks(*, example_timeout_s: float = 10.0) -> Callable[[Callable[..., Any]], Callable[[Any], None]]:
    """Have each example of a ``@given`` method run once on all ranks of its test; goes above ``@given``.

    For methods of :class:`MultiProcessTestCase` and what derives from it, such as ``FSDPTest``. A failure on any rank,
    its death, or no end within ``example_timeout_s`` fails the example on all ranks. Hypothesis shrinks it, and the
    report shows the one minimal example, what each rank did with it, and how to run it again.

    Guarantees: all ranks run the same examples in the same order, each freshly seeded, with a barrier after it if there
    is a process group. One set of ranks serves all examples until one fails; the next example gets fresh ones. Ranks
    neither draw nor write the database. All examples, shrinking included, fit into the time limit of the test: a test
    whose examples pass and do not fit fails; shrinking stops in time.

    Costs: a pickle, a message and a barrier an example; the start of ranks (some 50 ms) a failure; the limit of an
    example for each example that hangs while shrinking.

    ``@settings``, ``@example``, ``@seed`` and ``@reproduce_failure`` may stand above or below. Of the settings,
    ``deadline`` is off and so is the explain phase; where the variable ``CI`` is set, examples are derandomized and the
    database is not used.

    Args:
        example_timeout_s: how long one example may take on all ranks, in seconds.

    Raises:
        TypeError: the function is not one that ``@given`` made.
        ValueError: the limit is not positive.
    """
    if not example_timeout_s > 0:
        raise ValueError(f"example_timeout_s must be positive, got {example_timeout_s}")

    def decorator(test: Callable[..., Any]) -> Callable[[Any], None]:
        if not getattr(test, "is_hypothesis_test", False):
            raise TypeError(f"across_ranks() goes directly above @given(...), got {test!r} without it")
        return _method(test, example_timeout_s)

    return decorator


def _method(test: Any, example_timeout_s: float) -> Callable[[Any], None]:
    body = test.hypothesis.inner_test

    def in_rank(self: Any) -> None:
        serve(self, body)

    def beside_ranks(case: Any, method: Any) -> None:
        # Decorators further up left their wishes on the outermost function.
        for name, value in vars(getattr(method, "__func__", method)).items():
            if name.startswith(("hypothesis_", "_hypothesis_")):
                setattr(test, name, value)
        ExampleRun(case, test, example_timeout_s).run()

    in_rank.__name__, in_rank.__qualname__ = test.__name__, test.__qualname__
    in_rank.__module__, in_rank.__doc__ = test.__module__, test.__doc__
    vars(in_rank).update({name: value for name, value in vars(test).items() if name not in _NOT_TAKEN_OVER})
    bring_parent_half(in_rank, beside_ranks)
    return in_rank


def __getattr__(name: str) -> Any:
    return getattr(upstream_module("hypothesis_utils"), name)
