"""Virtual time: what a program's kernels, copies and collectives would take, by a model. ``torch.sim.clock``.

    with torch.sim.clock.measure(model="unit") as trace:
        train_step()
    trace.exposed("all_gather")  # nanoseconds in which an all-gather runs and no kernel does

Values, order and races stay as they are; only time is computed. So equal programs give equal numbers, whatever the
load of the machine. Note [Virtual time] in csrc/clock.h says what takes time and what waits for what; ``MODELS`` are
the cost models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from torch_ext.sim import _native
from torch_ext.sim.clock._models import MODELS, Model, NoModelError, count_flops
from torch_ext.sim.clock._trace import Step, Trace, Work

__all__ = [
    "MODELS",
    "Model",
    "NoModelError",
    "Step",
    "Trace",
    "Work",
    "measure",
    "now_ns",
    "start",
    "stop",
]

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


def stop() -> None:
    """Wait for the devices, and turn virtual time off. Does nothing if it is off."""
    global _running
    _native.stop_clock()
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
    _native.init()
    if outer is None:
        start(model or "unit", launch_ns=launch_ns)
    current = outer or _running
    trace = Trace(begin=now_ns(), first=_native.clock_traced())
    try:
        yield trace
        _synchronize()
    finally:
        trace.end = now_ns()
        if outer is None:
            stop()
        trace.works = [Work(*work) for work in _native.clock_trace(trace.first)]
        unknown = _native.clock_unknown()
    if unknown and current is not None:
        raise NoModelError(current.name, unknown)


def _synchronize() -> None:
    for index in range(_native.device_count()):
        torch.accelerator.synchronize(index)
