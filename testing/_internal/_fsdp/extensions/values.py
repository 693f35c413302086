"""The inner tensors of a tensor subclass: how to find them, compare them, overwrite
them and identify their memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.overrides import TorchFunctionMode

__all__ = [
    "ContractError",
    "ScribbledEmpty",
    "check_close",
    "inner_tensors",
    "scribble",
    "storage_keys",
]


class ContractError(AssertionError):
    """A tensor subclass breaks the contract of all-gather extensions. The message says
    where, how, and what to do.
    """


_PLAIN = (torch.Tensor, torch.nn.Parameter)

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
    if type(tensor) in _PLAIN:
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


def storage_keys(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the addresses of the storages of plain ``tensors``, except of
    empty ones.
    """
    return {
        tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel() > 0
    }


def scribble(tensor: torch.Tensor) -> None:
    """Overwrite plain ``tensor`` with NaN, or for other types with their maximum."""
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(
                True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max
            )


class ScribbledEmpty(TorchFunctionMode):
    """Overwrites the memory that ``torch.empty`` and similar functions return, to
    expose code that reads it.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and type(result) is torch.Tensor and not result.is_meta:
            scribble(result)
        return result


def check_close(
    got: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    *,
    tolerances: tuple[float | None, float | None],
    complaint: str,
    check_dtype: bool = True,
) -> None:
    """Compare plain tensors pairwise within ``(rtol, atol)``; None for both means
    torch's defaults for the type.

    Raises:
        ContractError: ``complaint``, and the first difference.
    """
    if len(got) != len(expected):
        raise ContractError(
            f"{complaint}: made of {len(got)} tensors, expected {len(expected)}"
        )
    rtol, atol = _both(tolerances)
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        try:
            torch.testing.assert_close(
                mine, theirs, rtol=rtol, atol=atol, check_dtype=check_dtype
            )
        except AssertionError as error:
            which = f" (inner tensor {index} of {len(got)})" if len(got) > 1 else ""
            raise ContractError(
                f"{complaint}{which}. {' '.join(str(error).split())}"
            ) from None


def _both(
    tolerances: tuple[float | None, float | None],
) -> tuple[float | None, float | None]:
    # assert_close needs both or neither
    rtol, atol = tolerances
    return tolerances if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)
