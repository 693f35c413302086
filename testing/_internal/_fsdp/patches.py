"""Context managers that replace a function of c10d or FSDP2 on all ranks.

Note [Patches and threads]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks may be threads, which share the patched name and the replacement set last. A
barrier after setting keeps a rank from running its body before every rank has set its
replacement. A barrier before leaving keeps the name from being restored while a thread
is in its body; a body that raises leaves without it, because a peer may never arrive.
The last thread to leave restores what the first thread found: if each restored what it
found, one could leave another's replacement in place.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torch_ext.compat.fsdp import param_group

__all__ = [
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


@dataclass
class _Level:
    """One depth of nested contexts over a name."""

    before: Any  # what the first thread found
    threads_inside: int = 0


_lock = threading.Lock()
# Keyed by the owner's id and the name, as are each thread's counts of contexts.
_levels: defaultdict[tuple[int, str], list[_Level]] = defaultdict(list)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.depths: Counter[tuple[int, str]] = Counter()


_state = _ThreadState()


def _enter(owner: Any, name: str, replacement: Any) -> None:
    key = id(owner), name
    with _lock:
        levels, depth = _levels[key], _state.depths[key]
        if depth == len(levels):
            levels.append(_Level(before=_read(owner, name)))
        levels[depth].threads_inside += 1
        _write(owner, name, replacement)
        _state.depths[key] += 1


def _leave(owner: Any, name: str) -> None:
    key = id(owner), name
    with _lock:
        levels = _levels[key]
        _state.depths[key] -= 1
        levels[_state.depths[key]].threads_inside -= 1
        # A thread that raised may leave an outer level before another an inner one.
        while levels and not levels[-1].threads_inside:
            _write(owner, name, levels.pop().before)


def _read(owner: Any, name: str) -> Any:
    # Without binding, so that a static method is restored as one, unless computed.
    entries = owner if isinstance(owner, dict) else vars(owner)
    return entries[name] if name in entries else getattr(owner, name)


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


@contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Keep ``replacement`` as attribute ``name`` of a module or class, or as entry of a
    dictionary, while all ranks of the default group run their bodies. Collective. See
    Note [Patches and threads].
    """
    _enter(owner, name, replacement)
    try:
        dist.barrier()
        yield
        dist.barrier()
    finally:
        _leave(owner, name)


def patch_all_gather(new_all_gather_into_tensor: Callable[..., Any]) -> _Patch:
    """Replace ``torch.distributed.all_gather_single``, which FSDP calls."""
    return patched(dist, "all_gather_single", new_all_gather_into_tensor)


def patch_reduce_scatter(new_reduce_scatter_tensor: Callable[..., Any]) -> _Patch:
    """Replace ``torch.distributed.reduce_scatter_single``, which FSDP calls."""
    return patched(dist, "reduce_scatter_single", new_reduce_scatter_tensor)


def patch_all_reduce(new_all_reduce: Callable[..., Any]) -> _Patch:
    """Replace ``torch.distributed.all_reduce``."""
    return patched(dist, "all_reduce", new_all_reduce)


def patch_foreach_all_gather(new_foreach_all_gather: Callable[..., Any]) -> _Patch:
    """Replace the function that all-gathers the parameters of an FSDP2 group."""
    return patched(param_group, "foreach_all_gather", new_foreach_all_gather)


def patch_foreach_reduce(new_foreach_reduce: Callable[..., Any]) -> _Patch:
    """Replace the function that reduces the gradients of an FSDP2 group."""
    return patched(param_group, "foreach_reduce", new_foreach_reduce)


def patch_unshard(new_unshard: Callable[..., Any]) -> _Patch:
    """Replace FSDP2's method ``FSDPParamGroup.unshard``."""
    return patched(param_group.FSDPParamGroup, "unshard", new_unshard)


def patch_reshard(new_reshard: Callable[..., Any]) -> _Patch:
    """Replace FSDP2's method ``FSDPParamGroup.reshard``."""
    return patched(param_group.FSDPParamGroup, "reshard", new_reshard)


def patch_post_backward(new_post_backward: Callable[..., Any]) -> _Patch:
    """Replace FSDP2's method ``FSDPParamGroup.post_backward``."""
    return patched(param_group.FSDPParamGroup, "post_backward", new_post_backward)


def patch_register_post_backward_hook_backward(new_backward: Any) -> _Patch:
    """Replace the backward of the autograd function that runs post-backward."""
    function = param_group.RegisterPostBackwardFunction
    return patched(function, "backward", new_backward)
