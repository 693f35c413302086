"""The memory of this machine: the share that a run may use for simulated devices, and the count of out-of-memory kills.

Note [The page of memory]
~~~~~~~~~~~~~~~~~~~~~~~~~
All processes of a run count their device memory in one page of shared memory: see Note [The run's memory] in
``sim/csrc/machine_memory.h``. The first process of the run makes the page, writes the cap into it and sets
``TORCH_EXT_SIM_MEMORY_PAGE`` to ``PID:DESCRIPTOR:CAP``; its descendants open the page through ``/proc``. Torchrun's
ranks have no such ancestor if their program imports the simulator itself: each gets an equal part.

The standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

_PAGE = "TORCH_EXT_SIM_MEMORY_PAGE"
_CAP = "TORCH_EXT_SIM_MACHINE_MEMORY"
_NAME, _BYTES = "torch_ext memory", 16384
_PART = 0.8
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
# For both versions of cgroups: the files of limit and usage, and the line of memory.stat with reclaimable memory.
_CGROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def share() -> str:
    """Return the path of the run's page; make the page if there is none. Empty on systems without anonymous files.
    Raises ValueError if ``TORCH_EXT_SIM_MACHINE_MEMORY`` is no number of bytes.
    """
    if not hasattr(os, "memfd_create"):
        return ""
    value = os.environ.get(_CAP, "")
    if value and not (value.isascii() and value.isdigit() and int(value)):
        raise ValueError(f"{_CAP}={value}: expected a number of bytes above 0.")
    maker, _, rest = os.environ.get(_PAGE, "").partition(":")
    descriptor, _, cap = rest.partition(":")
    if not value or value == cap:
        place = f"/proc/{maker}/fd/{descriptor}"
        with contextlib.suppress(OSError):
            # The maker may have closed the descriptor or ended, and the numbers may be reused.
            if os.readlink(place).startswith(f"/memfd:{_NAME} "):
                return place
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    siblings = max(1, int(ranks)) if ranks.isascii() and ranks.isdigit() else 1
    cap = value or str(max(1, int(available_bytes() * _PART / siblings)))
    page = os.memfd_create(_NAME)
    os.ftruncate(page, _BYTES)
    os.pwrite(page, struct.pack("=Q", int(cap)), 0)
    os.environ[_PAGE] = f"{os.getpid()}:{page}:{cap}"
    return f"/proc/{os.getpid()}/fd/{page}"


def available_bytes() -> int:
    """Return the bytes that processes can still allocate: the machine's available memory, or less in a cgroup."""
    on_machine = 1024 * _number_after("MemAvailable:", Path("/proc/meminfo"))
    return min(on_machine, *_in_cgroups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))


def kills() -> int:
    """Return the number of out-of-memory kills on this machine; 0 if the kernel does not report it."""
    with contextlib.suppress(OSError):
        return _number_after("oom_kill", Path("/proc/vmstat"))
    return 0


def bytes_of(size: str) -> int:
    """Return a size in bytes.

    >>> bytes_of("2GiB"), bytes_of("1.5k"), bytes_of("3 MB"), bytes_of("100")
    (2147483648, 1536, 3000000, 100)

    Raises:
        ValueError: ``size`` is not a size. ``KB`` is 1000 bytes, ``K`` and ``KiB`` are 1024.
    """
    found = _SIZE.fullmatch(size.strip())
    if found is None or not float(found[1]):
        raise ValueError(f"got {size!r}, expected a size such as 2GiB or 512MiB")
    decimal = not found[3] and size.strip().upper().endswith("B")
    return int(float(found[1]) * (1000 if decimal else 1024) ** _POWERS[found[2].upper()])


def _in_cgroups(membership: Path, root: Path) -> Iterator[int]:
    """Yield a number without effect, then the free bytes in each cgroup of this process, outer ones included."""
    yield 1 << 62
    with contextlib.suppress(OSError):
        for line in membership.read_text(encoding="utf-8").splitlines():
            controllers, path = line.split(":", 2)[1:]
            for controller in _CGROUP_FILES.keys() & controllers.split(","):
                limit, used, idle = _CGROUP_FILES[controller]
                place = root / controller / path.lstrip("/")
                for folder in (place, *place.parents):
                    with contextlib.suppress(OSError, ValueError):
                        bound = int((folder / limit).read_text(encoding="utf-8"))  # "max": ValueError
                        held = int((folder / used).read_text(encoding="utf-8"))
                        yield max(0, bound - held + _number_after(idle, folder / "memory.stat"))


def _number_after(word: str, file: Path) -> int:
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return next((int(line[1]) for line in lines if line[0] == word), 0)
