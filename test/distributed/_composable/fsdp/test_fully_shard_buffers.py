# Owner(s): ["oncall: distributed"]
"""What FSDP2 copies and when it frees: offloaded shards and gradients, whole gradients,
waits after an exception, its operators, and the arguments of extensions.
"""

import copy
import itertools
import os
import sys
import types

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _init_default_fully_shard_mesh,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    ThreeUnits,
    check_races,
    fully_shard_units,
    patch_reduce_scatter,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class BuffersTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def step(self, model, step=0):
        model(self.rows(4, step)).square().sum().backward()


class Copies(TorchDispatchMode):
    """Notes copies between devices: to which, and whether the host waits."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            target = kwargs.get("device")
            if target is not None and target.type != args[0].device.type:
                waits = not kwargs.get("non_blocking", False)
                self.found.append((target.type, "waits" if waits else "runs on"))
        return func(*args, **kwargs)


class TestFullyShardCopies(BuffersTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_offloaded_shards_and_gradients(self):
        """The host waits for a copy of gradients that it reads in backward: to add to
        earlier ones, or for a hook. It waits for no other between pinned memory and the
        device.
        """
        skip_without_accelerator("offloading needs a device")
        for pins, accumulates, hooks in itertools.product((True, False), repeat=3):
            model = nn.Linear(4, 4, bias=False)
            policy = CPUOffloadPolicy(pin_memory=pins)
            fully_shard(model, mesh=world_mesh(4), offload_policy=policy)
            seen = []
            if hooks:
                model.weight.register_post_accumulate_grad_hook(
                    lambda each, seen=seen: seen.append(each.grad.to_local().clone())
                )
            if accumulates:
                self.step(model)
            rows = self.rows(4)
            with Copies() as copies:
                model(rows).square().sum().backward()
            waits = "waits" if accumulates or hooks or not pins else "runs on"
            host = model.weight.device.type
            expected = [(self.device.type, "runs on"), (host, waits)]
            where = f"{pins=}, {accumulates=}, {hooks=}"
            self.assertEqual(copies.found, expected, where)
            self.assertEqual(len(seen), hooks * (1 + accumulates), where)
            if hooks:
                self.assertEqual(seen[-1], model.weight.grad.to_local(), where)


class Extended(torch.Tensor):
    """Gathers as a plain tensor, through hooks of its class."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.as_subclass(torch.Tensor),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (outputs[0], outputs)


class TestFullyShardOffloadedExtension(BuffersTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_shards_are_moved_before_the_hooks(self):
        """And the host does not wait for the copy."""
        skip_without_accelerator("offloading needs a device")
        torch.manual_seed(0)
        model = nn.Linear(4, 8, bias=False)
        reference = copy.deepcopy(model).to(self.device)
        fully_shard(model, mesh=world_mesh(4), offload_policy=CPUOffloadPolicy())
        shard = model.weight._local_tensor
        model.weight._local_tensor = shard.as_subclass(Extended)
        rows = self.rows(4)
        for _ in range(2):
            with Copies() as copies:
                found = model(rows)
            self.assertEqual(found, reference(rows))
            self.assertEqual(copies.found, [(self.device.type, "runs on")])
            model.reshard()


class TestFullyShardFreedGradients(BuffersTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_whole_gradients_are_freed_before_they_are_reduced(self):
        """The reduction has a copy."""
        skip_without_accelerator("the host does not account for the memory of tensors")
        width = 128
        layers = (nn.Linear(width, width, bias=False) for _ in range(2))
        model = nn.Sequential(*layers).to(self.device)
        before = self.allocated_bytes() - 8 * width * width
        fully_shard(model, mesh=world_mesh(4))
        scatter, held = dist.reduce_scatter_single, []

        def scattering(*args, **kwargs):
            held.append((self.allocated_bytes() - before) / (4 * width * width))
            return scatter(*args, **kwargs)

        with patch_reduce_scatter(scattering):
            model(torch.ones(1, width, device=self.device)).sum().backward()
        # Two shards, the copy of both, and their summed shards. Through torch 2.13 a
        # variable of a loop keeps the last gradient.
        self.assertLess(held[0], 0.5 + 2 + 0.5 + 1 + 0.5, "weights held")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_a_smaller_mesh_keeps_its_shards_alone(self):
        """Between forward and backward, whole parameters are freed."""
        skip_without_accelerator("the host does not account for the memory of tensors")
        width = 128
        model = nn.Sequential(nn.Linear(width, width, bias=False)).to(self.device)
        before = self.allocated_bytes() - 4 * width * width
        fully_shard(model[0], mesh=world_mesh(4), reshard_after_forward=2)
        fully_shard(model, mesh=world_mesh(4))
        with torch.no_grad():
            model(torch.ones(1, width, device=self.device))
        held = (self.allocated_bytes() - before) / (4 * width * width)
        self.assertLess(held, 0.25 + 0.5 + 0.2, "weights held")


class TestFullyShardAfterExceptions(BuffersTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("where", ["forward", "backward"])
    def test_reset_waits_for_what_is_under_way(self, where):
        """After the reset, streams are ordered as after a whole step: parameters may be
        changed, and gradients read.
        """
        skip_without_accelerator("the host has no streams")
        low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        layouts = (
            ((4,), {"reshard_after_forward": True}),
            ((4,), {"reshard_after_forward": 2}),
            ((2, 2), {"mp_policy": low}),
            ((4, 1), {}),
        )
        for number, (sizes, options) in enumerate(layouts):
            for index, name in enumerate(ThreeUnits.UNITS):
                model = fully_shard_units(self, world_mesh(*sizes), **options)
                model._set_unshard_async_op((number + index) % 2 == 1)
                model.set_modules_to_forward_prefetch([model.first, model.second])
                model.set_modules_to_backward_prefetch([model.second, model.first])
                with check_races():
                    self._fail_and_go_on(model, name, where)

    def _fail_and_go_on(self, model, name, where):
        self.step(model)

        def stop(*_):
            raise KeyError

        def hook(module, args, output):
            if where == "forward":
                stop()
            output.register_hook(stop)

        handle = getattr(model, name).register_forward_hook(hook)
        with self.assertRaises(KeyError):
            self.step(model, 1)
        handle.remove()
        model.reset_iter_state()
        with torch.no_grad():
            for each in model.parameters():
                self.assertIsInstance(each, DTensor)
                if each.grad is not None:
                    each.grad.to_local().mul_(2)
                each.to_local().mul_(2)
        model.zero_grad()
        self.step(model, 2)


class TestFullyShardOps(BuffersTest):
    """FSDP2's custom operators, which compiled graphs contain."""

    @property
    def world_size(self):
        return 1

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_operators_on_meta_tensors(self):
        """They return tensors of the same layout as on the device, without data."""
        ops, places = torch.ops.fsdp, (self.device, torch.device("meta"))
        for rank in range(3):
            layouts = []
            for place in places:
                inputs = [torch.ones(2, device=place), torch.ones(3, device=place)]
                whole = torch.zeros(15, device=place)
                part, out = ops.all_gather_copy_in(inputs, whole, [2, 3], 5, rank)
                layouts.append((part.shape, part.storage_offset(), out.shape))
                if place == self.device:
                    expected = [float(index // 5 == rank) for index in range(15)]
                    self.assertEqual(out.tolist(), expected, f"of rank {rank}")
            self.assertEqual(layouts[0], layouts[1], f"of rank {rank}")
        for place in places:
            source = torch.arange(12.0, device=place).view(3, 4)
            outs = [torch.zeros(rows, 4, device=place) for rows in (1, 2)]
            ops.split_with_sizes_copy(source, [1, 2], out=outs)
            columns = [torch.zeros(3, width, device=place) for width in (1, 3)]
            ops.split_with_sizes_copy(source, [1, 3], dim=1, out=columns)
            joined = torch.zeros(2, 6, device=place)
            parts = [source[:, :2], source[:, 2:3]]
            ops.chunk_cat(parts, dim=0, num_chunks=2, out=joined)
            if place == self.device:
                self.assertEqual(outs, [source[:1], source[1:]], "rows")
                self.assertEqual(columns, [source[:, :1], source[:, 1:]], "columns")
                expected = [[0.0, 1, 4, 5, 2, 6], [8, 9, 0, 0, 10, 0]]
                self.assertEqual(joined.tolist(), expected, "padded chunks")

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_copy(self):
        def copied(source):
            target = torch.zeros(3)
            torch.ops.fsdp.copy_(target, source)
            return target + 1

        for run in (copied, torch.func.functionalize(copied)):
            self.assertEqual(run(torch.ones(3)), torch.full((3,), 2.0))

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_factors_of_gradients(self):
        """Gradients are divided by the number of ranks or the given factor, by the
        collective if it can, else before and after it. In half precision both are about
        the root.
        """
        op = dist.ReduceOp

        def group(size):
            return size and types.SimpleNamespace(size=lambda: size)

        wide = (torch.float32, torch.bfloat16)
        for dtype, shards, replicas, factor, forced, (kind, adds) in itertools.product(
            (*wide, torch.float16),
            (None, 1, 2, 6),
            (None, 1, 4),
            (None, 1.0, 3.0, 6.0),
            (False, True),
            ((self.device.type, False), ("mtia", True)),
        ):
            before, after, *ops = _fsdp_collectives._get_gradient_divide_factors(
                group(shards), group(replicas), dtype, kind, factor, forced
            )
            ranks = (shards or 1) * (replicas or 1)
            divided = (before or 1.0) * (after or 1.0)
            where = f"{dtype=}, {shards=}, {replicas=}, {factor=}, {forced=}, {kind=}"
            if forced or adds or dtype not in wide:
                self.assertEqual(ops, [op.SUM] * 2, where)
                self.assertEqual(divided, factor or float(ranks), where)
                if dtype in wide:
                    self.assertIsNone(before, where)
                else:
                    self.assertLessEqual(
                        max(before, after) / min(before, after), 4, where
                    )
                continue
            self.assertEqual((before, after), (None, None), where)
            if factor is None:
                expected = op.SUM if ranks == 1 else op.AVG
                self.assertEqual(ops, [expected] * 2, where)
            else:
                self.assertEqual(ops[1], op.SUM, where)
                self.assertEqual(ops[0] == op.AVG, factor == shards, where)
                self.assertEqual(ops[0] == op.SUM, False, where)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_a_backend_without_an_allocator(self):
        """Buffers are then allocated as any tensor."""
        model = fully_shard(nn.Linear(4, 4).to(self.device), mesh=world_mesh(1))
        model.set_allocate_memory_from_process_group_for_comm(True)
        comm = fully_shard.state(model)._fsdp_param_group._all_gather_comm
        backend = types.SimpleNamespace(supports_tensor_alloc=lambda _: False)
        comm._group = types.SimpleNamespace(_get_backend=lambda _: backend)
        found = comm.allocate((3, 2), dtype=torch.float64, device=self.device)
        self.assertEqual(
            (found.shape, found.dtype, found.device),
            ((3, 2), torch.float64, self.device),
        )

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_default_group_and_mesh(self):
        """Without a mesh, FSDP uses one over all ranks, and starts the default group if
        the program has not.
        """
        dist.destroy_process_group()
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        model = fully_shard(nn.Linear(4, 4).to(self.device))
        self.assertTrue(dist.is_initialized())
        self.assertEqual(model.weight.device_mesh.shape, (1,))
        self.step(model)
        self.assertEqual(model.weight.grad.full_tensor().shape, (4, 4))
        self.assertEqual(_init_default_fully_shard_mesh().shape, (1,))


class Hooked:
    """Extension hooks of a plain shard: ``pre`` has the given arguments."""

    def __init__(self, arguments, calls, copies=1):
        self.arguments, self.calls, self.copies = arguments, calls, copies

    def attach(self, parameter):
        shard = parameter._local_tensor
        calls, copies = self.calls, self.copies

        def of_mesh(shard, mesh):
            calls.append((mesh,))
            return (shard,), None

        def of_two(shard, mesh, outer_size):
            raise NotImplementedError

        def of_all(shard, mesh, outer_size, outer_stride, module, mp_policy):
            calls.append((mesh, outer_size, outer_stride, module, mp_policy))
            return (shard,) * copies, None

        def after(shard, outputs, metadata, param_dtype, *, out=None):
            return None if out is not None else (outputs[0], outputs)

        pre = {1: of_mesh, 2: of_two, 5: of_all}[self.arguments]
        shard.fsdp_pre_all_gather = types.MethodType(pre, shard)
        shard.fsdp_post_all_gather = types.MethodType(after, shard)


class TestFullyShardExtensionSignatures(BuffersTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_arguments(self):
        """The hook before an all-gather may take the mesh alone, or all of it."""
        policy, rows = MixedPrecisionPolicy(), self.rows(4)
        for arguments in (1, 5, 2):
            model, calls = nn.Linear(4, 8, bias=False).to(self.device), []
            expected = model(rows)
            fully_shard(model, mesh=world_mesh(4), mp_policy=policy)
            Hooked(arguments, calls).attach(model.weight)
            if arguments == 2:
                with self.assertRaisesRegex(AssertionError, "Invalid fsdp_pre_all_gat"):
                    model(rows)
                continue
            self.assertEqual(model(rows), expected)
            all_of_it = (world_mesh(4), (8, 4), (4, 1), model, policy)
            self.assertEqual(calls, [all_of_it[:arguments]], f"{arguments} arguments")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_a_smaller_mesh_after_forward_is_refused(self):
        layer = nn.Linear(4, 8, bias=False).to(self.device)
        model = nn.Sequential(layer)
        fully_shard(layer, mesh=world_mesh(4), reshard_after_forward=2)
        fully_shard(model, mesh=world_mesh(4))
        Hooked(5, []).attach(layer.weight)
        loss = model(self.rows(4)).sum()
        with self.assertRaises(NotImplementedError):
            loss.backward()
        layer = nn.Linear(4, 8, bias=False).to(self.device)
        model = nn.Sequential(layer)
        fully_shard(layer, mesh=world_mesh(4), reshard_after_forward=2)
        fully_shard(model, mesh=world_mesh(4))
        Hooked(5, [], copies=2).attach(layer.weight)
        with self.assertRaisesRegex(AssertionError, "Expected 1 all_gather_output, go"):
            model(self.rows(4))


instantiate_parametrized_tests(TestFullyShardAfterExceptions)

if __name__ == "__main__":
    run_tests()
