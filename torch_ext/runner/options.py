"""The command line: what may be typed, and the options that come of it."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch_ext

__all__ = ["Options", "default_root", "parse", "parse_for_file"]


@dataclass(frozen=True)
class Options:
    """What the user asked for. Everything below the command line takes its orders from here.

    Attributes:
        root: absolute folder that holds the suites.
        include: patterns of ``-i``; none: everything.
        exclude: patterns of ``-x``.
        keywords: expressions of ``-k``; a test that fits one of them is selected.
        verbosity: -1 quiet, 0 one line a class, 1 one line a test.
        failfast: stop after the first failure.
        list_only: print the selected tests and run none.
        device: device type that was asked for; empty: ``TORCH_EXT_DEVICE`` or the machine decides.
        timeout_s: time limit of one test in seconds, in place of what the tests themselves say; None: theirs.
        start_method: ``"fork"`` ranks from a warm process, or start each as a fresh ``"interpreter"``.
        show_output: pass the output of ranks through as it comes, behind a rank prefix.
        jobs: the most classes that run at a time; None: as many as there are slots for, or one with ``show_output``.
        slots: how many ranks run at a time; None: the machine decides.
        typed_root: the argument of ``--root`` as typed; empty if it was not given.
        upstream: the files and folders of ``--upstream`` as typed, which run with our harness in the place of torch's.
        cuda_as_sim: in the files of ``upstream`` CUDA and NCCL mean the simulated accelerator and its backend.
        differences: lists of known differences, besides our own; see ``torch_ext/upstream/differences.py``.
        coverage: sum up how much of what was found passed, and why not.
        json: write that as JSON on stdout, and all else on stderr.
        script: the test file that was started by itself (``python file.py``), as a user would type it; else empty.
        command: how this runner was started, as a user would type it.
    """

    root: Path
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    verbosity: int = 0
    failfast: bool = False
    list_only: bool = False
    device: str = ""
    timeout_s: float | None = None
    start_method: str = "fork"
    show_output: bool = False
    jobs: int | None = None
    slots: int | None = None
    typed_root: str = ""
    upstream: tuple[str, ...] = ()
    cuda_as_sim: bool = False
    differences: tuple[str, ...] = ()
    coverage: bool = False
    json: bool = False
    script: str = ""
    command: str = "python run_test.py"

    def environment(self) -> dict[str, str]:
        """Return the environment of every process of the run: the user's, with what the command line adds."""
        environment = dict(os.environ)
        if self.device:
            environment["TORCH_EXT_DEVICE"] = self.device
        if self.timeout_s is not None:
            environment["TORCH_EXT_TIMEOUT"] = str(self.timeout_s)
        if self.start_method != "fork":
            environment["TORCH_EXT_START_METHOD"] = self.start_method
        if self.show_output:
            environment["TORCH_EXT_SHOW_OUTPUT"] = "1"
        if self.cuda_as_sim:
            from torch_ext.cuda_as_sim.words import environment_as_sim

            environment = {**environment_as_sim(environment), "TORCH_EXT_CUDA_AS_SIM": str(self.root)}
        return environment


def default_root() -> Path:
    """Return the ``test`` folder of the checkout that this package belongs to."""
    return Path(torch_ext.__file__).resolve().parents[1] / "test"


def parse(argv: Sequence[str]) -> Options:
    """Read the arguments of ``run_test.py``.

    Raises:
        SystemExit: after ``-h`` or ``--version`` (0), or a usage error (2), with its text already printed.
    """
    parser = argparse.ArgumentParser(
        prog=_command().removeprefix("python "),
        description="Run distributed tests on this machine.",
        epilog="PATTERN: a folder, a module, a class or a test, spelt as a path, with dots or as an id "
        "(distributed/fsdp, test_a.py, TestA, TestA.test_b, distributed/test_a.py::TestA::test_b). "
        "Exit codes: 0 all passed, 1 a test failed, 2 usage or nothing selected, 130 interrupted.",
    )
    for flags, text in ((("-i", "--include"), "run these only"), (("-x", "--exclude"), "do not run these")):
        parser.add_argument(*flags, nargs="+", action="extend", default=[], metavar="PATTERN", help=text)
    parser.add_argument("--root", default="", metavar="DIR", help="folder of the suites (default: test)")
    help_text = "run these unmodified test files, or folders of them, of a PyTorch checkout on our harness"
    parser.add_argument("--upstream", nargs="+", default=[], metavar="PATH", help=help_text)
    help_text = "in these files CUDA and NCCL mean the simulated accelerator and its backend"
    parser.add_argument("--cuda-as-sim", action="store_true", help=help_text)
    help_text = "with --upstream: a list of known differences, besides our own"
    parser.add_argument("--differences", nargs="+", default=[], metavar="FILE", help=help_text)
    parser.add_argument("--coverage", action="store_true", help="sum up what was found, run and passed, and why not")
    parser.add_argument("--json", action="store_true", help="with --coverage: as JSON on stdout, all else on stderr")
    _add_common(parser)
    given = parser.parse_args(argv)
    if given.json and not given.coverage:
        parser.error("--json is the form of --coverage; give both")
    if given.upstream:
        return _upstream_options(parser, given)
    if given.cuda_as_sim:
        parser.error("--cuda-as-sim goes with --upstream; our own suites name no device")
    if given.differences:
        parser.error("--differences goes with --upstream")
    root = Path(given.root).resolve() if given.root else default_root()
    if not root.is_dir():
        parser.error(f"got the root {root}, which is no folder; give the one that holds the suites with --root DIR")
    return _options(given, root=root, include=given.include, exclude=given.exclude, typed_root=given.root)


def _upstream_options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Options:
    if given.root:
        parser.error("--upstream brings its own root, the folder that holds all it names; leave --root out")
    if given.cuda_as_sim:
        from torch_ext.cuda_as_sim.words import DEVICE

        given.device = given.device or os.environ.get("TORCH_EXT_DEVICE", "") or DEVICE
        if given.device != DEVICE:
            parser.error(f"got --cuda-as-sim and the device {given.device}; leave --device out, or give {DEVICE}")
    folders = []
    for typed in given.upstream:
        path = Path(typed).resolve()
        if not path.exists():
            parser.error(f"got --upstream {typed}, which does not exist; give test files of a PyTorch checkout")
        folders.append(path if path.is_dir() else path.parent)
    root = Path(os.path.commonpath(folders))
    return _options(
        given,
        root=root,
        include=given.include,
        exclude=given.exclude,
        upstream=given.upstream,
        cuda_as_sim=given.cuda_as_sim,
    )


def parse_for_file(path: Path, argv: Sequence[str]) -> Options:
    """Read the arguments of the test file ``path`` (absolute), started by itself, in unittest's spellings.

    Raises:
        SystemExit: as :func:`parse`.
    """
    shown = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    parser = argparse.ArgumentParser(prog=shown, description="Run the tests of this file.")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="run these only: TestClass, TestClass.test_name")
    _add_common(parser)
    given = parser.parse_args(argv)
    root = default_root() if path.is_relative_to(default_root()) else path.parent
    return _options(given, root=root, include=given.tests, script=shown)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-k", action="append", default=[], metavar="WORDS", help="of these, run tests whose name fits WORDS: a part of "
        "it, a glob, or several with and/or/not; given twice, either may fit")  # fmt: skip
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("-v", "--verbose", action="store_true", help="print a line for each test")
    loudness.add_argument("-q", "--quiet", action="store_true", help="print failures and the summary only")
    add("-f", "--failfast", action="store_true", help="stop after the first failure")
    add("--list", action="store_true", help="print the ids of the tests and run none")
    add("--device", default="", metavar="TYPE", help="device type to test, such as cpu (default: TORCH_EXT_DEVICE, or "
        "the best that this machine has)")  # fmt: skip
    add("--timeout", type=_seconds, metavar="SECONDS", help="time limit of one test, in place of the tests' own")
    add("--start-method", choices=("fork", "interpreter"), default="fork", help="how ranks start (default: fork)")
    add("--show-output", action="store_true", help="show what ranks print, as it comes")
    add("-j", "--jobs", type=_jobs, metavar="N", help="run at most N classes at a time; auto: as many as there "
        "are slots for (default: auto, or 1 with --show-output)")  # fmt: skip
    add("--slots", type=_count, metavar="N", help="how many ranks run at a time (default: the accelerator's "
        "devices, or four for each core)")  # fmt: skip
    add("--version", action="version", version=f"torch_ext {torch_ext.__version__}")


def _jobs(text: str) -> int | None:
    return None if text == "auto" else _count(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of seconds above 0")
    return seconds


def _options(
    given: argparse.Namespace,
    *,
    root: Path,
    include: Sequence[str],
    exclude: Sequence[str] = (),
    typed_root: str = "",
    upstream: Sequence[str] = (),
    cuda_as_sim: bool = False,
    script: str = "",
) -> Options:
    return Options(
        root=root,
        include=tuple(include),
        exclude=tuple(exclude),
        keywords=tuple(given.k),
        verbosity=given.verbose - given.quiet,
        failfast=given.failfast,
        list_only=given.list,
        device=given.device,
        timeout_s=given.timeout,
        start_method=given.start_method,
        show_output=given.show_output,
        jobs=given.jobs,
        slots=given.slots,
        typed_root=typed_root,
        upstream=tuple(upstream),
        cuda_as_sim=cuda_as_sim,
        differences=tuple(getattr(given, "differences", ())),
        coverage=getattr(given, "coverage", False),
        json=getattr(given, "json", False),
        script=script,
        command=_command(),
    )


def _command() -> str:
    """How this process was started, for the lines that tell users what to type."""
    started = Path(sys.argv[0])
    if started.name == "run_test.py":
        return f"python {os.path.relpath(started)}"
    if started.name == "__main__.py" and started.parent.name == "torch_ext":
        return "python -m torch_ext"
    return "torch_ext" if started.name == "torch_ext" else "python run_test.py"
