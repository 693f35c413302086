"""Who allocated memory: snapshots for torch's memory visualizer, under the names that ``torch.cuda.memory`` has."""

from __future__ import annotations

import pickle
import sys
from typing import Any

from torch_ext.sim import _native

__all__ = ["_dump_snapshot", "_record_memory_history", "_snapshot", "memory_snapshot"]


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

    Costs about a microsecond for each. ``torch.OutOfMemoryError`` then says which lines hold the memory.

    Args:
        enabled: ``"state"`` keeps the stacks of live memory, ``"all"`` also a trace of what is allocated and freed,
            ``None`` stops and forgets. True and False, the form of older programs, are ``"state"`` and ``None``.
        context: ``None`` records no stacks.
        stacks: taken for compatibility; stacks are those of Python.
        max_entries: how many entries of the trace are kept, the newest ones.
        device: taken for compatibility; all devices are recorded.
        clear_history: taken for compatibility; recording always starts over.
        trace_alloc_max_entries: of the older form: the length of the trace, if there is to be one.
        trace_alloc_record_context: of the older form; taken for compatibility.

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

    Every block is a segment of its own. A block says beside what CUDA's say which operator allocated it, where one did.
    """
    return _native.memory_snapshot()


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    """Write a snapshot to a file, for ``python -m torch.cuda._memory_viz`` or https://docs.pytorch.org/memory_viz."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)


def memory_snapshot(mempool_id: object = None, include_traces: bool = True) -> list[dict[str, Any]]:
    """Return the segments of all devices, as ``torch.cuda.memory_snapshot`` does."""
    segments: list[dict[str, Any]] = _snapshot()["segments"]
    return segments
