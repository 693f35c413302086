"""Logs a training step as lines of text: the collectives, named by FSDP unit, and the
compute of the units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from torch_ext.compat.fsdp import TorchDispatchMode

__all__ = ["StepLog", "ThreeUnits", "layout_over_ranks"]

# For each c10d op: its name in the log, and which of its arguments are the unsharded
# tensors.
_COLLECTIVES: Mapping[
    str, tuple[str, Callable[[Sequence[Any]], Sequence[torch.Tensor]]]
] = {
    "_allgather_base_": ("all-gather", lambda args: [args[0]]),
    "allgather_": ("all-gather", lambda args: args[0][0]),
    "_reduce_scatter_base_": ("reduce-scatter", lambda args: [args[1]]),
    "allreduce_": ("all-reduce", lambda args: args[0]),
}


class ThreeUnits(nn.Module):
    """Linear layers ``first``, ``second`` and ``last`` in sequence. Shard the first two
    each on their own.

    Their sizes (16, 48 and 240 elements) identify them, and so do half sizes. Their
    rows are divisible by 2 and 4.
    Shapes: ``(*, 4)`` to ``(*, 20)``.
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


class StepLog(TorchDispatchMode):
    """Logs a step of a :class:`ThreeUnits` model, which you may shard before or after.

    Compute is logged when the forward or backward of a unit runs. A collective is named
    after the unit whose elements it moves: all of them, or half after a reduction over
    two shards. Otherwise the log shows the number of elements.
    """

    def __init__(self, model: ThreeUnits) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.dtypes: dict[str, torch.dtype] = {}
        units = {name: getattr(model, name) for name in model.UNITS}
        self._units = {unit.weight.numel(): name for name, unit in units.items()}
        for name, unit in units.items():
            unit.register_forward_hook(self._forward_hook(name))

    def _forward_hook(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.lines.append(f"forward {name}")
            if output.requires_grad:
                output.register_hook(lambda _: self.lines.append(f"backward {name}"))

        return note

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name in _COLLECTIVES:
            kind, tensors_of = _COLLECTIVES[name]
            tensors = tensors_of(args)
            self.lines.append(
                f"{kind} {self._unit(sum(tensor.numel() for tensor in tensors))}"
            )
            self.dtypes[kind] = tensors[0].dtype
        return func(*args, **(kwargs or {}))

    def _unit(self, numel: int) -> str:
        if 2 * numel in self._units:
            return f"shard of {self._units[2 * numel]}"
        return self._units.get(numel, str(numel))

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
    """Return a line for each tensor, with its shape on every rank of the default group.
    Collective.
    """
    own = {name: tuple(tensor.shape) for name, tensor in named_shards.items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return "\n".join(
        f"{name}: {' | '.join(str(each[name]) for each in gathered)}" for name in own
    )
