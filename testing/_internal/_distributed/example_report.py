"""The report of an example that failed: the example, how to run it again, and what each rank did."""

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

# Hypothesis's advice, which contains the example in Hypothesis's encoding.
_BLOB = re.compile(r"@reproduce_failure\((?:'[^']*'|\"[^\"]*\"), b'([^']*)'\)")


@dataclass(frozen=True)
class Example:
    """The arguments that were drawn for one call of a test's body."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def pickled(self) -> bytes:
        """Return the example as it is sent to all ranks.

        Raises:
            InvalidArgument: it cannot be pickled.
        """
        try:
            return pickle.dumps((self.args, dict(self.kwargs)))
        except Exception as error:
            raise InvalidArgument(
                f"the drawn {self.as_call('example')} cannot be sent to the ranks ({type(error).__name__}: {error}). "
                "Draw a description that can be pickled, and build the object in the test's body."
            ) from None

    def as_call(self, name: str) -> str:
        """Write the example as a call of ``name``.

        >>> Example((1,), {"sizes": [0], "flag": True}).as_call("@example")
        '@example(1, sizes=[0], flag=True)'
        """
        drawn = [*map(pretty, self.args), *(f"{key}={pretty(value)}" for key, value in self.kwargs.items())]
        return f"{name}({', '.join(drawn)})"


@dataclass(frozen=True)
class Failure:
    """An example that failed, with the outcomes of its ranks."""

    example: Example
    outcomes: tuple[Outcome, ...]
    took_s: float


def report(found: Failure, error: BaseException, test: str, tried: int, failed: int, variable: str) -> WorldReport:
    """Return the report of a failed test: the example ``found``, and how many examples were tried and failed.

    The notes of ``error``, which Hypothesis raised at the end, say how to run the example again; ``variable`` selects a
    single example.
    """
    notes = "\n".join(getattr(error, "__notes__", ())) + "".join(traceback.format_exception_only(error))
    blob = _BLOB.search(notes)
    example_line = _example_line(found, error, test, tried, failed, minimal=blob is not None)
    rerun_lines = _rerun_lines(found, blob[1] if blob else "", variable)
    return WorldReport(found.outcomes, judge(found.outcomes), found.took_s, (example_line, rerun_lines))


def _example_line(found: Failure, error: BaseException, test: str, tried: int, failed: int, minimal: bool) -> str:
    title = f"The minimal example, of {failed} that failed among {tried}" if minimal else "The example"
    text = f"{title}, the same on every rank:\n    {found.example.as_call(test)}"
    if isinstance(error, Flaky):
        text += "\nIt failed, but passed when it ran again: it depends on something that Hypothesis does not draw."
    return text


def _rerun_lines(found: Failure, blob: str, variable: str) -> str:
    lines = ["To run it again, put this above the test:", f"    {found.example.as_call('@example')}"]
    if blob:
        lines += ["Or leave the test as it is, and run this example alone with", f"    {variable}={blob}"]
    return "\n".join(lines)
