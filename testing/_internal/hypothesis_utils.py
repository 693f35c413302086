"""Property-based tests whose examples run on all ranks.

A name of upstream's ``hypothesis_utils`` that is not defined here is torch's own.

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

from torch_ext.compat.testing import upstream_name
from torch_ext.testing._internal._distributed.example_ranks import serve
from torch_ext.testing._internal._distributed.examples import ExampleRun
from torch_ext.testing._internal._distributed.methods import set_parent_half

__unittest = True

__all__ = ["across_ranks"]

_NOT_COPIED = frozenset({"__wrapped__"})


def across_ranks(
    *, example_timeout_s: float = 10.0
) -> Callable[[Callable[..., Any]], Callable[[Any], None]]:
    """Run each example of a ``@given`` method once on all ranks of its test. Put it
    above ``@given``.

    It decorates methods of :class:`MultiProcessTestCase` and its subclasses, such as
    ``FSDPTest``. An example fails if any rank fails, dies, or does not finish within
    ``example_timeout_s``. Hypothesis then shrinks it, and the report shows the minimal
    example, what each rank did with it, and how to run it again.

    All ranks run the same examples in the same order. Each example starts from a fresh
    seed and ends with a barrier if there is a process group. The same ranks run all
    examples until one fails; the next example gets fresh ranks. Ranks neither draw
    examples nor write the database. The test's time limit covers all examples and the
    shrinking: if it passes before all examples have run, the test fails; shrinking
    stops before it passes.

    Each example costs a pickle, a message and a barrier; each failure, the start of new
    ranks (about 50 ms).

    ``@settings``, ``@example``, ``@seed`` and ``@reproduce_failure`` may go above or
    below. The setting ``deadline`` and the explain phase are off. If the environment
    variable ``CI`` is set, examples are derandomized and the database is not used.

    Raises:
        TypeError: the function was not made by ``@given``.
        ValueError: the limit is not positive.
    """
    if not example_timeout_s > 0:
        raise ValueError(f"example_timeout_s must be positive, got {example_timeout_s}")

    def decorator(test: Callable[..., Any]) -> Callable[[Any], None]:
        if not getattr(test, "is_hypothesis_test", False):
            raise TypeError(
                f"across_ranks() goes directly above @given(...), got {test!r} "
                "without it"
            )
        return _method(test, example_timeout_s)

    return decorator


def _method(test: Any, example_timeout_s: float) -> Callable[[Any], None]:
    body = test.hypothesis.inner_test

    def in_rank(self: Any) -> None:
        serve(self, body)

    def parent_half(case: Any, method: Any) -> None:
        # Decorators further up set their attributes on the outermost function.
        for name, value in vars(getattr(method, "__func__", method)).items():
            if name.startswith(("hypothesis_", "_hypothesis_")):
                setattr(test, name, value)
        ExampleRun(case, test, example_timeout_s).run()

    in_rank.__name__, in_rank.__qualname__ = test.__name__, test.__qualname__
    in_rank.__module__, in_rank.__doc__ = test.__module__, test.__doc__
    vars(in_rank).update(
        {name: value for name, value in vars(test).items() if name not in _NOT_COPIED}
    )
    set_parent_half(in_rank, parent_half)
    return in_rank


def __getattr__(name: str) -> Any:
    return upstream_name("hypothesis_utils", name)
