"""Tests of DistributedDataParallel: their base class, and a log of its collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.compat.fsdp import TorchDispatchMode
from torch_ext.testing._internal._fsdp.cases import FSDPTest

__all__ = ["CollectiveLog", "DDPTest"]


class Collective(NamedTuple):
    """A collective that was called: its name in c10d without underscores, and its first
    tensor's type and elements.
    """

    name: str
    dtype: torch.dtype
    numel: int


class CollectiveLog(TorchDispatchMode):
    """Notes all-reduces and broadcasts while it is entered, also those of C++ and of
    autograd's threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name in ("allreduce_", "broadcast_"):
            tensor = args[0][0]
            self.calls.append(Collective(name.strip("_"), tensor.dtype, tensor.numel()))
        return func(*args, **(kwargs or {}))


class DDPTest(FSDPTest):
    """Compares DDP on two ranks with gradients that the test averages by hand."""

    @property
    def world_size(self) -> int:
        return 2

    def net(self) -> nn.Sequential:
        """Return two linear layers, the same on every rank. Shapes: ``(*, 4)`` to ``(*,
        3)``.
        """
        torch.manual_seed(0)
        layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)
        return nn.Sequential(*layers).to(self.device)

    def backward(self, model: nn.Module, step: int = 0) -> None:
        model(self.rows(4, step)).square().sum().backward()

    def counts(self, body: Callable[[], object]) -> tuple[int, int]:
        """Return how many all-reduces and broadcasts of floating-point tensors ``body``
        calls. DDP's integers, by which ranks agree on buckets, do not count.
        """
        with CollectiveLog() as log:
            body()
        names = [call.name for call in log.calls if call.dtype.is_floating_point]
        return names.count("allreduce"), names.count("broadcast")

    def gradients(self, model: nn.Module) -> dict[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def averaged(self, reference: nn.Module) -> dict[str, torch.Tensor]:
        """Return the averages over ranks of the gradients of a model without DDP, by
        parameter. Collective.
        """
        averages = {}
        for name, gradient in self.gradients(reference).items():
            if gradient is not None:
                averages[name] = average = gradient.clone()
                dist.all_reduce(average)
                average.div_(self.world_size)
        return averages

    def check_gradients(
        self, ddp: DDP, expected: Mapping[str, torch.Tensor], what: str
    ) -> None:
        """Check bit by bit that the parameters within ``ddp`` have the gradients
        ``expected``.
        """
        for name, gradient in expected.items():
            found = ddp.module.get_parameter(name).grad
            message = f"{what}: gradient of {name}"
            self.assertEqual(found, gradient, message, atol=0, rtol=0)
