"""The operators of ``torch.ops.symm_mem`` that CUDA implements without Triton and multicast, over the handles of
csrc/symmetric_signals.cpp, and torch's own operators in Python where the device is not named ``cuda``.

Each is a barrier, ordinary kernels on the peers' buffers, and a barrier, all on the current stream. Ranks add in the
order of ranks, so that all get the same bits, in the type of the tensors, as CUDA's kernels do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from torch_ext.sim import _module, _native
from torch_ext.sim._imports import when_imported
from torch_ext.sim._name import IS_CUDA, NAME
from torch_ext.sim._threads import start_beside
from torch_ext.sim.races import host_edges

__all__ = ["register"]

_KEY = "CUDA" if IS_CUDA else "PrivateUse1"
_TYPES = (torch.float32, torch.bfloat16)  # of CUDA's kernels
_WORD = 2**32
_LOOK_S = 0.002  # between two looks at signals that are not over

_library = torch.library.Library("symm_mem", "IMPL")


def register() -> None:
    """Register the operators, and complete torch's module once a program has imported it."""
    for name, operator in _OPERATORS.items():
        _library.impl(name, operator, _KEY)
    for name in _MULTICAST:
        _library.impl(name, _refusal(name, "needs NVLink multicast, which no simulated device has"), _KEY)
    why = "runs beside the copies that it waits for, and a kernel of the simulated accelerator ends before its call"
    _library.impl("_async_input_mm", _refusal("_async_input_mm", why), _KEY)
    when_imported("torch.distributed._symmetric_memory", _complete)


def _complete(module: Any) -> None:
    module._use_implicit_mempool = False  # a pool would be one of CUDA's allocator
    _at_first_rendezvous(module._SymmetricMemory)
    if IS_CUDA:
        return
    # Torch's operators in Python are registered for CUDA alone, and name `torch.cuda` in their bodies.
    module.torch = _TorchForTheDevice()
    for name in (
        "_low_contention_all_gather", "_low_contention_reduce_scatter", "fused_all_gather_matmul",
        "fused_all_gather_scaled_matmul", "fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter",
        "get_remote_tensors",
    ):  # fmt: skip
        function = getattr(module, name, None) or getattr(module, f"_{name}", None)
        _library.impl(name, function or module._get_remote_tensors_default, _KEY)


def _at_first_rendezvous(symmetric_memory: Any) -> None:
    """Do what programs without symmetric memory should not pay for."""
    original = symmetric_memory.rendezvous

    def rendezvous(*args: Any, **kwargs: Any) -> Any:
        symmetric_memory.rendezvous = staticmethod(original)
        host_edges.watch()
        start_beside("symmetric memory", _advance_signals)
        return original(*args, **kwargs)

    symmetric_memory.rendezvous = staticmethod(rendezvous)


def _advance_signals() -> None:
    while True:
        time.sleep(_LOOK_S)
        _native.advance_signals()


class _TorchForTheDevice:
    """``torch`` as torch's module of symmetric memory sees it."""

    cuda = _module

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(name: Any, *index: int) -> torch.device:
        return torch.device(name.replace("cuda", NAME) if isinstance(name, str) else name, *index)


def _refusal(name: str, why: str) -> Callable[..., NoReturn]:
    def refuse(*_arguments: Any, **_named: Any) -> NoReturn:
        raise NotImplementedError(f"symm_mem::{name} {why}.")

    return refuse


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(text)


def _check_pair(name: str, input: torch.Tensor, output: torch.Tensor) -> None:
    _check(input.is_contiguous(), f"{name}: input must be contiguous.")
    _check(output.is_contiguous(), f"{name}: output must be contiguous.")


def _check_all_reduce(name: str, reduce_op: str, input: torch.Tensor, output: torch.Tensor) -> None:
    _check_pair(name, input, output)
    sizes = f"input.sizes(): {list(input.shape)}, output.sizes(): {list(output.shape)}"
    _check(output.shape == input.shape, f"{name}: input/output size mismatch, {sizes}")
    _check(reduce_op == "sum", f"{name}: only sum is supported for now.")


def _handle_of(tensor: torch.Tensor, group: str, name: str) -> Any:
    handle = torch._C._distributed_c10d._SymmetricMemory.rendezvous(tensor, group)
    _check(handle is not None, f"{name}: input must be allocated with empty_strided_p2p().")
    if tensor.dtype not in _TYPES:
        raise NotImplementedError(f'"{name}" not implemented for {tensor.dtype}')
    return handle


def _everywhere(handle: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor at the place of ``tensor`` in the buffer of each rank."""
    offset = tensor.storage_offset()
    return [handle.get_buffer(rank, tensor.shape, tensor.dtype, offset) for rank in range(handle.world_size)]


def _add(parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return out.copy_(total)


def _one_shot(
    symmetric: torch.Tensor, local: torch.Tensor | None, reduce_op: str, group: str, out: torch.Tensor
) -> torch.Tensor:
    name = "one_shot_all_reduce"
    _check_all_reduce(name, reduce_op, symmetric, out)
    if local is not None:
        _check(local.is_contiguous(), f"{name}: local input must be contiguous.")
        _check(local.numel() <= symmetric.numel(), f"{name}: local input size must be smaller than symm buffer size.")
    if symmetric.numel() == 0:
        return out
    handle = _handle_of(symmetric, group, name)
    if local is not None:
        symmetric.view(-1)[: local.numel()].copy_(local.view(-1))
    handle.barrier()
    _add(_everywhere(handle, symmetric), out)
    handle.barrier()
    return out


def _two_shot(input: torch.Tensor, reduce_op: str, group: str, output: torch.Tensor | None) -> torch.Tensor:
    name = "two_shot_all_reduce"
    result = input if output is None else output
    _check_all_reduce(name, reduce_op, input, result)
    handle = _handle_of(input, group, name)
    if input.numel() == 0:
        return result
    length = math.ceil(input.numel() / handle.world_size)
    everywhere = [each.view(-1).split(length) for each in _everywhere(handle, input)]
    handle.barrier()
    if handle.rank < len(everywhere[0]):  # a short input has no part for the last ranks
        total = _add([each[handle.rank] for each in everywhere], torch.empty_like(everywhere[0][handle.rank]))
        for each in everywhere if output is None else everywhere[handle.rank : handle.rank + 1]:
            each[handle.rank].copy_(total)
    handle.barrier()
    if output is not None:
        for rank, part in enumerate(output.view(-1).split(length)):
            part.copy_(everywhere[rank][rank])
        handle.barrier()
    return result


def _reduce_scatter(input: torch.Tensor, group: str, split_last_dim: bool, output: torch.Tensor) -> torch.Tensor:
    name = "reduce_scatter"
    _check_pair(name, input, output)
    handle = _handle_of(input, group, name)
    ranks, item = handle.world_size, input.element_size()
    alignment = math.gcd(input.numel() * item, input.storage_offset() * item, 16)
    unit = ranks * (alignment // item)
    about = f"world size {ranks} alignment {alignment}"
    _check(
        input.numel() % unit == 0,
        "expected number of elements to be divisible by world_size * alignment, number of elements "
        f"{input.numel()} {about}",
    )
    if split_last_dim:
        _check(
            output.shape == (*input.shape[:-1], input.size(-1) // ranks),
            f"{name} expected input and output to have same sizes except in the last dimension, and output last dim "
            "size to be input last dim size / world_size",
        )
        _check(
            input.size(-1) % unit == 0,
            "expected last dimension to be divisible by world_size * alignment, last dimension "
            f"{input.size(-1)} {about}",
        )
    else:
        _check(input.dim() == 1, f"{name} expected 1D input")
        _check(output.shape == (input.numel() // ranks,), f"{name} expected 1D output of input size / world_size")
    if input.numel() > 0:
        handle.barrier()
        _add([each.chunk(ranks, dim=-1)[handle.rank] for each in _everywhere(handle, input)], output)
        handle.barrier()
    return output


def _memset(input: torch.Tensor, offset: int, val: int, count: int = 1, *, name: str = "memset32_") -> torch.Tensor:
    flat = input.dim() == 1 and input.is_contiguous() and input.dtype == torch.uint32
    _check(flat, f"symm_mem::{name}: input must be a flat, contiguous uint32 tensor.")
    _check(offset >= 0, f"symm_mem::{name}: offset must be greater than or equal to 0 (got {offset})")
    _check(count > 0, f"symm_mem::{name}: count must be a positive integer (got {count})")
    _check(0 <= val < _WORD, f"symm_mem::{name}: val must be in the range of [0, 4294967295] (uint32_t).")
    end, numel = f"offset + count ({offset + count})" if name == "memset32_" else f"offset ({offset})", input.numel()
    _check(offset + count <= numel, f"symm_mem::{name}: {end} exceeded the numel of the input ({numel})")
    input[offset : offset + count].fill_(val)
    return input


_OPERATORS: dict[str, Callable[..., Any]] = {
    "one_shot_all_reduce": lambda input, op, group: _one_shot(input, None, op, group, torch.empty_like(input)),
    "one_shot_all_reduce_out": lambda input, op, group, out: _one_shot(input, None, op, group, out),
    "one_shot_all_reduce_copy": lambda input, local, op, group: _one_shot(
        input, local, op, group, torch.empty_like(local)
    ),
    "one_shot_all_reduce_copy_out": _one_shot,
    "two_shot_all_reduce_": lambda input, op, group: _two_shot(input, op, group, None),
    "two_shot_all_reduce_out": _two_shot,
    "reduce_scatter_out": _reduce_scatter,
    "memset32_": _memset,
    "stream_write_value32_": lambda input, offset, val: _memset(input, offset, val, name="stream_write_value32_"),
}

_MULTICAST = (
    "multimem_all_reduce_", "multimem_one_shot_all_reduce", "multimem_one_shot_all_reduce_out",
    "multimem_one_shot_reduce_out", "multimem_all_gather_out",
)  # fmt: skip
