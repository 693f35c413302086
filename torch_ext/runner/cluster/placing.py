"""Where Ray puts a class, by what it needs. Imports Ray on use."""

from __future__ import annotations

from typing import Any

from torch_ext.runner.schedule import Need

__all__ = ["Placement", "bundle"]

# As on a single machine: ranks wait for one another most of the time.
_RANKS_PER_CPU = 4
_CREATED = "CREATED"


def bundle(need: Need, largest_cpus: float, devices: int) -> dict[str, float]:
    """Return what a class takes of one machine, in Ray's resources: at most what the largest machine has.

    Args:
        need: of the class.
        largest_cpus: the most CPUs that a machine has.
        devices: the most devices that a machine has which ranks must share; 0 where they need not.

    >>> bundle(Need(ranks=2), 8, 0), bundle(Need(ranks=2, alone=True), 8, 0), bundle(Need(ranks=4), 8, 2)
    ({'CPU': 0.5}, {'CPU': 8}, {'GPU': 2, 'CPU': 0.25})
    """
    if devices:
        ranks = devices if need.alone else min(need.ranks, devices)
        return {"GPU": ranks, "CPU": largest_cpus if need.alone else 1 / _RANKS_PER_CPU}
    return {"CPU": largest_cpus if need.alone else min(largest_cpus, need.ranks / _RANKS_PER_CPU)}


class Placement:
    """A reservation that Ray makes on machines of its choice, as soon as there is room. :meth:`leave` ends it.

    Args:
        resources: what it takes of each machine.
        machines: how many, no two of them the same.
    """

    def __init__(self, resources: dict[str, float], machines: int = 1) -> None:
        from ray.util import placement_group

        self._machines = machines
        self._group: Any = placement_group([resources] * machines, strategy="STRICT_SPREAD" if machines > 1 else "PACK")

    def nodes(self) -> tuple[str, ...]:
        """Return the ids of the machines; none while there is no room."""
        from ray.util import placement_group_table

        table = placement_group_table(self._group)
        if table.get("state") != _CREATED:
            return ()
        return tuple(str(table["bundles_to_node_id"][number]) for number in range(self._machines))

    def leave(self) -> None:
        """Give the room back."""
        from ray.util import remove_placement_group

        remove_placement_group(self._group)
