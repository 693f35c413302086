"""The end of ``run --clock``: a table of the ranks' virtual time, and one trace of all ranks for Perfetto. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

TRACE = "torch_ext_trace.json"  # in the working directory
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
        exposed = ", ".join(f"{name} {_shown(time)}" for name, time in each["exposed"].items()) or "-"
        step = "-" if each["step"] is None else _shown(each["step"])
        rows.append((str(rank), _shown(each["time"]), step, exposed, shares["idle"], shares["critical_path"]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    validated = "" if summaries[0]["validated"] else " (not validated)"
    return "\n".join([f"virtual time by the model {summaries[0]['model']}{validated}", *lines])


def _shown(time_ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if time_ns >= size:
            return f"{time_ns / size:.2f} {unit}"
    return f"{time_ns:.0f} ns"


def finish(summaries: Sequence[Mapping[str, Any]], folder: str, ranks: Sequence[int] = ()) -> str:
    """Write one trace with the ranks' events, which are below ``folder``; return what to print."""
    path = Path(TRACE)
    events = [events_of(folder, rank).read_text(encoding="utf-8").splitlines() for rank in range(len(summaries))]
    whole = '{"traceEvents": [\n' + ",\n".join(chain.from_iterable(events)) + "\n]}\n"
    try:
        path.write_text(whole, encoding="utf-8")
    except OSError as error:
        return f"{table(summaries, ranks)}\nno trace: it cannot be written to the working directory: {error}"
    return f"{table(summaries, ranks)}\ntrace of all ranks, for https://ui.perfetto.dev: {path.absolute()}"
