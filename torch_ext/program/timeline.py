"""The end of ``run --clock``: a table of the ranks' virtual time, and one trace of all ranks for Perfetto. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from torch_ext.program import page
from torch_ext.program.page import shown

TRACE, PAGE = "torch_ext_trace.json", "torch_ext_trace.html"  # in the working directory
_HEADER = ("rank", "time", "step", "exposed communication", "idle", "critical path")


def events_of(folder: str, rank: int) -> Path:
    """Return the file for the events of a rank."""
    return Path(folder) / str(rank)


def replicas_of(folder: str, rank: int) -> Path:
    """Return the file for the hashes of a rank's replicas."""
    return Path(folder) / f"replicas_{rank}"


def table(summaries: Sequence[Mapping[str, Any]], ranks: Sequence[int] = ()) -> str:
    """Return the table of the ranks' summaries, which torch_ext.sim.clock makes: a row for each rank.
    ``ranks`` are their numbers; 0 and on by default.

    >>> print(table([{"model": "unit", "validated": False, "time": 1500, "step": None, "exposed": {"all_gather": 300},
    ...               "idle": {"stream 0": 750}, "critical_path": {"aten::mm": 1200, "all_gather": 300}}]))
    virtual time by the model unit (not validated)
    rank  time     step  exposed communication  idle          critical path
    0     1.50 us  -     all_gather 300 ns      stream 0 50%  aten::mm 80%, all_gather 20%
    """
    rows = [_HEADER]
    for rank, each in zip(ranks or range(len(summaries)), summaries, strict=True):
        shares = {
            key: ", ".join(f"{name} {time / max(each['time'], 1):.0%}" for name, time in each[key].items()) or "-"
            for key in ("idle", "critical_path")
        }
        exposed = ", ".join(f"{name} {shown(time)}" for name, time in each["exposed"].items()) or "-"
        step = "-" if each["step"] is None else shown(each["step"])
        rows.append((str(rank), shown(each["time"]), step, exposed, shares["idle"], shares["critical_path"]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    validated = "" if summaries[0]["validated"] else " (not validated)"
    return "\n".join([f"virtual time by the model {summaries[0]['model']}{validated}", *lines])


def read(text: str) -> dict[str, dict[str, Any]]:
    """Return the summaries in the trace of an earlier run at the path ``text``, by rank. Raises ValueError."""
    try:
        found: dict[str, dict[str, Any]] = json.loads(Path(text).read_bytes())["otherData"]["summaries"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{text} is no trace that run --clock has written: {error!r}") from None
    return found


def moved(before: Mapping[str, Mapping[str, Any]], summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the times that differ between two runs, a line for each, by the ranks' summaries.

    >>> old = {"time": 1000, "step": None, "exposed": {}, "idle": {"stream 0": 0}, "critical_path": {"aten::mm": 1000}}
    >>> print(moved({"0": old}, {"0": {**old, "time": 1500, "exposed": {"all_gather": 500}}}))
    rank 0: time 1.00 us -> 1.50 us
    rank 0: exposed all_gather 0 ns -> 500 ns
    """
    lines = []
    for rank in summaries.keys() & before.keys():
        old, new = _times(before[rank]), _times(summaries[rank])
        for name in {**new, **old}:
            if old.get(name, 0) != new.get(name, 0):
                lines.append(f"rank {rank}: {name} {shown(old.get(name, 0))} -> {shown(new.get(name, 0))}")
    return "\n".join(sorted(lines, key=lambda line: int(line.split()[1].rstrip(":")))) or "nothing moved"


def _times(summary: Mapping[str, Any]) -> dict[str, float]:
    titles = {"exposed": "exposed", "idle": "idle", "critical_path": "critical path:"}
    parts = {f"{title} {name}": time for key, title in titles.items() for name, time in summary[key].items()}
    return {"time": summary["time"], "step": summary["step"] or 0, **parts}


def finish(
    summaries: Sequence[Mapping[str, Any]],
    folder: str,
    ranks: Sequence[int] = (),
    before: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """Write one trace with the ranks' events, which are below ``folder``, and a page of one step; return what to print,
    with what moved since the run whose summaries are ``before``.
    """
    events = [events_of(folder, rank).read_text(encoding="utf-8").splitlines() for rank in range(len(summaries))]
    by_rank = {str(rank): each for rank, each in zip(ranks or range(len(summaries)), summaries, strict=True)}
    other = json.dumps({"summaries": by_rank})
    whole = f'{{"otherData": {other}, "traceEvents": [\n' + ",\n".join(chain.from_iterable(events)) + "\n]}\n"
    printed = [table(summaries, ranks), *([] if before is None else [moved(before, by_rank)])]
    try:
        Path(TRACE).write_text(whole, encoding="utf-8")
        read_events = [[json.loads(line) for line in lines] for lines in events]
        Path(PAGE).write_text(page.render(by_rank, read_events), encoding="utf-8")
    except OSError as error:
        printed.append(f"no trace: it cannot be written to the working directory: {error}")
    else:
        printed.append(f"one step, as a page: {Path(PAGE).absolute()}")
        printed.append(f"trace of all ranks, for https://ui.perfetto.dev: {Path(TRACE).absolute()}")
    return "\n".join(printed)
