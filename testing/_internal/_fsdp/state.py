"""Reads, zeroes, broadcasts and compares the state of a model."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
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
    "refused_while_unsharded",
]


def _assert_module_states(
    model: nn.Module,
    process_group: dist.ProcessGroup,
    assert_fn: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    """Call ``assert_fn(tensor on rank 0, tensor on another rank)`` for each parameter
    and buffer of ``model``. Every rank compares all ranks, so all fail alike.

    Raises:
        AssertionError: ranks have different names, or ``assert_fn`` raised.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    own = {name: tensor.detach().cpu() for name, tensor in named}
    gathered: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, own, group=process_group)
    first, *others = gathered
    for rank, other in enumerate(others, start=1):
        if [*other] != [*first]:
            missing, extra = first.keys() - other.keys(), other.keys() - first.keys()
            raise AssertionError(
                f"rank {rank} has other module states than rank 0: missing "
                f"{sorted(missing)}, unexpected {sorted(extra)}. Build the same model "
                "on every rank."
            )
        for name, expected in first.items():
            assert_fn(expected, other[name])


def _zero_model(
    model: nn.Module, zero_buffers: bool = False, summon_full: bool = True
) -> None:
    """Zero the parameters: FSDP1's unsharded ones if ``summon_full``."""
    unsharded: AbstractContextManager[Any] = (
        FSDP.summon_full_params(model) if summon_full else nullcontext()
    )
    with unsharded, torch.no_grad():
        for tensor in (*model.parameters(), *(model.buffers() if zero_buffers else ())):
            tensor.zero_()


def _get_state_dict(
    model: nn.Module, cpu_offload: bool = False, half: bool = False
) -> dict[str, Any]:
    """Return the state dict, on the device unless ``cpu_offload``."""
    if not cpu_offload:
        model = model.to(device.device_type())
    return (model.half() if half else model).state_dict()


def _broadcast_state_dict(
    rank: int, state_dict: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Return rank 0's ``state_dict`` on every rank, on the device under test, through
    host memory, because others may be unable to open rank 0's device. Collective.
    """
    shared: list[Any] = [None]
    if rank == 0 and state_dict is not None:
        shared = [{name: tensor.cpu() for name, tensor in state_dict.items()}]
    dist.broadcast_object_list(shared)
    return {name: tensor.to(device.device_type()) for name, tensor in shared[0].items()}


def get_full_params(model: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
    """Return copies of the unsharded parameters, on the compute device."""
    with FSDP.summon_full_params(model, recurse=recurse):
        return [deepcopy(parameter) for parameter in model.parameters()]


@contextmanager
def refused_while_unsharded(case: Any, model: FSDP, frame: str) -> Iterator[None]:
    """Context: unshard ``model``, and check by the test case ``case`` that FSDP refuses
    the block. Rank 0 alone prints which module it is, and a stack that has ``frame``.
    """
    text = (
        "expected to be in states [<TrainingState.IDLE: 1>] but current state is "
        "TrainingState.SUMMON_FULL_PARAMS"
    )
    with (
        redirect_stdout(io.StringIO()) as printed,
        redirect_stderr(io.StringIO()) as stack,
        case.assertRaisesRegex(ValueError, re.escape(text)),
        FSDP.summon_full_params(model),
    ):
        yield
    if case.rank == 0:
        lines = f"Asserting FSDP instance is: {model}\nERROR: {text}\n"
        case.assertEqual(printed.getvalue(), lines)
        case.assertIn(frame, stack.getvalue())
    else:
        case.assertEqual([printed.getvalue(), stack.getvalue()], ["", ""])
