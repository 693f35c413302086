"""Fault plans for tests: what goes wrong in which rank, and what every rank must see.

.. code-block:: python

    class TestTraining(DistributedTestBase):
        @fault_plan("rank 1: kill at all_reduce #3")
        @every_rank_sees(dist.DistBackendError, naming=1, within=10)
        def test_death_of_a_peer(self):
            train(self.create_pg("sim"))
"""

from __future__ import annotations

from torch_ext.faults.points import InjectedFault, phase
from torch_ext.testing._internal._distributed.trials import (
    Undisturbed,
    every_rank_sees,
    fault_plan,
    nothing_lost,
)

__all__ = [
    "InjectedFault",
    "Undisturbed",
    "every_rank_sees",
    "fault_plan",
    "nothing_lost",
    "phase",
]
