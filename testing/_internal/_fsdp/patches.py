"""Context managers that replace a function of c10d or FSDP2 on all ranks.

Note [Patches and threads] ~~~~~~~~~~~~~~~~~~~~~~~~~~ Ranks may be processes, which each
have the patched name to themselves, or threads, which share it. In both cases:

- No rank runs its body before every rank has set its replacement (a barrier after
  setting).
- The name is not restored while a thread is in its body (a barrier before leaving).
- The last thread to leave restores what the first thread found. If every thread
  restored what it found itself, one could restore another thread's replacement for
  good.

Threads share one replacement, the one that was set last. A body that raises leaves
without the barrier, because a peer may never arrive; the name is restored when the last
thread has left.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from torch_ext.compat import fsdp as private

__all__ = [
    "ALL_GATHER",
    "REDUCE_SCATTER",
    "patch_all_gather",
    "patch_all_reduce",
    "patch_foreach_all_gather",
    "patch_foreach_reduce",
    "patch_post_backward",
    "patch_reduce_scatter",
    "patch_register_post_backward_hook_backward",
    "patch_reshard",
    "patch_unshard",
]

_Patch = AbstractContextManager[None]


def _first_present(*names: str) -> str:
    return next(name for name in names if hasattr(dist, name))


# What FSDP calls for one tensor. Releases before 2.13 have only the second name of each
# pair; later ones keep it as a deprecated wrapper that FSDP no longer calls, so that
# patching the wrapper would change nothing.
ALL_GATHER = _first_present("all_gather_single", "all_gather_into_tensor")
REDUCE_SCATTER = _first_present("reduce_scatter_single", "reduce_scatter_tensor")


@dataclass(frozen=True)
class AttributeSlot:
    """An attribute of a module or class, or an entry of a dictionary.

    An attribute is read without binding, so that a static method is restored as one.
    """

    owner: Any
    name: str

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def read(self) -> Any:
        entries = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        if self.name in entries:
            return entries[self.name]
        # Configuration modules compute their attributes.
        return getattr(self.owner, self.name)

    def write(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


@dataclass
class _Level:
    """One depth of nested contexts over a slot: what the first thread found, and how
    many threads are inside.
    """

    before: Any
    threads_inside: int = 0


@dataclass
class _Registry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    levels: dict[tuple[int, str], list[_Level]] = field(default_factory=dict)
    here: threading.local = field(default_factory=threading.local)

    def enter(self, slot: AttributeSlot, replacement: Any) -> None:
        with self.lock:
            levels, depths = self.levels.setdefault(slot.key, []), self._depths()
            if depths[slot.key] == len(levels):
                levels.append(_Level(before=slot.read()))
            levels[depths[slot.key]].threads_inside += 1
            slot.write(replacement)
            depths[slot.key] += 1

    def leave(self, slot: AttributeSlot) -> None:
        with self.lock:
            levels, depths = self.levels[slot.key], self._depths()
            depths[slot.key] -= 1
            levels[depths[slot.key]].threads_inside -= 1
            # A thread that raised may leave an outer level while another is still in an
            # inner one.
            while levels and not levels[-1].threads_inside:
                slot.write(levels.pop().before)
            if not levels:
                del self.levels[slot.key]

    def _depths(self) -> Counter[tuple[int, str]]:
        if not hasattr(self.here, "depths"):
            self.here.depths = Counter()
        return self.here.depths


_registry = _Registry()


@contextmanager
def patched(slot: AttributeSlot, replacement: Any) -> Iterator[None]:
    """Keep ``replacement`` in ``slot`` while all ranks of the default group run their
    bodies.

    Collective: all ranks must enter, and all must leave or raise. See Note [Patches and
        threads].
    """
    _registry.enter(slot, replacement)
    try:
        dist.barrier()
        yield
        dist.barrier()
    finally:
        _registry.leave(slot)


def patch_all_gather(new_all_gather_into_tensor: Callable[..., Any]) -> _Patch:
    """Replace the single-tensor all-gather that FSDP calls through
    ``torch.distributed``.
    """
    return patched(AttributeSlot(dist, ALL_GATHER), new_all_gather_into_tensor)


def patch_reduce_scatter(new_reduce_scatter_tensor: Callable[..., Any]) -> _Patch:
    """Replace the single-tensor reduce-scatter that FSDP calls through
    ``torch.distributed``.
    """
    return patched(AttributeSlot(dist, REDUCE_SCATTER), new_reduce_scatter_tensor)


def patch_all_reduce(new_all_reduce: Callable[..., Any]) -> _Patch:
    """Replace ``torch.distributed.all_reduce``."""
    return patched(AttributeSlot(dist, "all_reduce"), new_all_reduce)


def patch_foreach_all_gather(new_foreach_all_gather: Callable[..., Any]) -> _Patch:
    """Replace the function that all-gathers the parameters of an FSDP2
    parameter group.
    """
    return patched(
        AttributeSlot(private.param_group, "foreach_all_gather"), new_foreach_all_gather
    )


def patch_foreach_reduce(new_foreach_reduce: Callable[..., Any]) -> _Patch:
    """Replace the function that reduces the gradients of an FSDP2 parameter group."""
    return patched(
        AttributeSlot(private.param_group, "foreach_reduce"), new_foreach_reduce
    )


def patch_unshard(new_unshard: Callable[..., Any]) -> _Patch:
    """Replace FSDP2's method ``FSDPParamGroup.unshard``."""
    return _patch_param_group("unshard", new_unshard)


def patch_reshard(new_reshard: Callable[..., Any]) -> _Patch:
    """Replace FSDP2's method ``FSDPParamGroup.reshard``."""
    return _patch_param_group("reshard", new_reshard)


def patch_post_backward(new_post_backward: Callable[..., Any]) -> _Patch:
    """Replace FSDP2's method ``FSDPParamGroup.post_backward``."""
    return _patch_param_group("post_backward", new_post_backward)


def patch_register_post_backward_hook_backward(
    new_backward: Callable[..., Any],
) -> _Patch:
    """Replace the backward of the autograd function that runs the post-backward of an
    FSDP2 parameter group.
    """
    return patched(
        AttributeSlot(private.param_group.RegisterPostBackwardFunction, "backward"),
        new_backward,
    )


def _patch_param_group(method: str, replacement: Callable[..., Any]) -> _Patch:
    return patched(
        AttributeSlot(private.param_group.FSDPParamGroup, method), replacement
    )
