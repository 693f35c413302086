"""``torch_ext doctor``: one screen about this machine's features, and the effects of missing ones. For bug reports, CI.

Loads torch, but builds nothing and initializes no device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import os
import platform
import resource
import runpy
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import torch_ext
from torch_ext import machine_memory
from torch_ext.personality import is_cuda
from torch_ext.world import settings
from torch_ext.world.child import reason_not_to_fork

_PACKAGES = ("numpy", "expecttest", "hypothesis")
# Least free bytes in /dev/shm, for segments of collectives, and least limit of open files: 8 ranks need about 150.
_SHARED_BYTES, _FEW_FILES = 64 << 20, 256


# Without the package, whose import builds the simulator and registers the device.
build = SimpleNamespace(**runpy.run_path(str(Path(torch_ext.__file__).parent / "sim" / "build.py")))


def main(arguments: Sequence[str]) -> int:
    """Print the screen; return 0, or 1 if ranks cannot run on the simulated accelerator."""
    argparse.ArgumentParser("torch_ext doctor", description="Show this machine's features.").parse_args(arguments)
    problems = [("PROBLEM", problem) for problem in _problems()]
    well = ("all well", "ranks run on the simulated accelerator")
    if not build.finished_builds():
        well = (
            "not built",
            "`python -m torch_ext build` builds the simulated accelerator now, the first run otherwise",
        )
    for name, text in (*_facts(), *(problems or [well])):
        print(f"{name:<14}{text}")
    return 1 if problems else 0


def _facts() -> Iterator[tuple[str, str]]:
    yield "torch_ext", f"{torch_ext.__version__} in {Path(torch_ext.__file__).parent}"
    yield "torch", f"{torch.__version__} in {Path(torch.__file__).parent}"
    yield "python", f"{platform.python_version()} at {sys.executable}"
    yield "system", f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} cores"
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    yield "compiler", build.compiler_found() or "none"
    finished = build.finished_builds()
    yield "simulator", f"built in {finished[0].parent}" if finished else "not built for this torch yet"
    found = torch.accelerator.current_accelerator(check_available=True)
    devices = f"{torch.get_device_module(found.type).device_count()} {found.type}" if found else ""
    yield "devices", devices or "no accelerator: tests and programs run on the simulated one"
    gpus = f"{'GPUs' if torch.cuda.is_available() else 'none'}; the simulated device with --cuda-as-sim"
    yield "cuda", "the simulated device, which hides GPUs" if is_cuda() else gpus
    places = {"/dev/shm", os.environ.get("TMPDIR") or "/tmp"}
    free = [f"{place} {shutil.disk_usage(place).free >> 20} MiB" for place in sorted(places) if os.path.isdir(place)]
    yield "free", f"memory {machine_memory.available_bytes() >> 20} MiB, {', '.join(free)}"
    why = "TORCH_EXT_START_METHOD asks for it" if settings.wants_interpreter() else reason_not_to_fork()
    yield "start method", f"interpreter: {why}" if why else "fork: a process that has loaded torch has one thread here"
    variables = (name for name in sorted(os.environ) if name.startswith(("TORCH_EXT_", "OMP_NUM")))
    yield "variables", " ".join(f"{name}={os.environ[name]}" for name in variables) or "no TORCH_EXT_ variable"


def _problems() -> Iterator[str]:
    if not sys.platform.startswith("linux"):
        yield f"{platform.system()} is not supported: run on Linux"
    if not dist.is_available() or not dist.is_gloo_available():
        yield "this torch has no gloo: ranks cannot communicate"
    if build.finished_builds():
        try:
            importlib.import_module("torch_ext.sim")
        except (ImportError, OSError, RuntimeError) as error:
            yield f"the simulator is built, but cannot be loaded: {error}"
    elif not build.compiler_found():
        yield "no C++ compiler: tests and programs that need a device are left out. Debian, Ubuntu: apt install g++"
    if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free < _SHARED_BYTES:
        yield "/dev/shm is full: collectives go through gloo, which is slow. In docker: --shm-size 1g"
    if 0 <= (soft := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < _FEW_FILES:
        yield f"{soft} open files are few for a world of 8 ranks: ulimit -n 4096"


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return "missing"
