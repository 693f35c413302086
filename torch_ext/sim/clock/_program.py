"""What ``run --clock`` reports of a rank's virtual time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_ext.sim.clock._trace import Trace

_SHOWN_STEPS = 4  # of the critical path
_NANOSECONDS_PER_MICROSECOND = 1e3
_LANES = 1000  # numbers of a rank in a trace, for its lanes; more than it has


def summary(trace: Trace, steps: Sequence[int]) -> dict[str, Any]:
    """Return what ``run --clock`` shows of a rank, in plain types: times in nanoseconds.
    ``steps`` has the number of works before each step of an optimizer was over.
    """
    ends = [max((work.end for work in trace.works[:number]), default=0) for number in steps[-2:]]
    communication = sorted({work.name for work in trace.works if work.kind in ("collective", "transfer")})
    streams = sorted({(work.device, work.stream) for work in trace.works if work.stream >= 0})
    path = Counter[str]()
    for step in trace.critical_path():
        path[re.sub(r"\b\d+\b", "*", step.name)] += step.time  # layers.0, layers.1: one row
    return {
        "time": trace.time,
        "step": ends[1] - ends[0] if len(ends) > 1 else None,
        "last_step": ends if len(ends) > 1 else None,
        "exposed": {name: trace.exposed(name) for name in communication},
        "idle": {f"stream {stream}": trace.idle((device, stream)) for device, stream in streams},
        "critical_path": dict(path.most_common(_SHOWN_STEPS)),
    }


def write_events(trace: Trace, rank: int, path: Path) -> None:
    """Write the works of a rank as events of Chrome's trace format, which Perfetto reads: one JSON object a line."""
    first = 1 + rank * _LANES  # Perfetto takes thread 0 for the idle one, and a thread's number for unique in all ranks
    lanes: dict[str, int] = {}
    with path.open("w", encoding="utf-8") as file:

        def write(**event: Any) -> None:
            file.write(json.dumps(event | {"pid": first}) + "\n")

        write(ph="M", name="process_name", args={"name": f"rank {rank}"})
        for work in (each for each in trace.works if each.start >= 0):
            if work.lane not in lanes:
                lanes[work.lane] = first + len(lanes)
                write(ph="M", name="thread_name", tid=lanes[work.lane], args={"name": work.lane})
            times = {"ts": work.start / _NANOSECONDS_PER_MICROSECOND}
            times["dur"] = (work.end - work.start) / _NANOSECONDS_PER_MICROSECOND
            details: dict[str, Any] = {"bytes": work.bytes, "peer": work.peer, "waited ns": work.start - work.ready}
            details |= {"module": work.module} if work.module else {}
            write(ph="X", name=work.name, cat=work.kind, tid=lanes[work.lane], **times, args=details)
