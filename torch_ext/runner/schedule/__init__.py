"""Which class runs when, and on which slots: decisions alone, without processes and without a clock.

``plan``      what a run executes
``slots``     the places for ranks that a machine has, and who holds them
``base``      the Protocol of a policy
``serial``, ``packed``   the policies, one file each
``queue``     classes that wait, those that run, and the policy's choice among them
``simulate``  a whole run with a clock that jumps

To add a policy, write a file with a class that satisfies :class:`~torch_ext.runner.schedule.base.Policy`, and choose it
where ``execute`` chooses the others.
"""

from torch_ext.runner.schedule.base import Policy
from torch_ext.runner.schedule.packed import Packed
from torch_ext.runner.schedule.plan import Batch, Need, Plan, make_plan
from torch_ext.runner.schedule.queue import Queue
from torch_ext.runner.schedule.serial import Serial
from torch_ext.runner.schedule.slots import Slots

__all__ = ["Batch", "Need", "Packed", "Plan", "Policy", "Queue", "Serial", "Slots", "make_plan"]
