"""What this process has used of what a rank is given. Imports torch only if it is loaded."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch_ext.world import collectives

__all__ = ["groups_made", "uses_of_device"]


# Their pickled bytes and the numbers of these, as flight records call the types.
_TYPES_OF_OBJECTS = frozenset({"Byte", "Long"})
_SIDES = ("input_dtypes", "output_dtypes")


def groups_made() -> int:
    """Return how many process groups this process has made since the simulator was loaded."""
    collectives = sys.modules.get("torch_ext.sim._collectives")
    return collectives.groups_made() if collectives is not None else 0


def uses_of_device() -> int:
    """Return how often this process has used a simulated device: it allocated memory, or moved tensors between ranks,
    be they empty. Moving objects between ranks counts where nothing but objects was moved there.
    """
    sim: Any = sys.modules.get("torch_ext.sim._module")
    if sim is None:
        return 0
    return _allocations(sim) + _operations() or _objects_alone()


def _allocations(sim: Any) -> int:
    if not sim.is_initialized():
        return 0
    stats = (sim.memory_stats(index) for index in range(sim.device_count()))
    return sum(int(each.get("allocation.all.allocated", 0)) for each in stats)


def _operations() -> int:
    return int(sys.modules["torch_ext.sim._native"].operations_launched_on_devices())


def _objects_alone() -> int:
    """Return how many objects went between ranks; 0 if tensors of the host that stand for numbers did, too."""
    moved: int = sys.modules["torch_ext.sim._collectives"].objects_moved()
    entries = json.loads(collectives.own_record() or "{}").get("entries", []) if moved else []
    types = {kind for entry in entries for side in _SIDES for kind in entry.get(side, [])}
    return moved if types <= _TYPES_OF_OBJECTS else 0
