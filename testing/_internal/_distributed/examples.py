"""The parent half of a property-based test whose examples run in ranks.

Note [Examples across ranks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Hypothesis runs only in the parent half: it draws, shrinks, and writes the example database. Instead of calling the
test's body, it sends the drawn arguments to a standing set of ranks, which each report a receipt. Every failure of a
rank (an exception, a death, a timeout) is raised here as a failure of that example, always from the same line, so that
Hypothesis shrinks to one minimal example. After a failure the ranks are ended, because some may still wait in a
collective that the next example would join. ``assume()`` in a body works, interactive draws (``st.data()``) do not.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import traceback
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import DidNotReproduce, Flaky, InvalidArgument
from hypothesis.vendor.pretty import pretty

from torch_ext.testing._internal._distributed.example_ranks import NO_MORE, REJECTED
from torch_ext.testing._internal._distributed.multi_process import raise_verdict
from torch_ext.world import settings, wording
from torch_ext.world._os import monotonic
from torch_ext.world.follow import World
from torch_ext.world.outcome import Outcome
from torch_ext.world.settings import Limits, timeout_of
from torch_ext.world.start import ZygoteLostError
from torch_ext.world.verdict import Judgement, WorldFailure, WorldReport, judge

__unittest = True

__tracebackhide__ = True  # pytest: its frames say nothing that the report of the ranks does not

# Selects a single example to run; a failure's report gives the value.
EXAMPLE_VARIABLE = "TORCH_EXT_EXAMPLE"

# Seconds until ranks are ready for an example, and have ended after the last one.
_READY_S, _END_S = 60.0, 30.0

# A test whose time limit is too short for its examples still has time for this many that hang.
_MIN_EXAMPLES = 4

# Hypothesis's advice, which contains the example in Hypothesis's encoding.
_BLOB = re.compile(r"@reproduce_failure\((?:'[^']*'|\"[^\"]*\"), b'([^']*)'\)")


@dataclass(frozen=True)
class Example:
    """The arguments that were drawn for one call of a test's body."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def pickled(self) -> bytes:
        """Return the example as it is sent to all ranks."""
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
class _Failure:
    """An example that failed, with the outcomes of its ranks."""

    example: Example
    outcomes: tuple[Outcome, ...]
    took_s: float


class _StopEngine(BaseException):
    """Ends the run of Hypothesis, as an interrupt does: ``error`` is not the failure of an example."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def settings_for_ranks(given: hypothesis.settings) -> hypothesis.settings:
    """Return ``given`` for examples that run in other processes: without deadlines, because each example has its own
    time limit; without the explain phase, which traces lines that run in the ranks; with slow draws, because ranks keep
    the machine busy. If ``CI`` is set, examples are the same in every run and the database is not used.
    """
    derandomize = given.derandomize or bool(os.environ.get("CI"))
    return hypothesis.settings(
        given,
        deadline=None,
        derandomize=derandomize,
        database=None if derandomize else given.database,
        print_blob=True,
        report_multiple_bugs=False,
        phases=[phase for phase in given.phases if phase is not Phase.explain],
        suppress_health_check=[*given.suppress_health_check, HealthCheck.too_slow],
    )


class ExampleRun:
    """One run of Hypothesis over ``test``, the function that ``@given`` made. ``example_s`` limits each example."""

    def __init__(self, case: Any, test: Any, example_s: float) -> None:
        self._case = case
        self._test = test
        self._limit_s = timeout_of(case)
        self._example_s = min(example_s, self._limit_s / _MIN_EXAMPLES)
        self._deadline_s = monotonic() + self._limit_s
        self._ready: World | None = None
        self._tried = 0
        self._failures: dict[bytes, _Failure] = {}
        self._last: _Failure | None = None

    def run(self) -> None:
        """Run the test; return if it passes.

        Raises:
            WorldFailure: an example failed, and this reports the minimal one; or the ranks failed without an example.
            unittest.SkipTest: the ranks skipped.
            hypothesis.errors.HypothesisException: Hypothesis cannot run the test.
        """
        try:
            with self._prepared_test(os.environ.get(EXAMPLE_VARIABLE, "")):
                self._test(self._case)
        except _StopEngine as stop:
            raise stop.error from None
        except (WorldFailure, Flaky) as error:
            if self._last is None:
                raise
            raise self._report(self._last, error) from None
        except DidNotReproduce:
            if self._last is not None or self._tried != 1:
                raise
            wording.announce(f"{self._case.id()}: the example of {EXAMPLE_VARIABLE} passes")
        self._end_ranks()

    @contextlib.contextmanager
    def _prepared_test(self, requested: str) -> Iterator[None]:
        """Have Hypothesis call us in place of the body, with our settings; ``requested`` selects a single example."""
        test, handle = self._test, self._test.hypothesis
        body, attributes = handle.inner_test, dict(vars(test))
        handle.inner_test = self._replacement(body)
        test._hypothesis_internal_use_settings = settings_for_ranks(test._hypothesis_internal_use_settings)
        if requested:
            hypothesis.reproduce_failure(hypothesis.__version__, requested.encode())(test)
        try:
            yield
        finally:
            handle.inner_test = body
            vars(test).clear()
            vars(test).update(attributes)

    def _replacement(self, body: Callable[..., Any]) -> Callable[..., None]:
        # Wrapped, because Hypothesis identifies tests by name and source, for its database and for seeds in CI.
        @wraps(body)
        def run_in_ranks(*args: Any, **kwargs: Any) -> None:
            # The instance may have any name among the arguments; every rank has its own.
            drawn = {name: value for name, value in kwargs.items() if value is not self._case}
            try:
                self._run_example(Example(tuple(value for value in args if value is not self._case), drawn))
            except ZygoteLostError as error:
                raise _StopEngine(error) from None

        return run_in_ranks

    def _run_example(self, example: Example) -> None:
        payload = example.pickled()
        if monotonic() + self._example_s > self._deadline_s:
            self._replay_result(payload)
            return
        outcomes, took_s = self._run_on_ranks(payload)
        self._tried += 1
        verdict = judge(outcomes)
        if verdict.judgement is Judgement.SKIPPED:
            if verdict.summary == REJECTED:
                hypothesis.reject()
            raise unittest.SkipTest(verdict.summary)
        if verdict.judgement is Judgement.FAILED:
            self._fail(payload, _Failure(example, tuple(outcomes), took_s))

    def _replay_result(self, payload: bytes) -> None:
        """End the search when the test's time is up: examples that failed fail again, others pass without running."""
        if payload in self._failures:
            self._fail(payload, self._failures[payload])
        if not self._failures:
            raise _StopEngine(
                AssertionError(
                    f"{self._tried} examples passed, but the test's time limit of {self._limit_s:g} s left no time for "
                    "the rest. Run fewer with @settings(max_examples=...), or give the test more time with "
                    "@with_timeout(seconds)."
                )
            )

    def _fail(self, payload: bytes, found: _Failure) -> None:
        self._failures[payload] = self._last = found
        raise_verdict(found.outcomes, found.took_s)

    def _report(self, found: _Failure, error: BaseException) -> WorldFailure:
        """Report the example ``found``, with the advice in ``error``, which Hypothesis raised at the end."""
        notes = "\n".join(getattr(error, "__notes__", ())) + "".join(traceback.format_exception_only(error))
        minimal = _BLOB.search(notes)
        title = f"The minimal example, of {len(self._failures)} that failed among {self._tried}"
        call = found.example.as_call(self._test.__name__)
        shown = f"{title if minimal else 'The example'}, the same on every rank:\n    {call}"
        if isinstance(error, Flaky):
            shown += "\nIt failed, but passed when it ran again: it depends on something that Hypothesis does not draw."
        again = f"To run it again, put this above the test:\n    {found.example.as_call('@example')}"
        if minimal:
            again += f"\nOr run this example alone, with the test as it is:\n    {EXAMPLE_VARIABLE}={minimal[1]}"
        return WorldFailure(WorldReport(found.outcomes, judge(found.outcomes), found.took_s, (shown, again)))

    # The ranks

    def _run_on_ranks(self, payload: bytes) -> tuple[Sequence[Outcome], float]:
        """Run one example on all ranks; return their outcomes and how long it took, in seconds."""
        try:
            world = self._ranks()
        except WorldFailure as failure:  # before an example ran, so that none is blamed
            raise _StopEngine(failure) from None
        world.new_round(self._case.id(), payload)
        outcomes = world.wait(Limits(test_s=self._example_s, hang_s=settings.hang_after_s()), keep=True)
        took_s = world.took_s
        self._case._outcomes = [*getattr(self._case, "_outcomes", ()), *outcomes]
        if any(not outcome.ok or outcome.exit_code is not None for outcome in outcomes):
            self._case._kill_ranks()
        return outcomes, took_s

    def _ranks(self) -> World:
        """Return ranks that wait for an example; start fresh ones if there are none. Raises what :func:`raise_verdict`
        does if they fail or skip before the first example.
        """
        world: World | None = self._case._world
        if world is None or world is not self._ready:
            if self._ready is not None:
                self._case._spawn_processes()
                world = self._case._world
            if world is None:
                raise unittest.SkipTest(f"setUp() of {type(self._case).__name__} did not call self._spawn_processes()")
            raise_verdict(world.wait(Limits(test_s=_READY_S), keep=True), world.took_s)
            self._ready = world
        return world

    def _end_ranks(self) -> None:
        """Have the ranks finish as after any other test; they may fail although all examples passed."""
        world = self._ranks()
        world.new_round(self._case.id(), NO_MORE)
        raise_verdict(world.wait(Limits(test_s=_END_S)), world.took_s)
