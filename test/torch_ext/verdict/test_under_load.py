"""``--long``: every row of this folder twenty times, on a machine at four times its load.

No state may come out otherwise there, no other rank be named, and nothing be left behind. ``--times N`` runs each row N
times instead, and ``-k receipts`` the rows of one file.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.torch_ext.verdict.programs import PATIENCE
from test.torch_ext.world.suites import CHECKOUT

FILES = sorted(path.name for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
# Busy processes for each core, and how much longer a run may take that shares the cores with them.
LOAD = 4
# Seconds for all rows of a file on a quiet machine, far above what they take.
DEADLINE_S = 600


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOAD * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of processes whose files for a while are below ``folder``, as those of all programs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}/".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.mark.parametrize("file", FILES)
def test_rows_end_alike_each_time(file: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("long"):
        pytest.skip("takes hours; pytest --long runs it")
    wrong: list[str] = []
    with busy_machine():
        for number in range(request.config.getoption("times")):
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                str(Path(__file__).with_name(file)),
            ]
            rows = subprocess.run(
                [*command, "--basetemp", str(tmp_path / f"rows{number}"), str(Path(__file__).with_name(file))],
                cwd=CHECKOUT,
                env={**os.environ, PATIENCE: str(LOAD + 1)},
                capture_output=True,
                text=True,
                timeout=DEADLINE_S * (LOAD + 1),
                check=False,
            )
            said = re.findall(r"^(?:FAILED|ERROR) .*|^\d+ passed.*", rows.stdout, re.MULTILINE)
            print(f"{file}, time {number + 1}: {'; '.join(said)}", flush=True)
            if rows.returncode:
                wrong.append(f"time {number + 1}:\n{rows.stdout}{rows.stderr}")
            if left := processes_of(tmp_path):
                wrong.append(f"time {number + 1} left behind: {left}")
    assert not wrong, "\n\n".join(wrong)
