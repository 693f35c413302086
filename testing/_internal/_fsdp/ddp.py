"""The base class of tests of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal._fsdp.cases import FSDPTest
from torch_ext.testing._internal._fsdp.step_log import CollectiveLog

__all__ = ["DDPTest"]


class DDPTest(FSDPTest):
    """Compares DDP on two ranks with gradients that the test averages by hand."""

    world_size = 2

    def net(self) -> nn.Sequential:
        """Return two linear layers, 4 to 6 to 3, the same on every rank."""
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
        return names.count("all-reduce"), names.count("broadcast")

    def gradients(self, model: nn.Module) -> dict[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def averaged(self, reference: nn.Module) -> dict[str, torch.Tensor]:
        """Return ``reference``'s gradients, averaged over ranks. Collective."""
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
        """Check bit by bit that ``ddp`` has the gradients ``expected``."""
        for name, gradient in expected.items():
            found = ddp.module.get_parameter(name).grad
            message = f"{what}: gradient of {name}"
            self.assertEqual(found, gradient, message, atol=0, rtol=0)
