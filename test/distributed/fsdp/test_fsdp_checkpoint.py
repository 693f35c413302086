# Owner(s): ["oncall: distributed"]
"""Activation checkpointing around and inside FSDP1 wrappers: backward runs forward
again, on unsharded parameters.
"""

import functools
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.checkpoint import checkpoint

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    FSDPTest,
    StepLog,
    ThreeUnits,
    get_full_params,
    skip_without_accelerator,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

REENTRANT = functools.partial(
    checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT
)
NO_REENTRANT = functools.partial(
    checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT
)
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "reentrant": REENTRANT,
    "no_reentrant": NO_REENTRANT,
    "offload": offload_wrapper,
}


class Checkpointed(nn.Module):
    """A chain that checkpoints its layers by a call, with one under FSDP."""

    def __init__(
        self,
        use_reentrant: bool,
        wrap: Callable[[nn.Module], nn.Module],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.use_reentrant, self.chain = use_reentrant, Chain(wrap, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.chain, x, use_reentrant=self.use_reentrant)


class TestFSDPCheckpoint(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _train(
        self, model: nn.Module, rank: int | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the losses and the gradients of the inputs of some steps."""
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses, gradients = [], []
        for step in range(3):
            rows = Chain.rows(self.device, self.world_size, rank, step).requires_grad_()
            loss = model(rows).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
            gradients.append(rows.grad)
        return losses, gradients

    def _check_parity(self, model: FSDP) -> None:
        reference = Chain(device=self.device)
        _, expected = self._train(reference, None)
        _, found = self._train(model, self.rank)
        own = slice(2 * self.rank, 2 * self.rank + 2)
        expected = [self.world_size * gradient[own] for gradient in expected]
        self.assertEqual(found, expected, "gradients of the inputs")
        self.assertEqual(
            get_full_params(model),
            list(reference.parameters()),
            "parameters after training",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("kind", list(WRAPPERS))
    def test_checkpoint_fsdp_wrapping(self, kind):
        """Checkpoints of wrapped layers, wrapped checkpoints of layers, and one
        checkpoint of a wrapped whole.
        """
        self.run_subtests(
            {
                "order": ["of a wrapper", "in a wrapper", "of the whole"],
                "sharding_strategy": [*ShardingStrategy][:2],
                "use_orig_params": [False, True],
            },
            self._test_checkpoint_fsdp_wrapping,
            wrapper=WRAPPERS[kind],
        )

    def _test_checkpoint_fsdp_wrapping(
        self,
        order: str,
        wrapper: Callable[[nn.Module], nn.Module],
        **fsdp_kwargs: object,
    ) -> None:
        def wrap(module: nn.Module) -> nn.Module:
            return FSDP(module, device_id=self.device, **fsdp_kwargs)

        if order == "of a wrapper":
            model = wrap(Chain(lambda layer: wrapper(wrap(layer)), self.device))
        elif order == "in a wrapper":
            model = wrap(Chain(lambda layer: wrap(wrapper(layer)), self.device))
        else:
            model = wrap(wrapper(Chain(wrap, self.device)))
        self._check_parity(model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("use_reentrant", [False, True])
    def test_basic_checkpoint_end_to_end(self, use_reentrant):
        for wrap in (partial(FSDP, device_id=self.device), lambda module: module):
            self._check_parity(
                FSDP(
                    Checkpointed(use_reentrant, wrap, self.device),
                    device_id=self.device,
                )
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_recomputation_gathers_once(self):
        """Backward gathers a unit once for all recomputation in it, and reduces its
        gradient once.
        """
        model = ThreeUnits().to(self.device)
        log = StepLog(model)
        for name in model.UNITS[:2]:
            setattr(
                model,
                name,
                FSDP(NO_REENTRANT(getattr(model, name)), device_id=self.device),
            )
        sharded = FSDP(model, device_id=self.device, backward_prefetch=None)
        rows = torch.ones(2, 4, device=self.device)
        with log.of("step"):
            sharded(rows).sum().backward()
        lines = [line.strip() for line in log.lines]
        counts = {
            f"{kind} {unit}": lines.count(f"{kind} {unit}")
            for unit in model.UNITS[:2]
            for kind in ("all-gather", "reduce-scatter")
        }
        self.assertEqual(
            counts,
            {
                "all-gather first": 2,
                "reduce-scatter first": 1,
                "all-gather second": 2,
                "reduce-scatter second": 1,
            },
            "collectives of a step",
        )


class TestFSDPCheckpointSubmodule(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("use_reentrant", [False, True])
    def test_checkpoint_submodule(self, use_reentrant):
        """A wrapper whose module is checkpointed in part saves fewer activations than
        without.
        """

        def build(wrap: bool) -> nn.Module:
            torch.manual_seed(0)
            layers = [
                nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(
                    self.device
                )
                for _ in range(2)
            ]
            kind = REENTRANT if use_reentrant else NO_REENTRANT
            parts = [kind(layer) if wrap else layer for layer in layers]
            # A reentrant backward ends with each checkpoint, and FSDP reduces then: one
            # for each flat parameter.
            return nn.Sequential(
                *map(partial(FSDP, device_id=self.device), parts)
                if use_reentrant
                else parts
            )

        results = []
        for wrap in (False, True):
            torch.manual_seed(0)
            results.append(
                self._step(
                    FSDP(
                        nn.Sequential(nn.Linear(3, 4, device=self.device), build(wrap)),
                        device_id=self.device,
                    )
                )
            )
        self.assertEqual(results[1][1], results[0][1], "parameters after a step")
        self.assertLess(results[1][0], results[0][0], "tensors saved for backward")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_offloaded_activations_are_on_the_host(self):
        """The activations that an offloading wrapper saves for backward take no device
        memory.
        """
        skip_without_accelerator("the host's memory is not accounted for")
        held = {}
        for name, wrap in (
            ("offloaded", offload_wrapper),
            ("kept", lambda module: module),
        ):
            layers = [nn.Linear(4, 4, device=self.device) for _ in range(3)]
            model = FSDP(
                wrap(nn.Sequential(*layers)),
                device_id=self.device,
                use_orig_params=True,
            )
            rows = torch.ones(4096, 4, device=self.device, requires_grad=True)
            model(rows).sum().backward()
            before = self.allocated_bytes()
            output = model(rows)
            held[name] = self.allocated_bytes() - before - output.nbytes
            del output  # holds this round's rows and their gradient
        self.assertLess(
            held["offloaded"],
            held["kept"] - rows.nbytes,
            "bytes of activations held on the device",
        )

    def _step(self, model: FSDP) -> tuple[int, list[torch.Tensor]]:
        """Return how many tensors forward saved, and all parameters after a step."""
        saved: list[torch.Size] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(Chain.rows(self.device, self.world_size, self.rank))
        output.sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return len(saved), [param.detach() for param in get_full_params(model)]


instantiate_parametrized_tests(TestFSDPCheckpoint)
instantiate_parametrized_tests(TestFSDPCheckpointSubmodule)

if __name__ == "__main__":
    run_tests()
