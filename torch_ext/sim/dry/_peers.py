"""The other ranks of a dry run: none exists. Each is assumed to call what this rank calls, with equal objects.

Collectives of device tensors: csrc/transport/dry.cpp. Those of host tensors, which gloo would run, go to torch's fake
group: a gather copies this rank's tensor, all else leaves its tensors alone.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

from torch_ext.sim import _other_backends
from torch_ext.sim._imports import when_imported


def install() -> None:
    """Make groups and collectives work without peers."""
    setattr(FakeProcessGroup, "_set_sequence_number_for_group", _nothing)  # noqa: B010 - it has no numbers
    setattr(c10d, "ProcessGroupGloo", _NobodysGloo)  # noqa: B010 - mypy refuses to assign a type
    setattr(_other_backends, "is_gloo", lambda _group: False)  # noqa: B010
    setattr(c10d, "_store_based_barrier", _nothing)  # noqa: B010
    for function in (all_gather_object, gather_object, broadcast_object_list, scatter_object_list, recv_object_list):
        setattr(c10d, function.__name__, function)
        setattr(dist, function.__name__, function)
    when_imported("torch.nn.parallel.distributed", _trust_parameters)


class _IsFake(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, FakeProcessGroup)

    def __call__(cls, _store: object, rank: int, size: int, **_options: Any) -> Any:
        return FakeProcessGroup._create_internal(rank, size)


class _NobodysGloo(metaclass=_IsFake):
    """Makes a fake group in the place of one of gloo."""


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Return at once."""


def _trust_parameters(parallel: ModuleType) -> None:
    setattr(parallel, "_verify_param_shape_across_processes", _nothing)  # noqa: B010


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Give every rank's place this rank's object."""
    object_list[:] = [obj] * len(object_list)


def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_args: Any, **_kwargs: Any) -> None:
    """Give every rank's place this rank's object, if this rank gathers."""
    if object_gather_list:
        object_gather_list[:] = [obj] * len(object_gather_list)


def broadcast_object_list(object_list: list[Any], *_args: Any, **_kwargs: Any) -> None:
    """Leave the objects: the source has equal ones."""


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    *_args: Any,
    **_kwargs: Any,
) -> None:
    """Give this rank its object, which only the source knows."""
    if not scatter_object_input_list:
        raise _unknown("scatter_object_list")
    scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank(group)]


def recv_object_list(*_args: Any, **_kwargs: Any) -> None:
    """Refuse: the sender does not exist."""
    raise _unknown("recv_object_list")


def _unknown(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"dry run: {name} needs an object of another rank, which does not exist. Give it to this rank otherwise; "
        "for a pipeline stage, give PipelineStage its input_args and output_args."
    )
