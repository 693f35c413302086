"""The ``torch.backends`` entry point: torch calls :func:`load` when it has been imported, in every process.

Without ``TORCH_EXT_SIM`` it returns at once. ``TORCH_EXT_SIM=1`` registers the simulated accelerator, so that what
torchrun starts runs on it. ``TORCH_EXT_SIM=cuda`` makes it CUDA's device: see :mod:`torch_ext.personality`.

Note [A program that has begun]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On builds of torch for GPUs, files are rewritten. When torch calls, the program that imports it has been compiled, with
"cuda" in it. So the process starts again, as
``python -m torch_ext.program.main_module PROGRAM``, which rewrites the program's files as they are read. The program's
statements above its import of torch run twice. Launchers (torchrun, accelerate) do not start again.

==========================  =======================================================================================
``TORCH_EXT_SIM``           ``1``: what imports torch runs on the simulated accelerator; ``cuda``: and CUDA means it
``TORCH_EXT_SIM_PACKAGES``  packages, joined by commas, in which CUDA means it besides the program
``TORCH_EXT_SIM_STRICT``    ``1``: a worker that never used its device or its peers ends with code 1
``TORCH_EXT_SIM_WORKER``    set for the processes that a worker starts
==========================  =======================================================================================
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch_ext import personality

__all__ = ["ON", "ON_AS_CUDA", "ask", "flags_of", "hide", "is_strict", "load", "mark_worker", "packages"]

_AGAIN = "torch_ext.program.main_module"
# Modules that -m runs and that start the program in other processes.
_LAUNCHERS = ("torch.distributed.", "accelerate.", "torch_ext.", "deepspeed.", "lightning.fabric.cli")
# Flags of Python that are followed by a value.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")

_SIM = personality.VARIABLE
ON, ON_AS_CUDA = "1", personality.AS_CUDA
_PACKAGES, _STRICT, _WORKER = "TORCH_EXT_SIM_PACKAGES", "TORCH_EXT_SIM_STRICT", "TORCH_EXT_SIM_WORKER"


def packages() -> tuple[str, ...]:
    """Return the packages in which CUDA means the simulated accelerator too."""
    return tuple(name for name in os.environ.get("TORCH_EXT_SIM_PACKAGES", "").split(",") if name)


def is_strict() -> bool:
    """Whether a worker fails that has used neither its device nor its peers."""
    return os.environ.get("TORCH_EXT_SIM_STRICT") == "1"


def mark_worker() -> None:
    """Mark the processes that this one starts: they are no workers of the job themselves."""
    os.environ[_WORKER] = str(os.getpid())


def hide() -> None:
    """Remove from the environment the variables that a rank's ``Program`` has in their place."""
    for name in (_SIM, "TORCH_EXT_RACES", _PACKAGES, _STRICT):
        os.environ.pop(name, None)


def ask(value: str, of: tuple[str, ...]) -> None:
    """Set ``TORCH_EXT_SIM`` to ``value`` for the processes that this one starts, and ``TORCH_EXT_SIM_PACKAGES``."""
    os.environ[_SIM] = value
    if of:
        os.environ[_PACKAGES] = ",".join(of)


def load() -> None:
    """Do what ``TORCH_EXT_SIM`` asks for.

    Raises:
        ValueError: it asks for something unknown.
        BuildError: the simulator cannot be built.
    """
    asked = os.environ.get("TORCH_EXT_SIM", "")
    if asked in ("", "0"):
        return
    if asked not in (ON, ON_AS_CUDA):
        raise ValueError(f"{_SIM}={asked}: expected 1, or cuda to have CUDA mean the simulated accelerator.")
    is_program, as_cuda = _is_program(), asked == ON_AS_CUDA
    if as_cuda:
        from torch_ext.cuda_as_sim import visible

        visible.record_at_start()
        if is_program and not personality.is_cuda():
            _run_again()
        visible.hide_unless_set()
    if ranks := os.environ.get("LOCAL_WORLD_SIZE"):
        os.environ.setdefault("TORCH_EXT_SIM_DEVICES", ranks)
    import torch_ext.sim  # noqa: F401  # registers the device

    if personality.is_cuda():
        from torch_ext.cuda_as_sim import stand_in

        stand_in.install()
    is_worker = os.environ.get("WORLD_SIZE", "1") != "1" and "LOCAL_RANK" in os.environ
    is_below_worker = bool(os.environ.get("TORCH_EXT_SIM_WORKER"))
    if is_worker and not is_below_worker and (is_program or (as_cuda and _main_name() == _AGAIN)):
        import atexit

        from torch_ext.program.rank import report_at_end

        mark_worker()
        atexit.register(report_at_end, os.getpid(), cuda_as_sim=as_cuda)


def _main_name() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec is not None else ""


def _is_program() -> bool:
    """Whether this process runs a user's program, and not a launcher, ``-c`` or a child of multiprocessing."""
    if name := _main_name():
        return not name.startswith(_LAUNCHERS)
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    programs = os.path.dirname(os.path.abspath(sys.executable))  # with console scripts
    return bool(file) and os.path.dirname(os.path.abspath(str(file))) != programs


def flags_of(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line of an interpreter into its flags, and the program with its arguments.

    >>> flags_of(["-u", "-X", "dev", "train.py", "-m"]), flags_of(["-um", "train", "x"]), flags_of(["-mtrain"])
    ((['-u', '-X', 'dev'], ['train.py', '-m']), (['-u'], ['-m', 'train', 'x']), ([], ['-m', 'train']))
    """
    flags, rest = [], list(command)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        flag = rest.pop(0)
        if flag in _WITH_VALUE and rest:
            flags += [flag, rest.pop(0)]
        elif not flag.startswith(("--", "-W", "-X")) and "m" in flag:
            before, _, after = flag.partition("m")
            return flags + [before] * (before != "-"), ["-m", *([after] if after else []), *rest]
        else:
            flags.append(flag)
    return flags, rest


def _run_again() -> None:
    """Replace this process by ``python -m torch_ext.program.main_module PROGRAM...`` with the same flags.

    Raises:
        OSError: the system refuses.
    """
    flags, program = flags_of(sys.orig_argv[1:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, *flags, "-m", _AGAIN, *program])
