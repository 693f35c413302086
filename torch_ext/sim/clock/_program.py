"""Virtual time of a whole program, or of a test's body, as ``--clock`` asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_ext.sim import _native
from torch_ext.sim.clock._trace import Trace, Work

_SHOWN_STEPS = 4  # of the critical path
_NANOSECONDS_PER_MICROSECOND = 1e3
COMMUNICATION = ("collective", "transfer")


class Steps:
    """Notes where a program's optimizers step, to divide its time into steps."""

    def __init__(self) -> None:
        self._works: list[int] = []  # before each optimizer's step was over

    def watch(self) -> None:
        """Note the steps from now on."""
        register_optimizer_step_post_hook(lambda *_: self._works.append(_native.clock_traced()))

    def length_ns(self, trace: Trace) -> int | None:
        """Return the time between the last two steps of the optimizer that stepped most; None without two."""
        ends = [max((work.end for work in trace.works[:number]), default=0) for number in self._works]
        return ends[-1] - ends[-2] if len(ends) > 1 else None


def summary(trace: Trace, steps: Steps) -> dict[str, Any]:
    """Return what ``run --clock`` shows of a rank, in plain types: times in nanoseconds."""
    streams = sorted({(work.device, work.stream) for work in trace.works if work.stream >= 0})
    idle = {f"stream {stream}": trace.idle_on(device, stream) for device, stream in streams}
    path: dict[str, int] = {}
    for step in trace.critical_path():
        path[step.name] = path.get(step.name, 0) + step.time
    exposed = {
        name: trace.exposed(name) for name in sorted({work.name for work in trace.works if work.kind in COMMUNICATION})
    }
    longest = sorted(path.items(), key=lambda each: -each[1])[:_SHOWN_STEPS]
    return {
        "time": trace.time,
        "step": steps.length_ns(trace),
        "exposed": exposed,
        "idle": idle,
        "critical_path": dict(longest),
    }


def write_events(trace: Trace, rank: int, path: Path) -> None:
    """Write the works of a rank as events of Chrome's trace format, which Perfetto reads: one JSON object a line."""
    lanes: dict[str, int] = {}
    with path.open("w", encoding="utf-8") as file:

        def write(**event: Any) -> None:
            file.write(json.dumps(event | {"pid": rank}) + "\n")

        write(ph="M", name="process_name", args={"name": f"rank {rank}"})
        for work in trace.works:
            if work.start < 0:
                continue
            if work.lane not in lanes:
                lanes[work.lane] = len(lanes)
                write(ph="M", name="thread_name", tid=lanes[work.lane], args={"name": work.lane})
            write(
                ph="X",
                name=work.name,
                cat=work.kind,
                tid=lanes[work.lane],
                ts=work.start / _NANOSECONDS_PER_MICROSECOND,
                dur=(work.end - work.start) / _NANOSECONDS_PER_MICROSECOND,
                args=_details(work),
            )


def _details(work: Work) -> dict[str, Any]:
    if work.kind == "host":
        return {}
    peer = {"peer": work.peer} if work.kind == "transfer" else {"last rank": work.peer} if work.peer >= 0 else {}
    waited = {"waited ns": work.start - work.ready} if work.start > work.ready else {}
    return {"bytes": work.bytes, **peer, **waited}
