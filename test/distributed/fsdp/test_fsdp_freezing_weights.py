# Owner(s): ["oncall: distributed"]
"""FSDP1 trains a model whose trunk is frozen: the head learns as without FSDP, and the
trunk does not change.
"""

import sys
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import Chain, FSDPTest, get_full_params
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

FREEZING = ["requires_grad", "grad_to_none"]


class Network(nn.Module):
    """A trunk without gradients, if asked for also without autograd, and a
    head on it.
    """

    def __init__(
        self, trunk: nn.Module, head: nn.Module, disable_autograd: bool
    ) -> None:
        super().__init__()
        self.trunk, self.head, self.disable_autograd = trunk, head, disable_autograd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(not self.disable_autograd):
            features = self.trunk(x)
        return self.head(torch.tanh(features))


class TestFreezingWeights(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _network(
        self, freezing: str, freeze_after_wrap: bool, disable_autograd: bool, **how: Any
    ) -> nn.Module:
        wrap_trunk, wrap_layers, wrap = (
            how["wrap_trunk"],
            how["wrap_layers"],
            how["wrap"],
        )
        torch.manual_seed(0)
        trunk, head = (
            Chain(wrap_layers, self.device),
            nn.Linear(2, 3, device=self.device),
        )

        def freeze(module: nn.Module) -> None:
            if freezing == "requires_grad":
                module.requires_grad_(False)

        if not freeze_after_wrap:
            freeze(trunk)
        model = Network(wrap_trunk(trunk), wrap(head), disable_autograd)
        if freeze_after_wrap:
            freeze(model.trunk)
        return wrap(model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("freezing_method", FREEZING)
    @parametrize("with_nested_trunk", [False, True])
    def test_freezing_weights(self, with_nested_trunk, freezing_method):
        self.run_subtests(
            {
                "freeze_after_wrap": [False, True],
                "disable_autograd": [False, True],
                "use_orig_params": [False, True],
            },
            self._test_freezing_weights,
            nested=with_nested_trunk,
            freezing=freezing_method,
            # With one unit below the root there is little to prefetch.
            forward_prefetch=with_nested_trunk,
        )

    def _test_freezing_weights(
        self,
        nested: bool,
        freezing: str,
        use_orig_params: bool,
        forward_prefetch: bool,
        **how: Any,
    ) -> None:
        def unwrapped(module: nn.Module) -> nn.Module:
            return module

        def wrap(module: nn.Module) -> nn.Module:
            return FSDP(
                module,
                device_id=self.device,
                use_orig_params=use_orig_params,
                forward_prefetch=forward_prefetch,
            )

        reference = self._network(
            freezing, wrap_trunk=unwrapped, wrap_layers=unwrapped, wrap=unwrapped, **how
        )
        layers = wrap if nested else unwrapped
        # With the layers wrapped, the trunk's own wrapper has no parameters left.
        model = self._network(
            freezing, wrap_trunk=wrap, wrap_layers=layers, wrap=wrap, **how
        )
        before = [param.detach().clone() for param in reference.trunk.parameters()]
        self._train(reference, freezing, rank=None)
        self._train(model, freezing, rank=self.rank)
        names = [name for name, _ in reference.named_parameters()]
        found = dict(zip(names, get_full_params(model), strict=True))
        self.assertEqual(
            found,
            dict(reference.named_parameters()),
            "parameters after training the head",
        )
        frozen = {
            name: old
            for name, old in zip(names, before, strict=False)
            if name.startswith("trunk")
        }
        self.assertEqual(
            {name: found[name].detach() for name in frozen},
            frozen,
            "frozen parameters after training",
        )

    def _train(self, model: nn.Module, freezing: str, rank: int | None) -> None:
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trunk = (model.module if isinstance(model, FSDP) else model).trunk
        for step in range(3):
            optim.zero_grad()
            model(
                Chain.rows(self.device, self.world_size, rank, step)
            ).square().mean().backward()
            if freezing == "grad_to_none":
                for param in trunk.parameters():
                    param.grad = None
            else:
                self.assertTrue(
                    all(param.grad is None for param in trunk.parameters()),
                    "a frozen one got a gradient",
                )
            optim.step()


instantiate_parametrized_tests(TestFreezingWeights)

if __name__ == "__main__":
    run_tests()
