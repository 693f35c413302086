#!/usr/bin/env python3
"""Check the simulator's native sources against .clang-format and .clang-tidy.

    python .ci/lint_cpp.py           # all of torch_ext/sim/csrc, unless they have passed as they are
    python .ci/lint_cpp.py FILE...
    python .ci/lint_cpp.py --all     # also sources that have passed

Note [Torch's headers are read once]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
clang-tidy spends nine tenths of its time for a source in torch's headers, so without FILE its checks run in two parts.
The check of includes runs per source, over one clang module of all torch headers that any source names, and again
without it to confirm a problem. So it misses a source that names too few of *torch's* headers, as the build does. All
other checks run over the units that the build compiles (Note [Two units] in torch_ext/sim/build.py).

Note [Sources that have passed]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
clang-tidy takes five minutes of a core, and most changes touch no native source. So a run without problems writes a
digest of the sources, the settings and the versions of the linters into ``linted_cpp``: commit it with the sources.
While it fits, only clang-format runs; the nightly run checks everything.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
SOURCES = CHECKOUT / "torch_ext" / "sim" / "csrc"
PASSED = CHECKOUT / ".ci" / "linted_cpp"
PROGRAMS = Path(sys.executable).parent
INCLUDES = "misc-include-cleaner"
OF_TORCH = re.compile(r"^#include <((?:ATen|c10|torch)/[^>]+)>", re.MULTILINE)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAMS / program), *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)


def include_paths() -> list[str]:
    torch = importlib.util.find_spec("torch")  # an import would take seconds
    roots = [Path(root) / "include" for root in (torch.submodule_search_locations or [])] if torch else []
    return [
        *(str(each) for root in roots for each in (root, root / "torch/csrc/api/include", root / "kineto")),
        sysconfig.get_path("include"),
    ]


def units() -> dict[str, list[Path]]:
    """Return the sources of each unit of the build, without loading the simulator."""
    found: dict[str, list[Path]] = runpy.run_path(str(CHECKOUT / "torch_ext" / "sim" / "build.py"))["units"]()
    return found


def format_problems(files: Sequence[Path]) -> str:
    done = run("clang-format", f"--style=file:{CHECKOUT / '.clang-format'}", "--dry-run", "-Werror", *map(str, files))
    return done.stderr if done.returncode else ""


def tidy_problems(source: Path, checks: str = "", flags: Sequence[str] = ()) -> str:
    flags = ["-std=c++20", *(flag for path in include_paths() for flag in ("-isystem", path)), *flags]
    settings = [f"--config-file={CHECKOUT / '.clang-tidy'}", "--quiet", f"--checks={checks}"]
    done = run("clang-tidy", *settings, str(source), "--", *flags)
    return (done.stdout or done.stderr) if done.returncode else ""


def write_module(folder: Path, sources: Sequence[Path]) -> list[str]:
    """Write a module map of torch's headers, and return clang's flags for it."""
    named = sorted({name for source in sources for name in OF_TORCH.findall(source.read_text(encoding="utf-8"))})
    headers = [next(path for root in include_paths() if (path := Path(root, name)).exists()) for name in named]
    lines = "".join(f'  header "{header}"\n' for header in headers)
    (folder / "module.modulemap").write_text(f"module torch_headers [system] {{\n{lines}  export *\n}}\n")
    # Without clang's own map: its modules of <stdint.h> and the like hide names from torch's headers.
    own = ("-fmodules", "-fno-implicit-module-maps", f"-fmodule-map-file={folder / 'module.modulemap'}")
    return [*own, f"-fmodules-cache-path={folder / 'cache'}"]


def all_tidy_problems(files: Sequence[Path], folder: Path) -> list[str]:
    sources = [path for path in files if path.suffix == ".cpp"]
    of_units = units()
    for name, together in of_units.items():
        text = "".join(f'#include "{path}"  // NOLINT(bugprone-suspicious-include)\n' for path in together)
        (folder / f"{name}.cpp").write_text(text, encoding="utf-8")
    shared = write_module(folder, files)

    def includes_of(source: Path) -> str:
        return tidy_problems(source, f"-*,{INCLUDES}", shared) and tidy_problems(source, f"-*,{INCLUDES}")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rest = [pool.submit(tidy_problems, folder / f"{name}.cpp", f"-{INCLUDES}") for name in of_units]
        first = includes_of(sources[0])  # builds the module, which all other sources need
        return [first, *pool.map(includes_of, sources[1:]), *(each.result() for each in rest)]


def digest(files: Sequence[Path]) -> str:
    names = (".clang-format", ".clang-tidy", "requirements-dev.txt", "torch_ext/sim/build.py")
    found = hashlib.sha256()
    for path in (Path(__file__).resolve(), *(CHECKOUT / name for name in names), *files):
        found.update(f"{path.relative_to(CHECKOUT)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def main() -> int:
    named = [Path(argument).resolve() for argument in sys.argv[1:] if argument != "--all"]
    files = named or sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h"))
    started = time.monotonic()
    problems = [format_problems(files)]
    key = digest(files)
    has_passed = PASSED.is_file() and PASSED.read_text(encoding="utf-8").strip() == key
    if has_passed and "--all" not in sys.argv:  # see Note [Sources that have passed]
        print(f"clang-tidy: nothing has changed since {PASSED.name} was written")
    elif named:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            problems += pool.map(tidy_problems, [path for path in files if path.suffix == ".cpp"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            problems += all_tidy_problems(files, Path(folder))
    for problem in filter(None, problems):
        print(problem, file=sys.stderr)
    found = sum(map(bool, problems))
    if not named and not found:
        PASSED.write_text(f"{key}\n", encoding="utf-8")
    print(f"C++ linters: {len(files)} files, {found} with problems, {time.monotonic() - started:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
