#!/usr/bin/env python3
"""Run the simulator's tests and the FSDP suites on several releases of torch, one release after another.

Usage: .ci/versions.py [--keep] [VERSION...] [-- COMMAND...]

Each release gets a temporary environment (about 5 GB where pip finds no CPU-only build) with the pinned versions of
everything else, and a build of the simulator. The commands then run in the tree with the environment's programs first
on the path. A COMMAND is one shell line. Environment and build are removed at the end, except with --keep.

Exits 0 if every step of every release passed, and 1 if not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sum_results import count

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ["2.13.0", "2.14.0", "2.15.0"]
BUILD = "python -m torch_ext build"
TESTS = [
    "python -m pytest -q -n 3 --dist loadgroup test/torch_ext/sim",
    "python run_test.py --device sim -q -i distributed/fsdp distributed/_composable",
]
PACKAGES = ["numpy", "expecttest", "hypothesis", "rich", "pytest", "pytest-xdist"]
HEADER = f"{'torch':<10}{'passed':>8}{'failed':>8}{'skipped':>9}{'in all, s':>11}"


def main(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, usage="%(prog)s [--keep] [VERSION...] [-- COMMAND...]")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {' '.join(RELEASES)}")
    parser.add_argument("--keep", action="store_true", help="keep the environments, and print where they are")
    options = parser.parse_args(arguments[:end])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # removes the environment
    commands, releases = arguments[end + 1 :] or TESTS, options.versions or RELEASES
    rows = [try_release(version, commands, options.keep) for version in releases]
    print("\n".join(["", HEADER, *rows]))
    return int(not all(row.endswith(" ok") for row in rows))


def try_release(version: str, commands: list[str], keep: bool) -> str:
    """Install a release, build the simulator and run ``commands``; return a row of the table."""
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix=f"torch_ext-{version}-"))
    log = folder / "log"
    log.touch()
    try:
        ready = all(step(command, folder) for command in (install(version, folder), BUILD))
        broken = [command for command in commands if not step(command, folder)] if ready else ["install or build"]
        passed, failed, skipped = count(log.read_text(errors="replace"))
    finally:
        if keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    fault = f"FAILED: {'; '.join(broken)}" if broken else "FAILED" if failed else "ok" if passed else "no test ran"
    row = f"{version:<10}{passed:>8}{failed:>8}{skipped:>9}{time.monotonic() - started:>11.0f}   {fault}"
    print(row, flush=True)
    return row


def install(version: str, folder: Path) -> str:
    """Return the command that makes the environment, with CI's pinned versions of all but torch."""
    pins = [line for name in ("requirements.txt", "requirements-dev.txt") for line in (ROOT / name).read_text().split()]
    packages = [pin for pin in pins if pin.partition("==")[0] in PACKAGES]
    # pip's cache would keep gigabytes outside the folder.
    return (
        f"{sys.executable} -m venv {folder}/env && pip install -q --no-cache-dir torch=={version} {' '.join(packages)}"
        " && pip install -q --no-deps -e ."
    )


def step(command: str, folder: Path) -> bool:
    """Run ``command``, show its output and add it to the log. Return whether it succeeded."""
    print(f"+ {command}", flush=True)
    inherited = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "TORCH_EXT_DEVICE")}
    environment = {
        **inherited,
        "PATH": os.pathsep.join([str(folder / "env" / "bin"), os.environ.get("PATH", os.defpath)]),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "TORCH_EXT_CACHE": str(folder / "cache"),
    }
    shell = f"set -o pipefail; {{ {command}; }} 2>&1 | tee -a {folder / 'log'}"
    return subprocess.run(["bash", "-c", shell], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode == 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
