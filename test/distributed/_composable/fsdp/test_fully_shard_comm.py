# Owner(s): ["oncall: distributed"]
"""FSDP2's communication: how often it gathers and reduces, in which order under prefetching, over how many bytes.

The order of a plain step is written out in test_fully_shard_anatomy.py; here are the switches that change it.
"""

import sys
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    FSDPTest,
    get_devtype,
    patch_foreach_all_gather,
    patch_foreach_reduce,
    patch_reshard,
    patch_unshard,
    rank_device,
)
from torch_ext.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

c10d_ops = torch.ops.c10d
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = (
    c10d_ops._allgather_base_,
    c10d_ops._reduce_scatter_base_,
    c10d_ops.allreduce_,
)


class CommCase(FSDPTest):
    @property
    def world_size(self) -> int:
        return 2

    @property
    def device(self) -> torch.device:
        return rank_device(self.rank)

    def _model(self, count: int = 3, **options: Any) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*(MLP(6, self.device) for _ in range(count)))
        for module in (*model, model):
            fully_shard(module, **options)
        return model

    def _inputs(self) -> torch.Tensor:
        return torch.randn(4, 6, device=self.device)

    def _counts(self, mode: CommDebugMode) -> dict[Any, int]:
        return {op: count for op, count in mode.get_comm_counts().items() if count}

    def _step_counts(self, model: nn.Module) -> tuple[dict[Any, int], dict[Any, int]]:
        with CommDebugMode() as forward:
            loss = model(self._inputs()).sum()
        with CommDebugMode() as backward:
            loss.backward()
        return self._counts(forward), self._counts(backward)


class TestFullyShardCollectiveCounts(CommCase):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("reshard_after_forward", [True, False])
    def test_gathers_and_reductions_of_a_step(self, reshard_after_forward):
        """One gather a group in forward, one more in backward where it was freed; one reduction a group."""
        forward, backward = self._step_counts(self._model(reshard_after_forward=reshard_after_forward))
        self.assertEqual(forward, {ALL_GATHER: 3})
        self.assertEqual(backward, {REDUCE_SCATTER: 3, **({ALL_GATHER: 3} if reshard_after_forward else {})})

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_the_root_keeps_its_own_parameters_after_forward(self):
        torch.manual_seed(0)
        model = nn.Sequential(MLP(6, self.device), nn.Linear(6, 6, device=self.device))
        fully_shard(model[0])
        fully_shard(model)  # manages the second layer; by default the root does not reshard after forward
        forward, backward = self._step_counts(model)
        self.assertEqual((forward, backward), ({ALL_GATHER: 2}, {ALL_GATHER: 1, REDUCE_SCATTER: 2}))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_set_reshard_after_forward_and_backward(self):
        model = self._model()
        model.set_reshard_after_forward(False)
        self.assertEqual(self._step_counts(model), ({ALL_GATHER: 3}, {REDUCE_SCATTER: 3}))
        model.set_reshard_after_backward(False)
        self._step_counts(model)
        self.assertEqual(self._step_counts(model), ({}, {REDUCE_SCATTER: 3}), "parameters were to be kept")
        model.reshard()
        for module in model:
            module.reshard()
        self.assertEqual(self._step_counts(model)[0], {ALL_GATHER: 3})

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_set_requires_gradient_sync(self):
        model = self._model()
        for sync in (False, False, True, False):
            model.set_requires_gradient_sync(sync)
            _, backward = self._step_counts(model)
            self.assertEqual(backward.get(REDUCE_SCATTER, 0), 3 * sync)
        for sync in (False, True):
            model[0].set_requires_gradient_sync(sync, recurse=False)
            _, backward = self._step_counts(model)
            self.assertEqual(backward.get(REDUCE_SCATTER, 0), sync, "only the first was to be reduced")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_unshard_ahead(self):
        """What was gathered by hand is not gathered again, whether or not the caller waited for it."""
        for asynchronous in (False, True):
            model = self._model()
            model(self._inputs())  # initializes the root
            with CommDebugMode() as mode:
                handles = [module.unshard(async_op=asynchronous) for module in model]
                for handle in handles:
                    self.assertEqual(handle is not None, asynchronous)
                    if handle is not None:
                        handle.wait()
                        handle.wait()  # waiting again is harmless
            self.assertEqual(self._counts(mode), {ALL_GATHER: 3})
            self.assertNotIsInstance(model[0].in_proj.weight, DTensor)
            self.assertEqual(model[0].in_proj.weight.shape, (24, 6))
            with CommDebugMode() as mode:
                model(self._inputs())
            self.assertEqual(self._counts(mode), {})
            self.assertIsInstance(model[0].in_proj.weight, DTensor)


class TestFullyShardHSDPCounts(CommCase):
    @property
    def world_size(self) -> int:
        return 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_replicas_are_reduced_once_a_group_when_required(self):
        mesh = init_device_mesh(get_devtype().type, (2, 2), mesh_dim_names=("replicate", "shard"))
        model = self._model(mesh=mesh)
        for required in (True, False, True):
            model.set_requires_all_reduce(required)
            _, backward = self._step_counts(model)
            self.assertEqual(backward, {ALL_GATHER: 3, REDUCE_SCATTER: 3, **({ALL_REDUCE: 3} if required else {})})


class TestFullyShardOrder(CommCase):
    """The order in which groups are gathered, freed and reduced, by the index of the module in the model."""

    def _order_of_step(self, model: nn.Sequential) -> tuple[list[str], list[str]]:
        names = {id(module._get_fsdp_state()._fsdp_param_group): str(index) for index, module in enumerate(model)}
        events: list[str] = []

        def logging(what: str, original: Any) -> Any:
            def logged(group: Any, *args: Any, **kwargs: Any) -> Any:
                # Asked for while the parameters are there, neither does anything.
                changes = group.is_sharded if what == "gather" else group.is_unsharded
                if id(group) in names and changes and (what != "gather" or group._all_gather_result is None):
                    events.append(f"{what} {names[id(group)]}")
                return original(group, *args, **kwargs)

            return logged

        group_class = type(model[0]._get_fsdp_state()._fsdp_param_group)
        with ExitStack() as stack:
            stack.enter_context(patch_unshard(logging("gather", group_class.unshard)))
            stack.enter_context(patch_reshard(logging("free", group_class.reshard)))
            loss = model(self._inputs()).sum()
            forward, events[:] = list(events), []
            loss.backward()
        return forward, list(events)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_backward_prefetches_the_group_before(self):
        model = self._model(reshard_after_forward=True)
        self._order_of_step(model)  # the order of the first forward is what later backwards prefetch by
        forward, backward = self._order_of_step(model)
        self.assertEqual(forward, ["gather 0", "free 0", "gather 1", "free 1", "gather 2", "free 2"])
        self.assertEqual(backward, ["gather 2", "gather 1", "free 2", "gather 0", "free 1", "free 0"])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_set_modules_to_forward_prefetch(self):
        model = self._model(reshard_after_forward=True)
        self._order_of_step(model)
        model[0].set_modules_to_forward_prefetch([model[1], model[2]])
        forward, _ = self._order_of_step(model)
        self.assertEqual(forward, ["gather 0", "gather 1", "gather 2", "free 0", "free 1", "free 2"])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_set_modules_to_backward_prefetch(self):
        model = self._model(reshard_after_forward=True)
        self._order_of_step(model)
        model[2].set_modules_to_backward_prefetch([model[1], model[0]])
        _, backward = self._order_of_step(model)
        self.assertEqual(backward, ["gather 2", "gather 1", "gather 0", "free 2", "free 1", "free 0"])


class TestFullyShardBytes(CommCase):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("param_dtype", [None, torch.bfloat16])
    @parametrize("reduce_dtype", [None, torch.float32])
    def test_types_on_the_wire(self, param_dtype, reduce_dtype):
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

        gathered, reduced = [], []
        all_gather, reduce = groups.foreach_all_gather, groups.foreach_reduce

        def recording_gather(params: Any, *args: Any, **kwargs: Any) -> Any:
            result = all_gather(params, *args, **kwargs)
            gathered.append((result.all_gather_output.dtype, result.all_gather_output.numel()))
            return result

        def recording_reduce(params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
            reduced.extend(grad.dtype for grad in grads)
            return reduce(params, grads, *args, **kwargs)

        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        model = self._model(1, mp_policy=policy)
        with patch_foreach_all_gather(recording_gather), patch_foreach_reduce(recording_reduce):
            model(self._inputs()).sum().backward()
        elements = sum(param.numel() for param in MLP(6).parameters())
        self.assertEqual({dtype for dtype, _ in gathered}, {param_dtype or torch.float32})
        self.assertEqual([count for _, count in gathered], [elements] * 2)
        self.assertEqual(set(reduced), {param_dtype or torch.float32}, "gradients come in the type of the computation")


instantiate_parametrized_tests(TestFullyShardCollectiveCounts)
instantiate_parametrized_tests(TestFullyShardBytes)

if __name__ == "__main__":
    run_tests()
