"""Reading, zeroing, sharing and comparing the state of a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal._fsdp import device

__all__ = [
    "_assert_module_states",
    "_broadcast_state_dict",
    "_get_state_dict",
    "_zero_model",
    "get_full_params",
]

_NamedStates = list[tuple[str, torch.Tensor]]


def _assert_module_states(
    model: nn.Module,
    process_group: dist.ProcessGroup,
    assert_fn: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    """Call ``assert_fn(state on rank 0, state on another rank)`` for each parameter and buffer of ``model``.

    Every rank gathers every state and compares all ranks, so all ranks fail alike.

    Raises:
        AssertionError: the ranks name their states differently; and whatever ``assert_fn`` raises.
    """
    gathered: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, _named_states(model), group=process_group)
    first, *others = gathered
    for rank, other in enumerate(others, start=1):
        _check_same_names(rank, first, other)
        for (_, expected), (_, actual) in zip(first, other, strict=True):
            assert_fn(expected, actual)


def _named_states(model: nn.Module) -> _NamedStates:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor.detach().cpu()) for name, tensor in named]


def _check_same_names(rank: int, first: _NamedStates, other: _NamedStates) -> None:
    expected, actual = ([name for name, _ in states] for states in (first, other))
    if expected != actual:
        raise AssertionError(
            f"rank {rank} has other module states than rank 0: missing {sorted(set(expected) - set(actual))}, "
            f"unexpected {sorted(set(actual) - set(expected))}. Build the same model on every rank."
        )


def _zero_model(model: nn.Module, zero_buffers: bool = False, summon_full: bool = True) -> None:
    """Zero the parameters of ``model`` in place, and its buffers if asked.

    Args:
        summon_full: unshard FSDP1 parameters first and write the zeros back; without it, zero what is there.
    """
    unsharded: AbstractContextManager[Any] = FSDP.summon_full_params(model) if summon_full else nullcontext()
    with unsharded, torch.no_grad():
        for tensor in (*model.parameters(), *(model.buffers() if zero_buffers else ())):
            tensor.zero_()


def _get_state_dict(model: nn.Module, cpu_offload: bool = False, half: bool = False) -> dict[str, Any]:
    """Return the state of ``model`` after moving it to the device (unless offloaded) and to half precision (if so)."""
    if not cpu_offload:
        model = model.to(device.device_type())
    return (model.half() if half else model).state_dict()


def _broadcast_state_dict(rank: int, state_dict: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Return rank 0's ``state_dict`` on every rank, each tensor on the device under test.

    The tensors travel through host memory, because rank 0 may hold some on a device that other ranks cannot open.
    What other ranks pass is ignored.
    """
    shared: list[Any] = [None]
    if rank == 0 and state_dict is not None:
        shared = [{name: tensor.cpu() for name, tensor in state_dict.items()}]
    dist.broadcast_object_list(shared)
    return {name: tensor.to(device.device_type()) for name, tensor in shared[0].items()}


def get_full_params(model: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
    """Return copies of the unsharded parameters of ``model``, on the compute device even where FSDP offloads them.

    Args:
        recurse: whether FSDP submodules are unsharded too.
    """
    with FSDP.summon_full_params(model, recurse=recurse):
        return [deepcopy(parameter) for parameter in model.parameters()]
