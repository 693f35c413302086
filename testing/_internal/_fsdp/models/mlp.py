"""Models for FSDP2 tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_ext.compat import fsdp as private

__all__ = ["MLP", "DoubleLinear", "MLPStack"]


class MLP(nn.Module):
    """Two linear layers of widths ``dim`` and ``dim_multiplier * dim``, each followed
    by ReLU: ``(*, dim)`` in and out. With ``with_buffer`` a random buffer ``(dim,)`` is
    added to the output.
    """

    buffer: torch.Tensor | None

    def __init__(
        self,
        dim: int,
        device: torch.device | None = None,
        *,
        bias: bool = True,
        with_buffer: bool = False,
        dim_multiplier: int = 4,
    ) -> None:
        super().__init__()
        hidden = dim_multiplier * dim
        self.in_proj = nn.Linear(dim, hidden, bias=bias, device=device)
        self.out_proj = nn.Linear(hidden, dim, bias=bias, device=device)
        if with_buffer:
            self.register_buffer("buffer", torch.randn(dim, device=device))
        else:
            self.buffer = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = F.relu(self.out_proj(F.relu(self.in_proj(x))))
        return output if self.buffer is None else output + self.buffer

    def reset_parameters(self) -> None:
        """Initialize the buffer, as the meta-device flow asks its owner to."""
        if self.buffer is not None:
            nn.init.normal_(self.buffer)


class MLPStack(nn.Sequential):
    """Three MLPs with hidden widths of 3, 4 and 3 times ``mlp_dim``, some uneven. With
    ``with_seq_parallel``, a layer norm without bias follows, on activations sharded
    along the sequence.
    """

    def __init__(self, mlp_dim: int, *, with_seq_parallel: bool = False) -> None:
        layers: list[nn.Module] = [
            MLP(mlp_dim, dim_multiplier=multiplier) for multiplier in (3, 4, 3)
        ]
        if with_seq_parallel:
            layers.append(nn.LayerNorm(mlp_dim, bias=False))
        super().__init__(*layers)
        self.with_seq_parallel = with_seq_parallel

    def parallelize(
        self,
        tp_mesh: DeviceMesh,
        dp_mesh: DeviceMesh,
        use_activation_checkpointing: bool,
        **fsdp_kwargs: Any,
    ) -> MLPStack:
        """Apply tensor parallelism over ``tp_mesh``, then FSDP2 over ``dp_mesh`` to
        each MLP and the root, in place, and return the stack.

        Inner activations stay DTensors, because a local tensor does not know its uneven
        global width. The last MLP returns a plain tensor; with sequence parallelism it
        shards dimension 1 for the norm. Activation checkpointing wraps each MLP.
        """
        parallelize_module(self, tp_mesh, self._tensor_parallel_plan())
        for mlp in self:
            if isinstance(mlp, nn.LayerNorm):
                continue
            if use_activation_checkpointing:
                private.checkpoint(mlp)
            fully_shard(mlp, mesh=dp_mesh, **fsdp_kwargs)
        fully_shard(self, mesh=dp_mesh, **fsdp_kwargs)
        return self

    def _tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        plan: dict[str, ParallelStyle] = {}
        for index in range(3):
            plan[f"{index}.in_proj"] = ColwiseParallel(use_local_output=False)
            plan[f"{index}.out_proj"] = RowwiseParallel(use_local_output=False)
        last = Shard(1) if self.with_seq_parallel else Replicate()
        plan["2.out_proj"] = RowwiseParallel(output_layouts=last)
        if self.with_seq_parallel:
            plan["3"] = SequenceParallel(sequence_dim=1)
        return plan


class DoubleLinear(nn.Module):
    """Two parallel linear layers with two outputs, ``(*, dim)`` in and out. With
    ``use_second_linear=False`` one output, and an unused layer.
    """

    def __init__(self, dim: int, use_second_linear: bool = True) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.relu = nn.ReLU()
        self.use_second_linear = use_second_linear

    def forward(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        first = self.relu(self.lin1(x))
        return (first, self.relu(self.lin2(x))) if self.use_second_linear else first
