"""Which class runs when, and on which slots: decisions alone, without processes and without a clock.

``plan``      what a run executes
``slots``     the places for ranks that a machine has, and who holds them
``policies``  the Protocol of a policy, and the two that there are
``queue``     classes that wait, those that run, and the policy's choice among them
``simulate``  a whole run with a clock that jumps

To add a policy, write a class that satisfies :class:`~torch_ext.runner.schedule.policies.Policy`, and choose it where
``execute`` chooses the others.
"""

from torch_ext.runner.schedule.plan import Batch, Need, Plan, make_plan
from torch_ext.runner.schedule.policies import Packed, Policy, Serial
from torch_ext.runner.schedule.queue import Queue
from torch_ext.runner.schedule.slots import Slots

__all__ = ["Batch", "Need", "Packed", "Plan", "Policy", "Queue", "Serial", "Slots", "make_plan"]
