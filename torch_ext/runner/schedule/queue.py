"""Classes that wait, those that run, and the policy's choice among them. No processes, no clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch_ext.runner.discovery import TestFile
from torch_ext.runner.schedule.plan import Batch, Plan
from torch_ext.runner.schedule.policies import Policy
from torch_ext.runner.schedule.slots import Slots, slots_of

__all__ = ["Queue"]

# How many files are open beyond those whose classes run. An open file has a process that has imported it.
_AHEAD = 2


class Queue:
    """The state of a run, file by file: closed, open (being imported), ready (imported), done.

    A file is imported once: it stays open until all of its classes have run. So that not all files are open at once,
    the policy chooses among the classes of a few, and the next file opens when one is done.
    """

    def __init__(self, plan: Plan, policy: Policy, slots: Slots) -> None:
        self._policy = policy
        self._slots = slots
        self._waiting: dict[str, list[Batch]] = {}
        for batch in policy.order(plan.batches):
            self._waiting.setdefault(batch.file.name, []).append(batch)
        self._files = {batch.file.name: batch.file for batch in plan}
        self._closed = list(self._waiting)
        self._ready: dict[str, None] = {}
        self._open: dict[str, None] = {}
        self.running: dict[Batch, tuple[int, ...]] = {}

    def files_to_open(self) -> list[TestFile]:
        """Return the files whose import is to begin now; each is returned once."""
        busy = {batch.file.name for batch in self.running}
        opened = []
        while self._closed and len(set(self._open) - busy) < _AHEAD:
            name = self._closed.pop(0)
            self._open[name] = None
            opened.append(self._files[name])
        return opened

    def loaded(self, file: TestFile, batches: Sequence[Batch]) -> None:
        """Take note that ``file`` is imported, and that ``batches`` are what there is to run of it."""
        self._waiting[file.name] = self._policy.order(batches)
        self._ready[file.name] = None

    def start(self) -> Batch | None:
        """Return the class that begins now, which takes its slots in :attr:`running`; None to wait."""
        ready = self._policy.order([batch for name in self._may_run() for batch in self._waiting[name]])
        chosen = self._policy.choose(ready, tuple(self.running), self._slots.free, self._slots.number)
        if chosen is not None:
            self._waiting[chosen.file.name].remove(chosen)
            self.running[chosen] = self._slots.take(slots_of(chosen.need, self._slots.number))
        return chosen

    def _may_run(self) -> list[str]:
        if not self._policy.keeps_order:
            return list(self._ready)
        return list(itertools.takewhile(lambda name: name in self._ready, self._open))

    def ended(self, batch: Batch) -> None:
        """Take note that ``batch`` has ended."""
        self._slots.give_back(self.running.pop(batch))

    def files_done(self) -> list[TestFile]:
        """Return the files all of whose classes have ended; each is returned once."""
        busy = {batch.file.name for batch in self.running}
        done = [name for name in self._ready if not self._waiting[name] and name not in busy]
        for name in done:
            del self._ready[name], self._open[name]
        return [self._files[name] for name in done]

    @property
    def over(self) -> bool:
        """Whether every class has ended."""
        return not (self._closed or self._open or self.running)
