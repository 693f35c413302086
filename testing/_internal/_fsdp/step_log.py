"""Logs collectives, and a training step as lines of text: collectives by FSDP unit, and
the compute of the units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

from torch_ext.compat.fsdp import TorchDispatchMode

__all__ = ["CollectiveLog", "StepLog", "ThreeUnits", "layout_over_ranks"]

# For each c10d op: its name in the log, and which arguments are unsharded tensors.
_COLLECTIVES = {
    "_allgather_base_": ("all-gather", lambda args: [args[0]]),
    "allgather_": ("all-gather", lambda args: args[0][0]),
    "_reduce_scatter_base_": ("reduce-scatter", lambda args: [args[1]]),
    "allreduce_": ("all-reduce", lambda args: args[0]),
    "broadcast_": ("broadcast", lambda args: args[0]),
}


class Collective(NamedTuple):
    """A call, with the type and the elements of its unsharded tensors."""

    name: str
    dtype: torch.dtype
    numel: int


class CollectiveLog(TorchDispatchMode):
    """Notes collectives while entered, also of C++ and autograd's threads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def note(self, call: Collective) -> None:
        """Note a collective that is about to run."""
        self.calls.append(call)

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        namespace, _, op = func._schema.name.partition("::")
        if namespace == "c10d" and op in _COLLECTIVES:
            name, tensors_of = _COLLECTIVES[op]
            tensors = tensors_of(args)
            numel = sum(tensor.numel() for tensor in tensors)
            self.note(Collective(name, tensors[0].dtype, numel))
        return func(*args, **(kwargs or {}))


class ThreeUnits(nn.Module):
    """Linear layers ``first``, ``second`` and ``last`` in sequence: ``(*, 4)`` to ``(*,
    20)``. Shard the first two each on their own.

    Their sizes (16, 48 and 240 elements) identify them, and so do half sizes. Their
    rows are divisible by 2 and 4.
    """

    UNITS = ("first", "second", "last")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 12, bias=False)
        self.last = nn.Linear(12, 20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


class StepLog(CollectiveLog):
    """Logs a step of a :class:`ThreeUnits` model, which you may shard before or after:
    the forward and backward of its units, and collectives.

    A collective is named after the unit whose elements it moves: all of them, or half
    after a reduction over two shards. Otherwise the log shows the number of elements.
    """

    def __init__(self, model: ThreeUnits) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.dtypes: dict[str, torch.dtype] = {}
        self._units: dict[int, str] = {}
        for name in model.UNITS:
            unit = getattr(model, name)
            self._units[unit.weight.numel()] = name
            unit.register_forward_hook(self._forward_hook(name))

    def _forward_hook(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.lines.append(f"forward {name}")
            if output.requires_grad:
                output.register_hook(lambda _: self.lines.append(f"backward {name}"))

        return note

    def note(self, call: Collective) -> None:
        unit = self._units.get(call.numel, str(call.numel))
        if 2 * call.numel in self._units:
            unit = f"shard of {self._units[2 * call.numel]}"
        self.lines.append(f"{call.name} {unit}")
        self.dtypes[call.name] = call.dtype

    @contextmanager
    def of(self, title: str) -> Iterator[None]:
        """Log what happens in the ``with`` block, indented under ``title``."""
        self.lines.append(f"{title}:")
        start = len(self.lines)
        with self:
            yield
        self.lines[start:] = [f"  {line}" for line in self.lines[start:]]

    def text(self) -> str:
        return "\n".join(self.lines)


def layout_over_ranks(named_shards: Mapping[str, torch.Tensor]) -> str:
    """Return a line for each tensor: its shape on every rank. Collective."""
    own = {name: tuple(tensor.shape) for name, tensor in named_shards.items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return "\n".join(
        f"{name}: {' | '.join(str(each[name]) for each in gathered)}" for name in own
    )
