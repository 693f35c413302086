"""Private names of torch's test utilities."""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
import threading
import traceback
import unittest
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType, ModuleType
from typing import Any

import torch

from torch_ext.compat import lazy_names

_UTILS = "torch.testing._internal.common_utils"
_DISTRIBUTED = "torch.testing._internal.common_distributed"
_THREADED = "torch.testing._internal.distributed.multi_threaded_pg"

_PLACES = {
    "FILE_SCHEMA": (f"{_UTILS}:FILE_SCHEMA",),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg:FakeStore",),
    "TEST_SKIPS": (f"{_DISTRIBUTED}:TEST_SKIPS",),
    "module_db": ("torch.testing._internal.common_modules:module_db",),
    "neg_view": ("torch:_neg_view",),
    "noncontiguous_like": (f"{_UTILS}:noncontiguous_like",),
    "op_db": ("torch.testing._internal.common_methods_invocations:op_db",),
    "OpInfo": ("torch.testing._internal.opinfo.core:OpInfo",),
    "SampleInput": ("torch.testing._internal.opinfo.core:SampleInput",),
    "testing_utils": ("torch.testing:_utils",),
    "tree_leaves": ("torch.utils._pytree:tree_leaves",),
    "tree_map": ("torch.utils._pytree:tree_map",),
    "_install_threaded_pg": (f"{_THREADED}:_install_threaded_pg",),
    "_uninstall_threaded_pg": (f"{_THREADED}:_uninstall_threaded_pg",),
}

__getattr__ = lazy_names(__name__, _PLACES)

# Modules that keep a seed, with the caller's stack, until their device is initialized.
_SEEDED = ("torch.cuda", "torch.xpu", "torch.mtia")

# How many of a rank's last collectives of a group are kept.
_MAX_CALLS = 16
# Seconds to wait for the calls of the remaining ranks after two ranks' calls differ.
_ALL_RANKS_S = 1.0

_originals: dict[str, ModuleType] = {}


def seed_without_stacks() -> None:
    """Make ``torch.manual_seed`` format no stack for a kind of device that this torch was built without: no message
    shows these stacks, and three for each seed take a twelfth of the time of FSDP's suites.
    """
    quiet = ModuleType("traceback")
    vars(quiet).update(vars(traceback), format_stack=lambda *args, **kwargs: [])
    for module in map(importlib.import_module, _SEEDED):
        if not getattr(module, "_is_compiled", lambda: True)() and getattr(module, "traceback", None) is traceback:
            module.traceback = quiet  # type: ignore[attr-defined]


def samples_without_sources() -> None:
    """Make ``OpInfo`` find the test that asks for samples by the stack's frames alone. ``inspect.stack`` looks for the
    source of each frame too: below pytest, four fifths of the time in which an operator is compared.
    """
    for name in (_UTILS, "torch.testing._internal.opinfo.core"):
        importlib.import_module(name).extract_test_fn = _running_test  # type: ignore[attr-defined]


def _running_test() -> Callable[..., Any] | None:
    """Return the function of the innermost test of unittest on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        case = frame.f_locals.get("self")
        if issubclass(type(case), unittest.TestCase):  # a proxy may claim another class
            try:
                class_name, _, name = str(case.id()).rpartition(".")  # type: ignore[union-attr]
            except Exception:  # as torch's: a sample is wanted, and its test only for messages
                return None
            if class_name.rpartition(".")[2] == type(case).__name__ and name.startswith("test"):
                return getattr(getattr(case, name, None), "__func__", None)
        frame = frame.f_back
    return None


def upstream_module(name: str) -> ModuleType:
    """Return torch's own ``torch.testing._internal.<name>``, even if ours has replaced it in ``sys.modules``."""
    return _originals[name] if name in _originals else importlib.import_module(f"torch.testing._internal.{name}")


def upstream_name(module: str, name: str) -> Any:
    """Return ``name`` of torch's own ``torch.testing._internal.<module>``, for the ``__getattr__`` of ours. Raises
    AttributeError if there is none, or Python itself looks it up, such as ``__path__`` at each ``from`` import.
    """
    if name.startswith("__"):
        raise AttributeError(f"module 'torch_ext.testing._internal.{module}' has no attribute {name!r}")
    return getattr(upstream_module(module), name)


def keep_upstream(name: str) -> None:
    """Remember torch's own module, and the names we take from it, before another module replaces it."""
    _originals[name] = upstream_module(name)
    for each, places in _PLACES.items():
        if any(place.startswith(f"torch.testing._internal.{name}:") for place in places):
            __getattr__(each)


def around_threaded_collectives(around: Callable[..., AbstractContextManager[None]]) -> Callable[[], None]:
    """Enter a context around each rank's part of each collective of torch's threaded group; return the undo function.
    ``around`` is called in the rank's thread with an object that all ranks of the collective share, the collective's
    name, such as ``AllReduce``, and the rank's tensors that it reads and writes.
    """
    collective = importlib.import_module(_THREADED).Collective
    original = collective.join

    def join(self: Any, rank: int, data: Any) -> Any:
        reads, writes = _reads_and_writes(self._collective, rank, data)
        with around(self, type(self._collective).__name__, reads, writes):
            return original(self, rank, data)

    def undo() -> None:
        collective.join = original

    collective.join = join
    return undo


class ThreadedWorld:
    """The collectives of one test whose ranks are threads. ``line_here`` returns the user's line that the calling
    thread is in, for messages; empty if there is none.

    Torch keeps the collectives of all tests in one table, by the name of the group. So a thread of a test that has
    timed out would join a collective of the next test, whose groups have the same names.
    """

    def __init__(self, line_here: Callable[[], str]) -> None:
        self._line_here = line_here
        self._terminate = threading.Event()  # torch's collectives read it by this name
        self._pending: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._calls: dict[tuple[int, str], list[dict[str, Any]]] = {}  # by rank and group
        self._groups: dict[str, list[int]] = {}

    def end(self) -> None:
        """Wake the ranks from their collectives, which raise SystemExit from now on. Idempotent."""
        self._terminate.set()
        with self._changed:
            pending = list(self._pending.values())
            self._changed.notify_all()
        for collective in pending:
            for condition in (collective._start_cond, collective._done_cond):
                with condition:
                    condition.notify_all()

    def start(self, collective: Any, group: Any) -> Any:
        """Return the collective of ``group`` that the calling rank is to join. Raises RuntimeError if another rank has
        called a different one, SystemExit if the world has ended.
        """
        rank = torch.distributed.get_rank()
        with self._changed:
            if self._terminate.is_set():
                sys.exit("Test termination event occurs: this thread belongs to a test that is over.")
            pending = self._pending.get(group.pg_name)
            if pending is None:
                pending = importlib.import_module(_THREADED).Collective(group.size(), collective, self)
                pending.calls = {}
                self._pending[group.pg_name] = pending
            pending.calls[rank] = _describe(collective), self._line_here()
            self._note_call(rank, group, collective)
            self._changed.notify_all()
            if pending.calls[rank][0] != _describe(pending._collective):
                # Wait for all ranks, so that the message shows which calls most of them made.
                self._changed.wait_for(lambda: len(pending.calls) == group.size(), _ALL_RANKS_S)
                calls = "; ".join(
                    f"rank {peer} called {call}{f' at {line}' if line else ''}"
                    for peer, (call, line) in sorted(pending.calls.items())
                )
                raise RuntimeError(
                    f"the ranks differ in a collective of group {group.pg_name!r}: {calls}. "
                    "Have all ranks of a group call the same collectives in the same order."
                )
        return pending

    def finish(self, collective: Any, group: Any) -> None:
        """Forget ``collective``: the calling rank has its result. The first rank forgets it for all."""
        with self._changed:
            if self._pending.get(group.pg_name) is collective:
                del self._pending[group.pg_name]
            self._calls[torch.distributed.get_rank(), group.pg_name][-1]["retired"] = True

    def record(self, rank: int) -> str:
        """Return the collectives of a rank, in JSON, in the form of a flight record."""
        with self._changed:
            entries = [entry for (of, _), calls in self._calls.items() if of == rank for entry in calls]
            return json.dumps({"entries": entries, "groups": self._groups})

    def _note_call(self, rank: int, group: Any, collective: Any) -> None:
        name = group.pg_name
        if name not in self._groups:
            self._groups[name] = torch.distributed.get_process_group_ranks(group)
        calls = self._calls.setdefault((rank, name), [])
        number = calls[-1]["collective_seq_id"] + 1 if calls else 1
        calls.append(
            {
                "process_group": [name, "default_pg" if name == "0" else ""],
                "collective_seq_id": number,
                "profiling_name": f"threaded:{_name(collective)}",
            }
        )
        del calls[:-_MAX_CALLS]


def separate_threaded_worlds(world_of: Callable[[threading.Thread], ThreadedWorld | None]) -> None:
    """Make threads for which ``world_of`` returns a world meet only in that world, and compare their collectives:
    torch's group runs the first rank's collective for all. Threads that ranks start, such as autograd's, belong to the
    world in which their group was used first. Idempotent.
    """
    group: Any = importlib.import_module(_THREADED).ProcessLocalGroup
    start, finish = group._start_coll.__func__, group._end_coll.__func__
    if hasattr(start, "__wrapped__"):
        return

    def world_for(pg: Any) -> ThreadedWorld | None:
        world = world_of(threading.current_thread()) or getattr(pg, "_torch_ext_world", None)
        pg._torch_ext_world = world
        return world

    @functools.wraps(start)
    def start_in_world(cls: Any, collective: Any, pg: Any) -> Any:
        world = world_for(pg)
        return start(cls, collective, pg) if world is None else world.start(collective, pg)

    @functools.wraps(finish)
    def finish_in_world(cls: Any, collective: Any, pg: Any) -> None:
        world = world_for(pg)
        if world is None:
            finish(cls, collective, pg)
        else:
            world.finish(collective, pg)

    group._start_coll, group._end_coll = classmethod(start_in_world), classmethod(finish_in_world)


def _describe(collective: Any) -> str:
    own = vars(collective)
    known = [f"{name}={own[name]}" for name in ("src", "dst") if name in own]
    return f"{_name(collective)}({', '.join(known)})"


def _name(collective: Any) -> str:
    """Return the user's name of a collective of torch's threaded group, such as ``all_reduce`` for ``AllReduce``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(collective).__name__).lower()


def _reads_and_writes(collective: Any, rank: int, data: Any) -> tuple[list[Any], list[Any]]:
    # `data` is a rank's (outputs, inputs) and perhaps their sizes, or tensors that are both.
    if isinstance(data, tuple):
        return list(_tensors((data[1],))), list(_tensors((data[0],)))
    both = list(_tensors(data))
    if type(collective).__name__ != "Broadcast":
        return both, both
    return (both, []) if collective.src == rank else ([], both)


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif hasattr(value, "untyped_storage"):
            yield value


def prepare_for_threads() -> None:
    """Replace CUDA's device guard before there are threads: without a GPU, every fake mode of torch replaces the
    process's guard by one that does nothing, and two threads that do so at the same time crash the process (seen with a
    CUDA build).
    """
    exchange = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if exchange is not None and not torch.cuda.is_available():
        exchange()
