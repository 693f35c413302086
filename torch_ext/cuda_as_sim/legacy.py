"""Tensor types such as ``torch.cuda.FloatTensor``, which predate tensor devices: they make tensors of the simulated
accelerator.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_ext.sim._name import NAME

_KINDS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")


class _TensorType(type):
    """Calling such a type makes a tensor, and tensors of its device and dtype are its instances."""

    dtype: torch.dtype
    is_cuda = True
    is_sparse = False

    def __call__(cls, *args: Any, device: Any = NAME, **kwargs: Any) -> torch.Tensor:
        """Make a tensor by the host's type of this name and move it to ``device``, or copy the tensor ``args[0]``."""
        if args and isinstance(args[0], torch.Tensor):
            return args[0].to(device=device, dtype=cls.dtype, copy=True)
        made: torch.Tensor = getattr(torch, cls.__name__.rpartition(".")[2])(*args, **kwargs)
        return made.to(device)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.device.type == NAME and instance.dtype == cls.dtype


# Tensor.type() takes a class by its C name, which is the whole of __name__.
TYPES: dict[str, type] = {
    f"{kind}Tensor": _TensorType(f"torch.{NAME}.{kind}Tensor", (), {"dtype": getattr(torch, f"{kind}Tensor").dtype})
    for kind in _KINDS
}

_torch_setter = torch.set_default_tensor_type


def _dtype_of(kind: Any) -> torch.dtype | None:
    """Return the dtype of one of these types or of its name; None for anything else."""
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    found = TYPES.get(name.removeprefix(f"torch.{NAME}."))
    return getattr(found, "dtype", None) if name.startswith(f"torch.{NAME}.") else None


def set_default_tensor_type(kind: Any) -> None:
    """As ``torch.set_default_tensor_type``. Factories without a device argument then use the device of ``kind``."""
    dtype = _dtype_of(kind)
    if dtype is None:
        torch.set_default_device(None)
        _torch_setter(kind)
    else:
        torch.set_default_dtype(dtype)
        torch.set_default_device(NAME)
