"""What the suites of FSDP have no short test of: waits are deleted in each scenario many times."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig, ShardedStateDictConfig
from torch.distributed.tensor import init_device_mesh

from studies.waits.scenarios import ScenarioTest
from torch_ext.testing._internal.common_fsdp import get_devtype
from torch_ext.testing._internal.common_utils import run_tests

SHARDED, FULL = StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT


class FailureForTest(Exception):
    """Stands for whatever goes wrong in a model."""


class Layers(nn.Sequential):
    """A few layers."""

    def __init__(self, count: int = 3, width: int = 16) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(count)))
        self.fails_before: int | None = None  # the number of the layer before which forward raises; None for never

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self):
            if number == self.fails_before:
                raise FailureForTest
            rows = layer(rows)
        return rows


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    model(rows).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class TestFSDP1(ScenarioTest):
    def _model(self, **options: Any) -> FSDP:
        device = torch.device(get_devtype().type, self.rank)
        layers = Layers().to(device)
        for number in range(len(layers)):
            layers[number] = FSDP(layers[number], device_id=device, **options)
        return FSDP(layers, device_id=device, **options)

    def _trained(self, **options: Any) -> tuple[FSDP, torch.optim.Optimizer]:
        self._begin()
        model = self._model(**options)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        _step(model, optimizer, self._rows(4, 16))
        return model, optimizer

    def _save_and_load(self, kind: StateDictType, *, use_orig_params: bool, configs: tuple[Any, ...] = ()) -> None:
        """As a checkpoint in the middle of training does."""
        model, optimizer = self._trained(use_orig_params=use_orig_params)
        with FSDP.state_dict_type(model, kind, *configs):
            saved = model.state_dict()
            of_optimizer = FSDP.optim_state_dict(model, optimizer)
            _step(model, optimizer, self._rows(4, 16))
            model.load_state_dict(saved)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, of_optimizer))
        _step(model, optimizer, self._rows(4, 16))

    def test_full_state(self) -> None:
        self._save_and_load(FULL, use_orig_params=False)

    def test_full_state_of_original_parameters(self) -> None:
        self._save_and_load(FULL, use_orig_params=True)

    def test_sharded_state(self) -> None:
        self._save_and_load(SHARDED, use_orig_params=False)

    def test_sharded_state_of_original_parameters(self) -> None:
        self._save_and_load(SHARDED, use_orig_params=True)

    def test_sharded_state_offloaded(self) -> None:
        configs = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
        self._save_and_load(SHARDED, use_orig_params=True, configs=configs)

    def test_unshard_ahead(self) -> None:
        model, optimizer = self._trained()
        first, _, last = model.module

        def unshard_last(*_: Any) -> None:
            last._unshard(async_op=True)

        first.register_forward_pre_hook(unshard_last)
        _step(model, optimizer, self._rows(4, 16))

    def test_hook_that_compresses(self) -> None:
        self._begin()
        model = self._model()
        state = default_hooks.LowPrecisionState(dist.group.WORLD)
        model.register_comm_hook(state, default_hooks.fp16_compress_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            _step(model, optimizer, self._rows(4, 16))


class TestFSDP2(ScenarioTest):
    def _sharded(self, **options: Any) -> Any:
        """Layers, each of which is its own group."""
        layers = Layers().to(get_devtype().type)
        for layer in layers:
            fully_shard(layer, **options)
        return fully_shard(layers, **options)

    def _model(self) -> Any:
        self._begin()
        return self._sharded()

    def _hybrid(self) -> Any:
        self._begin()
        return self._sharded(mesh=init_device_mesh(get_devtype().type, (2, 1), mesh_dim_names=("replicate", "shard")))

    def _steps(self, model: nn.Module, steps: int = 2) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            _step(model, optimizer, self._rows(4, 16))

    def test_hook_that_reduces(self) -> None:
        model = self._model()
        for layer in model:
            layer.set_all_reduce_hook(lambda output: output.mul_(2))
        self._steps(model)

    def test_event_after_the_optimizer(self) -> None:
        model = self._model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            _step(model, optimizer, self._rows(4, 16))
            model.set_post_optim_event(torch.get_device_module(get_devtype().type).current_stream().record_event())

    def test_hybrid_backward_twice(self) -> None:
        model = self._hybrid()
        self._steps(model)
        for is_last in (False, True):
            model.set_is_last_backward(is_last)
            model(self._rows(4, 16)).sum().backward()

    def test_layer_that_is_gathered_and_not_used(self) -> None:
        model = self._model()
        self._steps(model)
        last = model[-1]
        last.forward = lambda rows: rows  # leaves its parameters alone
        last.unshard(async_op=True)
        rows = self._rows(4, 16)
        model[1](model[0](rows)).sum().backward()
        last.reshard()

    def test_group_of_which_a_part_runs(self) -> None:
        self._begin()
        layers = Layers().to(get_devtype().type)
        fully_shard(layers[0])
        fully_shard([layers[1], layers[2]])
        model = fully_shard(layers)
        self._steps(model)
        hidden = self._rows(4, 16).requires_grad_()
        for chunk in hidden.chunk(2):
            model[2](chunk).sum().backward()
        self._steps(model)

    def _fails_in_forward(self, *, async_op: bool) -> None:
        model = self._model()
        self._steps(model)
        if async_op:
            model[2].unshard(async_op=True)
        else:
            model[1].set_modules_to_forward_prefetch([model[2]])
        model.fails_before = 2
        with self.assertRaises(FailureForTest):
            model(self._rows(4, 16))
        model.fails_before = None
        model.reset_iter_state()
        self._steps(model)

    def test_failure_in_forward(self) -> None:
        self._fails_in_forward(async_op=False)

    def test_failure_in_forward_while_gathering(self) -> None:
        self._fails_in_forward(async_op=True)

    def _fails_in_backward(self, model: Any) -> None:
        self._steps(model)

        def fail(gradient: torch.Tensor) -> None:
            raise FailureForTest

        hidden = model[0](self._rows(4, 16).requires_grad_())
        hidden.register_hook(fail)
        with self.assertRaises(FailureForTest):
            model[2](model[1](hidden)).sum().backward()
        model.reset_iter_state()
        self._steps(model)

    def test_failure_in_backward(self) -> None:
        self._fails_in_backward(self._model())

    def test_failure_in_hybrid_backward(self) -> None:
        self._fails_in_backward(self._hybrid())


if __name__ == "__main__":
    run_tests()
