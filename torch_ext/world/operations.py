"""Which operation of a process group, a store or RPC a Python frame is in. Runs in ranks; touches torch only if it is
loaded.

A thread that waits in a method of a store is in C++, and the Python frame above says what was called, but not on what:
``group.store().wait(...)`` has a receiver without a name. So :func:`watch_stores` has these methods called through a
frame that holds the store, the arguments and the time. A store that is made waits too: a server for its clients.

A page of shared memory in which a rank's device backend says what it waits for. Standard library only.

Note [The page of waits]
~~~~~~~~~~~~~~~~~~~~~~~~
Each rank inherits the descriptor of 4096 bytes, whose number it finds in ``TORCH_EXT_WAIT_PAGE``. Whatever waits for a
peer keeps an entry there, so that the parent half can read what a rank is in without its help: also if it holds the
GIL, has been stopped by a signal, or is dead. The rank reads its own page to tell which of its threads can go on: see
Note [Provable hangs]. Neither side imports the other; this is the layout.

======  ====================================================================  ======
offset  what                                                                  type
======  ====================================================================  ======
0       2, the version of this layout; 0: nothing has been written            uint64
64      entry 0 of 8; they are 504 bytes apart                                +0      changes before and after each change: odd while the entry is changed  uint32
+4      global rank that is waited for; -1: any                               int32
+8      since when, nanoseconds of ``CLOCK_MONOTONIC``; 0: not in use         int64
+16     number of the collective in its group; 0: a transfer                  uint64
+24     name of the group, zero-terminated                                    64
+88     operation, zero-terminated                                            40
+128    file and line of the call, zero-terminated                            200
+328    when the wait ends by itself, nanoseconds of ``CLOCK_MONOTONIC``      int64
+336    the thread that waits, as the kernel numbers it                       int32
======  ====================================================================  ======
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import json
import linecache
import math
import mmap
import os
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

from torch_ext.world import _os, wording
from torch_ext.world.protocol import Wait

__all__ = [
    "ALL",
    "VARIABLE",
    "Operation",
    "ThreadWait",
    "WaitPage",
    "after_body",
    "look_through",
    "note_destroyed",
    "operation_of",
    "own_record",
    "own_summary",
    "peers_waited_for",
    "raised_by_transport",
    "test_began",
    "waits_of_error",
    "waits_of_threads",
    "watch_stores",
]

# Python files of torch whose functions call into a process group, a store or RPC, and wait there.
_WAITING_FILES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/rpc/api.py",
    "/torch/testing/_internal/distributed/multi_threaded_pg.py",
    "/torch/distributed/rendezvous.py",
    "/torch/distributed/rpc/backend_registry.py",
)
# It dispatches everything; the type of the receiver decides.
_OPERATORS = "/torch/_ops.py"
# Wait for their caller; with those of layers above, see look_through().
_looked_through = ["/torch_ext/compat/c10d.py", "/torch_ext/compat/testing.py", "/torch_ext/world/threads.py"]
_LOCKS = ("/threading.py", "/queue.py", "/multiprocessing/connection.py", "/multiprocessing/queues.py")
# Functions of these that only all ranks together can finish. The last is that of RPC, where it knows the number of its
# workers beforehand.
_NEEDS_EVERYONE = frozenset(
    {"init_process_group", "_new_process_group_helper", "_new_group_with_tag", "new_group", "_init_process_group"}
)
# What such functions call their time limit.
_LIMITS = ("timeout", "process_group_timeout")
# Functions of these that wait for one peer, and the arguments that name it.
_PEER_ARGUMENTS = {"recv": ("src", "group_src"), "send": ("dst", "group_dst")}
# Methods by which a test waits itself, and the modules of their objects' types.
_METHODS = frozenset({"wait", "get", "multi_get", "compare_set", "synchronize", "result", "barrier"})
_TYPES = ("torch._C._distributed_c10d", "torch._C._distributed_rpc", "torch.distributed")
_STORE_METHODS = ("barrier", "get", "multi_get", "queue_pop", "wait")
_STORE_FRAMES = ("wait_in_store", "make_store")
# The arguments of torch's TCPStore, and its time limit if it is given none, in seconds.
_OF_SERVER = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers")
_SERVER_S = 300.0

# torch.distributed.rpc.constants.DEFAULT_RPC_TIMEOUT_SEC
_RPC_TIMEOUT_S = 60.0
# Characters of a call that a report shows.
_MOST_OF_CALL = 80

_AFTER_BODY = "the barrier after its body, which is over"

_began_s = _os.monotonic()


def test_began() -> None:
    """Count time limits from now on: what a thread waits for was called after this."""
    global _began_s
    _began_s = _os.monotonic()


def after_body(wait: Callable[..., object], **how: Any) -> None:
    """Call ``wait(**how)``, one of torch's functions, in which a rank whose body is over waits for the others.

    A report then says so, and does not take it for a call of the test.
    """
    wait(**how)


@dataclass(frozen=True)
class Operation:
    """What a thread is in.

    Attributes:
        wait: in words, and for whom.
        limit_s: before when it does not end by itself, by ``time.monotonic``; None if the frame is in no operation that
            is known to wait.
        position: changes if the thread has moved on to another call.
        sliced: whether it looks again and again for what it waits for.
    """

    wait: Wait
    limit_s: float | None
    position: str
    sliced: bool = False


def look_through(*files: str) -> None:
    """Have waits in ``files`` (the ends of paths) count as waits of what called them, from now on."""
    _looked_through.extend(file for file in files if file not in _looked_through)


def operation_of(frame: FrameType) -> Operation:
    """Return what a thread whose innermost Python frame is ``frame`` is in."""
    position = f"{id(frame)}:{frame.f_lasti}"
    while frame.f_code.co_filename.endswith((*_LOCKS, *_looked_through)) and frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_filename == __file__ and frame.f_code.co_name in _STORE_FRAMES and frame.f_back is not None:
        return _in_store(frame, frame.f_back, f"{position}:{frame.f_locals.get('began_s')}")
    if frame.f_code.co_filename.endswith((*_WAITING_FILES, _OPERATORS)):
        return _in_torch(frame, position)
    call = _call_at(frame)
    receiver = _receiver(call, frame) if call is not None else None
    if call is None or not type(receiver).__module__.startswith(_TYPES):
        return Operation(Wait(_place(frame)), None, position)
    words = f"{ast.unparse(call)[:_MOST_OF_CALL]} in {_place(frame)}"
    # A limit among its arguments is not read: then it may end at once.
    limit_s = 0.0 if call.args or call.keywords else math.inf
    return Operation(Wait(words, transport=True), limit_s, position)


def watch_stores(makes_transport: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have the waiting methods of torch's stores called through frames that this module knows, in this process. The
    maker of servers is passed through ``makes_transport``. Idempotent.
    """
    torch: Any = sys.modules["torch"]
    store, server = torch.distributed.Store, torch.distributed.TCPStore
    for name in _STORE_METHODS:
        method = getattr(store, name, None)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(store, name, _watched(method))
    if not hasattr(server.__init__, "__wrapped__"):
        server.__init__ = _watched_server(makes_transport(server.__init__))


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wait_in_store(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_s = _os.monotonic()  # noqa: F841  # _limit_in_store() reads it
        return method(self, *args, **kwargs)

    return wait_in_store


def _watched_server(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def make_store(self: Any, *args: Any, **kwargs: Any) -> None:
        began_s = _os.monotonic()  # noqa: F841  # _limit_in_store() reads it
        make(self, *args, **kwargs)

    return make_store


def _in_store(frame: FrameType, caller: FrameType, position: str) -> Operation:
    """``frame`` is the one that :func:`watch_stores` puts between a store's method and its ``caller``."""
    limit_s = _limit_in_store(frame)
    if caller.f_code.co_filename.endswith(_WAITING_FILES):  # a rendezvous, or a barrier over the store
        operation = _in_torch(caller, position)
        known_s = math.inf if operation.limit_s is None else operation.limit_s
        return replace(operation, limit_s=min(limit_s, known_s), sliced=True)
    call = _call_at(caller)
    method = frame.f_locals.get("method")
    called = f"{method.__name__}() of a store" if method is not None else "TCPStore()"
    what = ast.unparse(call)[:_MOST_OF_CALL] if call is not None else called
    return Operation(Wait(f"{what} in {_place(caller)}", transport=True), limit_s, position, sliced=True)


def _limit_in_store(frame: FrameType) -> float:
    """Return before when the call does not end by itself, by ``time.monotonic``."""
    found = frame.f_locals
    if "began_s" not in found:
        return 0.0
    if "make" in found:
        given = {**dict(zip(_OF_SERVER, found["args"], strict=False)), **found["kwargs"]}
        # A client sleeps between two tries to connect, ever longer: it may go on by itself.
        waits = given.get("is_master", False) and given.get("wait_for_workers", True)
        return float(found["began_s"]) + _seconds_of_store(given.get("timeout")) if waits else 0.0
    values = [*found["args"], *found["kwargs"].values()]
    if any(value is False for value in values):  # queue_pop() that is not to wait
        return 0.0
    limits = [value for value in values if isinstance(value, timedelta)] or [found["self"].timeout]
    return float(found["began_s"]) + _seconds_of_store(limits[0])


def _seconds_of_store(limit: Any) -> float:
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else _SERVER_S
    return seconds if seconds > 0 else math.inf


def _in_torch(frame: FrameType, position: str) -> Operation:
    names, limit_s, inner = [], math.inf, frame
    outer: FrameType | None = frame
    while outer is not None and (
        "/torch/" in outer.f_code.co_filename or outer.f_code.co_filename.endswith(tuple(_looked_through))
    ):
        names.append(outer.f_code.co_name)
        limit_s = min(limit_s, *(_seconds(outer.f_locals.get(name)) for name in _LIMITS))
        inner, outer = outer, outer.f_back
    if frame.f_code.co_filename.endswith(_OPERATORS) and not _is_of_c10d(frame.f_locals.get("self")):
        return Operation(Wait(_place(outer or frame)), None, position)
    if outer is not None and outer.f_code is after_body.__code__:
        return Operation(Wait(_AFTER_BODY, transport=True, over=True), _began_s + limit_s, position)
    peers = peers_waited_for(frame)
    everyone = not _NEEDS_EVERYONE.isdisjoint(names)
    public = next((name for name in reversed(names) if not name.startswith(("_", "wrapper"))), names[0])
    words = f"{public}({f'peer {peers[0]}' if peers else ''}) in {_place(outer or inner)}"
    return Operation(Wait(words, peers, everyone, transport=True), _began_s + limit_s, position)


def _is_torchs(file: str) -> bool:
    return "/torch/" in file or file.endswith(tuple(_looked_through))


def _is_of_c10d(operator: Any) -> bool:
    """Whether it is one of torch's collectives. Another thread may be about to make it: no code of its is run."""
    names = (getattr(operator, "__dict__", {}).get(name) for name in ("_name", "_qualified_op_name"))
    return any(isinstance(name, str) and "c10d" in name for name in names)


def peers_waited_for(frame: FrameType) -> tuple[int, ...]:
    """Return the ranks that a point-to-point call waits for, if ``frame`` is in one of torch's."""
    if not frame.f_code.co_filename.endswith(_WAITING_FILES[0]):
        return ()
    found = (frame.f_locals.get(name) for name in _PEER_ARGUMENTS.get(frame.f_code.co_name, ()))
    return tuple(peer for peer in found if isinstance(peer, int))[:1]


def waits_of_error(error: BaseException) -> tuple[Wait, ...]:
    """Return the operation of torch's that raised ``error``, if one did."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(_WAITING_FILES):
            found = _in_torch(_innermost(trace), "")
            return (found.wait,) if found.wait.transport else ()
        trace = trace.tb_next
    return ()


def _innermost(trace: TracebackType) -> FrameType:
    """Return the deepest frame of torch's below ``trace``."""
    frame = trace.tb_frame
    while trace.tb_next is not None:
        trace = trace.tb_next
        if trace.tb_frame.f_code.co_filename.endswith(_WAITING_FILES):
            frame = trace.tb_frame
    return frame


def _seconds(value: Any) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # RPC's marks: 0 for no limit, -1 for its default.
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


def _call_at(frame: FrameType) -> ast.Call | None:
    """Return the call that ``frame`` is in, if it is one of a method that waits.

    Python 3.10 does not tell which call of a line it is: there the line must hold one only.
    """
    code = frame.f_code
    where = _positions(code)
    first, last, begin, end = where[frame.f_lasti // 2] if frame.f_lasti // 2 < len(where) else (None,) * 4
    if first is None or last is None or begin is None or end is None:
        text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    else:
        lines = [linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)]
        lines[-1] = lines[-1][:end]  # before the other end, which may be in the same line
        lines[0] = lines[0][begin:]
        text = f"({b''.join(lines).decode(errors='replace')})"
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    statement = tree.body[0] if tree.body else None
    is_exact = begin is not None and isinstance(statement, ast.Expr) and statement.value in calls
    if not (is_exact or (begin is None and len(calls) == 1)):
        return None
    call = calls[0]  # a walk is breadth first
    return call if isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS else None


@functools.lru_cache(maxsize=64)
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    return list(code.co_positions()) if hasattr(code, "co_positions") else []


def _receiver(call: ast.Call, frame: FrameType) -> Any:
    """Return the object whose method is called, if that can be told without running any code."""
    names: list[str] = []
    node: ast.expr = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    found = frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    for name in reversed(names):
        found = getattr(found, "__dict__", {}).get(name)
    return found


# In place of a group's name.
ALL = "*"
# Where the body has destroyed process groups, by the group's name.
_destroyed: dict[str, str] = {}


def note_destroyed(names: Sequence[str]) -> None:
    """Note the user's line that destroys these groups now; no names: all groups."""
    place = wording.place_here()
    if place:
        _destroyed.update(dict.fromkeys(names or [ALL], place))


def own_record() -> str:
    """Return the record as JSON, or an empty string: ``entries``, ``groups`` (ranks by the group's name) and
    ``destroyed`` (the line that destroyed a group, by its name; ``"*"`` for all).

    It is empty where torch is not loaded or has no recorder, and before the first process group exists.
    """
    if "torch" not in sys.modules:
        return ""
    try:
        from torch_ext.compat.c10d import _dump_fr_trace_json, ranks_of_groups

        entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
        return json.dumps({"entries": entries, "groups": ranks_of_groups(), "destroyed": _destroyed})
    except Exception:  # whatever a release of torch does here, it must not cost the rank its receipt
        return ""


def own_summary() -> str:
    """Return a text that changes whenever a collective begins or ends; empty if there is no record."""
    record = json.loads(own_record() or "{}")
    return json.dumps([[entry.get("record_id"), entry.get("retired")] for entry in record.get("entries", [])][-64:])


# Folders of torch whose Python code raises in the name of a process group, a store or RPC.
_THREADED_GROUP = "/multi_threaded_pg.py"
_FOLDERS = ("/torch/distributed/", "/torch/futures/", "/torch_ext/compat/", _THREADED_GROUP)


def raised_by_transport(error: BaseException) -> bool:
    """Whether ``error`` was raised by torch's C++ or by ``torch.distributed``, rather than by a test's own ``raise``.

    Words cannot tell: a test may raise ``ValueError("unexpected EOF")`` of its own. Where it was raised can.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    innermost = _innermost(error.__traceback__)
    if innermost is None:
        return False
    if isinstance(error, SystemExit):  # how torch's threaded group tells a rank that another one has failed
        return innermost.tb_frame.f_code.co_filename.endswith(_THREADED_GROUP)
    if not isinstance(error, (RuntimeError, ConnectionError, EOFError, TimeoutError)):
        return False
    in_torch = any(folder in innermost.tb_frame.f_code.co_filename for folder in _FOLDERS)
    return in_torch or not _is_raise(innermost)


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _is_raise(trace: TracebackType) -> bool:
    """Whether the exception was raised by a ``raise`` statement in this frame, not by what it called."""
    code = trace.tb_frame.f_code.co_code
    if not 0 <= trace.tb_lasti < len(code):
        return False
    return dis.opname[code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


VARIABLE = "TORCH_EXT_WAIT_PAGE"

_NAME = "torch_ext waits"
_BYTES, _VERSION = 4096, 2
_FIRST, _STRIDE, _ENTRIES = 64, 504, 8
_ENTRY = struct.Struct("=IiqQ64s40s200sqi")


class ThreadWait(NamedTuple):
    """An entry of a page: what thread ``tid`` has waited for since ``since_ns``, and until when at most.

    ``until_s`` is by :func:`time.monotonic`.
    """

    since_ns: int
    wait: Wait
    tid: int
    until_s: float


class WaitPage:
    """One rank's page, as its parent half reads it. There is none where the system has no anonymous files.

    Attributes:
        descriptor: what the rank inherits; -1 without a page. Closed by :meth:`close`.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._memory: mmap.mmap | None = None
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create(_NAME)
            os.ftruncate(self.descriptor, _BYTES)
            self._memory = mmap.mmap(self.descriptor, _BYTES)

    def waits(self) -> tuple[Wait, ...]:
        """Return what the rank waits for now, the longest wait first."""
        return tuple(entry.wait for entry in _entries(self._memory)) if self._memory is not None else ()

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def waits_of_threads() -> dict[int, ThreadWait]:
    """Return what this process's own page says, by thread; nothing if it has none, or has closed it."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = int(os.environ.get(VARIABLE, ""))
        # A program may close what it has inherited, and open something else under the number.
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME} "):
            with mmap.mmap(descriptor, _BYTES, prot=mmap.PROT_READ) as memory:
                return {entry.tid: entry for entry in _entries(memory)}
    return {}


def _entries(memory: mmap.mmap) -> list[ThreadWait]:
    """Return what stands on a page, the longest wait first."""
    if struct.unpack_from("=Q", memory)[0] != _VERSION:
        return []
    entries = (_entry(memory, _FIRST + number * _STRIDE) for number in range(_ENTRIES))
    return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.since_ns)


def _entry(memory: mmap.mmap, offset: int) -> ThreadWait | None:
    """Return what an entry says; None for one that is not in use, or is being changed."""
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
