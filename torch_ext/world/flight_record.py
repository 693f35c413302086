"""What a rank knows of its own collectives: torch's flight record, and who belongs to which group. Runs in the rank;
touches torch only if it is loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from torch_ext.world import frames

__all__ = ["ALL", "note_destroyed", "read", "summary"]

# In place of a group's name.
ALL = "*"
# Where the body has destroyed process groups, by the group's name.
_destroyed: dict[str, str] = {}


def note_destroyed(names: Sequence[str]) -> None:
    """Note the user's line that destroys these groups now; no names: all groups."""
    place = frames.place_here()
    if place:
        _destroyed.update(dict.fromkeys(names or [ALL], place))


def read() -> str:
    """Return the record as JSON, or an empty string: ``entries``, ``groups`` (ranks by the group's name) and
    ``destroyed`` (the line that destroyed a group, by its name; ``"*"`` for all).

    It is empty where torch is not loaded or has no recorder, and before the first process group exists.
    """
    if "torch" not in sys.modules:
        return ""
    try:
        from torch_ext.compat.c10d import _dump_fr_trace_json, ranks_of_groups

        entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
        return json.dumps({"entries": entries, "groups": ranks_of_groups(), "destroyed": _destroyed})
    except Exception:  # whatever a release of torch does here, it must not cost the rank its receipt
        return ""


def summary() -> str:
    """Return a text that changes whenever a collective begins or ends; empty if there is no record."""
    record = json.loads(read() or "{}")
    return json.dumps([[entry.get("record_id"), entry.get("retired")] for entry in record.get("entries", [])][-64:])
