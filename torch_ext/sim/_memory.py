"""Memory of the simulated accelerator: statistics, limit, poison, and allocation history. All sizes are in bytes."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_ext.sim import _native
from torch_ext.sim._absent import refuse
from torch_ext.sim._devices import Device, index_of


def empty_cache() -> None:
    """Return idle memory of all devices to the host."""
    if _native.is_initialized():
        torch.accelerator.empty_cache()


def memory_stats(device: Device = None) -> dict[str, Any]:
    """Return the allocator's statistics of ``device``, named as those of CUDA."""
    return dict(torch.accelerator.memory_stats(index_of(device)))


def _by_device(function: Callable[[int], Any]) -> Callable[[Device], Any]:
    """Make a function of ``torch.accelerator`` accept every form of device that this module accepts."""

    @functools.wraps(function, assigned=("__name__", "__qualname__", "__doc__"))
    def call(device: Device = None) -> Any:
        return function(index_of(device))

    return call


memory_allocated = _by_device(torch.accelerator.memory_allocated)
max_memory_allocated = _by_device(torch.accelerator.max_memory_allocated)
memory_reserved = _by_device(torch.accelerator.memory_reserved)
max_memory_reserved = _by_device(torch.accelerator.max_memory_reserved)
reset_peak_memory_stats = _by_device(torch.accelerator.reset_peak_memory_stats)
reset_accumulated_memory_stats = _by_device(torch.accelerator.reset_accumulated_memory_stats)


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the free and the total bytes of ``device``; no more is free than the run's cap on memory leaves."""
    index = index_of(device)
    limit = _native.memory_limit(index)
    cap, held_by_run, _ = _native.machine_memory()
    free = limit - memory_reserved(index)
    return max(min(free, cap - held_by_run) if cap else free, 0), limit


def set_memory_limit(nbytes: int, device: Device = None) -> None:
    """Set the memory of ``device`` to ``nbytes``. An allocation past that raises ``torch.OutOfMemoryError``.

    Raises:
        ValueError: ``nbytes`` is negative.
    """
    if nbytes < 0:
        raise ValueError(f"Expected a number of bytes, got {nbytes}.")
    _native.set_memory_limit(index_of(device), nbytes)


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Allow this process a part of the memory of ``device``, from 0 to 1. Past it ``torch.OutOfMemoryError`` is raised.

    Raises:
        TypeError: ``fraction`` is not a float.
        ValueError: it is not between 0 and 1.
    """
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _native.set_memory_fraction(index_of(device), fraction)


def get_per_process_memory_fraction(device: Device = None) -> float:
    """Return the part of the memory of ``device`` that this process may use."""
    return _native.memory_fraction(index_of(device))


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """Return the statistics of :func:`memory_stats` as nested dictionaries."""
    return dict(torch._C._accelerator_getDeviceStats(index_of(device)))


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    """Return the statistics of pinned host memory as nested dictionaries."""
    return _native.pinned_memory_stats()


def host_memory_stats() -> dict[str, Any]:
    """Return the statistics of pinned host memory, such as ``"active_bytes.current"``."""
    flat: dict[str, Any] = {}
    for name, value in sorted(host_memory_stats_as_nested_dict().items()):
        if isinstance(value, dict):
            flat.update({f"{name}.{kind}": number for kind, number in value.items()})
        else:
            flat[name] = value
    return flat


def reset_accumulated_host_memory_stats() -> None:
    """Reset the accumulated counts of allocations and frees of pinned host memory."""
    _native.reset_accumulated_pinned_memory_stats()


def reset_peak_host_memory_stats() -> None:
    """Make the current numbers of pinned host memory its peaks."""
    _native.reset_peak_pinned_memory_stats()


def get_allocator_backend() -> str:
    """Return ``"native"``: there is one allocator."""
    return "native"


# Older names, which torch.cuda still has.
memory_cached, max_memory_cached = memory_reserved, max_memory_reserved
reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def __getattr__(name: str) -> Any:
    raise refuse(name)


def set_poison(enabled: bool) -> None:
    """Fill fresh and freed memory with NaN (-1 in integers), so that reads of unset values show. Off by default."""
    _native.set_poison(enabled)


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """Return a summary of the memory of ``device`` in the format of ``torch.cuda.memory_summary``."""
    theirs = torch.cuda.memory_summary
    names = {"memory_stats": memory_stats, "_get_device_index": lambda device, optional: index_of(device)}
    ours = types.FunctionType(theirs.__code__, {**theirs.__globals__, **names})
    return str(ours(device, abbreviated))


# --- origin of memory: snapshots for torch's memory visualizer ---


def _record_memory_history(
    enabled: str | bool | None = "all",
    context: str | None = "all",
    stacks: str = "python",
    max_entries: int = sys.maxsize,
    device: object = None,
    clear_history: bool = False,
    *,
    trace_alloc_max_entries: int = 0,
    trace_alloc_record_context: bool = False,
) -> None:
    """Record the Python stack of every allocation from now on, on all devices.

    Costs about a microsecond per allocation. ``torch.OutOfMemoryError`` then names the lines that hold the memory.

    Args:
        enabled: ``"state"`` keeps the stacks of live memory, ``"all"`` also a trace of what is allocated and freed,
            ``None`` stops and forgets. True and False, the form of older programs, are ``"state"`` and ``None``.
        context: ``None`` records no stacks.
        stacks: ignored, for compatibility; stacks are Python's.
        max_entries: length of the trace; the newest entries are kept.
        device: ignored, for compatibility; all devices are recorded.
        clear_history: ignored, for compatibility; recording always starts over.
        trace_alloc_max_entries: older form: the length of the trace; 0 for no trace.
        trace_alloc_record_context: older form; ignored, for compatibility.

    Raises:
        ValueError: ``enabled`` is none of these.
    """
    if isinstance(enabled, bool):
        enabled = None if not enabled else "all" if trace_alloc_max_entries else "state"
        max_entries = trace_alloc_max_entries or max_entries
    if enabled is None:
        _native.stop_memory_history()
    elif enabled in ("state", "all"):
        _native.start_memory_history(context is not None, enabled == "all", max_entries)
    else:
        raise ValueError(f"Expected enabled to be 'state', 'all' or None, got {enabled!r}.")


def _snapshot(device: object = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
    """Return the memory of all devices in the format of ``torch.cuda.memory._snapshot``.

    Besides CUDA's fields, a block names the operator that allocated it, if any.
    """
    return _native.memory_snapshot()


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    """Write a snapshot to a file, for ``python -m torch.cuda._memory_viz`` or https://docs.pytorch.org/memory_viz."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)


def memory_snapshot(mempool_id: tuple[int, int] | None = None, include_traces: bool = True) -> list[dict[str, Any]]:
    """Return the segments of all devices, or those of one pool, as ``torch.cuda.memory_snapshot`` does."""
    segments: list[dict[str, Any]] = _snapshot()["segments"]
    if mempool_id in (None, (0, 0)):
        return segments
    return [segment for segment in segments if segment["segment_pool_id"] == mempool_id]


class MemPool(_native.MemPool):
    """Memory of the current device apart from the rest, as :class:`torch.cuda.MemPool`; :func:`use_mem_pool` allocates
    in it. What is idle in it serves nothing else, and returns to the host when the pool is deleted.

    Args:
        allocator: None, or ``torch.distributed._symmetric_memory.get_mempool_allocator()``, which then serves each
            request by itself and outside of the statistics.
        use_on_oom: what is idle in the pool serves others before they run out of memory.
        no_split: a segment serves one tensor at a time.
    """

    def __init__(
        self, allocator: _native.Allocator | None = None, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        super().__init__(allocator, use_on_oom, no_split)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """Return the pool's segments, as :func:`memory_snapshot`."""
        return memory_snapshot(self.id, include_traces)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: Device = None) -> Iterator[None]:
    """Allocate in ``pool``: this thread on ``device`` (None: the current one), in the block.

    Raises:
        RuntimeError: the thread does so already.
    """
    index = index_of(device)
    pool.begin(index)
    try:
        yield
    finally:
        pool.end(index)
