"""``DistributedOptimizer``: each worker's own optimizer steps its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from torch_ext.compat import dist_autograd
from torch_ext.testing._internal.dist_utils import dist_init
from torch_ext.testing._internal.distributed.rpc.rpc_agent_test_fixture import (
    RpcAgentTestFixture,
)


class Layer:
    """A square matrix that one worker owns; ``forward`` multiplies by it."""

    def __init__(self, seed: int) -> None:
        weight = torch.rand((3, 3), generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x

    def parameter_rref(self) -> rpc.RRef[Tensor]:
        return rpc.RRef(self.weight)

    def value(self) -> Tensor:
        return self.weight.detach()


class FailsToStep(optim.Optimizer):
    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        raise ValueError("this optimizer does not step")


class FailsToStart(optim.Optimizer):
    def __init__(self, params: Iterable[Any], lr: float) -> None:
        raise ValueError("this optimizer does not start")


OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (optim.Adadelta, {"lr": 0.5}),
    "Adagrad": (optim.Adagrad, {"lr": 0.05}),
    "Adam": (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adamax": (optim.Adamax, {"lr": 0.01}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
    "SGD": (optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    # NAdam has no functional form, so each worker steps under a lock.
    "NAdam": (optim.NAdam, {"lr": 0.01}),
}


class DistOptimizerTest(RpcAgentTestFixture):
    """Trains two layers on two other workers, and here the same two as reference."""

    world_size = 3

    def _remote_layers(self) -> list[rpc.RRef[Layer]]:
        return [
            rpc.remote(self.peer(i), Layer, args=(self.rank * 10 + i,)) for i in (1, 2)
        ]

    def _optimizer(
        self, cls: Any, layers: list[rpc.RRef[Layer]], **options: Any
    ) -> DistributedOptimizer:
        return DistributedOptimizer(
            cls, [layer.rpc_sync().parameter_rref() for layer in layers], **options
        )

    def _backward(
        self, layers: list[rpc.RRef[Layer]], x: Tensor, context_id: int
    ) -> None:
        hidden = layers[0].rpc_async().forward(x).wait()
        out = layers[1].rpc_async().forward(hidden).wait()
        dist_autograd.backward(context_id, [out.sum()])

    @dist_init
    def test_steps_match_a_local_optimizer(self) -> None:
        x = torch.rand((3, 2), generator=torch.Generator().manual_seed(self.rank))
        for name, (cls, options) in OPTIMIZERS.items():
            with self.subTest(name):
                remote = self._remote_layers()
                local = [Layer(self.rank * 10 + i) for i in (1, 2)]
                distributed = self._optimizer(cls, remote, **options)
                reference = cls([layer.weight for layer in local], **options)
                for step in range(3):
                    with dist_autograd.context() as context_id:
                        self._backward(remote, x, context_id)
                        distributed.step(context_id)
                    reference.zero_grad()
                    local[1].forward(local[0].forward(x)).sum().backward()
                    reference.step()
                    for there, here in zip(remote, local, strict=True):
                        value = there.rpc_sync().value()
                        self.assertEqual(value, here.value(), msg=f"step {step}")

    @dist_init
    def test_parameters_without_gradient_stay(self) -> None:
        used, unused = self._remote_layers()
        optimizer = self._optimizer(optim.SGD, [used, unused], lr=0.1)
        before = unused.rpc_sync().value()
        with dist_autograd.context() as context_id:
            loss = used.rpc_sync().forward(torch.ones((3, 2))).sum()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        self.assertEqual(unused.rpc_sync().value(), before)

    @dist_init
    def test_gradients_of_another_context_are_not_used(self) -> None:
        layers = self._remote_layers()
        optimizer = self._optimizer(optim.SGD, layers, lr=0.1)
        before = [layer.rpc_sync().value() for layer in layers]
        with dist_autograd.context() as context_id:
            self._backward(layers, torch.ones((3, 2)), context_id)
        with dist_autograd.context() as context_id:
            # Workers learn of a context from the calls made in it.
            for layer in layers:
                layer.rpc_sync().forward(torch.ones((3, 2), requires_grad=True))
            optimizer.step(context_id)
        self.assertEqual([layer.rpc_sync().value() for layer in layers], before)

    @dist_init
    def test_step_outside_its_context_is_refused(self) -> None:
        layers = self._remote_layers()
        optimizer = self._optimizer(optim.SGD, layers, lr=0.1)
        with dist_autograd.context() as context_id:
            self._backward(layers, torch.ones((3, 2)), context_id)
        why = "Could not find autograd context with id"
        with self.assertRaisesRegex(RuntimeError, why):
            optimizer.step(context_id)

    @dist_init
    def test_error_in_a_step_names_the_worker(self) -> None:
        layers = self._remote_layers()
        optimizer = self._optimizer(FailsToStep, layers, lr=0.1)
        with dist_autograd.context() as context_id:
            self._backward(layers, torch.ones((3, 2)), context_id)
            with self.assertRaisesRegex(Exception, "does not step") as caught:
                optimizer.step(context_id)
        self.assertRegex(str(caught.exception), f"name=({self.peer(1)}|{self.peer(2)})")

    @dist_init
    def test_error_while_an_optimizer_starts_names_the_worker(self) -> None:
        layers = self._remote_layers()
        with self.assertRaisesRegex(Exception, "does not start") as caught:
            self._optimizer(FailsToStart, layers, lr=0.1)
        self.assertRegex(str(caught.exception), f"name=({self.peer(1)}|{self.peer(2)})")
