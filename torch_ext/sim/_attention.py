"""Attention that torch knows by device: FlexAttention's list of devices, and SDPA whose inputs are DTensors.

Note [Ring attention]
~~~~~~~~~~~~~~~~~~~~~
Context parallelism gives each rank a part of the sequence; with a causal mask, two parts from both of its ends. A mask
by position in the tensor would be wrong there, so torch replaces the fused kernels of DTensors by a ring of them. Torch
calls CUDA's flash attention on each part, which here runs the host's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_ext.sim._imports import when_imported
from torch_ext.sim._name import KEY, NAME
from torch_ext.sim._patches import wrap

_FLEX, _DTENSOR = "torch.nn.attention.flex_attention", "torch.distributed.tensor"
_SDPA = "scaled_dot_product_attention"
_FLASH = "_scaled_dot_product_flash_attention"

# Registrations end with the object that made them.
_library: torch.library.Library | None = None


def register() -> None:
    """Make FlexAttention's eager form accept the device, and SDPA accept DTensors, once torch loads either."""
    when_imported(_FLEX, _allow_device)
    when_imported(_DTENSOR, _allow_dtensors)


def _allow_device(flex: ModuleType) -> None:
    if not hasattr(flex, "_validate_device"):
        return  # this release accepts any device

    @wrap(flex, "_validate_device")
    def _validate_device(validate: Callable[..., None], query: torch.Tensor, *others: torch.Tensor) -> None:
        if query.device.type != NAME:
            validate(query, *others)


def _allow_dtensors(tensor: ModuleType) -> None:
    """Run SDPA of DTensors by its formula, whose causal mask is a plain tensor, the same on all ranks.

    Torch's sharding rules are for the fused kernels of devices that it knows.
    """
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    composite: Any = getattr(torch.ops.aten, _SDPA).default
    flash: Any = getattr(torch.ops.aten, _FLASH).default

    def sdpa(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(each, tensor.DTensor) for each in (query, key, value)):
            return composite.decompose(query, key, value, *args, **kwargs)
        if flash in tensor.DTensor._op_dispatcher._custom_op_handlers:  # see Note [Ring attention]
            return _ring_attention(flash, query, key, value, *args, **kwargs)
        # CUDA's choice of a kernel goes by the device of its inputs, and would choose one that has no sharding rule.
        with _replicate_plain_tensors(), sdpa_kernel(SDPBackend.MATH):
            return composite.decompose(query, key, value, *args, **kwargs)

    _library.impl(_SDPA, sdpa, f"Autograd{KEY}")
    _library.impl(_FLASH, _flash, KEY)
    _library.impl(f"{_FLASH}_backward", _flash_backward, KEY)


def _ring_attention(  # noqa: PLR0913 - as torch calls it
    flash: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if attn_mask is not None or dropout_p:
        raise NotImplementedError("Context parallelism takes neither attn_mask nor dropout_p; is_causal=True is a mask")
    if enable_gqa and (groups := query.size(1) // key.size(1)) > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    return flash(query, key, value, 0.0, is_causal, False, scale=scale)[0]


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    host: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, logsumexp = host(query, key, value, dropout_p, is_causal, scale=scale)
    unused = [query.new_zeros(()) for _ in range(5)]  # of packed sequences, of dropout, and for debugging
    return out, logsumexp, unused[0], unused[1], query.size(2), key.size(2), *unused[2:]


def _flash_backward(*args: Any, scale: float | None = None) -> Any:
    # args: gradient, inputs and results; lengths of packed sequences, which the host's kernel lacks; dropout and mask.
    tensors, dropout_p, is_causal = args[:6], args[10], args[11]
    host: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return host(*tensors, dropout_p, is_causal, scale=scale)


@contextlib.contextmanager
def _replicate_plain_tensors() -> Iterator[None]:
    dispatcher: Any = sys.modules[_DTENSOR].DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before
