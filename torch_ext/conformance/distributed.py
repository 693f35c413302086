"""The tier ``distributed``: the files below ``test/distributed`` of a PyTorch checkout, unmodified, where CUDA and NCCL
mean the simulated accelerator if that is the device. Known differences are those of ``torch_ext/upstream``.

Only a test that needs one of ``PHYSICAL``, or a name that the installed torch lacks, is not counted. Any other skip is
a disagreement.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch_ext import accelerator
from torch_ext.conformance import suites
from torch_ext.conformance.forks import Finding, Status
from torch_ext.upstream.reasons import ANOTHER_RELEASE

# What no simulated device has -> the reasons of skips that name it.
PHYSICAL = {
    "a Triton kernel": re.compile(r"[Tt]riton"),
    "NVLink multicast, or peers' mapped memory": re.compile(r"[Mm]ulticast|symmetric memory|NVLink|NVSHMEM|P2P"),
    "an IPC handle": re.compile(r"\bIPC\b"),
    "CUPTI": re.compile(r"CUPTI|Kineto", re.IGNORECASE),
    "another vendor's device, or a GPU of a certain generation": re.compile(
        r"\bS[Mm] ?\d\d|\b[HA]100\b|[Cc]ompute capability|\bR[Oo][Cc][Mm]\b|\bX[Pp][Uu]\b|\bHPU\b|\bMPS\b"
    ),
    "a build of torch with another library": re.compile(r"\bMPI\b|\bUCC\b"),
}
# The files of one start of the runner, and so of what an interrupt loses.
_AT_ONCE = 8
_DONE = "every test has a result"


def key(options: argparse.Namespace) -> tuple[object, ...]:
    """Return the checkout and its revision, empty without git."""
    shown = subprocess.run(["git", "-C", options.checkout, "rev-parse", "HEAD"], capture_output=True, check=False)
    return options.checkout, shown.stdout


def groups(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the files. Which tests they have is known when they have run; until then a file has one case."""
    tests = Path(options.checkout, "test", "distributed")
    found = sorted({*tests.rglob("test_*.py"), *tests.rglob("*_test.py")})
    return {str(path.relative_to(tests)): [_DONE] for path in found}


def findings(groups: Mapping[str, Sequence[str]], options: argparse.Namespace) -> Iterator[Finding]:
    """Run the files of ``groups``."""
    tests = Path(options.checkout, "test", "distributed")
    left = [name for name, cases in groups.items() if cases]
    as_cuda = ["--cuda-as-sim"] if accelerator.is_simulated() else ["--device", options.device]
    for first in range(0, len(left), _AT_ONCE):
        names = left[first : first + _AT_ONCE]
        paths = [str(tests / name) for name in names]
        arguments = ["--upstream", *paths, *as_cuda, "--timeout", str(options.timeout), "-j", str(options.slots)]
        for each in suites.run(arguments, os.environ):
            yield _counted(dataclasses.replace(each, group=_name(each.group, names)))
        yield from (Finding(name, _DONE, Status.AGREES) for name in names)


def _name(shown: str, names: Sequence[str]) -> str:
    return next((name for name in names if name == shown or name.endswith(f"/{shown}")), shown)


def _counted(found: Finding) -> Finding:
    if found.status is not Status.REFUSED:
        return found
    if found.text.startswith(ANOTHER_RELEASE):
        return found  # of the checkout's age, not of the device
    if needs := next((what for what, pattern in PHYSICAL.items() if pattern.search(found.text)), ""):
        return dataclasses.replace(found, text=f"needs {needs}: {found.text}")
    return dataclasses.replace(found, status=Status.DIFFERS, known=found.text)
