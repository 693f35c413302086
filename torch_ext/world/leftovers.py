"""Processes that children of a zygote have started and left running: whose they are, and their end. Runs in zygotes;
standard library and own layer only.

Note [Leftovers]
~~~~~~~~~~~~~~~~
A zygote is the subreaper of its descendants, so that a process whose parent has ended becomes the zygote's child. Its
owner is the child of the zygote that started it. Every child of a zygote leads a process group of its own, which the
processes that it starts join, so the group tells the owner. A process that has left that group still has the variable
``TORCH_EXT_OWNER`` of the environment that it was started in; one that has neither is charged to the child that ended
last. A process whose owner still lives is let be: the processes of a class serve until the class ends.

Three kinds end by themselves once their clients are gone, and clean up before they do: torch's shared memory manager,
and multiprocessing's resource tracker and fork server. They are nobody's leftovers.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from torch_ext.world import _os
from torch_ext.world.protocol import OWNER_VARIABLE, LeftBehind

__all__ = ["Leftovers", "ends_by_itself"]

# What tells such a process from its command line.
_END_BY_THEMSELVES = ("torch_shm_manager", "multiprocessing.resource_tracker", "multiprocessing.forkserver")
# Torch's manager ends two seconds after its last client, and only then removes its socket.
_PATIENCE_S = 4.0


def ends_by_itself(command: str) -> bool:
    """Whether a process with this command line ends once nobody uses it.

    >>> ends_by_itself("/usr/bin/python3 -c from multiprocessing.resource_tracker import main;main(7)")
    True
    """
    return any(name in command for name in _END_BY_THEMSELVES)


class Leftovers:
    """The processes that this zygote has adopted. See Note [Leftovers]."""

    def __init__(self) -> None:
        self._helpers: set[int] = set()  # adopted, and known to end by themselves

    def end_those_of(self, indices: dict[int, int], living: Collection[int], last: int) -> tuple[LeftBehind, ...]:
        """End what ended children have left behind; return those that were still running.

        Args:
            indices: pid -> index, the children of the group that has ended.
            living: pids of children of this process that still run.
            last: index of the child that ended last.
        """
        found: list[LeftBehind] = []
        self._helpers = {pid for pid in self._helpers if not _os.waitpid(pid, os.WNOHANG)[0]}
        while adopted := [
            pid for pid in _os.children_of(_os.getpid()) if pid not in living and pid not in self._helpers
        ]:
            kept = 0
            for pid in adopted:
                command, owner = _os.command_line(pid), _owner(pid)
                if ends_by_itself(command):
                    self._helpers.add(pid)
                elif owner in living:
                    kept += 1
                else:
                    ended = not command or _os.is_ending(pid)  # a zombie has no command line
                    _os.end_process(pid)
                    _os.waitpid(pid, 0)
                    if not ended:
                        found.append(LeftBehind(indices.get(owner, last), pid, command))
            if kept == len(adopted):
                break
        return tuple(found)


def _owner(pid: int) -> int:
    """Return the pid of the child that has started ``pid``, as far as that can be told; else 0."""
    marked = _os.environment_of(pid).get(OWNER_VARIABLE, "")
    return int(marked) if marked.isdigit() else _os.group_of(pid)


def end_everything(patience_s: float = _PATIENCE_S) -> None:
    """End and reap every child of this process, those that end by themselves after a while of patience."""
    patience_end = _os.monotonic() + patience_s
    while True:
        patient = _os.monotonic() < patience_end
        for pid in _os.children_of(_os.getpid()):
            if not (patient and ends_by_itself(_os.command_line(pid))):
                _os.end_process(pid)
        try:
            if not _os.waitpid(-1, os.WNOHANG if patient else 0)[0]:
                _os.sleep(0.005)
        except ChildProcessError:
            return
