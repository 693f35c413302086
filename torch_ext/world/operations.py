"""Finds the operation of a process group, a store or RPC that a Python frame is in; reads this rank's flight record and
the page on which a device's backend records its waits. Runs in ranks; touches torch only if it is loaded.

A thread in a method of a store is in C++, and the calling frame need not name the store: ``group.store().wait(...)``.
:func:`watch_stores` inserts a frame that holds the store, the arguments and the time of the call. The constructor of a
TCPStore gets such a frame too, since a server waits for its clients.

Note [The page of waits]
~~~~~~~~~~~~~~~~~~~~~~~~
Each rank inherits the descriptor of 4096 bytes of shared memory; ``TORCH_EXT_WAIT_PAGE`` has its number. The device's
backend keeps an entry there for each wait for a peer. The parent half reads the page without help of the rank, which
may hold the GIL, be stopped by a signal or be dead. The rank reads its own page to judge its threads: see Note
[Provable hangs]. Reader and writer share no code, only this layout:

======  ====================================================================  ======
offset  content                                                               type
======  ====================================================================  ======
0       2, the version of this layout; 0: nothing has been written            uint64
64      entry 0 of 8; they are 504 bytes apart
+0      sequence lock, incremented before and after each change: odd during   uint32
+4      global rank of the peer; -1: any                                      int32
+8      begin of the wait, nanoseconds of ``CLOCK_MONOTONIC``; 0: not in use  int64
+16     number of the collective in its group; 0: a transfer                  uint64
+24     name of the group, zero-terminated                                    64
+88     operation, zero-terminated                                            40
+128    file and line of the call, zero-terminated                            200
+328    end of the wait at the latest, nanoseconds of ``CLOCK_MONOTONIC``     int64
+336    the waiting thread, by its number in the kernel                       int32
======  ====================================================================  ======
"""

from __future__ import annotations

import contextlib
import dis
import functools
import json
import linecache
import math
import mmap
import os
import re
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

from torch_ext.world import _os, wording
from torch_ext.world.frames import stack_of, variables
from torch_ext.world.protocol import Wait

_THREADED_GROUP = "/multi_threaded_pg.py"
# Python files of torch whose functions call into a process group, a store or RPC, and wait there.
_WAITING_FILES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/rpc/api.py",
    "/torch/testing/_internal/distributed" + _THREADED_GROUP,
    "/torch/distributed/rendezvous.py",
    "/torch/distributed/rpc/backend_registry.py",
)
# Dispatches every operator; the type of the receiver decides whether it waits.
_OPERATORS = "/torch/_ops.py"
# A wait in these files counts as the caller's.
_LOOKED_THROUGH = tuple(
    f"/torch_ext/{name}.py"
    for name in ("compat/c10d", "compat/testing", "faults/points", "world/threads", "sim/_collectives",
                 "sim/_gloo_halves", "sim/_patches", "sim/races/_threads")
)  # fmt: skip
_LOCKS = ("/threading.py", "/queue.py", "/multiprocessing/connection.py", "/multiprocessing/queues.py")
# Functions of the waiting files that need all ranks; RPC's, the last, only if it knows the number of its workers.
_NEEDS_EVERYONE = frozenset(
    {"init_process_group", "_new_process_group_helper", "_new_group_with_tag", "new_group", "_init_process_group"}
)
# Their arguments for time limits.
_LIMITS = ("timeout", "process_group_timeout")
# Functions of the waiting files that wait for one peer, and the arguments that name it.
_PEER_ARGUMENTS = {"recv": ("src", "group_src"), "send": ("dst", "group_dst")}
# A call of a method that waits, in a line of source.
_CALL = re.compile(
    r"(?P<receiver>[A-Za-z_][\w.]*)\.(?:wait|get|multi_get|compare_set|synchronize|result|barrier)"
    r"\((?P<arguments>(?:[^()]|\([^()]*\))*)\)"
)
# Modules of the types whose methods wait for peers.
_TYPES = ("torch._C._distributed_c10d", "torch._C._distributed_rpc", "torch.distributed")
_STORE_METHODS = ("barrier", "get", "multi_get", "queue_pop", "wait")
# The arguments of torch's TCPStore, and its default time limit in seconds.
_OF_SERVER = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers")
_SERVER_S = 300.0
# torch.distributed.rpc.constants.DEFAULT_RPC_TIMEOUT_SEC
_RPC_TIMEOUT_S = 60.0
# Maximal length of a call in a report, in characters.
_MAX_CALL = 80

_AFTER_BODY = "the barrier after its body, which is over"

_began_s = _os.monotonic()


def test_began() -> None:
    """Measure time limits from now: every thread's wait began later."""
    global _began_s
    _began_s = _os.monotonic()


def after_body(wait: Callable[..., object], **how: Any) -> None:
    """Call ``wait(**how)``, the wait for peers after the body, which reports recognize by this frame."""
    wait(**how)


@dataclass(frozen=True)
class Operation:
    """The operation that a thread is in."""

    wait: Wait  # its description and its peers
    limit_s: float | None  # `time.monotonic` before which the wait does not end by itself; None: not known to wait
    position: str  # changes if the thread has moved on to another call
    sliced: bool = False  # whether it polls


def operation_of(frame: FrameType) -> Operation:
    """Return the operation of a thread whose innermost Python frame is ``frame``."""
    position = f"{id(frame)}:{frame.f_lasti}"
    stack = stack_of(frame)
    while stack[0].f_code.co_filename.endswith((*_LOCKS, *_LOOKED_THROUGH)) and len(stack) > 1:
        del stack[0]
    frame = stack[0]
    if frame.f_code.co_filename == __file__ and frame.f_code.co_name == "wait_in_store" and len(stack) > 1:
        return _in_store(stack, f"{position}:{variables(frame, ('began_s',)).get('began_s')}")
    if frame.f_code.co_filename.endswith((*_WAITING_FILES, _OPERATORS)):
        return _in_torch(stack, position)
    line = _line(frame)
    call = _CALL.search(line)
    if call is None or not type(_receiver(call["receiver"], frame)).__module__.startswith(_TYPES):
        return Operation(Wait(_place(frame)), None, position)
    # Another call of the same line may be running, and arguments may limit the wait: then only the kernel knows.
    limit_s = math.inf if line.count("(") == 1 and not call["arguments"] else None
    return Operation(Wait(f"{call[0][:_MAX_CALL]} in {_place(frame)}", transport=True), limit_s, position)


def watch_stores(makes_transport: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """In this process, call the waiting methods of torch's stores through frames that this module recognizes, and wrap
    the constructor of servers in ``makes_transport``. Idempotent.
    """
    torch: Any = sys.modules["torch"]
    store, server = torch.distributed.Store, torch.distributed.TCPStore
    for method in (getattr(store, name) for name in _STORE_METHODS):
        if not hasattr(method, "__wrapped__"):
            setattr(store, method.__name__, _watched(method))
    if not hasattr(server.__init__, "__wrapped__"):
        server.__init__ = _watched(makes_transport(server.__init__))


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wait_in_store(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_s = _os.monotonic()  # noqa: F841  # _limit_in_store() reads it
        return call(self, *args, **kwargs)

    return wait_in_store


def _in_store(stack: Sequence[FrameType], position: str) -> Operation:
    """Return the operation of the first frame, which :func:`watch_stores` inserts between a store's method and the
    second.
    """
    found, caller = variables(stack[0], ("began_s", "call", "args", "kwargs", "self")), stack[1]
    limit_s = _limit_in_store(found)
    if caller.f_code.co_name == "_store_based_barrier":  # repeats a short wait until its own limit
        return replace(_in_torch(stack[1:], str(id(caller))), sliced=True)
    if caller.f_code.co_filename.endswith(_WAITING_FILES):  # a rendezvous
        operation = _in_torch(stack[1:], position)
        return replace(operation, limit_s=min(limit_s, operation.limit_s or math.inf), sliced=True)
    method, called = found["call"].__name__, "TCPStore()"
    if method in _STORE_METHODS:
        call = re.search(rf"[\w.()\[\]]+\.{method}\(.*\)", _line(caller))
        called = call[0][:_MAX_CALL] if call is not None else f"{method}() of a store"
    return Operation(Wait(f"{called} in {_place(caller)}", transport=True), limit_s, position, sliced=True)


def _limit_in_store(found: Mapping[str, Any]) -> float:
    if "began_s" not in found:
        return 0.0
    if found["call"].__name__ not in _STORE_METHODS:
        given = {**dict(zip(_OF_SERVER, found["args"], strict=False)), **found["kwargs"]}
        # A client may go on by itself: it retries to connect with a growing delay.
        waits = given.get("is_master", False) and given.get("wait_for_workers", True)
        return float(found["began_s"]) + _seconds_of_store(given.get("timeout")) if waits else 0.0
    values = [*found["args"], *found["kwargs"].values()]
    if any(value is False for value in values):  # queue_pop() without a wait
        return 0.0
    limits = [value for value in values if isinstance(value, timedelta)] or [found["self"].timeout]
    return float(found["began_s"]) + _seconds_of_store(limits[0])


def _seconds_of_store(limit: Any) -> float:
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else _SERVER_S
    return seconds if seconds > 0 else math.inf


def _in_torch(stack: Sequence[FrameType], position: str) -> Operation:
    frame, names, limit_s = stack[0], [], math.inf
    for each in stack:
        file = each.f_code.co_filename
        if not wording.is_torchs(file) and not file.endswith(_LOOKED_THROUGH):
            break
        names.append(each.f_code.co_name)
        limit_s = min(limit_s, *map(_seconds, variables(each, _LIMITS).values()), math.inf)
    outer = stack[len(names) :]
    caller = next((each for each in outer if wording.is_users(each.f_code.co_filename)), (*outer, stack[-1])[0])
    if frame.f_code.co_filename.endswith(_OPERATORS) and not _is_of_c10d(variables(frame, ("self",)).get("self")):
        return Operation(Wait(_place(caller)), None, position)
    if outer and outer[0].f_code is after_body.__code__:
        return Operation(Wait(_AFTER_BODY, transport=True, over=True), _began_s + limit_s, position)
    peers = awaited_peers(frame)
    everyone = not _NEEDS_EVERYONE.isdisjoint(names)
    public = next((name for name in reversed(names) if not name.startswith(("_", "wrapper"))), names[0])
    words = f"{public}({f'peer {peers[0]}' if peers else ''}) in {_place(caller)}"
    return Operation(Wait(words, peers, everyone, transport=True), _began_s + limit_s, position)


def _is_of_c10d(operator: Any) -> bool:
    """Whether ``operator`` is one of torch's collectives. Runs none of its code: it may be partly constructed."""
    names = (getattr(operator, "__dict__", {}).get(name) for name in ("_name", "_qualified_op_name"))
    return any(isinstance(name, str) and "c10d" in name for name in names)


def awaited_peers(frame: FrameType) -> tuple[int, ...]:
    """Return the ranks that torch's point-to-point call in ``frame`` waits for; empty for any other frame."""
    if not frame.f_code.co_filename.endswith(_WAITING_FILES[0]):
        return ()
    found = variables(frame, _PEER_ARGUMENTS.get(frame.f_code.co_name, ()))
    return tuple(peer for peer in found.values() if isinstance(peer, int))[:1]


def waits_of_error(error: BaseException) -> tuple[Wait, ...]:
    """Return torch's operation that raised ``error``; empty if another caller did."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    in_torch = [frame for frame in frames if frame.f_code.co_filename.endswith(_WAITING_FILES)]
    found = _in_torch(stack_of(in_torch[-1]), "").wait if in_torch else None
    return (found,) if found is not None and found.transport else ()


def _seconds(value: Any) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # RPC's special values: 0 for no limit, -1 for the default.
        return math.inf if value == 0 else float(value) if value > 0 else _rpc_timeout_s()
    return math.inf


def _rpc_timeout_s() -> float:
    rpc: Any = sys.modules.get("torch.distributed.rpc")
    try:
        return float(rpc.get_rpc_timeout()) or math.inf
    except (AttributeError, RuntimeError):  # no agent runs
        return _RPC_TIMEOUT_S


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0).strip()  # compiled code has no line


def _receiver(path: str, frame: FrameType) -> Any:
    """Return the object that ``path`` names in ``frame``, such as ``self.work``; else None. Runs no code of a test."""
    name, *attributes = path.split(".")
    found = variables(frame, (name,)).get(name, frame.f_globals.get(name))
    for attribute in attributes:
        found = getattr(found, "__dict__", {}).get(attribute)
    return found


# The flight record

# Stands for every group's name.
ALL = "*"
# Lines at which the body has destroyed process groups, by the group's name.
_destroyed: dict[str, str] = {}
_has_destroyed = False  # groups, at any line


def note_destroyed(names: Sequence[str]) -> None:
    """Record the user's line that destroys these groups; no names: all groups."""
    global _has_destroyed
    _has_destroyed = True
    place = wording.place_here()
    if place:
        _destroyed.update(dict.fromkeys(names or [ALL], place))


def own_record() -> str:
    """Return the record as JSON: ``entries``, ``groups`` (ranks by the group's name) and ``destroyed`` (the line that
    destroyed a group, by its name; ``"*"`` for all). Empty without torch.
    """
    return json.dumps(found) if (found := record()) else ""


def own_summary() -> str:
    """Return a text that changes whenever a collective begins or ends."""
    entries = record().get("entries", [])[-64:]
    return str([(entry.get("record_id"), entry.get("retired")) for entry in entries])


def record() -> dict[str, Any]:
    """Return what :func:`own_record` writes; empty without torch."""
    if "torch" not in sys.modules:
        return {}
    try:
        from torch_ext.compat.c10d import flight_record, ranks_of_groups

        groups = ranks_of_groups()
        # The first look creates the recorder, with the size that the environment gives it at that time.
        entries = flight_record() if groups or _has_destroyed else []
        return {"entries": entries, "groups": groups, "destroyed": dict(_destroyed)}
    except Exception:  # no failure of the recorder may cost the rank its receipt
        return {}


# Folders of torch whose Python code raises in the name of a process group, a store or RPC.
_FOLDERS = ("/torch/distributed/", "/torch/futures/", "/torch_ext/compat/", _THREADED_GROUP)


def raised_by_transport(error: BaseException) -> bool:
    """Whether torch's C++ or ``torch.distributed`` raised ``error``, rather than a test's own ``raise``. The raising
    frame decides, not the message: a test may raise ``ValueError("unexpected EOF")`` itself.
    """
    innermost = error.__traceback__
    if innermost is None or "torch" not in sys.modules:
        return False
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    file = innermost.tb_frame.f_code.co_filename
    if isinstance(error, SystemExit):  # torch's threaded group raises it in a rank when another rank has failed
        return file.endswith(_THREADED_GROUP)
    if not isinstance(error, (RuntimeError, ConnectionError, EOFError, TimeoutError)):
        return False
    code, at = innermost.tb_frame.f_code.co_code, innermost.tb_lasti
    is_raise = 0 <= at < len(code) and dis.opname[code[at]] in ("RAISE_VARARGS", "RERAISE")
    return any(folder in file for folder in _FOLDERS) or not is_raise


# The page of waits

VARIABLE = "TORCH_EXT_WAIT_PAGE"

_NAME = "torch_ext waits"
_BYTES, _VERSION = 4096, 2
_FIRST, _STRIDE, _ENTRIES = 64, 504, 8
_ENTRY = struct.Struct("=IiqQ64s40s200sqi")


class ThreadWait(NamedTuple):
    """An entry of a page: the wait of thread ``tid`` since ``since_ns``, until ``until_s`` (``time.monotonic``)."""

    since_ns: int
    wait: Wait
    tid: int
    until_s: float


class WaitPage:
    """One rank's page, read by its parent half."""

    def __init__(self) -> None:
        self.descriptor = -1  # inherited by the rank; stays -1 on a system without anonymous files
        self._memory: mmap.mmap | None = None
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create(_NAME)
            os.ftruncate(self.descriptor, _BYTES)
            self._memory = mmap.mmap(self.descriptor, _BYTES)

    def waits(self) -> tuple[Wait, ...]:
        """Return the waits of the rank, the longest first."""
        return tuple(entry.wait for entry in _entries(self._memory)) if self._memory is not None else ()

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            os.close(self.descriptor)
            self.descriptor = -1


def waits_of_threads() -> dict[int, ThreadWait]:
    """Return the entries of this process's own page, by thread; empty if there is no page, or it is closed."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = int(os.environ.get(VARIABLE, ""))
        # A program may close inherited descriptors and reuse the number for another file.
        if _os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME} "):
            with mmap.mmap(descriptor, _BYTES, prot=mmap.PROT_READ) as memory:
                return {entry.tid: entry for entry in _entries(memory)}
    return {}


def _entries(memory: mmap.mmap) -> list[ThreadWait]:
    if struct.unpack_from("=Q", memory)[0] != _VERSION:
        return []
    entries = (_entry(memory, _FIRST + number * _STRIDE) for number in range(_ENTRIES))
    return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.since_ns)


def _entry(memory: mmap.mmap, offset: int) -> ThreadWait | None:
    """Return the entry at ``offset``; None if not in use, or during a change."""
    before, peer, since_ns, number, group, operation, site, until_ns, tid = _ENTRY.unpack_from(memory, offset)
    (after,) = struct.unpack_from("=I", memory, offset)
    if before % 2 or before != after or not since_ns:
        return None
    which = f"#{number} {_text(operation)}" if number else _text(operation)
    place = f", called at {_text(site)}" if _text(site) else ""
    words = f"{which} in group {_text(group)}{place}"
    return ThreadWait(since_ns, Wait(words, (peer,) if peer >= 0 else (), transport=True), tid, until_ns / 1e9)


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")
