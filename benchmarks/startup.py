"""How long the runner takes before it runs anything.

    python benchmarks/startup.py [--repeats 5] [-i PATTERN ...]

Runs each of these as a fresh command, in turns: ``--list`` with cached names, ``--list`` without, importing the
same suite in a plain interpreter, ``--list`` of 2,000 tests with cached names, also with a history and by a file
that names each of them, and a run up to its first test. Prints medians in seconds, and a ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

# A test that prints when it began. All processes of a machine share this clock.
PROBE = """
import time
from torch_ext.testing._internal.common_distributed import MultiProcessTestCase

class TestProbe(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        print("class began at", time.monotonic())
        super().setUp()
        self._spawn_processes()

    def test_probe(self):
        print("rank began at", time.monotonic())
        raise RuntimeError("show the output")
"""


def seconds(command: list[str], environment: dict[str, str]) -> float:
    """Return the duration of a command in seconds; exit if it fails."""
    started = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


# Numbers of files, classes per file and tests per class, as in a large checkout.
MANY_FILES, MANY_CLASSES, MANY_TESTS = 50, 4, 10


def write_many(root: Path) -> int:
    """Write a suite of many tests below ``root`` and return their number."""
    for number in range(MANY_FILES):
        classes = "".join(
            f"class TestCase{number}_{cls}(unittest.TestCase):\n"
            + "".join(f"    def test_{test}_of_many(self):\n        pass\n" for test in range(MANY_TESTS))
            for cls in range(MANY_CLASSES)
        )
        (root / f"test_many_{number}.py").write_text(f"import unittest\n{classes}")
    return MANY_FILES * MANY_CLASSES * MANY_TESTS


def list_many(repeats: int) -> dict[str, float]:
    """Return the median seconds to list many cached tests, by the way of selecting them."""
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        number = write_many(root)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCH_EXT_CACHE": cache, "TORCH_EXT_DEVICE": "cpu"}
        runner = [sys.executable, str(REPOSITORY / "run_test.py"), "--root", folder]
        seconds([*runner, "-q"], environment)  # caches names and writes the history
        names = _list([*runner, "--list"], environment)
        (root / "names").write_text("\n".join(names))
        if len(names) != number:
            raise SystemExit(f"got {len(names)} tests, expected {number}")
        ways = {"all": [], "each by its id": [f"@{root / 'names'}"]}
        return {
            f"warm --list of {number} tests, {name}": statistics.median(
                seconds([*runner, "--list", *flags], environment) for _ in range(repeats)
            )
            for name, flags in ways.items()
        }


def to_first_test(environment: dict[str, str]) -> tuple[float, float]:
    """Return the seconds from the command's start to the first test's parent half, and to its first rank's body."""
    with tempfile.TemporaryDirectory() as root:
        Path(root, "test_probe.py").write_text(PROBE)
        command = [sys.executable, str(REPOSITORY / "run_test.py"), "--root", root]
        started = time.monotonic()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    times = {
        line.split(" began at ")[0].strip(): float(line.split()[-1])
        for line in done.stdout.splitlines()
        if " began at " in line
    }
    return times["class"] - started, times["rank"] - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("-i", "--include", nargs="+", default=["distributed/fsdp"], metavar="PATTERN")
    options = parser.parse_args()
    runner = [sys.executable, str(REPOSITORY / "run_test.py"), "--list", "-i", *options.include]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TORCH_EXT_CACHE": cache}
        modules = sorted({line.split("::")[0] for line in _list(runner, environment)})
        imports = "".join(f"import test.{module.removesuffix('.py').replace('/', '.')}\n" for module in modules)
        plain = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{imports}"]
        rows: dict[str, list[float]] = {"warm --list": [], "cold --list": [], "importing the suite": []}
        first = []
        for _ in range(options.repeats):
            rows["warm --list"].append(seconds(runner, environment))
            with tempfile.TemporaryDirectory() as empty:
                rows["cold --list"].append(seconds(runner, {**environment, "TORCH_EXT_CACHE": empty}))
            rows["importing the suite"].append(seconds(plain, environment))
            first.append(to_first_test(environment))
    medians = {name: statistics.median(values) for name, values in rows.items()}
    medians |= list_many(options.repeats)
    scope = f"medians of {options.repeats}, in seconds; {len(modules)} modules"
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {scope}")
    for name, median in medians.items():
        print(f"  {name:<45} {median:6.2f}")
    print(f"  {'enter to the first test, its parent half':<45} {statistics.median(one for one, _ in first):6.2f}")
    print(f"  {'enter to the first test, its first rank':<45} {statistics.median(one for _, one in first):6.2f}")
    print(f"  ratio cold --list / importing: {medians['cold --list'] / medians['importing the suite']:.2f}")


def _list(command: list[str], environment: dict[str, str]) -> list[str]:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


if __name__ == "__main__":
    main()
