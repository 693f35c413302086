"""``torch_ext doctor``: one screen that says what this machine has, and what that costs. For bug reports, and for CI.

Loads torch, but builds nothing and initialises no device.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

import torch_ext
from torch_ext.world import settings
from torch_ext.world.child import reason_not_to_fork

__all__ = ["main"]

_WIDTH = 14
_PACKAGES = ("numpy", "expecttest", "hypothesis", "rich", "ninja")
# Collectives on the simulated accelerator keep their segments there, in bytes.
_SHARED_BYTES = 64 << 20
_GIB = 1 << 30


def _read_build() -> ModuleType:
    """Load ``torch_ext.sim.build`` without its package, whose import builds the simulator and takes torch's device."""
    spec = importlib.util.spec_from_file_location("build_of_sim", Path(torch_ext.__file__).parent / "sim" / "build.py")
    if spec is None or spec.loader is None:
        raise AssertionError("torch_ext.sim.build is missing")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _read_build()


def main(arguments: Sequence[str]) -> int:
    """Print the screen; return 0, or 1 if something keeps ranks from running on the simulated accelerator."""
    if arguments:
        print(f"error: doctor takes no arguments, but got: {' '.join(arguments)}", file=sys.stderr)
        return 2
    for name, said in _facts():
        print(f"{name:<{_WIDTH}}{said}")
    problems = list(_problems())
    for problem in problems:
        print(f"{'PROBLEM':<{_WIDTH}}{problem}")
    if not problems:
        print(f"{'all well':<{_WIDTH}}ranks run on the simulated accelerator")
    return 1 if problems else 0


def _facts() -> Iterator[tuple[str, str]]:
    yield "torch_ext", f"{torch_ext.__version__} in {Path(torch_ext.__file__).parent}"
    yield "torch", f"{torch.__version__} in {Path(torch.__file__).parent}"
    yield "python", f"{platform.python_version()} at {sys.executable}"
    yield "system", f"{platform.platform()}, {platform.machine()}"
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    compiler = build.compiler_found()
    yield "compiler", compiler or "none"
    finished = build.finished_builds()
    yield "simulator", f"built in {finished[0].parent}" if finished else "not built for this torch yet"
    yield "devices", _devices()
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
    yield "backends", ", ".join(backends) or "none"
    yield "cores", f"{_cores()} of {os.cpu_count()} for this process"
    yield "memory", f"{_memory()}; /dev/shm {_free('/dev/shm')}; {_folder()} {_free(_folder())}"
    yield "limits", f"open files {_limit(resource.RLIMIT_NOFILE)}, processes {_limit(resource.RLIMIT_NPROC)}"
    yield "start method", _start_method()
    yield "variables", " ".join(sorted(each for each in map(_set_as, os.environ) if each)) or "none of ours"


def _problems() -> Iterator[str]:
    if not sys.platform.startswith("linux"):
        yield f"{platform.system()} is not supported: run on Linux"
    if not dist.is_available() or not dist.is_gloo_available():
        yield "this torch has no gloo: no rank can talk to another"
    if build.finished_builds():
        try:
            importlib.import_module("torch_ext.sim")
        except (ImportError, OSError, RuntimeError) as error:
            yield f"the simulator is built, but cannot be loaded: {error}"
    else:
        if not build.compiler_found():
            yield "no C++ compiler: tests and programs that need a device are left out. Debian, Ubuntu: apt install g++"
        elif not _has_ninja():
            yield "no ninja, which builds the simulator: pip install ninja"
    if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free < _SHARED_BYTES:
        yield "/dev/shm is full: collectives go through gloo, which is slow. In docker: --shm-size 1g"
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= soft < 256:
        yield f"{soft} open files are few: a world of 8 ranks needs some 150. ulimit -n 4096"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _devices() -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return "no accelerator: tests and programs run on the simulated one"
    return f"{torch.get_device_module(found.type).device_count()} {found.type}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> str:
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{pages / _GIB:.1f} GiB free of {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / _GIB:.1f}"


def _folder() -> str:
    return os.environ.get("TMPDIR") or "/tmp"


def _free(folder: str) -> str:
    return f"{shutil.disk_usage(folder).free / _GIB:.1f} GiB free" if os.path.isdir(folder) else "missing"


def _limit(which: int) -> str:
    soft = resource.getrlimit(which)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def _start_method() -> str:
    if settings.interpreter_wanted():
        return "interpreter: TORCH_EXT_START_METHOD asks for it"
    why = reason_not_to_fork()
    return f"interpreter: {why}" if why else "fork: a process that has loaded torch has one thread here"


def _has_ninja() -> bool:
    return (Path(sys.executable).parent / "ninja").exists() or shutil.which("ninja") is not None


def _set_as(name: str) -> str:
    return f"{name}={os.environ[name]}" if name.startswith(("TORCH_EXT_", "OMP_NUM")) else ""
