"""Virtual time: what a program's kernels, copies and collectives would take, by a model. ``torch.sim.clock``.

    with torch.sim.clock.measure(model="unit") as trace:
        train_step()
    trace.exposed("all_gather")  # nanoseconds in which an all-gather runs and no kernel does

Values, order and races stay as they are; only time is computed. So equal programs give equal numbers, whatever the
load of the machine. Note [Virtual time] in csrc/clock.h says what takes time and what waits for what; ``MODELS`` are
the cost models, and docs/time.md says what they leave out.

``TORCH_EXT_CLOCK`` (``--clock``) names the model for a whole program, whose ``time.perf_counter`` then reads its
virtual time: see :mod:`torch_ext.sim.clock._host_time`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torch_ext.sim import _native
from torch_ext.sim.clock import _host_time
from torch_ext.sim.clock._models import MODELS, Model, NoModelError, count_flops
from torch_ext.sim.clock._program import Steps, summary, write_events
from torch_ext.sim.clock._trace import Step, Trace, Work

__all__ = [
    "MODELS",
    "VARIABLE",
    "Model",
    "NoModelError",
    "Program",
    "Step",
    "Trace",
    "Work",
    "measure",
    "now_ns",
    "requested",
    "run_body",
    "start",
    "stop",
]

VARIABLE = "TORCH_EXT_CLOCK"
POLL_NS = 1000  # by definition: a loop of queries advances by it

_running: Model | None = None


def start(model: str = "unit", *, launch_ns: float = 0, traced: bool = True) -> None:
    """Turn virtual time on, from 0. Waits for the devices first.

    Args:
        model: one of ``MODELS``, or the path of a JSON file like theirs.
        launch_ns: host time of each launch. Python takes no other.
        traced: keep the works for a :class:`Trace`.

    Raises:
        ValueError: there is no such model.
        RuntimeError: virtual time is on already.
    """
    global _running
    loaded = Model.load(model)
    settings = {"launch": float(launch_ns), "poll": float(POLL_NS)}
    _native.start_clock(loaded.rates() | settings, count_flops if loaded.counts_flops() else None, traced)
    _running = loaded


def stop(*, wait: bool = True) -> None:
    """Turn virtual time off; does nothing if it is off. All that was launched is over then.

    Args:
        wait: for the devices first, so that the trace has the times of all works.
    """
    global _running
    _native.stop_clock(wait)
    _running = None


def now_ns() -> int:
    """Return the host's virtual time in nanoseconds."""
    return _native.clock_ns()


@contextlib.contextmanager
def measure(model: str | None = None, *, launch_ns: float = 0) -> Iterator[Trace]:
    """Run the body of a ``with`` statement in virtual time; the trace is complete after it. The body ends when the
    devices are idle. On several ranks, all begin together.

    Within another measure, or after :func:`start`, the trace is of the body alone, by the model that is on.

    Raises:
        NoModelError: at the end, if the model lacks a constant that the body needed.
        ValueError: there is no such model, or the program runs under another.
    """
    outer = _running
    if outer is not None and model not in (None, outer.name):
        raise ValueError(f"Got model={model!r}, but virtual time runs under {outer.name!r}: leave out the model.")
    if outer is None:
        start(model or "unit", launch_ns=launch_ns)
    current = outer or _running
    trace = Trace(begin=now_ns(), first=_native.clock_traced())
    try:
        yield trace
        _complete(trace)
    except BaseException:
        trace.end = now_ns()
        trace.works = _works(trace.first)
        raise
    finally:
        unknown = _native.clock_unknown()
        if outer is None:
            stop(wait=False)
    if unknown and current is not None:
        raise NoModelError(current.name, unknown)


def _complete(trace: Trace) -> None:
    for index in range(_native.device_count()):
        torch.accelerator.synchronize(index)
    trace.end = now_ns()
    trace.works = _works(trace.first)


def _works(first: int) -> list[Work]:
    return [Work(*work) for work in _native.clock_trace(first)]


def requested() -> str:
    """Return the model in ``TORCH_EXT_CLOCK``; empty if the variable is unset."""
    return os.environ.get(VARIABLE, "")


@contextlib.contextmanager
def run_body() -> Iterator[None]:
    """Run the body of a rank's test in virtual time if ``TORCH_EXT_CLOCK`` names a model. The host's clocks read it."""
    if not requested() or _running is not None:
        yield
        return
    start(requested(), traced=False)
    try:
        with _host_time.replaced(now_ns, _native.clock_host_sleeps):
            yield
    finally:
        stop(wait=False)


class Program:
    """The virtual time of a whole program, from here to :meth:`end`."""

    def __init__(self, model: str) -> None:
        """Begin, as :func:`start` does."""
        start(model)
        self._steps = Steps()
        self._steps.watch()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(_host_time.replaced(now_ns, _native.clock_host_sleeps))

    def end(self, rank: int, events: Path) -> dict[str, Any]:
        """Wait for the devices, write the rank's events to the file ``events``, and return a summary in plain types.

        Raises:
            NoModelError: the model lacks a constant that the program needed.
        """
        model = _running
        self._stack.close()
        trace = Trace()
        try:
            _complete(trace)
        finally:
            unknown = _native.clock_unknown()
            stop(wait=False)
        if unknown and model is not None:
            raise NoModelError(model.name, unknown)
        write_events(trace, rank, events)
        about = {} if model is None else {"model": model.name, "validated": model.validated}
        return about | summary(trace, self._steps)
