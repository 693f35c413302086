"""The names under which FSDP calls its two main collectives in the installed torch.

Releases before 2.13 have the second name of each pair only; later ones keep it as a deprecated wrapper that FSDP no
longer calls, so replacing the wrapper would replace nothing.
"""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["ALL_GATHER", "REDUCE_SCATTER"]


def _first_present(*names: str) -> str:
    return next(name for name in names if hasattr(dist, name))


ALL_GATHER = _first_present("all_gather_single", "all_gather_into_tensor")
REDUCE_SCATTER = _first_present("reduce_scatter_single", "reduce_scatter_tensor")
