"""What a test that passed has left in its rank (``--check-leaks``): groups, threads, children, files, device memory.

A rank that serves one test takes them with it. The same code leaks in a training job, and in ranks that serve the
tests of a class one after another.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch

from torch_ext import accelerator
from torch_ext.compat.c10d import ranks_of_groups
from torch_ext.world import _os, threads, wording

_MOST_PLACES = 3
_SETTLE_S = 0.2  # autograd's threads may free a graph after backward() has returned
# Libraries keep devices, the kernel's pseudo files and memory without a name for the process. They keep sockets and
# pipes too, for peers of RPC: only files with other paths count.
_OF_PROCESS = ("/dev/", "/proc/", "/sys/", "/memfd:")


class LeakError(AssertionError):
    """A test that passed has left something in its rank."""


class LeakCheck:
    """Compares this rank with its state before a test, when the check is made."""

    def __init__(self) -> None:
        self._memory: Any = accelerator.device_module().memory if accelerator.is_simulated() else None
        if self._memory is not None:
            self._memory._record_memory_history("state")  # for the lines that allocate
        self._before, self._allocated = _held(), _allocated()

    def conclude(self) -> None:
        """Raise :class:`LeakError` if the rank holds more than before. It will join threads that are no daemons, so
        those are no leak.
        """
        deadline_s = _os.monotonic() + _SETTLE_S
        while True:
            gc.collect()  # cycles hold tensors and files until a collection
            more, memory = _held() - self._before, _allocated() - self._allocated
            if not (more or memory) or _os.monotonic() > deadline_s:
                break
            _os.sleep(_SETTLE_S / 10)
        found = [f"{what}{f' ({count} times)' if count > 1 else ''}" for what, count in more.items()]
        if memory:  # without the device's number: ranks with equal leaks get equal messages
            places = ", ".join(self._places(set(memory)))
            found.append(f"{memory.total()} bytes of device memory{places and f', allocated at {places}'}")
        if self._memory is not None:
            self._memory._record_memory_history(None)
        if found:
            raise LeakError(f"the test left {'; '.join(found)}. Free it in the test, its tearDown or a cleanup")

    def _places(self, devices: Collection[int]) -> list[str]:
        """Return the lines of the program that allocated the live blocks of the devices, most bytes first."""
        sizes = Counter[str]()
        for segment in self._memory._snapshot()["segments"] if self._memory is not None else ():
            for block in segment["blocks"] if segment["device"] in devices else ():
                if block["state"] == "active_allocated":
                    frames = [(each["filename"], each["line"], each["name"]) for each in block.get("frames", ())]
                    sizes[wording.place_of_frames(frames)] += block["requested_size"]
        return [place for place, _ in sizes.most_common(_MOST_PLACES) if place]


def _held() -> Counter[str]:
    """Return what this rank holds, in words."""
    found = Counter[str]()
    for name, ranks in ranks_of_groups().items():
        found[f"the process group {name} of {wording.ranks_phrase(ranks)}"] += 1
    for thread in threading.enumerate():
        found[f"the daemon thread {thread.name}"] += thread.daemon and not threads.is_left_out(thread.native_id)
    for pid in _os.children_of(_os.getpid()):
        found[f"the child process {pid}, {_os.short_command(_os.command_line(pid)) or 'ended and not waited for'}"] += 1
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith("/") and not target.startswith(_OF_PROCESS):
                found[f"the open file {target}"] += 1
    return found


def _allocated() -> Counter[int]:
    """Return the allocated bytes of each device that is in use."""
    if not accelerator.is_accelerator() or not accelerator.device_module().is_initialized():
        return Counter()
    return Counter({index: torch.accelerator.memory_allocated(index) for index in range(accelerator.device_count())})
