"""Which operation of a process group, a store or RPC a Python frame is in. Runs in ranks; touches torch only if it is
loaded.
"""

from __future__ import annotations

import ast
import functools
import linecache
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from types import CodeType, FrameType, TracebackType
from typing import Any

from torch_ext.world import _os, stores
from torch_ext.world.protocol import Wait

__all__ = ["Operation", "after_body", "operation_of", "peers_waited_for", "test_began", "waits_of_error"]

# Python files of torch whose functions call into a process group, a store or RPC, and wait there.
_WAITING_FILES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/rpc/api.py",
    "/torch/testing/_internal/distributed/multi_threaded_pg.py",
    "/torch/distributed/rendezvous.py",
    "/torch/distributed/rpc/backend_registry.py",
)
# It calls into everything that torch has; what of that waits is told by the object that is called.
_OPERATORS = "/torch/_ops.py"
# Waiting in these is done for their caller.
_OURS = (
    "/torch_ext/compat/c10d.py",
    "/torch_ext/compat/testing.py",
    "/torch_ext/sim/_collectives.py",
    "/torch_ext/sim/_gloo_halves.py",
)
_LOCKS = (
    "/threading.py",
    "/queue.py",
    "/multiprocessing/connection.py",
    "/multiprocessing/queues.py",
    "/torch_ext/sim/races/_threads.py",
    *_OURS,
)
# Functions of these that only all ranks together can finish. The last is that of RPC, where it knows the number of its
# workers beforehand.
_NEEDS_EVERYONE = frozenset(
    {"init_process_group", "_new_process_group_helper", "_new_group_with_tag", "new_group", "_init_process_group"}
)
# What such functions call their time limit.
_LIMITS = ("timeout", "process_group_timeout")
# Functions of these that wait for one peer, and the arguments that name it.
_PEER_ARGUMENTS = {"recv": ("src", "group_src"), "send": ("dst", "group_dst")}
# Methods by which a test waits itself, by the module of the object's type.
_METHODS = frozenset({"wait", "get", "multi_get", "compare_set", "synchronize", "result", "barrier"})
_TYPES = ("torch._C._distributed_c10d", "torch._C._distributed_rpc", "torch.distributed", "torch.futures", "torch._C")

# torch.distributed.rpc.constants.DEFAULT_RPC_TIMEOUT_SEC
_RPC_TIMEOUT_S = 60.0
# Characters of a call that a report shows.
_MOST_OF_CALL = 80

_AFTER_BODY = "the barrier after its body, which is over"

_began_s = time.monotonic()


def test_began() -> None:
    """Count time limits from now on: what a thread waits for was called after this."""
    global _began_s
    _began_s = time.monotonic()


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
        keyed: whether it waits in a store for what others than ranks may set too.
    """

    wait: Wait
    limit_s: float | None
    position: str
    sliced: bool = False
    keyed: bool = False


def operation_of(frame: FrameType) -> Operation:
    """Return what a thread whose innermost Python frame is ``frame`` is in."""
    position = f"{id(frame)}:{frame.f_lasti}"
    while frame.f_code.co_filename.endswith(_LOCKS) and frame.f_back is not None:
        frame = frame.f_back
    limit_s = stores.limit_of(frame)
    if limit_s is not None and frame.f_back is not None:
        return _in_store(frame, frame.f_back, limit_s, f"{position}:{frame.f_locals.get('began_s')}")
    if frame.f_code.co_filename.endswith((*_WAITING_FILES, _OPERATORS)):
        return _in_torch(frame, position)
    call = _call_at(frame)
    receiver = _receiver(call, frame) if call is not None else None
    if receiver is None or not type(receiver).__module__.startswith(_TYPES):
        return Operation(Wait(_place(frame)), None, position)
    words = f"{ast.unparse(call)[:_MOST_OF_CALL] if call is not None else '?'} in {_place(frame)}"
    return Operation(Wait(words, transport=True), _limit_of(receiver, call), position, keyed=_is_store(receiver))


def _in_store(frame: FrameType, caller: FrameType, limit_s: float, position: str) -> Operation:
    """``frame`` is the one that ``stores.py`` puts between a store's method and its ``caller``."""
    if caller.f_code.co_filename.endswith(_WAITING_FILES):  # a rendezvous, or a barrier over the store
        operation = _in_torch(caller, position)
        known_s = math.inf if operation.limit_s is None else operation.limit_s
        return replace(operation, limit_s=min(limit_s, known_s), sliced=True)
    call = _call_at(caller)
    what = ast.unparse(call)[:_MOST_OF_CALL] if call is not None else stores.words_for(frame)
    # A child may be what sets the key.
    known = None if _os.own_children() else limit_s
    return Operation(Wait(f"{what} in {_place(caller)}", transport=True), known, position, sliced=True, keyed=True)


def _in_torch(frame: FrameType, position: str) -> Operation:
    names, limit_s, inner = [], math.inf, frame
    outer: FrameType | None = frame
    while outer is not None and ("/torch/" in outer.f_code.co_filename or outer.f_code.co_filename.endswith(_OURS)):
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
        return math.inf if value == 0 else float(value) if value > 0 else _RPC_TIMEOUT_S
    return math.inf


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


def _method(call: ast.Call | None) -> str:
    return call.func.attr if call is not None and isinstance(call.func, ast.Attribute) else "?"


def _call_at(frame: FrameType) -> ast.Call | None:
    """Return the method call, by one of the names that wait, that ``frame`` is in."""
    code = frame.f_code
    where = _positions(code)
    place = where[frame.f_lasti // 2] if frame.f_lasti // 2 < len(where) else (None, None, None, None)
    line, last = (place[0], place[1]) if place[0] else (frame.f_lineno, frame.f_lineno)
    text = "".join(linecache.getline(code.co_filename, number) for number in range(line or 0, (last or 0) + 1)).strip()
    try:
        tree = ast.parse(
            text.removesuffix(":") if not text.startswith(("with", "if", "for", "while")) else text + " pass"
        )
    except (SyntaxError, ValueError):
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _method(node) in _METHODS]
    return calls[0] if len(calls) == 1 else None


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


def _limit_of(receiver: Any, call: ast.Call | None) -> float:
    """Before when the call does not end by itself. A limit among its arguments is not read: then it may end at once."""
    if call is None or len(call.args) > 1 or call.keywords or (call.args and not _is_store(receiver)):
        return 0.0
    if _is_store(receiver):
        return _began_s + _seconds(receiver.timeout)
    return math.inf


def _is_store(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and isinstance(value, torch.distributed.Store)
