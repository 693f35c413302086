"""Builds the native half of the simulator on first use.

Guarantees: a finished build is found again by torch version, C++ ABI, Python, compiler and source text; a build works
in a folder beside its place, which is renamed when complete, under an operating-system lock that dies with its holder.
The next build keeps the units that an interrupted one has compiled. Waiting processes share one build.
Cost: under a minute on two cores once per key; finding a finished build takes a few milliseconds.

Note [Two units]
~~~~~~~~~~~~~~~~
Nearly all of a compiler's time goes into torch's headers, so the sources are compiled as two units, one for each of two
cores, and every header is read once in each. The sources of a unit share its anonymous namespaces: a name that two of
them define is a compile error.

Note [Two personalities]
~~~~~~~~~~~~~~~~~~~~~~~~
One source makes two devices. ``sim`` is torch's PrivateUse1 device: it coexists with a real GPU, and no program
mistakes it for one. ``cuda`` is ``DeviceType.CUDA`` itself, for programs that name CUDA; on builds of torch with CUDA's
kernels it replaces them, and hides real GPUs: see Note [CUDA's kernels] in csrc/replaced_kernels.h. A process has one
of them, and ``cuda`` only where ``TORCH_EXT_SIM=cuda`` asks for it. One library serves both, and reads the choice when
it is loaded: ``kSim`` and its like in csrc/device.h. Python code reads it from ``_name.IS_CUDA``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from torch_ext import cache
from torch_ext.machine_memory import available_bytes

_SOURCES = Path(__file__).resolve().parent / "csrc"
_LIBRARY = "_native.so"
# Torch is built with NDEBUG, without which its headers give some classes further members.
_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", "-Wall", "-Wextra", "-Wno-unused-parameter")
# Sources that include all of ATen, which autocast's macros and c10d's headers need. They run rarely, so they are not
# fully optimised. Everything that runs for each operator is in the other unit.
_WIDE = frozenset(
    {"autocast", "bindings", "finalization", "graph", "host_tensors", "observer_log", "profiler"}
    | {"races/report", "rpc_agent", "simccl", "work"}
    | {f"transport/{name}" for name in ("choice", "dry", "fingerprint", "gloo", "lane", "mailbox", "shared_memory")}
    | {"transport/transport"}
)
_LEVELS = {"wide": "-O1", "narrow": "-O2"}
# Names a compiler sanitizer (``address``, ``undefined``) to build with. Such a build has its own cache entry.
_SANITIZER = "TORCH_EXT_SIM_SANITIZE"
_ERROR_LINES = 40
_BYTES_OF_COMPILER = 2500 << 20  # the wide unit takes 2.3 GB with g++ 12


class BuildError(RuntimeError):
    """The compiler refused the sources; the message carries the end of its output."""


class MissingCompilerError(BuildError):
    """No C++ compiler was found, and no finished build either."""


@dataclass(frozen=True)
class _Compiler:
    path: str
    version: str  # first line of what --version prints


def cache_root() -> Path:
    """Return the folder that holds builds; see ``torch_ext.cache``.

    Raises:
        BuildError: there is no home to hold one.
    """
    found = cache.folder()
    if found is None:
        raise BuildError("no folder to build the simulated accelerator in: set TORCH_EXT_CACHE to one")
    return found


def ensure_built(*, verbose: bool = False) -> Path:
    """Return the path of the native library, building it if no finished build fits.

    Args:
        verbose: report the build and its duration on stderr.

    Raises:
        MissingCompilerError: a build is needed and there is no C++ compiler.
        BuildError: the compiler failed, or the cache folder cannot be written, or other users can write to it.
    """
    key = _family_key()
    if (bundled := _in_wheel(key)).exists():
        return bundled
    family = cache_root() / "sim" / key
    _check_trusted(family)
    compiler = _find_compiler()
    if compiler is None:
        return _check_trusted(_any_finished(family))
    target = family / _digest(compiler.path, compiler.version)
    library = target / _LIBRARY
    if not library.exists():
        with _lock(family):
            if not library.exists():
                _build(target, compiler, verbose=verbose)
    return _check_trusted(library)


def finished_builds() -> list[Path]:
    """Return the finished builds for this torch, these sources and any compiler; none where there is no folder."""
    key = _family_key()
    if (bundled := _in_wheel(key)).exists():
        return [bundled]
    with contextlib.suppress(BuildError):
        return sorted((cache_root() / "sim" / key).glob(f"*/{_LIBRARY}"))
    return []


def compiler_found() -> str:
    """Return the C++ compiler's version line and path; empty if there is none."""
    found = _find_compiler()
    return f"{found.version} at {found.path}" if found is not None else ""


def _in_wheel(key: str) -> Path:
    """Return the place of the library that a wheel brings for a family's key; see ``.ci/wheel``."""
    return _SOURCES.parent / "built" / key / _LIBRARY


def _check_trusted(path: Path) -> Path:
    if why := cache.why_not_trusted(path):
        raise BuildError(why)
    return path


def _family_key() -> str:
    """Return a readable folder name for everything that a build depends on, except the compiler."""
    import torch

    abi = f"abi{int(torch.compiled_with_cxx11_abi())}"
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    texts = (f"{path.relative_to(_SOURCES)}\0{path.read_text(encoding='utf-8')}" for path in _source_files())
    sources = _digest(*texts, *_flags(), *sorted(_WIDE), *_LEVELS.values())
    return f"torch-{torch.__version__}-{abi}-{python}-{sources}"


def _source_files() -> list[Path]:
    return sorted(path for path in _SOURCES.rglob("*") if path.suffix in (".cpp", ".h"))


def units() -> dict[str, list[Path]]:
    """Return the sources that are compiled together, by the unit's name: see Note [Two units]."""
    found: dict[str, list[Path]] = {}
    for path in _source_files():
        if path.suffix == ".cpp":
            name = path.relative_to(_SOURCES).with_suffix("").as_posix()
            found.setdefault("wide" if name in _WIDE else "narrow", []).append(path)
    return found


def _flags() -> tuple[str, ...]:
    """Return all flags, for the compiler and the linker."""
    import torch

    has_rpc = hasattr(torch._C, "_rpc_init")  # a build of torch without RPC lacks its symbols
    sanitizer = os.environ.get(_SANITIZER)
    # With null checks GCC no longer treats the address of a function as a constant, which torch's headers assert
    # (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=71962).
    without = ("-fno-sanitize=null,nonnull-attribute,returns-nonnull-attribute",) if sanitizer == "undefined" else ()
    return (
        *_FLAGS,
        *(("-DSIM_HAS_RPC",) if has_rpc else ()),
        *((f"-fsanitize={sanitizer}", *without, "-fno-omit-frame-pointer", "-g1") if sanitizer else ()),
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()[:16]


def _find_compiler() -> _Compiler | None:
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in candidates:
        path = shutil.which(name)
        if path is not None:
            output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            return _Compiler(os.path.realpath(path), output.partition("\n")[0])
    return None


def _any_finished(family: Path) -> Path:
    finished = sorted(family.glob(f"*/{_LIBRARY}"))
    if finished:
        return finished[0]
    raise MissingCompilerError(
        "The simulated accelerator is compiled on first use and no C++ compiler was found. Install one "
        "(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; conda: conda install gxx) or point CXX at it, "
        "then run `python -m torch_ext build`."
    )


@contextlib.contextmanager
def _lock(family: Path) -> Iterator[None]:
    """Hold the build lock. The kernel drops it when its holder dies, however it dies."""
    try:
        cache.make(family)
        handle = open(family / ".lock", "w", encoding="utf-8")  # noqa: SIM115  # closed below
    except OSError as error:
        remedy = "point TORCH_EXT_CACHE at a folder that you can write"
        raise BuildError(f"the simulated accelerator cannot be built: {error}; {remedy}") from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(target: Path, compiler: _Compiler, *, verbose: bool) -> None:
    started = time.monotonic()

    def say(what: str) -> None:
        if verbose:
            print(f"torch_ext: {what}", file=sys.stderr, flush=True)

    say(f"building the simulated accelerator with {compiler.version} (a minute or more, once for each torch)")
    folder = target.with_name(f".building-{target.name}")
    # Leftovers of killed builds: we hold the lock, so no build is using them.
    for leftover in set(target.parent.glob(".building-*")) - {folder}:
        shutil.rmtree(leftover, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    try:
        _compile(folder, compiler, say)
    except BuildError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / _LIBRARY).chmod(0o755)  # despite the umask: no other user may write a library that ranks load
    os.rename(folder, target)
    say(f"built in {time.monotonic() - started:.0f} s into {target}")


def _compile(folder: Path, compiler: _Compiler, say: Callable[[str], None]) -> None:
    """Compile the units and link them; leave only the library in ``folder``. Units compile side by side if the memory
    that is available suffices.
    """
    from torch.utils import cpp_extension

    torch_includes = cpp_extension.include_paths()
    # Kineto's headers include each other, and torch's include them, without their folder.
    kineto_includes = [path for path in (f"{each}/kineto" for each in torch_includes) if os.path.isdir(path)]
    includes = [f"-isystem{path}" for path in (*torch_includes, *kineto_includes, sysconfig.get_paths()["include"])]
    libraries = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    flags = [*_flags(), *includes]
    found = units()
    at_once = max(1, min(len(found), available_bytes() // _BYTES_OF_COMPILER))
    steps = len(found) + 1

    def compile_unit(unit: str) -> str:
        text = "".join(f'#include "{path}"\n' for path in found[unit])
        (folder / f"{unit}.cpp").write_text(text, encoding="utf-8")
        if not (folder / f"{unit}.o").exists():
            _run(folder, compiler, [*flags, _LEVELS[unit], "-c", f"{unit}.cpp"], f"{unit}.o")
        return unit

    say(f"compiling {len(found)} units, {at_once} at a time, then linking them")
    with ThreadPoolExecutor(at_once) as pool:
        for done, unit in enumerate(as_completed([pool.submit(compile_unit, unit) for unit in found]), 1):
            say(f"[{done}/{steps}] compiled {unit.result()}, {len(found[unit.result()])} files")
    link = [*_flags(), "-shared", *(f"{unit}.o" for unit in found), *libraries]
    _run(folder, compiler, [*link, "-lc10", "-ltorch_cpu", "-ltorch_python"], _LIBRARY)
    for left in folder.iterdir():
        if left.name != _LIBRARY:
            left.unlink()


def _run(folder: Path, compiler: _Compiler, arguments: list[str], output: str) -> None:
    """Run the compiler. Its output has its name only once it is whole."""
    # A preloaded library, such as a sanitizer's runtime, is not meant for the compiler.
    environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    part = f"{os.getpid()}-{output}"
    done = subprocess.run(
        [compiler.path, *arguments, "-o", part], cwd=folder, env=environ, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
    )  # fmt: skip
    if done.returncode:
        end = "".join(done.stdout.splitlines(keepends=True)[-_ERROR_LINES:])
        raise BuildError(f"Building the simulated accelerator failed; the last lines of the compiler's output:\n{end}")
    os.rename(folder / part, folder / output)
