"""Mistakes that FSDP could contain, and the tests of the suites that must notice them.

Each is a change of a line or two of torch's own code, of the kind that a patch to FSDP may bring by accident.
"""

from __future__ import annotations

from test.torch_ext.suite_faults import (
    ddp,
    fsdp1,
    fsdp1_areas,
    fsdp1_originals,
    fsdp2,
    fsdp2_streams,
    mirrored,
)

__all__ = ["FAULTS", "inject"]

_TABLES = (
    ddp.MISTAKES,
    fsdp1.MISTAKES,
    fsdp1_areas.MISTAKES,
    fsdp1_originals.MISTAKES,
    fsdp2.MISTAKES,
    fsdp2_streams.MISTAKES,
    mirrored.MISTAKES,
)

FAULTS = {name: mistake for table in _TABLES for name, mistake in table.items()}


def inject(name: str) -> None:
    """Make mistake ``name`` in this process and in all that are forked from it."""
    for edit in FAULTS[name].edits:
        edit.apply()
