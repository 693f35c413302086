"""What a user reads about an example that failed: which one, how to run it again, and what the ranks did with it."""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis.errors import Flaky, InvalidArgument
from hypothesis.vendor.pretty import pretty

from torch_ext.world.outcome import Outcome
from torch_ext.world.verdict import WorldReport, judge

__all__ = ["Example", "Found", "report"]

# How Hypothesis words the advice that carries an example in its own encoding.
_BLOB = re.compile(r"@reproduce_failure\((?:'[^']*'|\"[^\"]*\"), b'([^']*)'\)")


@dataclass(frozen=True)
class Example:
    """The arguments that were drawn for one call of a test's body."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def pickled(self) -> bytes:
        """Return the example as all ranks get it.

        Raises:
            InvalidArgument: it holds something that cannot travel.
        """
        try:
            return pickle.dumps((self.args, dict(self.kwargs)))
        except Exception as error:
            raise InvalidArgument(
                f"the drawn {self.as_call('example')} cannot be sent to the ranks ({type(error).__name__}: {error}). "
                "Draw a description that can be pickled, and build what it describes in the body."
            ) from None

    def as_call(self, name: str) -> str:
        """Write the example as a call of ``name``.

        >>> Example((), {"sizes": [0], "flag": True}).as_call("@example")
        '@example(sizes=[0], flag=True)'
        """
        drawn = [*map(pretty, self.args), *(f"{key}={pretty(value)}" for key, value in self.kwargs.items())]
        return f"{name}({', '.join(drawn)})"


@dataclass(frozen=True)
class Found:
    """An example that failed, and what became of the ranks that ran it."""

    example: Example
    outcomes: tuple[Outcome, ...]
    took_s: float


def report(found: Found, error: BaseException, test: str, tried: int, failed: int, variable: str) -> WorldReport:
    """Return the report of a failed test.

    Args:
        found: the example to show.
        error: what Hypothesis raised in the end; its notes tell how to run the example again.
        test: name of the test.
        tried, failed: how many examples ran, and how many different ones of them failed.
        variable: environment variable that names an example to run alone.
    """
    notes = "\n".join(getattr(error, "__notes__", ())) + "".join(traceback.format_exception_only(error))
    blob = _BLOB.search(notes)
    which = _which(found, error, test, tried, failed, minimal=blob is not None)
    again = _again(found, blob[1] if blob else "", variable)
    return WorldReport(found.outcomes, judge(found.outcomes), found.took_s, (which, again))


def _which(found: Found, error: BaseException, test: str, tried: int, failed: int, minimal: bool) -> str:
    title = f"The minimal example, of {failed} that failed among {tried}" if minimal else "The example"
    shown = f"{title}, alike on every rank:\n    {found.example.as_call(test)}"
    if isinstance(error, Flaky):
        shown += "\nIt failed, and passed when it was run again: what it depends on is not drawn."
    return shown


def _again(found: Found, blob: str, variable: str) -> str:
    lines = ["To run it again, put this above the test:", f"    {found.example.as_call('@example')}"]
    if blob:
        lines += ["or run the test, with nothing changed and no other example, under", f"    {variable}={blob}"]
    return "\n".join(lines)
