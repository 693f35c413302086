# Owner(s): ["oncall: distributed"]
"""Parts of FSDP2's communication that users may replace: collectives, buffers, groups
and the number in flight.
"""

import sys
import types
import unittest
from contextlib import ExitStack, nullcontext
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    ThreeUnits,
    check_train_parity,
    fully_shard_units,
    patch_all_gather,
    patch_reduce_scatter,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


def needs_setting(name):
    return unittest.skipIf(
        not hasattr(FSDPModule, name),
        f"FSDPModule of this torch has no {name}: install a newer one",
    )


class Counted:
    """Records FSDP's calls of a collective. Its buffers hold NaN, which shows any use
    before they are filled.
    """

    def __init__(self):
        self.allocated, self.called = [], []

    def allocate(self, size, *, dtype, device):
        self.allocated.append(torch.Size(size).numel())
        return torch.full(size, float("nan"), dtype=dtype, device=device)


class CountedAllGather(Counted):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.called.append((input_tensor.numel(), output_tensor.numel()))
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class CountedReduceScatter(Counted):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.called.append((input_tensor.numel(), output_tensor.numel()))
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


class CustomCommsTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    def check_parity(self, model):
        check_train_parity(
            self,
            ThreeUnits().to(self.device),
            model,
            [self.rows(4, step) for step in range(2)],
        )


class TestFullyShardCustomCollectives(CustomCommsTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_set_custom_all_gather(self):
        """The module's all-gathers go through the user's, with buffers that the user's
        allocates; other modules' do not.
        """
        model = fully_shard_units(self)
        gather = CountedAllGather()
        model.second.set_custom_all_gather(gather)
        self.check_parity(model)
        # In each of two steps, before forward and before backward: 24 of 48 elements.
        self.assertEqual(gather.called, [(24, 48)] * 4, "elements gathered")
        self.assertEqual(set(gather.allocated), {48}, "elements allocated")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_set_custom_reduce_scatter(self):
        model = fully_shard_units(self)
        scatter = CountedReduceScatter()
        model.second.set_custom_reduce_scatter(scatter)
        self.check_parity(model)
        self.assertEqual(scatter.called, [(48, 24)] * 2, "elements reduced")
        self.assertEqual(scatter.allocated, [48, 24] * 2, "elements allocated")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_allocation_from_the_group_and_custom_collectives_exclude_each_other(self):
        for setter, custom, words in (
            (
                "set_custom_all_gather",
                CountedAllGather(),
                "all gather comm is custom: CountedAllGather",
            ),
            (
                "set_custom_reduce_scatter",
                CountedReduceScatter(),
                "reduce scatter comm is custom: CountedReduceScatter",
            ),
        ):
            model = fully_shard_units(self)
            getattr(model, setter)(custom)
            with self.assertRaisesRegex(AssertionError, words):
                model.set_allocate_memory_from_process_group_for_comm(True)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_set_allocate_memory_from_process_group_for_comm(self):
        """Buffers come from the group's backend where it has an allocator, and change
        nothing.
        """
        model = fully_shard_units(self)
        backend = dist.group.WORLD._get_backend(torch.device(self.device))
        for enable in (True, False):
            for module in (model.first, model.second, model):
                module.set_allocate_memory_from_process_group_for_comm(enable)
            comms = [fully_shard.state(model)._fsdp_param_group._all_gather_comm]
            comms.append(
                fully_shard.state(model)._fsdp_param_group._reduce_scatter_comm
            )
            prefix = "ProcessGroupAlloc" if enable else "Default"
            found = [type(comm).__name__ for comm in comms]
            self.assertEqual(
                found, [f"{prefix}AllGather", f"{prefix}ReduceScatter"], f"{enable}"
            )
            if not backend.supports_tensor_alloc(torch.device(self.device)):
                allocated = comms[0].allocate(
                    (3, 2), dtype=torch.float64, device=torch.device(self.device)
                )
                self.assertEqual(
                    (allocated.dtype, allocated.device.type),
                    (torch.float64, self.device.type),
                    "type",
                )
            reference = ThreeUnits().to(self.device)
            reference.load_state_dict(
                {k: v.full_tensor() for k, v in model.state_dict().items()}
            )
            check_train_parity(
                self, reference, model, [self.rows(4, step) for step in range(2)]
            )


class SymmetricMemory:
    """Stands in for torch's symmetric memory, whose backend needs NCCL. Notes what is
    allocated in its pool, and which tensors are registered with a group.
    """

    def __init__(self):
        self.backends, self.pools, self.registered = [], [], []

    def rendezvous(self, tensor, group):
        self.registered.append((tensor.numel(), tensor.dtype, group))

    def barrier(self, group=None):
        if group is not None:  # which has a communicator from now on
            self.backends.append(group.group_name)

    def replacing(self):
        """Return a context in which FSDP uses this object."""
        symmetric, patches = "torch.distributed._symmetric_memory", ExitStack()
        for name, new in (
            (f"{symmetric}.set_backend", self.backends.append),
            (f"{symmetric}.get_mem_pool", lambda device: device),
            (f"{symmetric}.rendezvous", self.rendezvous),
            ("torch.distributed.barrier", self.barrier),
            ("torch.cuda.use_mem_pool", lambda pool: nullcontext(self.pools.append(1))),
        ):
            patches.enter_context(mock.patch(name, new))
        return patches


class TestFullyShardAllocators(CustomCommsTest):
    """Buffers of users' allocators, over two replicas of two shards."""

    @property
    def world_size(self):
        return 4

    def check_trains(self, model):
        """Check parity, and that each all-gather waits for none by the host unless
        asked.
        """
        gather, asynchronous = dist.all_gather_single, []

        def gathering(*args, **kwargs):
            asynchronous.append(kwargs["async_op"])
            return gather(*args, **kwargs)

        with patch_all_gather(gathering):
            self.check_parity(model)
            self.assertEqual(set(asynchronous), {False}, "by default")
            asynchronous.clear()
            model.second.unshard(async_op=True).wait()
            self.assertEqual(asynchronous, [True], "as asked")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_a_backend_with_an_allocator_allocates_the_buffers(self):
        model, allocated = fully_shard_units(self, world_mesh(2, 2)), []

        class Backend:
            def supports_tensor_alloc(self, device):
                return True

            def allocate_tensor(self, numel, *, dtype, device):
                allocated.append((numel, dtype, device.type))
                return torch.full((numel,), float("nan"), dtype=dtype, device=device)

        model.second.set_allocate_memory_from_process_group_for_comm(True)
        group = fully_shard.state(model.second)._fsdp_param_group
        for comm in (group._all_gather_comm, group._reduce_scatter_comm):
            comm._group = types.SimpleNamespace(_get_backend=lambda _: Backend())
        self.check_trains(model)
        # An output of each all-gather, and both buffers of the reduce-scatter.
        sizes = [*[48, 48, 48, 24] * 2, 48]
        expected = [(size, torch.float32, self.device.type) for size in sizes]
        self.assertEqual(allocated, expected, "elements, types and devices")

    @needs_setting("set_symm_mem_for_comm")
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_set_symm_mem_for_comm(self):
        """Buffers come from the pool of symmetric memory, and the group knows them
        before the collective. NCCL can only add in such memory, so reductions use it if
        they do no more.
        """
        self.run_subtests({"adds": [False, True]}, self._test_symm_mem)

    def _test_symm_mem(self, adds):
        mesh, memory = world_mesh(2, 2), SymmetricMemory()
        model, group = fully_shard_units(self, mesh), mesh.get_group("shard").group_name
        model.second.set_force_sum_reduction_for_comms(adds)
        with memory.replacing():
            model.second.set_symm_mem_for_comm()
            model.second.set_symm_mem_for_comm("OTHER")
        expected = [*["NCCL", group] * (1 + adds), *["OTHER", group] * (1 + adds)]
        self.assertEqual(memory.backends, expected, "backends and groups")
        with memory.replacing():
            self.check_trains(model)
        # Two all-gathers of a step have an output, and the reduction an input as well.
        sizes = [*([48, 48] + [48, 24] * adds) * 2, 48]
        expected = [(size, torch.float32, group) for size in sizes]
        self.assertEqual(memory.registered, expected, "elements, types and groups")
        self.assertEqual(len(memory.pools), len(sizes), "buffers from the pool")
        model.second.set_reduce_scatter_max_input_buffers(2)
        refused = self.assertRaisesRegex(ValueError, "max_input_buffers=1 with symm")
        with refused if adds else nullcontext(), memory.replacing():
            model.second.unshard()

    @needs_setting("set_symm_mem_for_comm")
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_custom_collectives_allocate_for_themselves(self):
        for setter, custom, words in (
            ("set_custom_all_gather", CountedAllGather(), "all gather comm is"),
            ("set_custom_reduce_scatter", CountedReduceScatter(), "reduce scatter"),
        ):
            model = fully_shard_units(self)
            getattr(model, setter)(custom)
            with (
                SymmetricMemory().replacing(),
                self.assertRaisesRegex(AssertionError, words),
            ):
                model.set_symm_mem_for_comm()


class TestFullyShardSeparateReduceScatterGroup(CustomCommsTest):
    @property
    def world_size(self):
        return 4

    def groups_used(self, model, step=0):
        """Return the groups of a step's all-gathers and of its reduce-scatters."""
        gather, scatter = dist.all_gather_single, dist.reduce_scatter_single
        used = ([], [])

        def gathering(*args, **kwargs):
            used[0].append(kwargs["group"])
            return gather(*args, **kwargs)

        def scattering(*args, **kwargs):
            used[1].append(kwargs["group"])
            return scatter(*args, **kwargs)

        with patch_all_gather(gathering), patch_reduce_scatter(scattering):
            model(self.rows(4, step)).square().sum().backward()
        return used

    @needs_setting("set_separate_reduce_scatter_group")
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_set_separate_reduce_scatter_group(self):
        """All modules over the same ranks share one more group, only for their
        reduce-scatters.
        """
        self.run_subtests({"replicas": [1, 2]}, self._test_separate_group)

    def _test_separate_group(self, replicas):
        if replicas == 1:
            mesh = world_mesh(4)
            own = mesh.get_group()
        else:
            mesh = world_mesh(2, 2)
            own = mesh.get_group(1)
        model = fully_shard_units(self, mesh)
        model.set_separate_reduce_scatter_group()
        gathers, scatters = self.groups_used(model)
        self.assertEqual(set(gathers), {own}, "groups of all-gathers")
        self.assertEqual(len(set(scatters)), 1, "number of groups of reduce-scatters")
        self.assertNotIn(own, scatters)
        ranks = [dist.get_process_group_ranks(group) for group in (scatters[0], own)]
        self.assertEqual(*ranks, "ranks that reduce")
        model.set_separate_reduce_scatter_group()
        self.assertEqual(self.groups_used(model)[1], scatters, "asked for again")
        model.zero_grad()
        self.check_parity(model)
        model.set_separate_reduce_scatter_group(False)
        self.assertEqual(set(self.groups_used(model)[1]), {own}, "reset")

    @needs_setting("set_separate_reduce_scatter_group")
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_a_separate_group_of_one_module(self):
        model = fully_shard_units(self)
        own = world_mesh(4).get_group()
        model.second.set_separate_reduce_scatter_group(recurse=False)
        _, scatters = self.groups_used(model)
        # The backward of second ends before that of the root; first, whose input needs
        # no gradient, comes last.
        self.assertEqual(
            [group is not own for group in scatters],
            [True, False, False],
            "reduced in a group apart",
        )


class TestFullyShardReduceScatterBuffers(CustomCommsTest):
    @needs_setting("set_reduce_scatter_max_input_buffers")
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_set_reduce_scatter_max_input_buffers(self):
        """FSDP keeps this many inputs of reduce-scatters at a time, the largest number
        that any module asks for.
        """
        self.run_subtests({"asked": [None, 1, 2, 3]}, self._test_max_input_buffers)

    def _test_max_input_buffers(self, asked):
        model = fully_shard_units(self)
        if asked is not None:
            model.set_reduce_scatter_max_input_buffers(4)
            model.set_reduce_scatter_max_input_buffers(1)
            model.second.set_reduce_scatter_max_input_buffers(asked)
            model.set_reduce_scatter_max_input_buffers(1, recurse=False)
        scatter, kept = dist.reduce_scatter_single, []

        def scattering(*args, **kwargs):
            work = scatter(*args, **kwargs)
            kept.append(len(fully_shard.state(model)._comm_ctx.reduce_scatter_states))
            return work

        with patch_reduce_scatter(scattering):
            for step in range(2):
                model(self.rows(4, step)).square().sum().backward()
        # Each reduction first releases the oldest inputs until its own buffer fits.
        limit = asked or 1
        self.assertEqual(
            kept,
            [min(before, limit - 1) for before in (0, 1, 2)] * 2,
            "kept when the next begins",
        )
        self.assertEqual(
            fully_shard.state(model)._comm_ctx.reduce_scatter_states,
            [],
            "kept after backward",
        )
        model.zero_grad()
        self.check_parity(model)


if __name__ == "__main__":
    run_tests()
