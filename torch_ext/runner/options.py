"""The options of a run. To add one, add a field with its row: the command line, ``[tool.torch_ext]``, the environment,
``--show-config`` and ``--help`` use the table of rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch_ext
from torch_ext.faults import plan
from torch_ext.machine_memory import bytes_of
from torch_ext.personality import AS_CUDA, VARIABLE


def typed(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``read`` as an argparse type whose errors show the text of the ValueError."""

    def read_typed(text: str) -> Any:
        try:
            if not text:
                raise ValueError("got an empty value, as from an unset variable")
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_typed


def seconds(text: str) -> float:
    """Parse a number of seconds above 0."""
    try:
        found_s = float(text)
    except ValueError:
        found_s = math.nan
    if not 0 < found_s < math.inf:
        raise ValueError(f"got {text!r}, expected a number of seconds above 0")
    return found_s


def clock_model(text: str) -> str:
    """Parse the name of a cost model, or the path of a file."""
    models = Path(torch_ext.__file__).parent / "sim/clock/models"
    if not (models / f"{text}.json").is_file() and not Path(text).is_file():
        known = ", ".join(sorted(path.stem for path in models.glob("*.json")))
        raise ValueError(f"got the model {text!r}, expected one of {known} or the path of a JSON file")
    return text


def count(minimum: int) -> Callable[[str], int]:
    """Return a parser of integers of at least ``minimum``."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < minimum:
            raise ValueError(f"got {text!r}, expected a whole number of at least {minimum}")
        return int(text)

    return read


def _cluster(text: str) -> str:
    """Parse ``ADDRESS`` or ``local:N``.

    >>> _cluster("local:3"), _cluster("auto")
    ('local:3', 'auto')
    """
    local, _, number = text.partition(":")
    if local == "local":
        count(1)(number)
    return text


def _shard(text: str) -> tuple[int, int]:
    """Parse ``I/N``."""
    one, _, of = text.partition("/")
    if not (one.isascii() and of.isascii() and one.isdigit() and of.isdigit() and 1 <= int(one) <= int(of)):
        raise ValueError(f"got {text!r}, expected I/N with I from 1 to N, such as 1/4")
    return int(one), int(of)


def schedule_of(text: str) -> str:
    """Parse ``early``, ``late``, ``random`` or ``random:SEED``.

    >>> schedule_of("late"), schedule_of("random"), schedule_of("random:7")
    ('late', 'random:0', 'random:7')
    """
    kind, _, seed = text.partition(":")
    if kind not in ("early", "late", "random") or (seed and (kind != "random" or not seed.isdecimal())):
        raise ValueError(f"got {text!r}, expected one of early, late, random, random:SEED")
    return f"random:{seed or 0}" if kind == "random" else kind


def fault_plan(given: str) -> str:
    """Parse a fault plan, or the file of that name, into its text."""
    return str(plan.read(given))


@dataclass(frozen=True)
class Row:
    """The spelling of an option."""

    flags: tuple[str, ...]  # the last is the long one, whose name is also the key of the configuration
    group: str  # its heading in `--help`
    help: str
    metavar: str = ""  # placeholder of its value; empty: takes no value and sets `const`
    read: Callable[[str], object] = str  # parses the value. Raises ValueError, with a message for users.
    const: object = True
    many: bool = False  # takes several values, and may be repeated
    variable: str = ""  # the environment variable with the same meaning
    choices: tuple[str, ...] = ()  # the valid values; empty: all that `read` accepts
    alone: bool = True  # `python test_file.py` has the option too
    field: str = ""  # the option's attribute of :class:`RunOptions`

    @property
    def name(self) -> str:
        """The key of the configuration: the long flag without its dashes."""
        return self.flags[-1].lstrip("-")


_NO_LIMIT_S = 1e7
_WHICH, _HOW, _SHOWN, _MORE = "which tests", "how they run", "reports", "more"
_FILE = "FILE"


def _typed(default: Any, *rows: Row) -> Any:
    return dataclasses.field(default=default, metadata={"rows": rows})


@dataclass(frozen=True)
class RunOptions:
    """The options of one run, read by everything below the command line.

    The row of a field has its help. An empty or absent value leaves the decision to the environment, the tests or the
    machine.
    """

    root: Path  # the suites' folder, absolute; `typed_root` is the argument of `--root`, if given
    # fmt: off
    include: tuple[str, ...] = _typed((), Row(("-i", "--include"), _WHICH, "run these only; the same as a bare PATTERN",
        "PATTERN", many=True, alone=False))
    exclude: tuple[str, ...] = _typed((), Row(("-x", "--exclude"), _WHICH, "do not run these; repeat it for more",
        "PATTERN", many=True, alone=False))
    keywords: tuple[str, ...] = _typed((), Row(("-k", "--keywords"), _WHICH, "of these, run tests whose name fits "
        "WORDS: a part of it, a glob, or several with and/or/not, ignoring case; given twice, either may fit",
        "WORDS", many=True))
    last_failed: bool = _typed(False, Row(("--last-failed",), _WHICH, "of these, run tests that failed last time, "
        "or all if none did"))
    changed: str = _typed("", Row(("--changed",), _WHICH, "of these, run tests whose file, or a module that it "
        "imports, differs from REV in git, such as HEAD", "REV", alone=False))
    shard: tuple[int, int] | None = _typed(None, Row(("--shard",), _WHICH,
        "run the I-th of N parts of about equal time", "I/N", _shard))
    times: str = _typed("", Row(("--times",), _WHICH, "divide --shard by the times that --json wrote in an earlier "
        "run; the same FILE for every part", _FILE))
    typed_root: str = _typed("", Row(("--root",), _WHICH, "folder of the suites (default: test)", "DIR", alone=False))
    upstream: tuple[str, ...] = _typed((), Row(("--upstream",), _WHICH, "run these unmodified test files, or folders "
        "of them, of a PyTorch checkout on our harness", "PATH", many=True, alone=False))
    cuda_as_sim: bool = _typed(False, Row(("--cuda-as-sim",), _WHICH, "CUDA means the simulated accelerator in "
        "these files", alone=False))
    differences: tuple[str, ...] = _typed((), Row(("--differences",), _WHICH, "with --upstream: a list of known "
        "differences, in addition to ours", _FILE, many=True, alone=False))
    device: str = _typed("", Row(("--device",), _HOW, "device type to test, such as cpu (default: the best that this "
        "machine has)", "TYPE", variable="TORCH_EXT_DEVICE"))
    timeout_s: float | None = _typed(None, Row(("--timeout",), _HOW, "time limit of one test, in place of the tests' "
        "own", "SECONDS", seconds, variable="TORCH_EXT_TIMEOUT"))
    races: str = _typed("", Row(("--races",), _HOW, "how to treat races between streams on the simulated device "
        "(default: error; off with --upstream)", "WHAT", choices=("error", "report", "off"),
        variable="TORCH_EXT_RACES"))
    schedule: str = _typed("", Row(("--schedule",), _HOW, "when streams that may not have waited see results on the "
        "simulated device: early (default), late, random or random:SEED", "WHEN", schedule_of,
        variable="TORCH_EXT_SCHEDULE"))
    clock: str = _typed("", Row(("--clock",), _HOW, "run ranks on the simulated device in virtual time, by this model: "
        "unit, h100-sxm, ..., or a JSON file", "MODEL", clock_model, variable="TORCH_EXT_CLOCK"))
    check_leaks: bool = _typed(False, Row(("--check-leaks",), _HOW, "fail a test that leaves process groups, daemon "
        "threads, children, open files or device memory in a rank", variable="TORCH_EXT_CHECK_LEAKS"))
    check_replicas: bool = _typed(False, Row(("--check-replicas",), _HOW, "fail a test whose ranks hold different bits "
        "in DTensors, what DDP trains, gradients or optimizer state", variable="TORCH_EXT_CHECK_REPLICAS"))
    memory_bytes: int | None = _typed(None, Row(("--memory",), _HOW, "memory of each simulated device, such as "
        "2GiB", "SIZE", bytes_of, variable="TORCH_EXT_SIM_MEMORY"))
    start_method: str = _typed("fork", Row(("--start-method",), _HOW, "how ranks start (default: fork)", "METHOD",
        choices=("fork", "interpreter"), variable="TORCH_EXT_START_METHOD"))
    jobs: int | None = _typed(None, Row(("-j", "--jobs"), _HOW, "run at most N classes at a time (default: as many as "
        "there are slots for, or 1 with --show-output or --upstream)", "N", count(1)))
    slots: int | None = _typed(None, Row(("--slots",), _HOW, "run at most N ranks at a time (default: the "
        "accelerator's devices, or four for each core)", "N", count(1)))
    cluster: str = _typed("", Row(("--cluster",), _HOW, "run on the Ray cluster at ADDRESS, or on local:N, a cluster "
        "of N on this machine", "ADDRESS", _cluster, alone=False))
    pdb: int | None = _typed(None, Row(("--pdb",), _HOW, "debug this rank at the terminal: at breakpoint() and where "
        "it fails; no limit ends meanwhile", "RANK", count(0), variable="TORCH_EXT_PDB"))
    faults: str = _typed("", Row(("--faults",), _HOW, f"what goes wrong in the ranks of each test, such as "
        f"{plan.EXAMPLE!r}; or a file", "PLAN", fault_plan, variable="TORCH_EXT_FAULTS"))
    failfast: bool = _typed(False, Row(("-f", "--failfast"), _HOW, "stop after the first failure"))
    reruns: int = _typed(0, Row(("--reruns",), _HOW, "run a failed test up to N times again, in fresh worlds; if it "
        "passes then, it is flaky, not passed", "N", count(0)))
    fail_on_flaky: bool = _typed(False, Row(("--fail-on-flaky",), _HOW, "exit with 1 if a test is flaky"))
    repeat: int = _typed(1, Row(("--repeat",), _HOW, "run everything N times; with -f, until a test fails", "N",
        count(1)))
    verbosity: int = _typed(0,  # 0: one line a class
        Row(("-v", "--verbose"), _SHOWN, "print a line for each test", const=1),
        Row(("-q", "--quiet"), _SHOWN, "print failures and the summary only", const=-1),
    )
    show_output: bool = _typed(False, Row(("--show-output",), _SHOWN, "print the ranks' output as it arrives",
        variable="TORCH_EXT_SHOW_OUTPUT"))
    list_only: bool = _typed(False, Row(("--list",), _SHOWN, "print the ids of the tests and run none"))
    json: str = _typed("", Row(("--json",), _SHOWN, "write events to FILE (- is stdout), one JSON object a line; "
        "with --list, the tests and their needs", _FILE))
    junit: str = _typed("", Row(("--junit",), _SHOWN, "write JUnit XML to FILE", _FILE))
    github: bool = _typed(False, Row(("--github",), _SHOWN, "also print each failure as a GitHub annotation"))
    show_config: bool = _typed(False, Row(("--show-config",), _MORE, "show the value of each option and where it comes "
        "from"))
    # fmt: on
    harness: tuple[str, ...] = ()  # see `Upstream` of `steps`
    script: str = ""  # the test file that was started itself (`python file.py`), as a user would type it
    command: str = "python run_test.py"  # the command that started this runner, as a user would type it

    @property
    def packs(self) -> bool:
        """Whether classes run concurrently: by default not with ``show_output``, since its lines name no class, nor
        with ``upstream``, whose files expect to run one after another.
        """
        if self.pdb is not None:
            return False
        if self.jobs is None:
            return not self.show_output and (not self.upstream or self.slots is not None)
        return self.jobs != 1

    @property
    def narrowed(self) -> bool:
        """Whether an option leaves out tests: patterns, keywords, ``--changed``, ``--last-failed`` or ``--shard``."""
        by_name = self.include or self.exclude or self.keywords
        return bool(by_name or self.changed or self.last_failed or self.shard)

    def environment(self) -> dict[str, str]:
        """Return the environment of every process of the run: the user's, with the command line's additions."""
        environment = dict(os.environ)
        with suppress(KeyError, OSError):  # the user has no name
            # Inductor's default lies below TMPDIR; classes with a private one share this cache.
            folder = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
            environment.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), folder))
        for row in TABLE:
            value = getattr(self, row.field)
            if row.variable and value != getattr(RunOptions, row.field):
                environment[row.variable] = "1" if value is True else str(value)
        if self.pdb is not None and not self.timeout_s:
            environment["TORCH_EXT_TIMEOUT"] = str(_NO_LIMIT_S)
        if self.upstream and not self.races:  # we do not fix races of upstream's own tests
            environment["TORCH_EXT_RACES"] = "off"
        if self.cuda_as_sim:
            environment[VARIABLE] = AS_CUDA
        return environment


TABLE: tuple[Row, ...] = tuple(
    dataclasses.replace(row, field=field.name)
    for field in dataclasses.fields(RunOptions)
    for row in field.metadata.get("rows", ())
)


def default_root(here: Path | None = None) -> Path:
    """Return the default folder of the suites, for a command that runs in ``here`` (default: the working directory):
    ``test`` of the checkout that contains this package, within that checkout and for its ``run_test.py``; elsewhere
    ``test`` or ``tests`` of ``here``, else ``here`` itself.
    """
    checkout, here = Path(torch_ext.__file__).resolve().parents[1], here or Path.cwd()
    if (checkout / "run_test.py").is_file() and (here.is_relative_to(checkout) or sys.argv[0].endswith("run_test.py")):
        return checkout / "test"
    return next((folder for folder in (here / "test", here / "tests") if folder.is_dir()), here)
