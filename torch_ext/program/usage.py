"""What this process has used of what a rank is given. Imports torch only if it is loaded."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["allocations", "groups_made"]


def groups_made() -> int:
    """Return how many process groups this process has made since the simulator was loaded."""
    collectives = sys.modules.get("torch_ext.sim._collectives")
    return collectives.groups_made() if collectives is not None else 0


def allocations() -> int:
    """Return how often memory of a simulated device was allocated in this process."""
    sim: Any = sys.modules.get("torch_ext.sim._module")
    if sim is None or not sim.is_initialized():
        return 0
    stats = (sim.memory_stats(index) for index in range(sim.device_count()))
    return sum(int(each.get("allocation.all.allocated", 0)) for each in stats)
