"""``--long``: every row of this folder twenty times, each file's beside itself, so that the rows are the load.

``--times N`` runs each file N times instead, and ``-k rank_ends`` the rows of one file. No row may fail or be left
out in one run alone, and nothing may be left behind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from test.torch_ext.world.faults import processes_where
from test.torch_ext.world.suites import CHECKOUT, PATIENCE

FILES = sorted(path.name for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
# Runs side by side for each core, and how much longer each may take for that.
LOAD, SLOWER = 4, 8
# Seconds for all rows of a file on a quiet machine, far above what they take.
DEADLINE_S = 300


def run_rows(file: Path, folder: Path) -> tuple[str, str]:
    """Run all rows of ``file``; return how many ended how, and what else was wrong, with all that was said."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/rows", str(file)]
    environment = {**os.environ, PATIENCE: str(SLOWER), "TMPDIR": str(temporary)}
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = str(process.wait(DEADLINE_S * SLOWER))
        except subprocess.TimeoutExpired:
            process.kill()
            code = "no end"
        left = processes_where(lambda variable: variable.startswith(f"TMPDIR={folder}/".encode()))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        said.seek(0)
        text = said.read()
    # Importing torch._dynamo creates Inductor's cache folder.
    files = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    counts = re.findall(r"^(\d+ \w+.*) in [\d.]+s", text, re.MULTILINE)
    wrong = "" if code == "0" and not left and not files else f"{file.name}: {code}, left {left} {files}\n{text}"
    return counts[-1] if counts else "", wrong


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_rows_end_alike_each_time(file: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    times: int = request.config.getoption("times")
    with ThreadPoolExecutor(LOAD * (os.cpu_count() or 1)) as pool:
        runs = list(pool.map(lambda n: run_rows(Path(__file__).with_name(file), tmp_path / str(n)), range(times)))
    assert not (wrong := [wrong for _, wrong in runs if wrong]), "\n\n".join(wrong)
    assert len({counts for counts, _ in runs}) == 1, runs
