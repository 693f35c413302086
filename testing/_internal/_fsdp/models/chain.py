"""A chain of three small layers, and the part of it that each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn as nn

__all__ = ["Chain", "own_slices", "shards_of"]

ROWS_PER_RANK = 2
_ALIGNED_TO = 4  # elements, as FSDP1 aligns original parameters of float32


class Chain(nn.Module):
    """Layers ``a`` (3 to 4), ``b`` (4 to 3) and ``c`` (3 to 2), with tanh between them.

    Its six parameters have 12, 4, 12, 3, 6 and 2 elements. As one flat parameter over
    two ranks, each rank holds several, and they share ``b.weight``. All instances of a
    seed are equal. ``wrap`` wraps each layer. Shapes: ``(N, 3)`` to ``(N, 2)``.
    """

    LAYERS = ("a", "b", "c")

    def __init__(
        self,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
        device: torch.device | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)]
        # Moved before it is wrapped, because a wrapper may look at its device.
        self.a, self.b, self.c = (
            wrap(layer if device is None else layer.to(device)) for layer in layers
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))

    @staticmethod
    def rows(
        device: torch.device, world_size: int, rank: int | None = None, step: int = 0
    ) -> torch.Tensor:
        """Return the rows of ``rank`` in a step, ``(2, 3)``, or those of all ranks."""
        generator = torch.Generator().manual_seed(100 + step)
        rows = torch.randn(ROWS_PER_RANK * world_size, 3, generator=generator)
        own = rows if rank is None else rows.split(ROWS_PER_RANK)[rank]
        return own.to(device)


def own_slices(
    numels: Mapping[str, int], rank: int, world_size: int
) -> dict[str, slice]:
    """Return which elements of each parameter ``rank`` holds if all are sharded as one.

    >>> own_slices({"a": 3, "b": 4}, 0, 2)
    {'a': slice(0, 3, None), 'b': slice(0, 0, None)}
    >>> own_slices({"a": 6, "b": 4}, 1, 2)
    {'a': slice(6, 6, None), 'b': slice(0, 4, None)}
    """
    starts, end = {}, 0
    for name, numel in numels.items():
        starts[name] = -(-end // _ALIGNED_TO) * _ALIGNED_TO
        end = starts[name] + numel
    width = -(-end // world_size)
    edges = (rank * width, (rank + 1) * width)
    return {
        name: slice(*(min(max(edge - starts[name], 0), numel) for edge in edges))
        for name, numel in numels.items()
    }


def shards_of(
    tensors: Mapping[str, torch.Tensor], rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """Return the elements of each tensor that :func:`own_slices` gives, flat."""
    numels = {name: tensor.numel() for name, tensor in tensors.items()}
    slices = own_slices(numels, rank, world_size)
    return {n: tensor.detach().flatten()[slices[n]] for n, tensor in tensors.items()}
