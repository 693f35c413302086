"""The tier ``distributed``: the files below ``test/distributed`` of a PyTorch checkout, unmodified, where CUDA and NCCL
mean the simulated accelerator if that is the device. Known differences are those of ``torch_ext/upstream``.

Only a test that needs one of ``PHYSICAL``, or a name that the installed torch lacks, or that fails on the host in the
same words, is not counted. Any other skip is a disagreement.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch_ext import accelerator
from torch_ext.accelerator import HOST
from torch_ext.conformance import suites
from torch_ext.conformance.forks import DONE, Finding, Status, first_line
from torch_ext.results import SetupError
from torch_ext.upstream.reasons import ANOTHER_RELEASE, NEWER_RELEASE

# What no simulated device has -> the reasons of skips that name it.
PHYSICAL = {
    "a Triton kernel": re.compile(r"[Tt]riton"),
    "NVLink multicast, NVSHMEM, or NCCL's windows": re.compile(
        r"[Mm]ulticast|symmetric memory of a kind|NVLink|NVSHMEM|P2P(?! work)"
    ),
    "an IPC handle": re.compile(r"\bIPC\b"),
    "CUPTI": re.compile(r"CUPTI|Kineto", re.IGNORECASE),
    "another vendor's device, or a GPU of a certain generation": re.compile(
        r"\b[Ss][Mm] ?\d\d|\b[HA]100\b|[Cc]ompute capability|\bR[Oo][Cc][Mm]\b|\bX[Pp][Uu]\b|\bHPU\b|\bMPS\b"
    ),
    "a build of torch with another library": re.compile(r"\bMPI\b|\bUCC\b"),
}
# The files of one start of the runner, and so of what an interrupt loses.
_AT_ONCE = 8
# A test that has hung runs again alone, with this many times the limit: beside others it may have been slow.
_ALONE = 5


def key(options: argparse.Namespace) -> tuple[object, ...]:
    """Return the checkout and its revision, empty without git."""
    shown = subprocess.run(["git", "-C", options.checkout, "rev-parse", "HEAD"], capture_output=True, check=False)
    return options.checkout, shown.stdout


def groups(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the files. Which tests they have is known when they have run; until then a file has one case."""
    tests = Path(options.checkout, "test", "distributed")
    found = sorted({*tests.rglob("test_*.py"), *tests.rglob("*_test.py")})
    return {str(path.relative_to(tests)): [DONE] for path in found}


def findings(groups: Mapping[str, Sequence[str]], options: argparse.Namespace) -> Iterator[Finding]:
    """Run the files of ``groups``, again alone what hangs there, and what differs also on the host."""
    left = [name for name, cases in groups.items() if cases]
    timed = [name for name in left if accelerator.is_simulated() and _measures_time(name, options)]
    others = [name for name in left if name not in timed]
    how = as_cuda(options)
    # The time of a device whose kernels are the host's means nothing, but by the simulated clock.
    batches = [(names, how) for names in _in_batches(others)] + [
        (names, [*how, "--clock", "unit"]) for names in _in_batches(timed)
    ]
    for names, arguments in batches:
        differ = dict[tuple[str, str], Finding]()
        for each in _at_last(names, arguments, options):
            if each.status is Status.DIFFERS and not each.known and options.device != HOST:
                differ[each.group, each.case] = each
            else:
                yield each
        yield from _beside_the_host(differ, options)
        yield from (Finding(name, DONE, Status.AGREES) for name in names)


def _in_batches(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[first : first + _AT_ONCE] for first in range(0, len(names), _AT_ONCE)]


def _measures_time(name: str, options: argparse.Namespace) -> bool:
    """Whether a file reads times of the device."""
    return ".elapsed_time(" in Path(options.checkout, "test", "distributed", name).read_text(encoding="utf-8")


def _run(names: Sequence[str], how: Sequence[str], options: argparse.Namespace) -> Iterator[Finding]:
    paths = [str(Path(options.checkout, "test", "distributed", name)) for name in names]
    arguments = ["--upstream", *paths, *how, "--timeout", str(options.timeout), "-j", str(options.slots)]
    for each in suites.run(arguments, os.environ):
        yield dataclasses.replace(each, group=_name(each.group, names))


def _at_last(names: Sequence[str], how: Sequence[str], options: argparse.Namespace) -> Iterator[Finding]:
    """Run files; yield a test that hangs as it ends when it runs again, alone."""
    hung = list[Finding]()
    for each in map(counted, _run(names, how, options)):
        if each.status is Status.HUNG and each.case != "import":
            hung.append(each)
        else:
            yield each
    for first in hung:
        alone = argparse.Namespace(**{**vars(options), "timeout": _ALONE * options.timeout, "slots": 1})
        ran = map(counted, _run([first.group], [*how, *_chosen(first.case)], alone))
        yield next((each for each in ran if each.case == first.case), first)


def _chosen(case: str) -> tuple[str, str]:
    """Return the runner's option that selects a case."""
    return "-k", case.replace("::", ".")


def _beside_the_host(differ: dict[tuple[str, str], Finding], options: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings of ``differ``; one that fails on the host in the same words is not of the device."""
    if names := sorted({group for group, _ in differ}):
        chosen = [word for _, case in differ if case != "import" for word in _chosen(case)]
        with contextlib.suppress(SetupError):  # none of the tests exists on the host
            for each in _run(names, ["--device", HOST, *chosen], options):
                found = differ.get((each.group, each.case))
                if found and each.status is Status.DIFFERS and _error(each.text) == _error(found.text):
                    text = f"fails on the host, too: {found.text}"
                    differ[each.group, each.case] = dataclasses.replace(found, status=Status.REFUSED, text=text)
    yield from differ.values()


def _error(text: str) -> str:
    """Return the error of a finding without the ranks, of which the fastest may have ended the others.

    >>> _error("ranks 0, 1, 3 raised AssertionError at test_x.py:1: False is not true; rank 2 failed in another way")
    'AssertionError at test_x.py:1: False is not true'
    """
    return re.sub(r"^ranks? [\d, -]+ raised |; ranks? [\d, -]+ failed in another way$", "", first_line(text))


def _name(shown: str, names: Sequence[str]) -> str:
    return next((name for name in names if name == shown or name.endswith(f"/{shown}")), shown)


def as_cuda(options: argparse.Namespace) -> list[str]:
    """Return the runner's options for the device, where a simulated one serves CUDA."""
    return ["--cuda-as-sim"] if accelerator.is_simulated() else ["--device", options.device]


def counted(found: Finding) -> Finding:
    """Return a finding of the runner's; a skip counts as a disagreement unless it is one of ``PHYSICAL``, of the
    checkout's age, or asked of no device: by torch's list of operators, or in a class for the host.
    """
    if found.status is not Status.REFUSED:
        return found
    if found.text.startswith((ANOTHER_RELEASE, NEWER_RELEASE)):
        return found  # of the checkout's age, not of the device
    if needs := next((what for what, pattern in PHYSICAL.items() if pattern.search(found.text)), ""):
        return dataclasses.replace(found, text=f"needs {needs}: {found.text}")
    if found.text == "Skipped!" or ("CPU::" in found.case and found.text.startswith("Only runs on ")):
        return dataclasses.replace(found, text=f"not asked of the device: {found.text}")
    return dataclasses.replace(found, status=Status.DIFFERS, known=found.text)
