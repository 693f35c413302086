"""Runs a program and returns the events that an observer of the devices received (csrc/kernel_observer.h)."""

from torch_ext.sim import _native

_FIELDS = ("kind", "name", "device", "stream", "moment", "accesses")  # of an entry of csrc/observer_log.cpp


def observe(program, *args):
    """Call ``program(*args)`` and return its result and what was observed, in order."""
    _native.start_observer_log()
    try:
        result = program(*args)
    finally:
        entries = _native.stop_observer_log()
    return result, [dict(zip(_FIELDS, entry, strict=True)) for entry in entries]


def kinds(entries):
    return [entry["kind"] for entry in entries]


def kernels(entries):
    return [entry for entry in entries if entry["kind"] in ("kernel", "launched")]


def ranges(entries, *, written):
    """Return the bytes that kernels have written, or read, as pairs of addresses: the first, and one past the last."""
    found = [access for entry in kernels(list(entries)) for access in entry["accesses"]]
    return [(address, address + size) for _, address, size, write in found if write is written]


def is_touched(tensor, where):
    """Whether one of the ranges holds an element of ``tensor``; true of one without elements."""
    return tensor.numel() == 0 or any(first <= tensor.data_ptr() < last for first, last in where)
