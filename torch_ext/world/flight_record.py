"""What a rank knows of its own collectives: torch's flight record, and who belongs to which group. Runs in the rank;
touches torch only if it is loaded.
"""

from __future__ import annotations

import json
import sys

__all__ = ["read", "summary"]


def read() -> str:
    """Return the record as JSON with ``entries`` and ``groups`` (ranks by the group's name), or an empty string.

    It is empty where torch is not loaded or has no recorder, and before the first process group exists.
    """
    if "torch" not in sys.modules:
        return ""
    try:
        from torch_ext.compat.c10d import _dump_fr_trace_json, ranks_of_groups

        entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
        return json.dumps({"entries": entries, "groups": ranks_of_groups()})
    except Exception:  # whatever a release of torch does here, it must not cost the rank its receipt
        return ""


def summary() -> str:
    """Return a text that changes whenever a collective begins or ends; empty if there is no record."""
    record = json.loads(read() or "{}")
    return json.dumps([[entry.get("record_id"), entry.get("retired")] for entry in record.get("entries", [])][-64:])
