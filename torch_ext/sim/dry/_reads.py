"""What the host gets where it reads a value of a device, which a dry run does not compute."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

OURS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/", "<")  # where files are not the program's

# Reads of torch itself: the end of a file, text of the line, and the value. None: the host's tensor is right already.
_OF_TORCH: tuple[tuple[str, str, float | None], ...] = (
    ("/nn/parallel/distributed.py", "", None),  # ranks agree on the buckets of DDP
    ("/distributed/tensor/_random.py", "rng_state == ", 1),  # rank 0 has the same seed
    ("/distributed/tensor/_random.py", "", 0),
    ("/distributed/pipelining/schedules.py", "result.item()", 1),  # all stages were given their shapes
    ("/amp/grad_scaler.py", "found_inf", 0),  # no gradient overflows
    ("/fsdp/sharded_grad_scaler.py", "found_inf", 0),
)


@dataclass(frozen=True)
class Assumption:
    """A value that reads give at a line of the program."""

    where: str  # a word of the line, FILE:LINE, or empty: all reads
    value: float

    @classmethod
    def parse(cls, text: str) -> Assumption:
        """Parse ``WHERE=VALUE`` or ``VALUE``.

        >>> Assumption.parse("loss=1.5"), Assumption.parse("train.py:41=0").where
        (Assumption(where='loss', value=1.5), 'train.py:41')
        """
        where, _, value = text.rpartition("=")
        return cls(where.strip(), float(value))

    def covers(self, place: str, line: str) -> bool:
        """Whether it is for a read at ``place``, as ``/path/train.py:41``, where the program has ``line``."""
        at_place = ":" in self.where and f"/{place}".endswith(f"/{self.where}")
        return not self.where or at_place or re.search(rf"(?<!\w){re.escape(self.where)}(?!\w)", line) is not None


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield ``frame`` and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_in_program(frame: FrameType | None) -> tuple[str, str]:
    """Return the innermost ``FILE:LINE`` of the program that calls ``frame``, and its text; empty if there is none."""
    for each in frames_from(frame):
        file = each.f_code.co_filename
        if not file.startswith(OURS):
            return f"{file}:{each.f_lineno}", linecache.getline(file, each.f_lineno).strip()
    return "", ""


@dataclass
class Reads:
    """Answers the reads of a dry run: see ``assumed`` in csrc/dry.h."""

    assumptions: Sequence[Assumption]

    def __call__(self, kernel: str, is_size: bool) -> float | str | None:
        """Return the value, None to leave the host's tensor as it is, or the message of an error."""
        frame = sys._getframe().f_back
        place, line = place_in_program(frame)
        if not is_size:
            for each in self.assumptions:
                if each.covers(place, line):
                    return each.value
            for file, word, value in _OF_TORCH:
                if frame is not None and frame.f_code.co_filename.endswith(file):
                    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                    if word in text:
                        return value
        shown = f"{place}, in `{line}`" if place else "a thread of torch"
        if is_size:
            return (
                f"dry run: {shown}: the size of the result of {kernel} depends on values, which a dry run does not "
                "compute. Use operators whose sizes follow from shapes, such as torch.where, or compute on the host."
            )
        named = re.search(r"(\w+)\.(?:item|cpu|tolist|numpy|to)\(", line)
        where = named[1] if named else "/".join(place.rsplit("/", 1)[-1:]) or "WORD"
        return (
            f"dry run: {shown}: the host reads a value of the device ({kernel}), which a dry run does not compute. "
            f"Give it: --assume {where}=VALUE, or do not read it."
        )
