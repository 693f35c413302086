"""``--long``: every row of this folder twenty times, each file's runs side by side, so that the rows are the load.

``--times N`` runs each file N times instead, and ``-k rank_ends`` the rows of one file. No row may fail or be left out
in any run, and no run may leave processes behind.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from test.torch_ext.world.suites import CHECKOUT, PATIENCE, suite_of
from torch_ext import cache

FILES = sorted(path.name for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
# Concurrent runs for each core, and how much longer each may take because of that.
LOAD, SLOWER = 4, 8
# Seconds for all rows of a file on a quiet machine, a generous bound.
DEADLINE_S = 300


def run_rows(file, folder):
    """Run all rows of ``file``; return the number of rows by ending."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/rows", str(file)]
    extra = {PATIENCE: str(SLOWER), "TORCH_EXT_CACHE": str(cache.folder())}
    with suite_of(folder, "") as suite:
        run = suite.finish(suite.start(command, extra, cwd=CHECKOUT), deadline_s=DEADLINE_S * SLOWER)
        assert run.code == 0, f"{file.name}: {run}"
        (counts,) = re.findall(r"^(\d+ \w+.*) in [\d.]+s", run.out, re.MULTILINE)
        return str(counts)


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_rows_end_alike_each_time(file, tmp_path, request):
    times = request.config.getoption("times")
    with ThreadPoolExecutor(LOAD * (os.cpu_count() or 1)) as pool:
        runs = pool.map(lambda n: run_rows(Path(__file__).with_name(file), tmp_path / str(n)), range(times))
        assert len(set(runs)) == 1
