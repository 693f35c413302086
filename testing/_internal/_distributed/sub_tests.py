"""Has a failure within ``self.subTest(...)`` of a rank say which sub-test it was.

A rank calls its test method itself, without the machinery that has unittest go on after a sub-test has failed. So the
first failure ends the test, and nothing else would say where.
"""

from __future__ import annotations

import types
import unittest
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch_ext.world.notes import add_note

__unittest = True

__all__ = ["name_sub_tests"]


class _Named:
    """Notes ``name`` in what leaves ``inner`` as an error, and no skip."""

    def __init__(self, inner: AbstractContextManager[None], name: str) -> None:
        self._inner, self._name = inner, name

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool | None:
        if error is not None and not isinstance(error, (unittest.SkipTest, SystemExit)):
            add_note(error, f"in {self._name}")
        return self._inner.__exit__(kind, error, trace)


def name_sub_tests(case: Any) -> None:
    """Wrap ``subTest`` of this instance, which runs in a rank."""
    sub_test: Callable[..., AbstractContextManager[None]] = case.subTest

    def named(*args: Any, **params: Any) -> AbstractContextManager[None]:
        message = args[0] if args else params.get("msg")
        shown = ", ".join(f"{name}={value!r}" for name, value in params.items() if name != "msg")
        name = "the subtest" + (f" [{message}]" if message is not None else "") + (f" with {shown}" if shown else "")
        return _Named(sub_test(*args, **params), name)

    case.subTest = named
