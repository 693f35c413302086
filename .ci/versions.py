#!/usr/bin/env python3
"""Run the simulator's tests and the FSDP suites on several releases of torch, one release after another.

Usage: .ci/versions.py [--keep] [VERSION...] [-- COMMAND...]

Each release gets a temporary environment (about 5 GB where pip finds no CPU-only build) with the pinned versions of
everything else, and a build of the simulator. The commands then run in the tree with the environment's programs first
on the path. A COMMAND is one shell line. Environment and build are removed however the run ends, except with --keep.

Exits 0 if every step of every release passed, 1 if not, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sum_results import count

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ["2.13.0", "2.14.0", "2.15.0"]
BUILD = "python -m torch_ext build"
TESTS = [
    "python -m pytest -q -n 3 --dist loadgroup test/torch_ext/sim",
    "python run_test.py --device sim -q -i distributed/fsdp distributed/_composable",
]
PACKAGES = ["numpy", "expecttest", "hypothesis", "rich", "ninja", "pytest", "pytest-xdist"]
# How long the programs of an interrupted run may take to end their children.
GRACE_S = 20
HEADER = f"{'torch':<10}{'passed':>8}{'failed':>8}{'skipped':>9}{'build, CPU s':>14}{'in all, s':>11}"


class _Signals:
    """Forwards a signal to the running step, so that its programs can clean up, and kills them if they take too long.

    Raises nothing where the signal arrives, so no step is lost while it starts, and no removal is cut short.
    """

    def __init__(self) -> None:
        self.asked_to_end = False
        self._running: subprocess.Popen[str] | None = None

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._ask)
        signal.signal(signal.SIGALRM, self._insist)

    @contextlib.contextmanager
    def to(self, process: subprocess.Popen[str]) -> Iterator[None]:
        self._running = process
        if self.asked_to_end:  # while it was being started
            self._send(signal.SIGINT)
        yield
        self._running = None

    def _ask(self, _number: int, _frame: object) -> None:
        self.asked_to_end = True
        signal.alarm(GRACE_S)
        self._send(signal.SIGINT)

    def _insist(self, _number: int, _frame: object) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._running is not None and self._running.poll() is None:
            os.killpg(self._running.pid, number)


@dataclass
class _Outcome:
    version: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    build_cpu_s: float = 0.0
    wall_s: float = 0.0
    broken: list[str] = field(default_factory=list)  # steps that ended with another status than 0

    def fault(self) -> str:
        """What went wrong; empty if every step ended well and tests ran."""
        if self.broken:
            return "FAILED: " + "; ".join(self.broken)
        return "FAILED" if self.failed else "" if self.passed else "no test ran"

    def row(self) -> str:
        counts = f"{self.version:<10}{self.passed:>8}{self.failed:>8}{self.skipped:>9}"
        return f"{counts}{self.build_cpu_s:>14.0f}{self.wall_s:>11.0f}   {self.fault() or 'ok'}"


def main(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, usage="%(prog)s [--keep] [VERSION...] [-- COMMAND...]")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {' '.join(RELEASES)}")
    parser.add_argument("--keep", action="store_true", help="keep the environments, and print where they are")
    options = parser.parse_args(arguments[:end])
    signals = _Signals()
    signals.listen()
    outcomes = []
    for version in options.versions or RELEASES:
        outcomes.append(_try(version, arguments[end + 1 :] or TESTS, signals, keep=options.keep))
        if signals.asked_to_end:
            return 130
        print(outcomes[-1].row(), flush=True)
    print("\n".join(["", HEADER, *(outcome.row() for outcome in outcomes)]))
    return int(any(outcome.fault() for outcome in outcomes))


def _try(version: str, commands: list[str], signals: _Signals, *, keep: bool) -> _Outcome:
    started = time.monotonic()
    outcome = _Outcome(version)
    with _folder(version, keep=keep) as folder:
        if _step(outcome, folder, _install(version, folder), signals):
            before = _children_cpu_s()
            built = _step(outcome, folder, BUILD, signals)
            outcome.build_cpu_s = _children_cpu_s() - before
            for command in commands if built else ():
                _step(outcome, folder, command, signals)
        outcome.passed, outcome.failed, outcome.skipped = count((folder / "log").read_text(errors="replace"))
    outcome.wall_s = time.monotonic() - started
    return outcome


@contextlib.contextmanager
def _folder(version: str, *, keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"torch_ext-{version}-"))
    (folder / "log").touch()
    try:
        yield folder
    finally:
        if keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _install(version: str, folder: Path) -> str:
    """Return the command that makes the environment, with CI's pinned versions of all but torch."""
    pins = [line for name in ("requirements.txt", "requirements-dev.txt") for line in (ROOT / name).read_text().split()]
    packages = [pin for pin in pins if pin.partition("==")[0] in PACKAGES]
    # pip's cache would keep gigabytes outside the folder.
    return (
        f"{sys.executable} -m venv {folder}/env && pip install -q --no-cache-dir torch=={version} {' '.join(packages)}"
    )


def _step(outcome: _Outcome, folder: Path, command: str, signals: _Signals) -> bool:
    """Run ``command``, show its output and add it to the log. Return whether it succeeded.

    Starts nothing once asked to end.
    """
    if signals.asked_to_end:
        return False
    print(f"+ {command}", flush=True)
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=ROOT,
        env=_environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with signals.to(process):
        _show(process, folder / "log")
    if process.returncode:
        outcome.broken.append(command)
    return process.returncode == 0


def _environment(folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "TORCH_EXT_DEVICE")}
    return {
        **inherited,
        "PATH": os.pathsep.join([str(folder / "env" / "bin"), os.environ.get("PATH", os.defpath)]),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        # The tree itself: an editable install would leave a folder of metadata in it.
        "PYTHONPATH": str(ROOT),
        "TORCH_EXT_CACHE": str(folder / "cache"),
    }


def _show(process: subprocess.Popen[str], log: Path) -> None:
    with open(log, "a", encoding="utf-8") as kept:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            kept.write(line)
    process.wait()


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
