"""The machine that tests share, and the private resources of each running class.

Note [Neighbours]
~~~~~~~~~~~~~~~~~
Several classes run at once, of one run or of several in one checkout. To isolate them, each has

- a private zygote: if a rank stops or kills it, no other class loses a test or is charged with a leftover process;
- ranks, a parent half and a process group;
- a folder for rendezvous files, and another that ``TMPDIR`` names, both removed when the class has ended;
- ports that the kernel chooses and keeps, never picked first and bound later: see ``reserve_port`` in ``dist_utils``;
- on an accelerator, the devices of its slots: its ranks see only these.

A class with ``alone = True`` runs without others, to have resources such as idle cores for itself.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from torch_ext.runner.schedule import cores
from torch_ext.world.protocol import Devices
from torch_ext.world.tree import ZygoteClient

# Slots per core: more than one, since ranks wait for each other most of the time.
_SLOTS_PER_CORE = 4
# Torch's shared memory manager makes a socket below TMPDIR; its name takes 34 of the 107 bytes of an address.
_LONGEST_TMPDIR = 107 - 34


class Place(NamedTuple):
    """The private resources of a running class."""

    environment: dict[str, str]  # of its processes
    scratch: str  # a folder for its short-lived files
    # Returns a descriptor: the channel on which the class process requests ranks from a zygote on this machine
    add_client: Callable[[ZygoteClient], int] = ZygoteClient.add_client


class Machine:
    """Makes the places of a run's classes, below the folder ``scratch``, for processes with ``environment``. Ranks
    share ``devices``: none on ``cpu`` and on simulated devices, which are unlimited.
    """

    def __init__(
        self, scratch: str, environment: Mapping[str, str], devices: Devices, slots: int | None = None
    ) -> None:
        self._scratch = scratch
        self._environment = environment
        self._devices = devices
        self.slots = slots or devices.number or _SLOTS_PER_CORE * cores()  # maximal number of concurrent ranks

    @contextmanager
    def place(self, slots: Sequence[int], *, packed: bool) -> Iterator[Place]:
        """Context: the place of a class that holds ``slots``; ``packed``: other classes run. See Note [Neighbours]."""
        os.makedirs(self._scratch, 0o700, exist_ok=True)  # a test may have removed it
        with ExitStack() as held:
            folder = tempfile.mkdtemp(dir=self._scratch, prefix="")
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            environment = dict(self._environment)
            if packed:
                environment["TMPDIR"] = own = os.path.join(folder, "t")
                os.mkdir(own)
                if len(os.fsencode(own)) > _LONGEST_TMPDIR >= len(os.fsencode(tempfile.gettempdir())):
                    opened = os.open(folder, os.O_RDONLY)
                    held.callback(os.close, opened)
                    short = f"/proc/{os.getpid()}/fd/{opened}/t"
                    environment["TMPDIR"] = short if os.path.isdir(short) else tempfile.gettempdir()
                environment.setdefault("TORCH_EXT_THREADS", str(max(1, cores() // self.slots)))
            if packed and self._devices.number:
                environment[self._devices.variable] = ",".join(self._names_of(slots))
            yield Place(environment, folder)

    def _names_of(self, slots: Sequence[int]) -> list[str]:
        """Return the devices of ``slots`` as the variable spells them, from the user's own value if it is set."""
        names = [name for name in self._environment.get(self._devices.variable, "").split(",") if name]
        names = names or [str(number) for number in range(self._devices.number)]
        return [names[slot] for slot in slots if slot < len(names)]
