"""A suite in its own folder, and how to run it: one test passes, one fails on one rank, one is skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from test.torch_ext.house.source import CHECKOUT

RUN_TEST = str(CHECKOUT / "run_test.py")

SUITE = """\
import os
import pickle

import torch.distributed as dist

from torch_ext.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu
from torch_ext.testing._internal.common_utils import run_tests


def double(x):
    return 2 * x


def plus_one(x):
    return x + 1  # line of ranks


class TestRanks(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()  # line of the parent half

    def test_functions_travel(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2)
        found = [None, None]
        dist.all_gather_object(found, (double, os.getpid()))
        self.assertEqual([function(plus_one(2)) for function, _ in found], [6, 6])
        self.assertEqual(len({pid for _, pid in found}), 2)
        self.assertIs(pickle.loads(pickle.dumps(double)), double)
        with open(os.environ["SEEN"], "a") as seen:
            seen.write(f"{double.__module__} {type(self).__module__}\\n")

    def test_one_rank_fails(self):
        if self.rank == 1:
            raise ValueError("this is rank 1")  # line of one rank

    @skip_if_lt_x_gpu(8)
    def test_wants_devices(self):
        pass


if __name__ == "__main__":
    run_tests()
"""


@dataclass(frozen=True)
class Done:
    """The result of one run: exit code, status of each test, and the module names that ranks saw."""

    code: int
    output: str
    endings: Mapping[str, str]
    names: frozenset[str]


def write_suite(folder: Path) -> None:
    folder.mkdir()
    (folder / "test_suite.py").write_text(SUITE, encoding="utf-8")


def line_of(comment: str) -> int:
    """Return the line of the suite that ends in ``comment``."""
    return next(number for number, line in enumerate(SUITE.splitlines(), start=1) if line.endswith(f"# {comment}"))


def run(folder: Path, *arguments: str) -> Done:
    """Run ``python arguments...`` in a fresh ``folder``, on plain cpu, without this run's coverage settings."""
    seen = folder / "seen"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE_", "TORCH_EXT_"))
    }
    environment |= {
        "PYTHONPATH": str(CHECKOUT), "TORCH_EXT_DEVICE": "cpu", "SEEN": str(seen),
        "TORCH_EXT_CACHE": str(folder / "cache"), "PYTEST_ADDOPTS": "-p no:cacheprovider",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, text=True, timeout=600,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    names = seen.read_text().split() if seen.exists() else []
    return Done(done.returncode, done.stdout, _endings(done.stdout.splitlines()), frozenset(names))


_LINE = re.compile(
    r"^(?:test_suite\.py::TestRanks::)?(test_\w+)(?: \(\S+\) \.\.\.)?  ?"
    r"(passed|failed|skipped|ok|ERROR|PASSED|FAILED|SKIPPED)"
)
_WORDS = {"ok": "passed", "ERROR": "failed"}


def _endings(lines: Sequence[str]) -> dict[str, str]:
    """Parse the status of each test from the verbose output of our runner, unittest or pytest."""
    found = [match for line in lines if (match := _LINE.match(line))]
    return {match[1]: _WORDS.get(match[2], match[2].lower()) for match in found}
