"""What a user can ask for: the options, and the table of how each is typed. To add one, add a field and a row.

Note [The table of options]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A row says under which flags an option is typed, which key of ``[tool.torch_ext]`` holds it, and which variable. The
command line, the configuration, ``--show-config`` and ``--help`` are made of the table.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch_ext
from torch_ext.machine_memory import bytes_of

__all__ = ["TABLE", "Row", "RunOptions", "default_root"]


@dataclass(frozen=True)
class RunOptions:
    """What the user asked for. Everything below the command line takes its orders from here.

    The row of :data:`TABLE` that sets a field says what it means. An empty or absent value leaves the matter to the
    environment, the tests or the machine. Beyond that:

    Attributes:
        root: absolute folder that holds the suites; ``typed_root`` is the argument of ``--root``, if it was given.
        shard: ``(I, N)``: the I-th of N parts, from 1.
        verbosity: -1 quiet, 0 one line a class, 1 one line a test.
        json: a file; ``-`` is stdout.
        jobs: the most classes that run at a time; None: as many as there are slots for, or one where output is shown as
            it comes or files are not ours.
        harness: with ``upstream``, modules that a zygote loads before each file, the first one in the root too.
        script: the test file that was started by itself (``python file.py``), as a user would type it; else empty.
        command: how this runner was started, as a user would type it.
    """

    root: Path
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    changed: str = ""
    last_failed: bool = False
    shard: tuple[int, int] | None = None
    times: str = ""
    verbosity: int = 0
    failfast: bool = False
    reruns: int = 0
    fail_on_flaky: bool = False
    repeat: int = 1
    list_only: bool = False
    junit: str = ""
    html: str = ""
    trace: str = ""
    github: bool = False
    json: str = ""
    show_config: bool = False
    device: str = ""
    timeout_s: float | None = None
    races: str = ""
    schedule: str = ""
    memory_bytes: int | None = None
    start_method: str = "fork"
    show_output: bool = False
    jobs: int | None = None
    slots: int | None = None
    cluster: str = ""
    typed_root: str = ""
    upstream: tuple[str, ...] = ()
    harness: tuple[str, ...] = ()
    cuda_as_sim: bool = False
    differences: tuple[str, ...] = ()
    script: str = ""
    command: str = "python run_test.py"

    @property
    def packs(self) -> bool:
        """Whether classes run side by side.

        By default not with ``show_output``, since its lines name no class, and not with ``upstream``, whose files were
        written to run one after another.
        """
        if self.jobs is None:
            return not self.show_output and (not self.upstream or self.slots is not None)
        return self.jobs != 1

    @property
    def narrowed(self) -> bool:
        """Whether anything but the files themselves says which tests run."""
        by_name = self.include or self.exclude or self.keywords
        return bool(by_name or self.changed or self.last_failed or self.shard)

    def environment(self) -> dict[str, str]:
        """Return the environment of every process of the run: the user's, with what the command line adds."""
        environment = dict(os.environ)
        for row in TABLE:
            value = getattr(self, row.field)
            if row.variable and value != getattr(RunOptions, row.field):
                environment[row.variable] = "1" if value is True else str(value)
        if self.upstream and not self.races:  # the races of upstream's own tests are not ours to mend
            environment["TORCH_EXT_RACES"] = "off"
        if self.cuda_as_sim:
            from torch_ext.cuda_as_sim.words import environment_as_sim

            environment = {**environment_as_sim(environment), "TORCH_EXT_CUDA_AS_SIM": str(self.root)}
        return environment


def default_root() -> Path:
    """Return the folder of the suites where none is given: ``test`` of the checkout that this package belongs to; of an
    installed package ``test`` or ``tests`` below the working directory, or that itself.
    """
    checkout = Path(torch_ext.__file__).resolve().parents[1]
    if (checkout / "run_test.py").is_file():
        return checkout / "test"
    here = Path.cwd()
    return next((folder for folder in (here / "test", here / "tests") if folder.is_dir()), here)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"got {text!r}, expected a number of seconds above 0")
    return seconds


def _count(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise ValueError(f"got {text!r}, expected a whole number of at least {least}")
        return int(text)

    return count


def _cluster(text: str) -> str:
    """Read ``ADDRESS`` or ``local:N``.

    >>> _cluster("local:3"), _cluster("auto")
    ('local:3', 'auto')
    """
    local, _, number = text.partition(":")
    if local == "local":
        _count(1)(number)
    return text


def _shard(text: str) -> tuple[int, int]:
    """Read ``I/N``.

    >>> _shard("2/3")
    (2, 3)
    """
    one, _, of = text.partition("/")
    if not (one.isascii() and of.isascii() and one.isdigit() and of.isdigit() and 1 <= int(one) <= int(of)):
        raise ValueError(f"got {text!r}, expected I/N with I from 1 to N, such as 1/4")
    return int(one), int(of)


def _schedule(text: str) -> str:
    """Read ``early``, ``late``, ``random`` or ``random:SEED``.

    >>> _schedule("late"), _schedule("random"), _schedule("random:7")
    ('late', 'random:0', 'random:7')
    """
    kind, _, seed = text.partition(":")
    if kind not in ("early", "late", "random") or (seed and (kind != "random" or not seed.isdecimal())):
        raise ValueError(f"got {text!r}, expected one of early, late, random, random:SEED")
    return f"random:{seed or 0}" if kind == "random" else kind


@dataclass(frozen=True)
class Row:
    """How an option is typed.

    Attributes:
        field: the attribute of :class:`RunOptions` that it sets.
        flags: its flags; the last is the long one, whose name is the key of the configuration too.
        group: the heading of ``--help`` below which it stands.
        help: what it does, in a few words.
        metavar: what stands for its value; empty: it takes none, and sets ``const``.
        read: makes the value of the text. Raises ValueError, with words for users.
        const: what it sets if it takes no value.
        many: it takes several values, and may be given again.
        variable: the environment variable with the same meaning.
        choices: the values that it takes; empty: any that ``read`` can read.
        alone: ``python test_file.py`` has it too.
    """

    field: str
    flags: tuple[str, ...]
    group: str
    help: str
    metavar: str = ""
    read: Callable[[str], object] = str
    const: object = True
    many: bool = False
    variable: str = ""
    choices: tuple[str, ...] = ()
    alone: bool = True

    @property
    def name(self) -> str:
        """The key of the configuration: the long flag without its dashes."""
        return self.flags[-1].lstrip("-")


_WHICH, _HOW, _SHOWN, _MORE = "which tests", "how they run", "reports", "more"
_FILE = "FILE"

TABLE: tuple[Row, ...] = (
    Row("include", ("-i", "--include"), _WHICH, "run these only; the same as a bare PATTERN", "PATTERN", many=True,
        alone=False),
    Row("exclude", ("-x", "--exclude"), _WHICH, "do not run these", "PATTERN", many=True, alone=False),
    Row("keywords", ("-k", "--keywords"), _WHICH, "of these, run tests whose name fits WORDS: a part of it, "
        "a glob, or several with and/or/not, whatever their case; given twice, either may fit", "WORDS", many=True),
    Row("last_failed", ("--last-failed",), _WHICH, "of these, run what failed last time"),
    Row("changed", ("--changed",), _WHICH, "of these, run tests whose file, or a module that it imports, differs from "
        "REV in git, such as HEAD", "REV", alone=False),
    Row("shard", ("--shard",), _WHICH, "run the I-th of N parts of about equal time", "I/N", _shard),
    Row("times", ("--times",), _WHICH, "the times by which --shard divides: what --json wrote of an earlier run, the "
        "same FILE for every part", _FILE),
    Row("typed_root", ("--root",), _WHICH, "folder of the suites (default: test)", "DIR", alone=False),
    Row("upstream", ("--upstream",), _WHICH, "run these unmodified test files, or folders of them, of a PyTorch "
        "checkout on our harness", "PATH", many=True, alone=False),
    Row("cuda_as_sim", ("--cuda-as-sim",), _WHICH, "in these files CUDA and NCCL mean the simulated accelerator and "
        "its backend", alone=False),
    Row("differences", ("--differences",), _WHICH, "with --upstream: a list of known differences, besides our own",
        _FILE, many=True, alone=False),
    Row("device", ("--device",), _HOW, "device type to test, such as cpu (default: the best that this machine has)",
        "TYPE", variable="TORCH_EXT_DEVICE"),
    Row("timeout_s", ("--timeout",), _HOW, "time limit of one test, in place of the tests' own", "SECONDS", _seconds,
        variable="TORCH_EXT_TIMEOUT"),
    Row("races", ("--races",), _HOW, "how to treat races between streams on the simulated device (default: error; "
        "off with --upstream)", "WHAT",
        choices=("error", "report", "off"), variable="TORCH_EXT_RACES"),
    Row("schedule", ("--schedule",), _HOW, "when results on the simulated device are seen by those that may not have "
        "waited for them: early (default), late, random or random:SEED", "WHEN", _schedule,
        variable="TORCH_EXT_SCHEDULE"),
    Row("memory_bytes", ("--memory",), _HOW, "how much memory each simulated device has, such as 2GiB", "SIZE",
        bytes_of, variable="TORCH_EXT_SIM_MEMORY"),
    Row("start_method", ("--start-method",), _HOW, "how ranks start (default: fork)", "METHOD",
        choices=("fork", "interpreter"), variable="TORCH_EXT_START_METHOD"),
    Row("jobs", ("-j", "--jobs"), _HOW, "run at most N classes at a time (default: as many as there are slots for, or "
        "1 with --show-output or --upstream)", "N", _count(1)),
    Row("slots", ("--slots",), _HOW, "how many ranks run at a time (default: the accelerator's devices, or four for "
        "each core)", "N", _count(1)),
    Row("cluster", ("--cluster",), _HOW, "run on the Ray cluster at ADDRESS, or on local:N, a cluster of N on this "
        "machine", "ADDRESS", _cluster, alone=False),
    Row("failfast", ("-f", "--failfast"), _HOW, "stop after the first failure"),
    Row("reruns", ("--reruns",), _HOW, "run a failed test up to N times again, in fresh worlds; if it passes then, it "
        "is flaky, not passed", "N", _count(0)),
    Row("fail_on_flaky", ("--fail-on-flaky",), _HOW, "exit with 1 if a test is flaky"),
    Row("repeat", ("--repeat",), _HOW, "run everything N times; with -f, until a test fails", "N", _count(1)),
    Row("verbosity", ("-v", "--verbose"), _SHOWN, "print a line for each test", const=1),
    Row("verbosity", ("-q", "--quiet"), _SHOWN, "print failures and the summary only", const=-1),
    Row("show_output", ("--show-output",), _SHOWN, "show what ranks print, as it comes",
        variable="TORCH_EXT_SHOW_OUTPUT"),
    Row("list_only", ("--list",), _SHOWN, "print the ids of the tests and run none"),
    Row("json", ("--json",), _SHOWN, "write what happens to FILE (- is stdout), one JSON object a line; with --list, "
        "the tests and their needs", _FILE),
    Row("junit", ("--junit",), _SHOWN, "write JUnit XML to FILE", _FILE),
    Row("html", ("--html",), _SHOWN, "write a page that needs no other file to FILE", _FILE),
    Row("trace", ("--trace",), _SHOWN, "write what ran when, side by side, to FILE, for ui.perfetto.dev", _FILE),
    Row("github", ("--github",), _SHOWN, "print each failure as an annotation of GitHub's too"),
    Row("show_config", ("--show-config",), _MORE, "show the value of each option and where it comes from"),
)  # fmt: skip
