"""``CUDA_VISIBLE_DEVICES`` as a program's choice of simulated devices. Imports the standard library only.

Note [A value from outside]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A value in the user's environment is meant for GPUs and must not hide simulated devices; a value that the program sets
chooses among them, even if the text is the same. So a value from outside is removed from the C environment, which the
native half reads, before the program begins. ``os.environ`` keeps it, for the program to read. The value is recorded
once in a job: child processes find the record in their environment, and so can tell the value from one that a script
has exported for them. See also Note [Visible devices] in sim/csrc/device.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_OUTSIDE = "TORCH_EXT_SIM_VISIBLE_OUTSIDE"  # "=" and the value; empty if there was none
# env_start and env_end among the fields of /proc/PID/stat behind the name: see proc_pid_stat(5).
_ENVIRONMENT = slice(47, 49)


def record() -> None:
    """Make the current value hide no device; values that are set from now on choose devices."""
    _record(os.environ.get(VISIBLE))
    _hide()


def record_at_start() -> None:
    """Record the value that this process was started with, unless its parent has recorded one already."""
    if _OUTSIDE not in os.environ:
        _record(_inherited_value(_environment_at_start()))


def _hide() -> None:
    """Make a value equal to the recorded one hide no device, even if the harness has set it."""
    if os.environ.get(_OUTSIDE) == f"={os.environ.get(VISIBLE)}":
        os.unsetenv(VISIBLE)


def hide_unless_set() -> None:
    """Make a value equal to the recorded one hide no device, unless this process has set it: a running program may
    choose a device by the same text.
    """
    if _is_unchanged():
        _hide()


def _is_unchanged() -> bool:
    """Whether the variable still lies where the kernel put it: setting a variable allocates new memory for it."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(VISIBLE.encode())
    try:
        begin, end = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ENVIRONMENT]
    except (OSError, ValueError):
        return True
    return address is None or int(begin) <= address < int(end)


def _record(outside: str | None) -> None:
    os.environ[_OUTSIDE] = "" if outside is None else f"={outside}"


def _environment_at_start() -> Mapping[str, str]:
    """Return the environment at process start: the program may have changed it before importing torch."""
    with suppress(OSError):
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
        return {name: value for name, _, value in (os.fsdecode(line).partition("=") for line in lines)}
    return os.environ


def _inherited_value(variables: Mapping[str, str]) -> str | None:
    """Return the value in ``variables``; None if it only gives one of several local ranks its device.

    >>> _inherited_value({"CUDA_VISIBLE_DEVICES": "0"})
    '0'
    >>> _inherited_value({"CUDA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})  # a script's
    """
    found = variables.get(VISIBLE)
    is_one_of_several = variables.get("LOCAL_WORLD_SIZE", "1") != "1"
    return None if is_one_of_several and found == variables.get("LOCAL_RANK") else found
