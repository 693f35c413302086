"""A sharded model trained beside a whole one, for suites of ``fully_shard``.

The whole model averages its gradients by plain all-reduces of this module, so that neither DDP nor FSDP is part of
what the sharded model is measured against.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_ext.testing._internal._fsdp.fixed_worlds import FourRankTest
from torch_ext.testing._internal._fsdp.models.mlp import MLP
from torch_ext.testing._internal._fsdp.parity import check_sharded_parity

__all__ = ["BesideTest", "average_gradients", "mlps", "shard_all", "whole"]

LEARNING_RATE = 0.05


def mlps(count: int = 3, width: int = 5) -> nn.Sequential:
    """Return up to three perceptrons in turn, the same on every rank.

    By default no number of ranks divides a width, so that every parameter is padded. Shapes: ``(*, width)`` in and out.
    """
    torch.manual_seed(0)
    return nn.Sequential(*(MLP(width, dim_multiplier=multiplier) for multiplier in (2, 3, 2)[:count]))


def shard_all(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each child of ``model``, then ``model`` with what is left; return it."""
    for child in model.children():
        fully_shard(child, **options)
    fully_shard(model, **options)
    return model


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient of ``model``, which every rank holds whole, by its mean over the world. Collective."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` unsharded and detached. Collective if it is a DTensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


class BesideTest(FourRankTest):
    """Four ranks, each with data of its own, that train a sharded model and a whole one in the same steps."""

    def rows(self, width: int, step: int = 0, count: int = 3) -> torch.Tensor:
        """Return this rank's data of that step, shape ``(count, width)``; no other rank or step has the same."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(count, width, generator=generator).to(self.device)

    def replica(self, model: nn.Module) -> nn.Module:
        """Return a copy of ``model``, taken before it is sharded, on this rank's device."""
        return copy.deepcopy(model).to(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # One tensor at a time, so that parameters of different meshes may share an optimizer.
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, foreach=False)

    def train_beside(
        self,
        reference: nn.Module,
        sharded: nn.Module,
        width: int,
        *,
        steps: int = 2,
        check: Callable[[nn.Module, nn.Module], None] | None = None,
        loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
        **tolerance: float,
    ) -> None:
        """Train both and compare loss, gradients and parameters in each step, and that parameters moved. Collective.

        Args:
            reference: plain tensors, a :meth:`replica` of ``sharded``.
            sharded: has been given to ``fully_shard``.
            width: last dimension of the input.
            steps: optimizer steps.
            check: compares gradients and parameters after each backward and at the end; shard by shard by default.
            loss_of: of a model and its input; by default the sum of the squared output.
            tolerance: ``atol`` and ``rtol`` for losses.
        """
        compare = check or self.check_shards
        optimizers = [self.optimizer(model) for model in (reference, sharded)]
        before = [parameter.detach().clone() for parameter in reference.parameters()]
        for step in range(steps):
            losses = [(loss_of or _squares)(model, self.rows(width, step)) for model in (reference, sharded)]
            for loss in losses:
                loss.backward()
            average_gradients(reference)
            self.check_equal(f"loss of step {step}", losses[1], losses[0], **tolerance)
            compare(reference, sharded)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        compare(reference, sharded)
        self.assertNotEqual(before, [parameter.detach() for parameter in reference.parameters()])

    def check_shards(self, reference: nn.Module, sharded: nn.Module, **kwargs: Any) -> None:
        """Compare parameters and gradients shard by shard, layouts included."""
        check_sharded_parity(self, reference, sharded, **kwargs)

    def check_whole(self, reference: nn.Module, sharded: nn.Module) -> None:
        """Compare parameters and gradients unsharded, for layouts that ``distribute_tensor`` orders otherwise."""
        pairs = zip(reference.named_parameters(), sharded.named_parameters(), strict=True)
        for (name, expected), (_, found) in pairs:
            self.check_equal(name, whole(found), expected.detach())
            self.check_equal(f"{name} has a gradient", found.grad is None, expected.grad is None)
            if expected.grad is not None and found.grad is not None:
                self.check_equal(f"{name}.grad", whole(found.grad), expected.grad)


def _squares(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().sum()
