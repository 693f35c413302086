"""Runs files of rows again and again, side by side, so that they are the load of the machine themselves.

Each run is a pytest of its own with a folder of its own, and so are its processes told from those of all others. What
the rows leave of the load that is wanted, processes take that only compute.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from test.torch_ext.world.faults import processes_where
from test.torch_ext.world.suites import CHECKOUT

__all__ = ["Repetition", "repetitions"]

# How often to look at what runs, and the weight of one look in the mean of those before, whose time is a few seconds.
_LOOK_S, _WEIGHT = 0.25, 0.1
# Computes until its parent is gone.
_SPINNER = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(20000))"
_CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Repetition:
    """One run of all rows of a file.

    Attributes:
        file: its name.
        number: which repetition it was, from 1.
        counts: how many rows ended how, such as ``"27 passed"``; empty if nothing says so.
        failed: the rows that failed, by name, and what else was wrong, in words.
        load: processes able to run for each core, in the mean.
        took_s: seconds.
        output: what it said; the file is there only if something was wrong.
    """

    file: str
    number: int
    counts: str
    failed: tuple[str, ...]
    load: float
    took_s: float
    output: Path

    def __str__(self) -> str:
        line = f"{self.file}, time {self.number}: {self.counts or 'no row ended'} in {self.took_s:.0f} s, load "
        line += f"{self.load:.1f} for each core"
        return f"{line}; WRONG: {'; '.join(self.failed)}; see {self.output}" if self.failed else line


class Machine:
    """How many processes are able to run, and processes that compute where those are too few. A context manager.

    Args:
        load: how many to keep able to run for each core.
    """

    def __init__(self, load: int) -> None:
        self._wanted = load * _CORES
        self._spinners: list[subprocess.Popen[bytes]] = []
        self._others = 0.0
        self._ran, self._looks = 0, 0

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self._keep(0)

    def look(self) -> None:
        """Count what is able to run, and make up for what is missing."""
        stat = Path("/proc/stat").read_text()
        found = re.search(r"^procs_running (\d+)", stat, re.MULTILINE)
        running = int(found[1]) - 1 if found else 0  # without this one
        self._ran, self._looks = self._ran + running, self._looks + 1
        self._others += _WEIGHT * (running - len(self._spinners) - self._others)
        self._keep(self._wanted - int(max(0.0, self._others)))

    def seen(self) -> tuple[int, int]:
        """Return how many were able to run at all looks together, and the number of looks."""
        return self._ran, self._looks

    def _keep(self, number: int) -> None:
        while len(self._spinners) < number:
            self._spinners.append(subprocess.Popen([sys.executable, "-S", "-E", "-c", _SPINNER]))
        while len(self._spinners) > max(0, number):
            spinner = self._spinners.pop()
            spinner.kill()
            spinner.wait()


class _Rows:
    """One run of a file's rows, from its start until :meth:`end`."""

    def __init__(self, file: Path, number: int, folder: Path, environment: Mapping[str, str], machine: Machine) -> None:
        self._file, self._number, self._machine = file, number, machine
        self._folder = folder / f"{number}{file.stem.removeprefix('test')}"
        temporary = self._folder / "tmp"
        temporary.mkdir(parents=True)
        self._output = self._folder / "output"
        self._start_s, self._seen = time.monotonic(), machine.seen()
        rows = self._folder / "rows"
        with self._output.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(rows), str(file)],
                cwd=CHECKOUT, env={**os.environ, **environment, "TMPDIR": str(temporary)}, stdin=subprocess.DEVNULL,
                stdout=stream, stderr=stream, start_new_session=True, preexec_fn=_as_in_the_foreground,
            )  # fmt: skip

    def has_ended(self, most_s: float) -> bool:
        """Whether it has; one that runs for longer than ``most_s`` is ended."""
        return self._process.poll() is not None or time.monotonic() - self._start_s > most_s

    def end(self) -> Repetition:
        """Return what came of it; kill what is left of it."""
        late = self._process.poll() is None
        if late:
            self._process.kill()
            self._process.wait()
        left = _processes_of(self._folder)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        said = self._output.read_text(errors="replace")
        rows = re.findall(r"^(?:FAILED|ERROR) \S*?\.py(?:::)?(\S*)", said, re.MULTILINE)
        counts = re.findall(r"^(?=\d)((?:\d+ \w+(?:, )?)+) in [\d.]+s", said, re.MULTILINE)
        failed = [*dict.fromkeys(rows)]
        failed += (
            ["it did not end"]
            if late
            else [f"pytest ended with {self._process.returncode}"] * (self._process.returncode != 0 and not rows)
        )
        failed += [f"left behind: {command[:100]}" for command in left.values()]
        failed += [] if late else [f"left behind: {path.name}" for path in _files_left(self._folder / "tmp")]
        ran, looks = (now - then for now, then in zip(self._machine.seen(), self._seen, strict=True))
        found = Repetition(
            self._file.name, self._number, counts[-1] if counts else "", tuple(failed), ran / max(1, looks) / _CORES,
            time.monotonic() - self._start_s, self._output,
        )  # fmt: skip
        if not failed:
            shutil.rmtree(self._folder, ignore_errors=True)
        return found


def _as_in_the_foreground() -> None:
    """Let SIGINT through, which a shell has ignored in what it starts in the background: rows are about it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _processes_of(folder: Path) -> dict[int, str]:
    """Return the processes whose files for a while are below ``folder``, as those of all programs, with their command
    lines.
    """
    return processes_where(lambda variable: variable.startswith(f"TMPDIR={folder}/".encode()))


def _files_left(folder: Path) -> list[Path]:
    # Importing torch._dynamo creates Inductor's cache folder.
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith("torchinductor_")]


def repetitions(
    files: Sequence[Path],
    times: int,
    folder: Path,
    load: int,
    most_s: float,
    environment: Mapping[str, str] = {},
) -> Iterator[Repetition]:
    """Run all rows of each file ``times`` times, and yield what came of each run as it ends.

    Args:
        files: what to run; each of them once before any of them twice.
        times: how often.
        folder: for their files. Those of a run in which something was wrong are kept.
        load: processes able to run for each core, which the machine has at all times. As many runs go side by side.
        most_s: what takes longer is ended.
        environment: variables of the runs, besides those of this process.
    """
    left = [(file, number) for number in range(1, times + 1) for file in files]
    running: list[_Rows] = []
    with Machine(load) as machine:
        try:
            while left or running:
                while left and len(running) < load * _CORES:
                    running.append(_Rows(*left.pop(0), folder, environment, machine))
                time.sleep(_LOOK_S)
                machine.look()
                for rows in [rows for rows in running if rows.has_ended(most_s)]:
                    running.remove(rows)
                    yield rows.end()
        finally:
            for rows in running:
                rows.end()
