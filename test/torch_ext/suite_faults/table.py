"""Mistakes that FSDP could contain, and the tests of the suites that must notice them.

Each is a change of a line or two of torch's own code, of the kind that a patch to FSDP may bring by accident.
"""

from __future__ import annotations

from test.torch_ext.suite_faults import checkpoint, ddp, fsdp1, fsdp2, fsdp2_areas, fsdp2_init, fsdp2_streams, mirrored

__all__ = ["FAULTS", "inject"]

FAULTS = {
    **fsdp1.MISTAKES,
    **fsdp2.MISTAKES,
    **fsdp2_streams.MISTAKES,
    **mirrored.MISTAKES,
    **ddp.MISTAKES,
    **fsdp2_areas.MISTAKES,
    **fsdp2_init.MISTAKES,
    **checkpoint.MISTAKES,
}


def inject(name: str) -> None:
    """Make mistake ``name`` in this process and in all that are forked from it."""
    for edit in FAULTS[name].edits:
        edit.apply()
