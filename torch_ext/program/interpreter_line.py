"""Starts this process's program anew, with something else in front of it. The standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["flags_of", "run_again"]

# Flags of Python that are followed by a value of their own.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def flags_of(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line of an interpreter into its flags, and the program with its arguments.

    >>> flags_of(["-u", "-X", "dev", "train.py", "-m"]), flags_of(["-um", "train", "x"]), flags_of(["-mtrain"])
    ((['-u', '-X', 'dev'], ['train.py', '-m']), (['-u'], ['-m', 'train', 'x']), ([], ['-m', 'train']))
    """
    flags, rest = [], list(command)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        flag = rest.pop(0)
        if flag in _WITH_VALUE and rest:
            flags += [flag, rest.pop(0)]
        elif not flag.startswith(("--", "-W", "-X")) and "m" in flag:
            before, _, after = flag.partition("m")
            return flags + [before] * (before != "-"), ["-m", *([after] if after else []), *rest]
        else:
            flags.append(flag)
    return flags, rest


def run_again(module: str) -> None:
    """Replace this process by ``python -m module PROGRAM...`` with the same flags. Returns only on an error.

    Raises:
        OSError: the system refuses.
    """
    flags, program = flags_of(sys.orig_argv[1:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *flags, "-m", module, *program])
