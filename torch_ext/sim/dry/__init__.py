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
from torch import _meta_registrations
from torch.fx.experimental import _config

from torch_ext.sim import _memory as memory
from torch_ext.sim import _native
from torch_ext.sim.dry import _peers
from torch_ext.sim.dry._memory import Watch
from torch_ext.sim.dry._reads import Assumption, Reads

__all__ = ["Assumption", "Program", "Reads", "Watch"]


_held: list[torch.library.Library] = []  # a dry run lasts as long as the process, also without its Program


class Program:
    """A dry run of this process, from here to its end."""

    def __init__(self, assumptions: Sequence[str]) -> None:
        """Begin, before the first use of a device.

        Args:
            assumptions: values of reads, see :class:`Assumption`.
        """
        reads = Reads([Assumption.parse(text) for text in assumptions])
        _held.append(_prefer_native_shapes())
        _config.meta_nonzero_assume_all_nonzero = True  # where `reads` allows a mask
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


def _shapes_of_weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight and its norms, which GPUs save in float for half precision; torch's function does not."""
    return torch.empty_like(v), torch.empty_like(g, dtype=torch.promote_types(g.dtype, torch.float32))


def _prefer_native_shapes() -> torch.library.Library:
    """Leave shape functions written in Python to operators that have no other, while the result lives. Torch registers
    one on top of many in C++, for symbolic sizes, at a hundred times the cost.
    """
    theirs = _meta_registrations._meta_lib_dont_use_me_use_register_meta
    functions = {}
    for key in theirs._op_impls:  # "aten/add.Tensor/Meta"
        packet, _, overload = key.split("/")[1].partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        functions[op] = op.py_kernels[torch._C.DispatchKey.Meta]
    theirs._destroy()
    functions[torch.ops.aten._weight_norm_interface.default] = _shapes_of_weight_norm
    ours = torch.library.Library("aten", "IMPL", "Meta")
    for op, function in functions.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"):
            ours.impl(op, function)
    return ours
