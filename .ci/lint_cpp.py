#!/usr/bin/env python3
"""Hold the simulator's native sources to .clang-format and .clang-tidy, each source alone, one on each core.

    python .ci/lint_cpp.py [FILE...]     # default: all of torch_ext/sim/csrc

A source that does not compile with the headers it names itself fails here; the build, which compiles sources together
(Note [Two units] in torch_ext/sim/build.py), would not notice.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
SOURCES = CHECKOUT / "torch_ext" / "sim" / "csrc"
PROGRAMS = Path(sys.executable).parent


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAMS / program), *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)


def include_paths() -> list[str]:
    torch = importlib.util.find_spec("torch")  # found, not imported, which takes seconds
    roots = [Path(root) / "include" for root in (torch.submodule_search_locations or [])] if torch else []
    return [
        *(str(each) for root in roots for each in (root, root / "torch/csrc/api/include", root / "kineto")),
        sysconfig.get_path("include"),
    ]


def format_problems(files: list[Path]) -> str:
    done = run("clang-format", f"--style=file:{CHECKOUT / '.clang-format'}", "--dry-run", "-Werror", *map(str, files))
    return done.stderr if done.returncode else ""


def tidy_problems(source: Path) -> str:
    flags = ["-std=c++20", *(flag for path in include_paths() for flag in ("-isystem", path))]
    done = run("clang-tidy", f"--config-file={CHECKOUT / '.clang-tidy'}", "--quiet", str(source), "--", *flags)
    return (done.stdout or done.stderr) if done.returncode else ""


def main() -> int:
    named = [Path(argument).resolve() for argument in sys.argv[1:]]
    files = named or sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h"))
    sources = [path for path in files if path.suffix == ".cpp"]
    started = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = [format_problems(files), *pool.map(tidy_problems, sources)]
    for problem in filter(None, problems):
        print(problem, file=sys.stderr)
    found = sum(map(bool, problems))
    print(f"C++ linters: {len(files)} files, {found} with problems, {time.monotonic() - started:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
