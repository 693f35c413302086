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
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torch_ext.sim import _native
from torch_ext.sim.clock import _host_time
from torch_ext.sim.clock._models import MODELS, Model, NoModelError, count_flops
from torch_ext.sim.clock._modules import Modules
from torch_ext.sim.clock._program import summary, write_events
from torch_ext.sim.clock._trace import Step, Trace, Work

__all__ = ["MODELS", "Model", "NoModelError", "Step", "Trace", "Work", "measure", "now_ns", "start", "stop"]

POLL_NS = 1000  # by definition: a loop of queries advances by it
now_ns = _native.clock_ns  # the host's virtual time in nanoseconds

_running: Model | None = None


def start(model: str = "unit", *, launch_ns: float = 0) -> None:
    """Turn virtual time on, from 0. Waits for the devices first.

    Args:
        model: one of ``MODELS``, or the path of a JSON file like theirs.
        launch_ns: host time of each launch. Python takes no other.

    Raises:
        ValueError: there is no such model, or ``launch_ns`` is below 0.
        RuntimeError: virtual time is on already.
    """
    global _running
    if not 0 <= launch_ns < math.inf:
        raise ValueError(f"Got launch_ns={launch_ns!r}, expected a number of nanoseconds from 0 on.")
    loaded = Model.load(model)
    rates = loaded.rates() | {"launch": float(launch_ns), "poll": float(POLL_NS)}
    is_roofline = any(name.startswith("flops.") for name in rates)
    _native.start_clock(loaded.identity, rates, count_flops if is_roofline else None)
    _running = loaded


def stop() -> None:
    """Turn virtual time off; does nothing if it is off. All that was launched is over then."""
    global _running
    _native.stop_clock()
    _running = None


@contextlib.contextmanager
def measure(model: str | None = None, *, launch_ns: float = 0, limits: bool = False) -> Iterator[Trace]:
    """Run the body of a ``with`` statement in virtual time; the trace is complete after it. The body begins and ends
    when the devices are idle; a body that raises ends with what has been launched by then. On several ranks, all begin
    together, with one model. Within virtual time the model and ``launch_ns`` stay, and the trace is of the body alone.

    Args:
        model: as of :func:`start`.
        launch_ns: as of :func:`start`.
        limits: whether a collective or receive of ``sim``'s own backend that takes longer in virtual time than the time
            limit of its group fails, on all of its ranks, as after that time on a real cluster.

    Raises:
        NoModelError: at the end, if the model lacks a rate that the body needed.
        ValueError: there is no such model, or another is on, or ``launch_ns`` is below 0.
    """
    outer = _running
    if outer is not None and (model not in (None, outer.name) or launch_ns):
        got = f"model={model!r}, launch_ns={launch_ns!r}"
        raise ValueError(f"Got {got}, but virtual time runs under {outer.name!r} already: leave out both.")
    if outer is None:
        start(model or "unit", launch_ns=launch_ns)
    else:
        _wait_for_devices()
    trace = Trace(begin=now_ns(), first=_native.clock_traced())
    had_limits = _native.set_clock_limits(True) if limits else None
    try:
        yield trace
        _wait_for_devices()
        _native.check_clock_limits()
        unknown = _native.clock_unknown()
        if unknown and _running is not None:
            raise NoModelError(_running.name, unknown)
    finally:
        if had_limits is not None:
            _native.set_clock_limits(had_limits)
        trace.works = [Work(*work) for work in _native.clock_trace(trace.first)]
        trace.end = max(now_ns(), *(work.end for work in trace.works), 0)
        if outer is None:
            stop()


def _wait_for_devices() -> None:
    for index in range(_native.device_count()):
        torch.accelerator.synchronize(index)


@contextlib.contextmanager
def run_body() -> Iterator[None]:
    """Run the body of a rank's test in virtual time if ``TORCH_EXT_CLOCK`` names a model. The host's clocks read it."""
    model = os.environ.get("TORCH_EXT_CLOCK")
    if not model or _running is not None:
        yield
        return
    start(model)
    try:
        with _host_time.replaced(now_ns, _native.clock_host_sleeps):
            yield
    finally:
        stop()


class Program:
    """The virtual time of a whole program, from here to :meth:`end`."""

    def __init__(self, model: str) -> None:
        """Begin, as :func:`start` does."""
        self._stack = contextlib.ExitStack()
        self._trace = self._stack.enter_context(measure(model))
        self._stack.enter_context(_host_time.replaced(now_ns, _native.clock_host_sleeps))
        self._model = Model.load(model)
        self._modules = Modules(_native.clock_traced)

    def end(self, rank: int, events: Path) -> dict[str, Any]:
        """Write the rank's events to the file ``events``, and return a summary in plain types. Raises as measure."""
        self._stack.close()
        self._trace.works = [
            work._replace(module=self._modules.of(number)) if work.kind in ("kernel", "copy") else work
            for number, work in enumerate(self._trace.works)
        ]
        write_events(self._trace, rank, events)
        return {"model": self._model.name, "validated": self._model.validated} | summary(
            self._trace, self._modules.steps
        )
