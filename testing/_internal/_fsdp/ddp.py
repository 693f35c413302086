"""What the suites of DistributedDataParallel share: a small model, a reference that averages by hand, and a log of
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

from torch_ext.compat.fsdp import TorchDispatchMode
from torch_ext.testing._internal._fsdp.cases import FSDPTest
from torch_ext.testing._internal._fsdp.device import is_accelerator

__all__ = ["Collective", "CollectiveLog", "DDPTest"]


class Collective(NamedTuple):
    """A collective that was called: its name in c10d without underscores, and its first tensor's type and elements."""

    name: str
    dtype: torch.dtype
    numel: int


class CollectiveLog(TorchDispatchMode):
    """Notes all-reduces and broadcasts while it is entered, also those of C++ and of autograd's threads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name in ("allreduce_", "broadcast_"):
            tensor = args[0][0]
            self.calls.append(Collective(name.strip("_"), tensor.dtype, tensor.numel()))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return sum(call.name == name for call in self.calls)


class DDPTest(FSDPTest):
    """Two ranks, each with its own data. With two, sums have one order and halving is exact, so comparisons are too."""

    @property
    def on_accelerator(self) -> bool:
        return is_accelerator()

    def net(self) -> nn.Sequential:
        """Return two linear layers, the same on every rank. Shapes: ``(*, 4)`` to ``(*, 3)``."""
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(self.device)

    def rows(self, step: int = 0) -> torch.Tensor:
        """Return this rank's input for ``step``, shape ``(3, 4)``. It differs by rank and step."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(3, 4, generator=generator).to(self.device)

    def backward(self, model: nn.Module, step: int = 0) -> None:
        model(self.rows(step)).square().sum().backward()

    def counts(self, body: Callable[[], object]) -> tuple[int, int]:
        """Run ``body`` and return how many all-reduces and broadcasts of floating-point numbers it calls. Others
        agree on buckets.
        """
        with CollectiveLog() as log:
            body()
        return tuple(
            sum(call.name == name and call.dtype.is_floating_point for call in log.calls)
            for name in ("allreduce", "broadcast")
        )

    def gradients(self, model: nn.Module) -> dict[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def averaged(self, reference: nn.Module) -> dict[str, torch.Tensor]:
        """Return the averages over ranks of the gradients of a model without DDP, by name. Collective."""
        averages = {}
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                averages[name] = parameter.grad.clone()
                dist.all_reduce(averages[name])
                averages[name].div_(self.world_size)
        return averages

    def check_gradients(self, ddp: nn.Module, expected: Mapping[str, Any], what: str) -> None:
        """Compare the gradients of a model in DDP, by their names within it, bit by bit."""
        model: Any = ddp.module
        for name, gradient in expected.items():
            found = model.get_parameter(name).grad
            self.check_equal(f"{what}: gradient of {name}", found, gradient, atol=0, rtol=0)
