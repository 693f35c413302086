"""Arguments of torch that are "cuda" where nobody says otherwise: there they are the simulated accelerator.

Without CUDA torch's own default could only warn and turn off what was asked for, as ``torch.amp.GradScaler()`` does.
"""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

import torch

from torch_ext.cuda_as_sim.words import DEVICE
from torch_ext.sim._imports import when_imported

__all__ = ["install"]

_CUDA = "cuda"
_SHARDED_SCALER = "torch.distributed.fsdp.sharded_grad_scaler"


def install() -> None:
    """Replace the defaults, in this process. Calling it again changes nothing."""
    _replace(torch.amp.GradScaler.__init__)
    _replace(torch.autograd.graph.save_on_cpu.__init__)
    when_imported(_SHARDED_SCALER, _of_sharded_scaler)


def _of_sharded_scaler(module: ModuleType) -> None:
    _replace(module.ShardedGradScaler.__init__)


def _replace(function: Any) -> None:
    if not isinstance(function, FunctionType):
        raise AssertionError(f"{function!r} has no defaults that could be replaced.")
    function.__defaults__ = tuple(DEVICE if each == _CUDA else each for each in function.__defaults__ or ())
