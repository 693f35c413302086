"""Lets the ranks of a group find one another's memory, or agree that they cannot share it.

Note [Agreeing on a transport]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that waits past the group's time limit, or for a process that has ended, raises. Each rank

1. makes memory, and writes an address to the store: machine, process, descriptor, inode
2. reads all addresses. If one has no machine or another one, every rank takes gloo, because all read the same addresses
3. opens each peer's memory through ``/proc/PID/fd`` and compares inodes: another process may have reused the pid
4. writes to the store whether all could be opened
5. waits until all ranks have done so. So all share memory, or all take gloo

Ranks find a memory by its owner's process and not by a name, so no file is left behind. After the last step a process
may end without its peers losing its data.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch._C._distributed_c10d import Backend, Store

from torch_ext.sim import _native

__all__ = ["meet"]

_TRANSPORT, _REDUCE = "TORCH_EXT_SIM_TRANSPORT", "TORCH_EXT_SIM_REDUCE"
_GLOO = "-"  # in the place of a machine
# Pauses between polls of the store for missing ranks, in seconds. A FileStore polls every 10 ms, which is longer than
# the ranks of one machine take to join.
_PAUSES_S = [0.0001 * 2**power for power in range(8)]
_LONGEST_PAUSE_S = 0.05

Memory = tuple["_native.Process | None", int]  # a rank's process, None for this one, and a descriptor


class _Address(NamedTuple):
    machine: str
    pid: int
    file: int
    inode: int
    reduce: str


def meet(
    make_gloo: Callable[..., Backend], store: Store, rank: int, size: int, timeout: timedelta
) -> list[Memory] | Backend:
    """Return the memory of each rank, in order of rank, or the gloo backend that all of them take."""
    wish = os.environ.get(_TRANSPORT, "")
    if wish not in ("", "shared", "gloo"):
        raise ValueError(f"{_TRANSPORT}={wish}: expected shared or gloo.")
    with contextlib.ExitStack() as on_failure:
        found = _share(store, rank, size, timeout, wish != "gloo", on_failure)
        if found is not None:
            on_failure.pop_all()
            return found
    if wish == "shared":
        raise RuntimeError(
            f"{_TRANSPORT}=shared, but the ranks of this group cannot map one another's memory: they run on several "
            "hosts, in several containers or as several users. Unset it to use gloo there."
        )
    return make_gloo(store, rank, size, timeout)


def _share(
    store: Store, rank: int, size: int, timeout: timedelta, willing: bool, on_failure: contextlib.ExitStack
) -> list[Memory] | None:
    deadline_s = time.monotonic() + timeout.total_seconds()
    machine, own = _machine() if willing else _GLOO, os.memfd_create("simccl")
    on_failure.callback(os.close, own)
    os.ftruncate(own, _native.segment_bytes(size))
    mine = _Address(machine, os.getpid(), own, os.fstat(own).st_ino, os.environ.get(_REDUCE, ""))
    store.set(f"address/{rank}", json.dumps(mine))
    keys = [f"address/{peer}" for peer in range(size)]
    _wait_for(store, keys, timeout)
    addresses = [_Address(*json.loads(store.get(key))) for key in keys]
    for peer, address in enumerate(addresses):
        if address.reduce != mine.reduce:
            raise ValueError(
                f"simccl: rank {rank} has {_REDUCE}={mine.reduce}, but rank {peer} has {_REDUCE}={address.reduce}. "
                "Set the variables alike on all ranks."
            )
    if _GLOO in (machines := {address.machine for address in addresses}) or len(machines) > 1:
        return None
    found = [(None, own) if peer == rank else _open(address, on_failure) for peer, address in enumerate(addresses)]
    store.set(f"opened/{rank}", str(None not in found))
    opened = [f"opened/{peer}" for peer in range(size)]
    pauses = iter(_PAUSES_S)
    while not store.check(opened):
        _check_running(addresses)
        if time.monotonic() > deadline_s:
            late = next(peer for peer, key in enumerate(opened) if not store.check([key]))
            raise RuntimeError(f"simccl: the group timed out while it was made: rank {late} stopped.")
        time.sleep(next(pauses, _LONGEST_PAUSE_S))
    if any(store.get(key) != b"True" for key in opened):
        time.sleep(_LONGEST_PAUSE_S)  # a process that has closed its memory may not have ended yet
        _check_running(addresses)  # gloo would wait for a rank that has ended until the time limit
        return None
    return [memory for memory in found if memory is not None]


def _machine() -> str:
    """Return a name that is equal only for processes that see each other's pids and lay memory out alike.

    ``TORCH_EXT_HOST`` separates processes that simulate several machines.
    """
    build = Path(_native.__file__).parent.parent.name  # names the sources: see build.py
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{build}/{os.environ.get('TORCH_EXT_HOST', '')}"
    return _GLOO


def _wait_for(store: Store, keys: list[str], timeout: timedelta) -> None:
    for pause in _PAUSES_S:
        if store.check(keys):
            return
        time.sleep(pause)
    store.wait(keys, timeout)


def _open(address: _Address, on_failure: contextlib.ExitStack) -> Memory | None:
    """Return the memory of a peer. None where this process may not open it, or the peer has closed it: the peer has
    ended or is about to, or another one's end has made it give up.
    """
    process = _native.Process.find(address.pid)
    try:
        file = os.open(f"/proc/{address.pid}/fd/{address.file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    on_failure.callback(os.close, file)
    is_its = process is not None and os.fstat(file).st_ino == address.inode  # Linux before 5.3 has no pidfds
    return (process, file) if is_its else None


def _check_running(addresses: Sequence[_Address]) -> None:
    for peer, address in enumerate(addresses):
        process = _native.Process.find(address.pid)
        if not os.path.exists(f"/proc/{address.pid}") if process is None else process.has_ended():
            raise RuntimeError(f"simccl: rank {peer} (process {address.pid}) ended while the group was made.")
