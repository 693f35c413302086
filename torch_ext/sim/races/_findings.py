"""Races as data: what the native checker found, with equal ones counted once."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import typing_extensions

from torch_ext.sim import _native

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
# Code that Inductor has generated lies in its own folder, below one that TORCHINDUCTOR_CACHE_DIR may name.
# Pytest calls tests, and is installed beside the user's libraries.
_GENERATED = re.compile(r"/torchinductor_[^/]*/|/[a-z0-9]{2}/c[a-z2-7]{51}\.py$|-packages/(?:_?pytest|pluggy)/")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Whether the code is torch's, torch_ext's, Python's or generated, rather than the user's.

        >>> Frame("/tmp/torchinductor_me/cc/cabc.py", 82, "call").is_library
        True
        >>> Frame("/me/train.py", 8, "step").is_library
        False
        """
        if _GENERATED.search(self.file):
            return True
        of_python = self.file.startswith(_PYTHON) and "site-packages" not in self.file
        return of_python or self.file.startswith((_TORCH, _OURS, "<")) or self.file == typing_extensions.__file__

    @property
    def at(self) -> str:
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        return f"{self.at} in {self.function}" if self.function else self.at


Stack = tuple[Frame, ...]  # innermost first


def place(stack: Stack | None) -> Frame | None:
    """Return the innermost frame of the user's code, or the innermost of all where there is none."""
    if not stack:
        return None
    return next((frame for frame in stack if not frame.is_library), stack[0])


@dataclass(frozen=True)
class Access:
    """One side of a race.

    Attributes:
        operator: the operator's or collective's name, such as ``aten::mul``.
        sequence: the number of a collective in its group; None for other operators.
        node: the autograd node that called the operator; None outside backward and for nodes written in Python.
        writes: whether the access writes.
        rank: the rank that called the operator, where ranks are threads of one process or the race is one between
            ranks; otherwise None.
        lane: the name of the lane that did the work.
        lane_kind: ``stream``, ``communication`` or ``host``.
        lane_stack: where a stream was made; None if unknown, and for default streams.
        dtype, sizes: of the tensor.
        stack: where the operator was called; of another rank its line alone, without the function.
    """

    operator: str
    sequence: int | None
    node: str | None
    rank: int | None
    writes: bool
    lane: str
    lane_kind: str
    lane_stack: Stack | None
    dtype: str
    sizes: tuple[int, ...]
    stack: Stack

    @property
    def place(self) -> Frame | None:
        return place(self.stack)


@dataclass(frozen=True)
class Race:
    """Two unordered accesses to the same memory, at least one of them a write.

    Attributes:
        earlier, later: the accesses, in the order in which the host launched them.
        begin, end: bytes of the block of memory.
        pinned: whether the memory is pinned memory of the host.
        reused: whether the memory was freed between the two accesses.
        allocated: where the later access's tensor was allocated.
        freed: where the earlier owner was freed, if at all.
        symmetric_of: the rank that allocated the memory, if that is symmetric memory; otherwise None.
        count: the number of races between the same two places.
    """

    earlier: Access
    later: Access
    begin: int
    end: int
    pinned: bool
    reused: bool
    allocated: Stack | None
    freed: Stack | None
    symmetric_of: int | None = None
    count: int = 1

    @property
    def is_between_ranks(self) -> bool:
        """Whether the accesses are of ranks that are processes."""
        return self.symmetric_of is not None and self.earlier.rank != self.later.rank


def _sort(access: Access) -> object:
    return access.operator, access.node, access.rank, access.lane_kind, access.place


def merged(races: Iterable[Race]) -> list[Race]:
    """Return ``races`` with one race for each pair of places."""
    kept: dict[object, Race] = {}
    counts: Counter[object] = Counter()
    for race in races:
        key = (_sort(race.earlier), _sort(race.later), race.reused, race.pinned)
        # An operator that reads and writes the same memory races twice in one place.
        kinds = (key, race.earlier.writes, race.later.writes)
        counts[kinds] += race.count
        known = kept.get(key, race)
        kept[key] = replace(known, count=max(known.count, counts[kinds]))
    return list(kept.values())


def take() -> list[Race]:
    """Return the races found since the last call of this function or ``stop``, one for each pair of places, and go on
    checking.
    """
    return merged(
        Race(
            **{
                **each,
                "earlier": _access(each["earlier"]),
                "later": _access(each["later"]),
                "allocated": _stack(each["allocated"]) or None,
                "freed": _stack(each["freed"]) or None,
            }
        )
        for each in _native.take_races()
    )


def _access(values: dict[str, Any]) -> Access:
    site = values.pop("site")
    return Access(
        **{
            **values,
            "node": values["node"] and values["node"].rpartition("::")[2],
            "sizes": tuple(values["sizes"]),
            "stack": _site(site) or _stack(values["stack"]),
            "lane_stack": _stack(values["lane_stack"]) or None,
        }
    )


def _site(text: str) -> Stack:
    file, _, line = text.rpartition(":")
    return (Frame(file, int(line), ""),) if file else ()


def _stack(frames: list[dict[str, Any]]) -> Stack:
    return tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in frames)
