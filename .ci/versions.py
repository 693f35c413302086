#!/usr/bin/env python3
"""Run the simulator's tests and the FSDP suites on several releases of torch, one release after another.

Usage: .ci/versions.py [VERSION...] [-- COMMAND...]

Each release gets a temporary environment (about 5 GB where pip finds no CPU-only build) with the pinned versions of
everything else, and a build of the simulator. The commands then run in the tree with the environment's programs first
on the path. A COMMAND is one shell line. Environment and build are removed at the end.

Exits 0 if every step of every release passed, and 1 if not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ["2.13.0", "2.14.0", "2.15.0"]
BUILD = "python -m torch_ext build"
TESTS = [
    "python -m pytest -q -n 3 test/torch_ext/sim",
    "python run_test.py --device sim -q -i distributed/fsdp distributed/_composable",
]
PACKAGES = ["numpy", "expecttest", "hypothesis", "pytest", "pytest-xdist"]


def main(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # SystemExit: removes the environment
    commands, releases = arguments[end + 1 :] or TESTS, arguments[:end] or RELEASES
    if not all(version[:1].isdigit() for version in releases):
        print(__doc__, file=sys.stderr)
        return 2
    failed = [step for version in releases for step in failed_steps(version, commands)]
    print("\n".join(["", *failed] if failed else ["", "ok"]))
    return int(bool(failed))


def failed_steps(version: str, commands: list[str]) -> list[str]:
    """Install a release, build the simulator and run ``commands``; return a line for each step that failed."""
    with tempfile.TemporaryDirectory(prefix=f"torch_ext-{version}-") as folder:
        for command in (install(version, Path(folder)), BUILD):
            if not passes(command, Path(folder)):
                return [f"FAILED on {version}: {command}"]
        return [f"FAILED on {version}: {command}" for command in commands if not passes(command, Path(folder))]


def install(version: str, folder: Path) -> str:
    """Return the command that makes the environment, with CI's pinned versions of all but torch."""
    pins = [line for name in ("requirements.txt", "requirements-dev.txt") for line in (ROOT / name).read_text().split()]
    packages = [pin for pin in pins if pin.partition("==")[0] in PACKAGES]
    # pip's cache would keep gigabytes outside the folder.
    return (
        f"{sys.executable} -m venv {folder}/env && pip install -q --no-cache-dir torch=={version} {' '.join(packages)}"
        " && pip install -q --no-deps -e ."
    )


def passes(command: str, folder: Path) -> bool:
    print(f"+ {command}", flush=True)
    path = f"{folder}/env/bin{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    own = {"PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "TORCH_EXT_CACHE": f"{folder}/cache"}
    shell = ["env", "-u", "VIRTUAL_ENV", "-u", "TORCH_EXT_DEVICE", "bash", "-c", command]
    return not subprocess.run(shell, cwd=ROOT, env={**os.environ, **own}, stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
