"""Property-based tests whose examples run on all ranks, and grids of options. Other
names are torch's own.

See Note [Examples across ranks] in ``_distributed/examples.py``.

.. code-block:: python

    class TestSizes(FSDPTest):
        @across_ranks(example_timeout_s=10)
        @settings(max_examples=30)
        @given(sizes=st.lists(st.integers(0, 9)))
        def test_sizes(self, sizes): ...
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_ext.compat.testing import upstream_name
from torch_ext.testing._internal._distributed.example_ranks import serve
from torch_ext.testing._internal._distributed.examples import ExampleRun
from torch_ext.testing._internal._distributed.methods import PARENT_HALF

__unittest = True

__all__ = ["across_ranks", "pairwise"]


def across_ranks(
    *, example_timeout_s: float = 10.0
) -> Callable[[Callable[..., Any]], Callable[[Any], None]]:
    """Run each example of a ``@given`` method of :class:`MultiProcessTestCase` and its
    subclasses once on all ranks of its test. Put it above ``@given``.

    An example fails if any rank fails, dies, or does not finish within
    ``example_timeout_s``. Hypothesis then shrinks it, and the report shows the minimal
    example, what each rank did with it, and how to run it again.

    All ranks run the same examples in the same order, each from a fresh seed and with a
    barrier at its end. The same ranks run all examples until one fails; the next gets
    fresh ranks. The test's time limit covers all examples: if it passes before all have
    run, the test fails; shrinking stops before it passes.

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
            what = "across_ranks() goes directly above @given(...)"
            raise TypeError(f"{what}, got {test!r} without it")
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

    functools.update_wrapper(in_rank, test)
    del vars(in_rank)["__wrapped__"]  # pytest would ask for the arguments of the body
    setattr(in_rank, PARENT_HALF, parent_half)
    return in_rank


def pairwise(
    options: Mapping[str, Sequence[Any]],
    works: Callable[[Mapping[str, Any]], bool] = lambda row: True,
) -> list[dict[str, Any]]:
    """Return few rows, with a value of each option, in which any two values of two
    options meet. ``works`` says whether a row, or a part of one, may be.

    >>> rows = pairwise({"shards": (True, False), "mesh": (1, 2), "offloads": (0, 1)})
    >>> [tuple(row.values()) for row in rows]
    [(True, 1, 0), (True, 2, 1), (False, 1, 1), (False, 2, 0)]
    """
    values = [(name, value) for name, each in options.items() for value in each]
    every = (pair for pair in itertools.combinations(values, 2) if works(dict(pair)))
    # A dictionary keeps the order, so all ranks agree.
    missing = dict.fromkeys((one, other) for one, other in every if one[0] != other[0])
    rows = []

    def new_pairs(row: Mapping[str, Any]) -> list[Any]:
        ordered = [(name, row[name]) for name in options if name in row]
        return [each for each in itertools.combinations(ordered, 2) if each in missing]

    while missing:
        row = dict(next(iter(missing)))
        for name in [each for each in options if each not in row]:
            grown = ({**row, name: value} for value in options[name])
            row = max(filter(works, grown), key=lambda each: len(new_pairs(each)))
        for pair in new_pairs(row):
            del missing[pair]
        rows.append({name: row[name] for name in options})
    return rows


def __getattr__(name: str) -> Any:
    return upstream_name("hypothesis_utils", name)
