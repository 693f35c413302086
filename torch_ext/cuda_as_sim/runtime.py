"""What rewritten files import: the stand-in for ``torch.cuda``, and the questions that they ask of computed values."""

from __future__ import annotations

from typing import Any

import torch

import torch_ext.sim  # noqa: F401  # registers the device
from torch_ext.cuda_as_sim import cuda, defaults, methods, nccl
from torch_ext.cuda_as_sim.errors import NeedsCudaError
from torch_ext.cuda_as_sim.legacy import set_default_tensor_type
from torch_ext.cuda_as_sim.words import DEVICE, word_as_sim

__all__ = [
    "VERSION",
    "NeedsCudaError",
    "ProcessGroupNCCL",
    "as_sim",
    "cuda",
    "is_built",
    "is_cuda",
    "is_nccl_available",
    "set_default_tensor_type",
]

ProcessGroupNCCL = nccl.ProcessGroupNCCL

# torch.version.cuda: programs ask whether there is one, and whether it is new enough for bfloat16.
VERSION = "12.8"

_CUDA = "cuda"

methods.install()
defaults.install()
nccl.install()


def is_nccl_available() -> bool:
    """Return True: simccl stands in for NCCL."""
    return True


def is_built() -> bool:
    """``torch.backends.cuda.is_built()``: True, since a program that asks means to use the device."""
    return True


def as_sim(value: Any) -> Any:
    """Return ``value``, or the simulated accelerator's like of it if it is a device or names a device or backend.

    >>> as_sim("cuda:1"), as_sim(torch.device("cuda", 1)), as_sim({"cuda:0": "cpu"}), as_sim(3)
    ('sim:1', device(type='sim', index=1), {'sim:0': 'cpu'}, 3)
    """
    if isinstance(value, str):
        return word_as_sim(value)
    if isinstance(value, torch.device) and value.type == _CUDA:
        return torch.device(DEVICE) if value.index is None else torch.device(DEVICE, value.index)
    if type(value) is dict:  # map_location
        return {as_sim(key): as_sim(item) for key, item in value.items()}
    return value


def is_cuda(value: Any) -> Any:
    """Return ``value.is_cuda``, which for tensors and storages asks for the simulated device."""
    if isinstance(value, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)):
        return value.device.type == DEVICE
    return value.is_cuda
