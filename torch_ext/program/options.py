"""The command line of ``torch_ext run``. Loads no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torch_ext.cuda_as_sim.words import DEVICE
from torch_ext.machine_memory import bytes_of
from torch_ext.program.main_module import Program

__all__ = ["HOST", "Hang", "Options", "Output", "parse"]

HOST = "cpu"
_DEVICES = (DEVICE, HOST, "cuda")
# Simulated devices have indices below this.
_MOST_SIMULATED = 64

_DESCRIPTION = """\
Run a program on several ranks of this machine, as torchrun does, without a GPU: each rank has a simulated device. A
rank that fails, dies or hangs is named, with what every rank did. Exit code: that of the first rank that failed, 128
plus the signal that killed it, 1 if it was stopped or a hang was reported; 2 for a usage error; 130 after Ctrl-C.
"""


class Output(Enum):
    """What is shown of the ranks' output while they run. All of it counts in a report."""

    RANK0 = "rank0"
    ALL = "all"
    QUIET = "quiet"


class Hang(Enum):
    """What becomes of a program that provably hangs."""

    REPORT = "report"
    END = "end"


@dataclass(frozen=True)
class Options:
    """The command line. ``program`` has no ``path`` yet."""

    program: Program
    ranks: int
    memory_bytes: int | None
    timeout_s: float | None
    hang: Hang
    output: Output
    strict: bool


def parse(arguments: Sequence[str]) -> Options:
    """Return the options that ``arguments`` ask for.

    Raises:
        SystemExit: code 2 for a usage error, which has been printed; 0 after ``--help``.
    """
    parser = _parser()
    found = parser.parse_args(arguments)
    program = found.program[1:] if found.program[:1] == ["--"] else found.program
    if not program:
        parser.error("which program? Name a script, or a module behind -m")
    device = found.device or DEVICE
    on_sim = device == DEVICE
    for given, flag in (
        (found.cuda_as_sim or found.cuda_in, "--cuda-as-sim"),
        (found.memory is not None, "--memory"),
        (found.races not in (None, "off"), "--races"),
        (found.strict, "--strict"),
    ):
        if given and not on_sim:
            parser.error(f"{flag} is for the simulated accelerator, but --device is {device}")
    if on_sim and found.ranks > _MOST_SIMULATED:
        parser.error(f"-n {found.ranks}: there are at most {_MOST_SIMULATED} simulated devices, one for each rank")
    if not found.module and not os.path.exists(program[0]):
        parser.error(f"{program[0]}: no such file. A module's name goes behind -m")
    return Options(
        Program(
            program[0],
            found.module,
            tuple(program[1:]),
            simulated=on_sim,
            cuda_as_sim=bool(found.cuda_as_sim or found.cuda_in),
            packages=tuple(found.cuda_in),
            races=found.races or os.environ.get("TORCH_EXT_RACES") or "off",
        ),
        found.ranks,
        found.memory,
        found.timeout,
        Hang(found.hang),
        Output(found.output),
        found.strict,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "torch_ext run",
        description=_DESCRIPTION,
        allow_abbrev=False,
        usage="%(prog)s [options] SCRIPT|-m MODULE [ARGS]",
    )
    add = parser.add_argument
    add("-n", "--ranks", type=_ranks, default=4, metavar="N", help="how many ranks (4)")
    add("--device", choices=_DEVICES, help=f"what tensors may lie on ({DEVICE}); each rank of N has its own")
    add(
        "--cuda-as-sim",
        action="store_true",
        help="in the program's files, CUDA and NCCL mean the simulated accelerator",
    )
    add("--cuda-in", action="append", default=[], metavar="PACKAGE", help="and in this package; may be repeated")
    add("--memory", type=_size, metavar="SIZE", help="how much memory each simulated device has, such as 2GiB")
    add("--races", choices=("error", "report", "off"), help="what becomes of races between streams (off)")
    add("--timeout", type=_seconds, metavar="S", help="end the program after so many seconds")
    add(
        "--hang",
        choices=[each.value for each in Hang],
        default=Hang.REPORT.value,
        help="report a hang that is proven, and let the program go on, or end it, too (report)",
    )
    add(
        "--output",
        choices=[each.value for each in Output],
        default=Output.ALL.value,
        help="show the output of rank 0 as it is, of all ranks with the rank in front of each line, or none (all)",
    )
    add("--strict", action="store_true", help="fail if no rank ever used a device or a process group")
    add("-m", "--module", action="store_true", help="what follows is the name of a module")
    add("program", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS]", help="the program, and what it is given")
    return parser


def _ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of ranks from 1 on")
    return int(text)


def _size(text: str) -> int:
    try:
        return bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of seconds above 0")
    return seconds
