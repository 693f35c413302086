"""Context managers that replace a function of c10d or FSDP2 on all ranks.

Note [Patches and threads]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Ranks may be threads, which share the patched name and the replacement set last. All
read the name between two barriers, when no rank is in an earlier context or has set its
replacement. A third barrier keeps a rank from running its body before every rank has
set its replacement. A barrier before leaving keeps the name from being restored while a
thread is in its body; a body that raises leaves without it, because a peer may never
arrive. So the last thread to leave restores what all of them have read.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


_lock = threading.Lock()
# How many threads are in the contexts of an owner and name that found the same value,
# which tells nested contexts apart. Keyed by the ids of owner and value, and the name.
_inside: Counter[tuple[int, str, int]] = Counter()


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
    dist.barrier()
    before = _read(owner, name)
    key = id(owner), name, id(before)
    with _lock:
        _inside[key] += 1
    try:
        dist.barrier()
        _write(owner, name, replacement)
        dist.barrier()
        yield
        dist.barrier()
    finally:
        with _lock:
            _inside[key] -= 1
            if not _inside[key]:
                _write(owner, name, before)


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
