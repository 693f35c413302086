"""What differs between releases of torch in FSDP's two main collectives: their names, and the type of the second.

Releases before 2.13 have the second name of each pair only; later ones keep it as a deprecated wrapper that FSDP no
longer calls, so replacing the wrapper would replace nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["ALL_GATHER", "REDUCE_SCATTER", "dtype_of_reduction"]


def _first_present(*names: str) -> str:
    return next(name for name in names if hasattr(dist, name))


ALL_GATHER = _first_present("all_gather_single", "all_gather_into_tensor")
REDUCE_SCATTER = _first_present("reduce_scatter_single", "reduce_scatter_tensor")


def dtype_of_reduction(policy: MixedPrecisionPolicy, original: torch.dtype = torch.float32) -> torch.dtype:
    """Return the type in which FSDP2 reduces gradients of parameters of type ``original`` that ask for no other type.

    Without ``policy.reduce_dtype`` it is the type of the computation, and since torch 2.15 that of the parameters (see
    the documentation of ``MixedPrecisionPolicy``).
    """
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    follows_parameters = torch.__version__ >= "2.15"  # a TorchVersion, which compares as one
    return original if follows_parameters else policy.param_dtype or original
