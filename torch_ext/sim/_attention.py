"""Attention that torch knows by device: FlexAttention's list of devices, and SDPA whose inputs are DTensors."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from torch_ext.sim._imports import when_imported
from torch_ext.sim._name import NAME

_FLEX, _DTENSOR = "torch.nn.attention.flex_attention", "torch.distributed.tensor"
_SDPA = "scaled_dot_product_attention"

# Registrations end with the object that made them.
_library: torch.library.Library | None = None


def register() -> None:
    """Let FlexAttention's eager form take the device, and SDPA take DTensors, once torch loads either."""
    when_imported(_FLEX, _allow_device)
    when_imported(_DTENSOR, _allow_dtensors)


def _allow_device(flex: ModuleType) -> None:
    validate = getattr(flex, "_validate_device", None)
    if validate is None:
        return  # this release takes any device

    @functools.wraps(validate)
    def _validate_device(query: torch.Tensor, *others: torch.Tensor) -> None:
        if query.device.type != NAME:
            validate(query, *others)

    setattr(flex, "_validate_device", _validate_device)  # noqa: B010 - mypy knows no such name


def _allow_dtensors(tensor: ModuleType) -> None:
    """Run SDPA of DTensors by its formula, whose causal mask is a plain tensor, the same on all ranks.

    Torch's sharding rules are for the fused kernels of devices that it knows.
    """
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    whole: Any = getattr(torch.ops.aten, _SDPA).default

    def sdpa(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(each, tensor.DTensor) for each in (query, key, value)):
            return whole.decompose(query, key, value, *args, **kwargs)
        with _plain_tensors_are_replicated():
            return whole.decompose(query, key, value, *args, **kwargs)

    _library.impl(_SDPA, sdpa, "AutogradPrivateUse1")


@contextlib.contextmanager
def _plain_tensors_are_replicated() -> Iterator[None]:
    dispatcher: Any = sys.modules[_DTENSOR].DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before
