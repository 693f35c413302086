"""The inner tensors of a tensor subclass: how to find them and overwrite them."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class ContractError(AssertionError):
    """A tensor subclass breaks the contract of all-gather extensions. The message says
    where, how, and what to do.
    """


# Functions that return uninitialized memory.
_EMPTY = {
    torch.empty, torch.empty_like, torch.empty_strided,
    torch.Tensor.new_empty, torch.Tensor.new_empty_strided,
}  # fmt: skip


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that ``tensor`` consists of, detached, including those
    of nested subclasses.

    Raises:
        ContractError: a subclass has no ``__tensor_flatten__``.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [tensor.detach()]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        raise ContractError(
            f"{type(tensor).__name__} has no __tensor_flatten__, so its values "
            "cannot be read. Define "
            "__tensor_flatten__ and __tensor_unflatten__, or override values(tensor) "
            "in the test class."
        )
    names, _ = flatten()
    return [each for name in names for each in inner_tensors(getattr(tensor, name))]


def scribble(tensor: torch.Tensor) -> None:
    """Overwrite plain ``tensor`` with NaN, or for other types with their maximum."""
    value: float = float("nan")
    if tensor.dtype is torch.bool:
        value = True
    elif not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        value = torch.iinfo(tensor.dtype).max
    with torch.no_grad():
        tensor.fill_(value)


class ScribbledEmpty(TorchFunctionMode):
    """Overwrites the memory that ``torch.empty`` and similar functions return, to
    expose code that reads it.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and type(result) is torch.Tensor and not result.is_meta:
            scribble(result)
        return result
