"""Scenarios for which the suites of this tree have no short test. Waits are deleted in each of them many times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils.rnn import PackedSequence

from torch_ext.testing._internal.common_fsdp import FSDPTest, get_devtype, world_mesh
from torch_ext.testing._internal.common_utils import run_tests


class FailureForTest(Exception):
    """Stands for any error in a model."""


class Layers(nn.Sequential):
    """Three layers on the device."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(16, 16) for _ in range(3)))
        self.to(get_devtype().type)
        self.fails_before: int | None = None  # the number of the layer before which forward raises; None for never

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self):
            if number == self.fails_before:
                raise FailureForTest
            rows = layer(rows)
        return rows


class Packed(nn.Module):
    """A layer that takes rows, and rows packed as for a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16).to(get_devtype().type)

    def forward(self, rows: torch.Tensor, packed: PackedSequence) -> torch.Tensor:
        return self.layer(rows) + self.layer(packed.data).sum()


def _rows(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes or (4, 16), device=get_devtype().type)


def _backward(model: nn.Module) -> None:
    model(_rows()).sum().backward()


def _steps(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(steps):
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()


class ScenarioTest(FSDPTest):
    world_size = 2


class TestDDP(ScenarioTest):
    def _model(self, **options: Any) -> DDP:
        return DDP(Layers(), **options)

    def test_mixed_precision(self) -> None:
        _steps(self._model(mixed_precision=_MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)))

    def test_optimizer_in_backward(self) -> None:
        layers = Layers()
        _apply_optimizer_in_backward(torch.optim.SGD, layers.parameters(), {"lr": 0.1})
        model = DDP(layers)
        for _ in range(2):
            _backward(model)

    def test_inputs_from_another_device(self) -> None:
        model = DDP(Packed(), device_ids=[self.rank])
        rows = torch.ones(4, 16, device=f"{get_devtype().type}:{1 - self.rank}")
        for _ in range(2):
            model(rows, PackedSequence(rows, torch.tensor([2, 2], device="cpu"))).sum().backward()
            rows = rows * 2

    def test_uneven_inputs(self) -> None:
        model = self._model()
        with model.join():
            _steps(model, steps=1 + self.rank)


class TestDTensor(ScenarioTest):
    def test_redistribution(self) -> None:
        mesh = world_mesh(2)
        rows = distribute_tensor(_rows(8, 8), mesh, [Shard(0)])
        (rows.redistribute(mesh, [Replicate()], async_op=True) * 2).sum()
        rows.redistribute(mesh, [Shard(1)]).to_local().mul(2)
        rows.redistribute(mesh, [Replicate()]).to_local().mul(2)
        rows.sum().full_tensor().mul(2)

    def test_rows_that_two_dimensions_of_the_mesh_shard(self) -> None:
        mesh = world_mesh(1, 2)
        strided = DTensor.from_local(_rows(4, 8), mesh, [Replicate(), _StridedShard(0, split_factor=2)])
        strided.full_tensor().mul(2)

    def test_functional_collectives(self) -> None:
        rows, group = _rows(4, 4), self.process_group
        functional.all_reduce(rows, "sum", group).mul(2)
        functional.all_gather_tensor(rows, 1, group).mul(2)
        functional.reduce_scatter_tensor(rows, "sum", 0, group).wait().mul(2)
        functional.all_to_all_single(rows, None, None, group).mul(2)

    def test_functional_collectives_in_backward(self) -> None:
        rows, group = _rows(4, 4).requires_grad_(), self.process_group
        for output in (
            functional.all_reduce(rows * 2, "sum", group),
            functional.all_gather_tensor_autograd(rows * 2, 0, group),
            functional.reduce_scatter_tensor_autograd(rows * 2, "sum", 0, group),
            functional.all_to_all_single_autograd(rows * 2, None, None, group),
        ):
            output.sum().backward()


class TestFSDP1(ScenarioTest):
    def _model(self, **options: Any) -> FSDP:
        options["device_id"] = self.device
        layers = Layers()
        for number in range(len(layers)):
            layers[number] = FSDP(layers[number], **options)
        return FSDP(layers, **options)

    def test_unshard_ahead(self) -> None:
        model = self._model()
        first, _, last = model.module
        _steps(model, 1)

        def unshard_last(*_: Any) -> None:
            last._unshard(async_op=True)

        first.register_forward_pre_hook(unshard_last)
        _steps(model, 1)

    def test_compression_hook(self) -> None:
        model = self._model()
        model.register_comm_hook(default_hooks.LowPrecisionState(dist.group.WORLD), default_hooks.fp16_compress_hook)
        _steps(model)


class TestFSDP2(ScenarioTest):
    def _model(self, *, hybrid: bool = False) -> Any:
        """Layers, each of which is its own group."""
        options = {"mesh": world_mesh(2, 1)} if hybrid else {}
        layers = Layers()
        for layer in layers:
            fully_shard(layer, **options)
        return fully_shard(layers, **options)

    def test_all_reduce_hook(self) -> None:
        model = self._model()
        for layer in model:
            layer.set_all_reduce_hook(lambda output: output.mul_(2))
        _steps(model)

    def test_event_after_the_optimizer(self) -> None:
        model = self._model()
        for _ in range(3):
            _steps(model, 1)
            model.set_post_optim_event(torch.get_device_module(get_devtype().type).current_stream().record_event())

    def test_hybrid_backward_twice(self) -> None:
        model = self._model(hybrid=True)
        _steps(model)
        for is_last in (False, True):
            model.set_is_last_backward(is_last)
            _backward(model)

    def test_layer_that_is_gathered_and_not_used(self) -> None:
        model = self._model()
        _steps(model)
        last = model[-1]
        last.forward = lambda rows: rows  # leaves its parameters alone
        last.unshard(async_op=True)
        model[1](model[0](_rows())).sum().backward()
        last.reshard()

    def test_group_of_which_a_part_runs(self) -> None:
        layers = Layers()
        fully_shard(layers[0])
        fully_shard([layers[1], layers[2]])
        model = fully_shard(layers)
        _steps(model)
        for chunk in _rows().requires_grad_().chunk(2):
            model[2](chunk).sum().backward()
        _steps(model)

    @contextmanager
    def _failure(self, model: Any) -> Iterator[None]:
        """Train; fail within; reset; train again."""
        _steps(model)
        with self.assertRaises(FailureForTest):
            yield
        model.fails_before = None
        model.reset_iter_state()
        _steps(model)

    def _fails_in_forward(self, prepare: Callable[[Any], object]) -> None:
        model = self._model()
        with self._failure(model):
            prepare(model)
            model.fails_before = 2
            model(_rows())

    def test_failure_in_forward(self) -> None:
        self._fails_in_forward(lambda model: model[1].set_modules_to_forward_prefetch([model[2]]))

    def test_failure_in_forward_while_gathering(self) -> None:
        self._fails_in_forward(lambda model: model[2].unshard(async_op=True))

    def _fails_in_backward(self, model: Any) -> None:
        def fail(gradient: torch.Tensor) -> None:
            raise FailureForTest

        with self._failure(model):
            hidden = model[0](_rows().requires_grad_())
            hidden.register_hook(fail)
            model[2](model[1](hidden)).sum().backward()

    def test_failure_in_backward(self) -> None:
        self._fails_in_backward(self._model())

    def test_failure_in_hybrid_backward(self) -> None:
        self._fails_in_backward(self._model(hybrid=True))


if __name__ == "__main__":
    run_tests()
