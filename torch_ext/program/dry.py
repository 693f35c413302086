"""The end of ``run --dry``: for each rank, the peak of its memory, and what held it. No torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PER_HOST = 8  # ranks of one host, as https://docs.nvidia.com/dgx/dgxh100-user-guide: eight GPUs
UNBOUNDED = 1 << 42  # bytes of a device without --memory

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def assumption(text: str) -> str:
    """Return ``text``, a number with or without ``WORD=`` before it. Raises ValueError."""
    try:
        float(text.rpartition("=")[2])
    except ValueError:
        raise ValueError("expected VALUE, WORD=VALUE or FILE:LINE=VALUE with a number") from None
    return text


def problem(found: argparse.Namespace, chosen: Sequence[int]) -> str:
    """Return what is wrong with the options of a dry run, of whose job ``chosen`` ranks run; empty if nothing is."""
    if not found.dry:
        given = {"--world": found.world is not None, "--assume": bool(found.assume)}
        return next((f"{flag} is for a dry run: add --dry" for flag, is_given in given.items() if is_given), "")
    if found.world is None:
        return "--dry needs --world N, the number of ranks of the job"
    if found.world > PER_HOST and found.world % PER_HOST:
        return f"--world {found.world}: expected a multiple of {PER_HOST}, the ranks of a host"
    if not all(0 <= each < found.world for each in chosen):
        return f"--ranks {','.join(map(str, chosen))}: expected numbers from 0 to {found.world - 1}"
    computing = {"--races": found.races not in (None, "off"), "--check-replicas": found.check_replicas}
    return next(
        (f"{flag} is not for a dry run, which computes nothing" for flag, given in computing.items() if given), ""
    )


def hosts(world: int) -> int:
    """Return the number of hosts of a job."""
    return -(-world // PER_HOST)


def snapshot_of(rank: str) -> Path:
    """Return the file for the memory snapshot of a rank, in the working directory."""
    return Path(f"torch_ext_memory_{rank}.pickle").absolute()


def finish(reports: Sequence[Mapping[str, Any] | None], ranks: Sequence[int], world: int, limit: int | None) -> int:
    """Print the ranks' reports, which torch_ext.sim.dry makes. Return 1 if one needs more than ``limit`` bytes."""
    code = 0
    for rank, report in zip(ranks, reports, strict=True):
        if report is not None:
            print(f"\n{text(report, rank, world, limit)}", flush=True)
            code = code or int("beyond" in report)
    return code


def text(report: Mapping[str, Any], rank: int, world: int, limit: int | None) -> str:
    """Return the report of a rank.

    >>> print(text({"allocated": 3 << 30, "reserved": 4 << 30, "kinds": {"parameters": 3 << 30}, "at": "train.py:41",
    ...             "lines": [("model.py:7", "parameters", 3 << 30, 2)], "steps": 1, "snapshot": "m.pickle",
    ...             "beyond": 1 << 30, "beyond_at": "train.py:40"}, 7, 8, 3 << 30))
    rank 7 of 8: at most 3.00 GiB allocated, 4.00 GiB reserved
      reached at train.py:41, after 1 step of an optimizer
      by kind: parameters 3.00 GiB
      by line:
           3.00 GiB in 2 blocks  parameters  model.py:7
      snapshot for https://docs.pytorch.org/memory_viz: m.pickle
      does not fit in 3.00 GiB by 1.00 GiB at train.py:40
    """
    when = f"after {report['steps']} step{'s' * (report['steps'] != 1)} of an optimizer"
    if "time_us" in report:
        when += f", at {report['time_us'] / 1e3:.3f} ms of virtual time"
    kinds = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in report["kinds"].items())
    lines = [
        f"rank {rank} of {world}: at most {size(report['allocated'])} allocated, {size(report['reserved'])} reserved",
        f"  reached at {_shown(report['at'])}, {when}",
        f"  by kind: {kinds}",
        "  by line:",
    ]
    for place, kind, nbytes, blocks in report["lines"]:
        lines.append(f"    {size(nbytes):>11} in {blocks} block{'s' * (blocks != 1)}  {kind}  {_shown(place)}")
    lines.append(f"  snapshot for https://docs.pytorch.org/memory_viz: {report['snapshot']}")
    if "beyond" in report:
        lines.append(
            f"  does not fit in {size(limit or 0)} by {size(report['beyond'])} at {_shown(report['beyond_at'])}"
        )
    elif limit is not None:
        lines.append(f"  fits in {size(limit)}")
    return "\n".join(lines)


def size(nbytes: int) -> str:
    """Return bytes in words.

    >>> size(3 << 29), size(512)
    ('1.50 GiB', '512 bytes')
    """
    return next((f"{nbytes / unit:.2f} {name}" for name, unit in _UNITS if nbytes >= unit), f"{nbytes} bytes")


def _shown(place: str) -> str:
    relative = os.path.relpath(place)
    return place if relative.startswith("..") else relative
