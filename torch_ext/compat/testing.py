"""Private names of torch's test utilities."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch_ext.compat._lookup import lazy_names

if TYPE_CHECKING:
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import FILE_SCHEMA
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

__all__ = [
    "FILE_SCHEMA",
    "TEST_SKIPS",
    "FakeStore",
    "ProcessLocalGroup",
    "_install_threaded_pg",
    "_uninstall_threaded_pg",
    "around_threaded_collectives",
    "compare_threaded_collectives",
    "complete_threaded_world",
    "keep_upstream",
    "prepare_for_threads",
    "upstream_module",
    "upstream_name",
]

_UTILS = "torch.testing._internal.common_utils"
_DISTRIBUTED = "torch.testing._internal.common_distributed"
_THREADED = "torch.testing._internal.distributed.multi_threaded_pg"

_PLACES = {
    "FILE_SCHEMA": (f"{_UTILS}:FILE_SCHEMA",),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg:FakeStore",),
    "ProcessLocalGroup": (f"{_THREADED}:ProcessLocalGroup",),
    "TEST_SKIPS": (f"{_DISTRIBUTED}:TEST_SKIPS",),
    "_install_threaded_pg": (f"{_THREADED}:_install_threaded_pg",),
    "_uninstall_threaded_pg": (f"{_THREADED}:_uninstall_threaded_pg",),
}

__getattr__ = lazy_names(__name__, _PLACES)

_kept: dict[str, ModuleType] = {}


def upstream_module(name: str) -> ModuleType:
    """Return torch's own ``torch.testing._internal.<name>``, even if ours has replaced it in ``sys.modules``."""
    return _kept[name] if name in _kept else importlib.import_module(f"torch.testing._internal.{name}")


def upstream_name(module: str, name: str) -> Any:
    """Return ``name`` of torch's own ``torch.testing._internal.<module>``, for the ``__getattr__`` of ours.

    Raises:
        AttributeError: there is none, or it is one that Python itself asks for, such as ``__path__`` at each ``from``
            import, for which that module is not imported.
    """
    if name.startswith("__"):
        raise AttributeError(f"module 'torch_ext.testing._internal.{module}' has no attribute {name!r}")
    return getattr(upstream_module(module), name)


def keep_upstream(name: str) -> None:
    """Remember torch's own module, and the names we take from it, before another module replaces it."""
    _kept[name] = upstream_module(name)
    for each, places in _PLACES.items():
        if any(place.startswith(f"torch.testing._internal.{name}:") for place in places):
            __getattr__(each)


def complete_threaded_world() -> None:
    """Add ``comms``, which ``destroy_process_group`` clears, to torch's threaded world. torch 2.11 lacks it."""
    world = importlib.import_module(_THREADED).ThreadLocalWorld
    if not hasattr(world, "comms"):
        world.comms = property(lambda _: [])  # threaded groups have no communicators


def around_threaded_collectives(around: Callable[..., AbstractContextManager[None]]) -> Callable[[], None]:
    """Enter a context around each rank's part of each collective of torch's threaded group.

    Args:
        around: called in the rank's thread with an object that all ranks of the collective share, the name of what it
            does, such as ``AllReduce``, and the tensors that the rank lets it read and has it write.

    Returns:
        a function that ends this.
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


def compare_threaded_collectives() -> None:
    """Have a rank of torch's threaded group fail that calls another collective than the rank that began it. Idempotent.

    The group itself does for all ranks what the first one has called, whatever the others have.
    """
    group: Any = importlib.import_module(_THREADED).ProcessLocalGroup
    start = group._start_coll.__func__
    if hasattr(start, "__wrapped__"):
        return

    @functools.wraps(start)
    def start_alike(cls: Any, collective: Any, pg: Any) -> Any:
        here = importlib.import_module("torch").distributed.get_rank()
        begun = start(cls, collective, pg)
        if begun._collective is collective:
            begun.begun_by = here
        elif (called := _described(collective)) != (expected := _described(begun._collective)):
            raise RuntimeError(
                f"the ranks differ in a collective of group {pg.pg_name!r}: rank {here} called {called}, and rank "
                f"{begun.begun_by} {expected}. Have all ranks of a group call the same collectives in the same order."
            )
        return begun

    group._start_coll = classmethod(start_alike)


def _described(collective: Any) -> str:
    own = vars(collective)
    known = [f"{name}={own[name]}" for name in ("src", "dst") if name in own]
    return f"{type(collective).__name__}({', '.join(known)})"


def _reads_and_writes(collective: Any, rank: int, data: Any) -> tuple[list[Any], list[Any]]:
    # A rank brings its outputs and its inputs, and perhaps their sizes; or tensors that are both.
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
    """Replace CUDA's device guard before there are threads, if torch's fake tensors would replace it later.

    On a machine without a GPU, every fake mode replaces the process's CUDA guard by one that does nothing. Two threads
    that do so at the same time crash the process (seen with a CUDA build of torch 2.11).
    """
    torch = importlib.import_module("torch")
    exchange = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if exchange is not None and not torch.cuda.is_available():
        exchange()
