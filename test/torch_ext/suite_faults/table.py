"""Mistakes that torch could contain, and the tests of the suites that must notice them.

Each is a change of a line or two of torch's own code, of the kind that a patch to FSDP may bring by accident.
"""

from __future__ import annotations

from test.torch_ext.suite_faults import (
    checkpoint,
    ddp,
    fsdp1,
    fsdp1_areas,
    fsdp1_layout,
    fsdp1_originals,
    fsdp1_streams,
    fsdp1_subjects,
    fsdp2,
    fsdp2_areas,
    fsdp2_groups,
    fsdp2_init,
    fsdp2_streams,
    mirrored,
    rpc,
)

__all__ = ["FAULTS", "inject"]

_TABLES = (
    checkpoint.MISTAKES,
    ddp.MISTAKES,
    fsdp1.MISTAKES,
    fsdp1_areas.MISTAKES,
    fsdp1_layout.MISTAKES,
    fsdp1_originals.MISTAKES,
    fsdp1_streams.MISTAKES,
    fsdp1_subjects.MISTAKES,
    fsdp2.MISTAKES,
    fsdp2_areas.MISTAKES,
    fsdp2_groups.MISTAKES,
    fsdp2_init.MISTAKES,
    fsdp2_streams.MISTAKES,
    mirrored.MISTAKES,
    rpc.MISTAKES,
)

FAULTS = {name: mistake for table in _TABLES for name, mistake in table.items()}


def inject(name: str) -> None:
    """Make mistake ``name`` in this process and in all that are forked from it."""
    for edit in FAULTS[name].edits:
        edit.apply()
