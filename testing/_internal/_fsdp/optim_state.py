"""The base class for tests of FSDP1 optimizer states, and the models that it trains.

All ranks train on the same data, so an unwrapped model on each rank is the reference. States are compared by parameter,
so that a state which went to the wrong parameter is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.compat.fsdp import _gather_state_dict
from torch_ext.testing._internal._fsdp.cases import FSDPTest
from torch_ext.testing._internal._fsdp.device import compute_device, get_devtype
from torch_ext.testing._internal._fsdp.models.base import fsdp_on_device
from torch_ext.testing._internal._fsdp.subtests import skip_without_accelerator

__all__ = [
    "FSDPOptimStateTest",
    "OptimStateModel",
    "OptimStateNestedModel",
    "skip_offload_of_orig_params",
    "state_by_name",
]

_ParamGroups = list[dict[str, Any]]


def skip_offload_of_orig_params() -> None:
    """Skip the running subtest, or the test if it has none, on the host.

    FSDP of torch 2.13 gathers the states of a flat parameter one after the other into one buffer. If the "copy" to the
    host is not a copy, each overwrites the previous one.

    Raises:
        unittest.SkipTest: there is no accelerator.
    """
    skip_without_accelerator(
        "offloading a full optimizer state with use_orig_params=True needs memory apart from the host's"
    )


def _sharding(group: dist.ProcessGroup | None, fsdp_kwargs: dict[str, Any]) -> Callable[..., FSDP]:
    def fsdp(module: nn.Module, **more: Any) -> FSDP:
        return fsdp_on_device(module, process_group=group, **fsdp_kwargs, **more)

    return fsdp


class _Bias(nn.Module):
    """Adds a vector. Shapes: ``(*, dim)`` in and out."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class _Block(nn.Module):
    """A weight, and two submodules with a bias each. Shapes: ``(*, in_dim)`` to ``(*, out_dim)``."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.bias_module0: nn.Module = _Bias(out_dim)
        self.weight = nn.Parameter(torch.randn(in_dim, out_dim))
        self.bias_module1: nn.Module = _Bias(out_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Without a nonlinearity in between, both biases would have the same gradient.
        hidden = torch.relu(self.bias_module0(x @ self.weight))
        output: torch.Tensor = self.bias_module1(hidden)
        return output


class OptimStateNestedModel(nn.Module):
    """Five blocks, to be wrapped at several depths, and a bias; always the same weights. Shapes: ``(8, 5)``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block0: Any = _Block(5, 3)
        self.block1: Any = _Block(3, 7)
        self.bias = nn.Parameter(torch.randn(5))
        self.block2: Any = nn.Sequential(_Block(7, 9), _Block(9, 9), _Block(9, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.block0, self.block1, self.block2):
            x = torch.relu(block(x))
        return x + self.bias

    def get_input(self, device: torch.device) -> tuple[torch.Tensor]:
        return (torch.randn(8, 5, device=device),)

    def get_loss(self, inp: Any, output: torch.Tensor) -> torch.Tensor:
        # Nonlinear, so that gradients change from step to step.
        return (output * output).mean() + output.sum()

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def wrap(
        self, group: dist.ProcessGroup | None = None, ignore_modules: bool = False, **fsdp_kwargs: Any
    ) -> OptimStateNestedModel:
        """Wrap ``block1``, two blocks of ``block2``, and some of their biases separately. The rest stays unwrapped.

        Args:
            group: the process group; the default group if None.
            ignore_modules: have FSDP ignore one bias of the last block.
            fsdp_kwargs: for every FSDP constructor.
        """
        fsdp = _sharding(group, fsdp_kwargs)
        self.block1.bias_module0 = fsdp(self.block1.bias_module0)
        self.block1 = fsdp(self.block1)
        self.block2[1].bias_module0 = fsdp(self.block2[1].bias_module0)
        self.block2[1].bias_module1 = fsdp(self.block2[1].bias_module1)
        self.block2[1] = fsdp(self.block2[1])
        ignored = [self.block2[2].bias_module0] if ignore_modules else None
        self.block2[2] = fsdp(self.block2[2], ignored_modules=ignored)
        return self

    def wrap_alt(self, group: dist.ProcessGroup | None = None, **fsdp_kwargs: Any) -> OptimStateNestedModel:
        """Wrap ``block0``, and one of its biases separately; nothing that :meth:`wrap` wraps."""
        fsdp = _sharding(group, fsdp_kwargs)
        self.block0.bias_module0 = fsdp(self.block0.bias_module0)
        self.block0 = fsdp(self.block0)
        return self

    def param_groups(self) -> _ParamGroups:
        """Return two groups that are not in the order of the parameters and lack ``bias``."""
        rest = [*self.block2.parameters(), *self.block0.parameters()]
        return [{"params": [*self.block1.parameters()]}, {"params": rest, "weight_decay": 0.9}]


class OptimStateModel(nn.Module):
    """Four layers, always with the same weights. Shapes: ``(8, 8)`` in and out.

    Args:
        no_grad: freeze the first layer.
    """

    def __init__(self, no_grad: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).requires_grad_(not no_grad)
        self.net2 = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.net3 = nn.Linear(32, 64)
        self.net4 = nn.Sequential(nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net4(self.net3(self.net2(self.net1(x))))
        return output

    def get_input(self) -> torch.Tensor:
        return torch.rand(8, 8, device=get_devtype())


def _gathered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter, unsharded and on the host. Collective if it is sharded."""
    whole = _gather_state_dict(dict(state))
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in whole.items()}


def state_by_name(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer state of each parameter of an unwrapped ``model``, by name."""
    return {name: optim.state[param] for name, param in model.named_parameters() if param in optim.state}


class FSDPOptimStateTest(FSDPTest):
    """Two ranks; methods that build a model with its optimizer, train, and compare optimizer states."""

    @property
    def world_size(self) -> int:
        return 2

    def _init_nested_model(
        self,
        wrap: bool,
        wrap_alt: bool = False,
        group: dist.ProcessGroup | None = None,
        use_multiple_param_groups: bool = False,
        use_diff_optim_inputs: bool = False,
        fsdp_kwargs: dict[str, Any] | None = None,
    ) -> tuple[OptimStateNestedModel, torch.optim.Optimizer, Any]:
        """Return the model, Adam and its input. If inputs are to differ, odd ranks list the parameters in reverse."""
        model = OptimStateNestedModel().to(compute_device())
        if wrap:
            model = (model.wrap_alt if wrap_alt else model.wrap)(group, **(fsdp_kwargs or {}))
        groups = model.param_groups() if use_multiple_param_groups else [{"params": [*model.parameters()]}]
        if use_diff_optim_inputs and self.rank % 2:
            for param_group in groups:
                param_group["params"].reverse()
        optim_input = groups if use_multiple_param_groups else groups[0]["params"]
        return model, torch.optim.Adam(optim_input, lr=0.01), optim_input

    def _step_model(self, model: nn.Module, optim: Any, num_iters: int = 2, seed: int = 0) -> list[float]:
        """Train with the same batches on all ranks and return the losses."""
        torch.manual_seed(seed)
        module: Any = getattr(model, "module", model)
        losses = []
        for _ in range(num_iters):
            optim.zero_grad()
            batch = module.get_input(compute_device())
            loss = module.get_loss(batch, model(*batch))
            module.run_backward(loss)
            optim.step()
            losses.append(loss.item())
        return losses

    def _broadcast_full_osd(self, full_osd: dict[str, Any], group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        shared: list[Any] = [full_osd]
        dist.broadcast_object_list(shared, src=0, group=group)
        received: dict[str, Any] = shared[0]
        return received

    def _check_same_state(self, fsdp_osd: Mapping[str, Any], ref_state: Mapping[Any, Any]) -> None:
        """Check that both have the same parameters, at least one, each with the same state."""
        actual = {param: _gathered(state) for param, state in fsdp_osd["state"].items()}
        expected = {param: _gathered(state) for param, state in ref_state.items()}
        self.assertEqual(set(actual), set(expected))
        self.assertNotEqual(expected, {})
        for param, state in expected.items():
            self.assertEqual(actual[param], state, f"state of {param}")

    def _check_same_param_groups(
        self, fsdp_osd: Mapping[str, Any], ref_osd: Mapping[str, Any], with_params: bool
    ) -> None:
        """Check that both have the same groups in the same order, and the same members if ``with_params``."""
        left_out = set() if with_params else {"params"}
        actual, expected = (
            [{key: value for key, value in group.items() if key not in left_out} for group in osd["param_groups"]]
            for osd in (fsdp_osd, ref_osd)
        )
        self.assertEqual(actual, expected)

    def _check_same_osd(self, osd: Mapping[str, Any], ref_osd: Mapping[str, Any]) -> None:
        self._check_same_param_groups(osd, ref_osd, with_params=True)
        self._check_same_state(osd, ref_osd["state"])
