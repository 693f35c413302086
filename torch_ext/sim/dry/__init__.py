"""Dry runs: rank r of N of a program, whose kernels allocate and take virtual time, but compute nothing.

``torch_ext run --dry`` starts one: see docs/dry.md. Note [Dry runs] in csrc/dry.h says what runs and what does not;
``_reads`` gives the host what it would read of a device, ``_peers`` stands in for the other ranks, and ``_memory`` says
what held the memory at its peak.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_ext.sim import _memory as memory
from torch_ext.sim import _native
from torch_ext.sim.dry import _peers, _shapes
from torch_ext.sim.dry._memory import Watch
from torch_ext.sim.dry._reads import Assumption, Reads

__all__ = ["Assumption", "Program", "Reads", "Watch"]


class Program:
    """A dry run of this process, from here to its end."""

    def __init__(self, assumptions: Sequence[str]) -> None:
        """Begin, before the first use of a device.

        Args:
            assumptions: values of reads, see :class:`Assumption`.
        """
        reads = Reads([Assumption.parse(text) for text in assumptions])
        _shapes.prefer_native()
        _native.start_dry(reads)
        _peers.install()
        memory._record_memory_history()
        self._watch = Watch()

    def end(self, snapshot: Path, *, is_timed: bool = False) -> dict[str, Any]:
        """Write a snapshot for torch's memory visualizer, and return the peaks in plain types: see
        :meth:`Watch.report`. ``is_timed``: the run has virtual time.
        """
        for index in range(_native.device_count()):
            torch.accelerator.synchronize(index)
        taken = memory._snapshot()
        report = self._watch.report(taken, is_timed=is_timed)
        snapshot.write_bytes(pickle.dumps(taken))
        return report | {"snapshot": str(snapshot)}
