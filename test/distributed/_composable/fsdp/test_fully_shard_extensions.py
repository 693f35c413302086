# Owner(s): ["oncall: distributed"]
"""All-gather extensions of FSDP2: a shard decides by two hooks what is gathered and what the unsharded weight is.

A subclass of two tensors, plain tensors patched with hooks of their own, and a subclass that gathers in bfloat16. That
a hook ran is asserted on every rank: FSDP gathers a tensor without hooks just as happily.
"""

import contextlib
import copy
import threading

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils._pytree as pytree
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    FSDPExtensionContract,
    FSDPTest,
    FSDPTestMultiThread,
    check_sharded_parity,
    get_devtype,
    rank_device,
)
from torch_ext.testing._internal.common_utils import run_tests


def two_tensor_fsdp_pre_all_gather(self, mesh):
    """The signature of one argument, which FSDP still calls: shards must be even, for nothing tells of padding."""
    return (self.a, self.b), None


def two_tensor_fsdp_pre_all_gather_with_outer_size(self, mesh, outer_size, outer_stride, module, mp_policy):
    """The signature of five arguments: the outer size tells how many rows every rank must give."""
    rows = -(-outer_size[0] // mesh.size())
    return tuple(padded(inner, rows) for inner in (self.a, self.b)), None


def two_tensor_fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    assert metadata is None, f"metadata of another weight: {metadata}"
    gathered_a, gathered_b = all_gather_outputs
    if out is None:
        a, b = (gathered.to(param_dtype) for gathered in all_gather_outputs)
        return TwoTensor(a, b), (gathered_a, gathered_b, a, b)
    assert type(out) in (TwoTensor, nn.Parameter), f"unsharded weight has become a {type(out)}"
    for gathered, inner in ((gathered_a, out.a), (gathered_b, out.b)):
        assert inner.dtype == param_dtype, f"{inner.dtype} in place of {param_dtype}"
        if gathered.dtype == param_dtype:
            assert inner.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr()
        else:
            inner.copy_(gathered[: inner.size(0)])
    return None


def padded(shard, rows):
    """Return ``shard`` with memory that nobody wrote behind it, up to ``rows`` rows."""
    if shard.size(0) == rows:
        return shard
    whole = shard.new_empty((rows, *shard.shape[1:]))
    whole[: shard.size(0)].copy_(shard)
    return whole


PRE_ALL_GATHER = {
    1: two_tensor_fsdp_pre_all_gather,
    5: two_tensor_fsdp_pre_all_gather_with_outer_size,
}


class SharedHooks:
    """Puts hooks on ``TwoTensor`` for as long as some rank wants them, ranks that are threads of one process included.

    The first to enter sets them, the last to leave takes them away: a rank that is done early must not take them
    from those that still train.
    """

    def __init__(self):
        self.lock, self.users = threading.Lock(), 0

    def enter(self, pre_all_gather):
        with self.lock:
            self.users += 1
            TwoTensor.fsdp_pre_all_gather = pre_all_gather
            TwoTensor.fsdp_post_all_gather = two_tensor_fsdp_post_all_gather

    def leave(self):
        with self.lock:
            self.users -= 1
            if not self.users:
                del TwoTensor.fsdp_pre_all_gather, TwoTensor.fsdp_post_all_gather


SHARED_HOOKS = SharedHooks()


class BFloat16AllGatherTensor(torch.Tensor):
    """Holds a tensor of any type and has it gathered in bfloat16; unsharded, it is a plain tensor of its own type."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data):
        self._data = data

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mesh.ndim == 1, f"{mesh}"
        return (padded(self._data.to(torch.bfloat16), -(-outer_size[0] // mesh.size())),), None

    @torch.no_grad()
    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        (gathered,) = all_gather_outputs
        assert gathered.dtype == torch.bfloat16, f"{gathered.dtype}"
        if out is None:
            upcast = gathered.to(param_dtype)
            return upcast, (upcast,)
        if gathered.dtype != out.dtype:
            with _unsafe_preserve_version_counter(out):
                out.copy_(gathered[: out.size(0)])
        return None

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda tensor: tensor._data, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def __tensor_flatten__(self):
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner_tensors, metadata, outer_size, outer_stride):
        return BFloat16AllGatherTensor(inner_tensors["_data"])

    def __repr__(self):
        return f"BFloat16AllGatherTensor({self._data})"


class PatchedHooks:
    """Hooks for single plain tensors, bound to them as methods, that count their calls.

    With ``metadata`` each tensor gives its scale along and is scaled back by what comes out: metadata of another weight
    would show in the values.
    """

    def __init__(self):
        self.calls, self.meshes = [], []

    def patch(self, tensor, name, scale=1.0):
        calls, meshes = self.calls, self.meshes

        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
            calls.append((name, "pre"))
            meshes.append(mesh)
            return ((self / scale).to(torch.bfloat16),), (name, scale)

        @torch.no_grad()
        def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
            calls.append((name, "post" if out is None else "post into out"))
            (gathered,) = all_gather_outputs
            owner, owners_scale = metadata
            assert owner == name, f"{name} was given the metadata of {owner}"
            assert gathered.dtype == torch.bfloat16, f"{gathered.dtype}"
            unsharded = gathered.to(param_dtype) * owners_scale
            if out is None:
                return unsharded, (unsharded,)
            with _unsafe_preserve_version_counter(out):
                out.copy_(unsharded)
            return None

        # On the tensor itself: to_local() returns a new object each time, which FSDP never sees.
        tensor.fsdp_pre_all_gather = fsdp_pre_all_gather.__get__(tensor)
        tensor.fsdp_post_all_gather = fsdp_post_all_gather.__get__(tensor)


def wrap_weights(model, wrap):
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(wrap(parameter.detach())))
    return model


class TestFullyShardAllGatherExtensionsCommon:
    @property
    def world_size(self):
        return 2

    @property
    def device(self):
        return rank_device(self.rank)

    @contextlib.contextmanager
    def _patch_two_tensor_fsdp_all_gather(self, num_arguments=1):
        """Collective: no rank goes on to other hooks before all are done with these."""
        SHARED_HOOKS.enter(PRE_ALL_GATHER[num_arguments])
        try:
            yield
        finally:
            SHARED_HOOKS.leave()
        dist.barrier()

    def _init_two_tensor_mlp(self, dim=8):
        # A bias of the reference would get a TwoTensor as its gradient, which FSDP's does not.
        model = nn.Sequential(*[MLP(dim, bias=False) for _ in range(3)])
        return wrap_weights(model, lambda data: TwoTensor(data, data.clone()))

    def _shard(self, model, **options):
        for mlp in model:
            fully_shard(mlp, **options)
        return fully_shard(model, **options)

    def _input(self, dim=8):
        torch.manual_seed(42 + self.rank + 1)
        return torch.randn((2, dim), device=self.device)

    def _train(self, model, num_steps=3):
        """Return the losses, which must fall or rise: a weight that is not trained, or trained on nothing, stays."""
        optim = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        inp, losses = self._input(), []
        for _ in range(num_steps):
            loss = model(inp).sum()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        return losses

    def _average_gradients(self, model):
        # One inner tensor at a time: of the two reductions of a TwoTensor, a caller waits for one.
        for param in model.parameters():
            for inner in (param.grad.a, param.grad.b):
                dist.all_reduce(inner)
                inner.div_(self.world_size)


class TestFullyShardAllGatherExtensionsMultiProcess(TestFullyShardAllGatherExtensionsCommon, FSDPTest):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_all_gather_extensions_train_parity(self):
        """Ten steps of a sharded TwoTensor model equal those of a replicated one, with either signature."""
        for num_arguments in PRE_ALL_GATHER:
            with self._patch_two_tensor_fsdp_all_gather(num_arguments):
                self.run_subtests(
                    {"reshard_after_forward": [True, False]},
                    self._test_all_gather_extensions_train_parity,
                )

    def _test_all_gather_extensions_train_parity(self, reshard_after_forward, dim=8, mesh=None, steps=10):
        torch.manual_seed(42)
        model = self._init_two_tensor_mlp(dim)
        ref_model = copy.deepcopy(model).to(self.device)
        self._shard(model, reshard_after_forward=reshard_after_forward, mesh=mesh)
        models = (ref_model, model)
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2, foreach=True) for each in models]
        inp = self._input(dim)
        for step in range(steps):
            losses = [each(inp).sum() for each in models]
            for loss in losses:
                loss.backward()
            self._average_gradients(ref_model)
            self.assertEqual(losses[0], losses[1])
            check_sharded_parity(self, ref_model, model)
            for optim in optims:
                optim.step()
                optim.zero_grad(set_to_none=(step % 2 == 0))
        check_sharded_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_all_gather_extensions_uneven_train_parity(self):
        """The same with first dimensions that two ranks cannot share evenly: rank 1 gives padding that none may see."""
        with self._patch_two_tensor_fsdp_all_gather(num_arguments=5):
            self.run_subtests(
                {"reshard_after_forward": [True, False], "dim": [3], "steps": [3]},
                self._test_all_gather_extensions_train_parity,
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_uneven_shards_without_padding_are_refused(self):
        """FSDP itself names the padded size; only the rank with the small shard learns of it, so it alone is asked."""
        with self._patch_two_tensor_fsdp_all_gather(num_arguments=5):
            model = self._shard(self._init_two_tensor_mlp(3))
            model(self._input(3))  # the first use replaces local tensors that need padding
            weight = model[0].out_proj.weight._local_tensor
            weight.fsdp_pre_all_gather = unpadded_pre_all_gather.__get__(weight)
            if weight.size(0) == 2:
                return
            with self.assertRaisesRegex(AssertionError, r"padded sharded size torch.Size\(\[2, 12\]\)"):
                model[0].unshard()


def unpadded_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
    return (self.a, self.b), None


class TestFullyShardAllGatherExtensionsMultiThread(TestFullyShardAllGatherExtensionsCommon, FSDPTestMultiThread):
    @property
    def device(self):
        # One for all ranks: DTensor's caches are shared by threads, and remember whose device was current.
        return rank_device(0)

    def perThreadSetUp(self):
        super().perThreadSetUp()
        if self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)  # else a new mesh chooses one by rank

    def _input(self, dim=8):
        # Positive inputs, and positive weights below, so that ReLU stops no gradient.
        return super()._input(dim).abs()

    def _initialize(self, param):
        # Of the local tensor: through DTensor, threads would share what it remembers of devices.
        with torch.no_grad():
            nn.init.uniform_(param._local_tensor, 0.01, 0.1)

    def _materialize(self, dim=8, **options):
        """Return a sharded model that was made on ``meta``, with values on the device."""
        with torch.device("meta"):
            model = self._init_two_tensor_mlp(dim)
        for param in model.parameters():
            self.assertEqual(param.device, torch.device("meta"))
        self._shard(model, **options).to_empty(device=self.device)
        for param in model.parameters():
            self.assertEqual(param.device, self.device)
            self._initialize(param)
        return model

    def _patch_weights(self, model):
        """Give each local tensor hooks of its own, with a scale of its own in their metadata."""
        hooks = PatchedHooks()
        for index, (name, param) in enumerate(model.named_parameters()):
            hooks.patch(param._local_tensor, name, scale=2.0**index)
        return hooks

    def _check_hooks_ran(self, hooks, model, num_unshards):
        """Each weight was gathered ``num_unshards`` times through its own hooks, on this rank."""
        for name, _ in model.named_parameters():
            calls = [call for owner, call in hooks.calls if owner == name]
            self.assertEqual(calls.count("pre"), num_unshards, name)
            self.assertEqual(calls.count("post"), 1, name)
            self.assertEqual(calls.count("post into out"), num_unshards - 1, name)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_all_gather_extensions_end_to_end(self):
        """A model made on the meta device trains in mixed precision, with either signature."""
        for num_arguments in PRE_ALL_GATHER:
            with self._patch_two_tensor_fsdp_all_gather(num_arguments):
                self.run_subtests(
                    {"reshard_after_forward": [True, False]},
                    self._test_all_gather_extensions_end_to_end,
                )

    def _test_all_gather_extensions_end_to_end(self, reshard_after_forward):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = self._materialize(reshard_after_forward=reshard_after_forward, mp_policy=policy)
        before = [param._local_tensor.a.clone() for param in model.parameters()]
        losses = self._train(model)
        self.assertTrue(all(loss.a.isfinite() and loss.dtype == torch.bfloat16 for loss in losses), losses)
        for (name, param), old in zip(model.named_parameters(), before, strict=True):
            local = param._local_tensor
            self.assertIs(type(local), TwoTensor, name)
            self.assertEqual(local.dtype, torch.float32, name)
            self.assertNotEqual(local.a, old, msg=name)
            self.assertEqual(local.a - old, local.b - old, rtol=1, atol=1, msg=name)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_all_gather_extensions_monkey_patch(self):
        """Hooks of single tensors, no subclass: bfloat16 on the way, float32 before and after."""
        model = nn.Sequential(*[MLP(8, bias=False, device=torch.device("meta")) for _ in range(3)])
        self._shard(model).to_empty(device=self.device)
        for param in model.parameters():
            self._initialize(param)
        # Not earlier: to_empty() replaces the local tensors.
        hooks = self._patch_weights(model)
        before = [param.to_local().clone() for param in model.parameters()]
        self._train(model, num_steps=3)
        # Each step unshards for forward and for backward, but the root reshards only after backward.
        self._check_hooks_ran(hooks, model, num_unshards=6)
        for param, old in zip(model.parameters(), before, strict=True):
            self.assertNotEqual(param.to_local(), old)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_patched_result_of_to_local_is_never_called(self):
        """Why the local tensor itself is patched: a hook on what ``to_local()`` returns is on an object of its own."""
        model = fully_shard(MLP(8, bias=False).to(self.device))
        hooks = PatchedHooks()
        for name, param in model.named_parameters():
            hooks.patch(param.to_local(), name)
        self._train(model, num_steps=1)
        self.assertEqual(hooks.calls, [])

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_metadata_belongs_to_its_weight(self):
        """Weights of one group, whose metadata travel beside each other, unshard to their own values rounded."""
        model = MLP(8, bias=False).to(self.device)
        torch.manual_seed(0)
        for param in model.parameters():
            nn.init.uniform_(param)
            dist.broadcast(param.detach(), src=0)
        whole = [param.detach().clone() for param in model.parameters()]
        fully_shard(model)
        hooks = self._patch_weights(model)
        for num_unshards in (1, 2):
            model.unshard()
            for param, expected in zip(model.parameters(), whole, strict=True):
                self.assertEqual(param, expected.to(torch.bfloat16).to(torch.float32))
            model.reshard()
            self._check_hooks_ran(hooks, model, num_unshards)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_hooks_stay_until_the_last_rank_leaves(self):
        with self._patch_two_tensor_fsdp_all_gather():
            SHARED_HOOKS.enter(two_tensor_fsdp_pre_all_gather)
            dist.barrier()
            if self.rank == 0:
                SHARED_HOOKS.leave()
            dist.barrier()
            self.assertTrue(hasattr(TwoTensor, "fsdp_pre_all_gather"))
            dist.barrier()
            if self.rank != 0:
                SHARED_HOOKS.leave()
        self.assertFalse(hasattr(TwoTensor, "fsdp_pre_all_gather"))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_one_hook_alone_is_refused(self):
        weight = torch.ones(4, 4, device=self.device)
        model = nn.Linear(4, 4, bias=False)
        tensor = OnlyPreAllGather(weight, weight.clone())
        model.weight = nn.Parameter(tensor)
        with self.assertRaisesRegex(AssertionError, "Both fsdp_pre_all_gather and fsdp_post_all_gather"):
            fully_shard(model)


class OnlyPreAllGather(TwoTensor):
    @staticmethod
    def fsdp_pre_all_gather(self, mesh):
        return (self.a,), None


class TestFullyShardAllGatherExtensionsHSDP(TestFullyShardAllGatherExtensionsCommon, FSDPTest):
    @property
    def world_size(self):
        return 4

    def _mesh(self):
        return init_device_mesh(get_devtype().type, (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_all_gather_extension_hsdp_mesh(self):
        """Hooks see the dimension over which they are gathered and no other; the weight comes back whole."""
        torch.manual_seed(0)
        model = MLP(8, bias=False).to(self.device)
        whole = [param.detach().clone() for param in model.parameters()]
        mesh = self._mesh()
        fully_shard(model, mesh=mesh)
        hooks = PatchedHooks()
        for name, param in model.named_parameters():
            hooks.patch(param._local_tensor, name)
        model.unshard()
        for param, expected in zip(model.parameters(), whole, strict=True):
            self.assertEqual(param, expected.to(torch.bfloat16).to(torch.float32))
        self.assertEqual(len(hooks.meshes), 2)
        for seen in hooks.meshes:
            self.assertEqual(seen, mesh["dp_shard"])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_all_gather_extensions_hsdp_train_parity(self):
        with self._patch_two_tensor_fsdp_all_gather(num_arguments=5):
            self.run_subtests({"dim": [8, 3]}, self._test_hsdp_parity)

    def _test_hsdp_parity(self, dim):
        parity = TestFullyShardAllGatherExtensionsMultiProcess._test_all_gather_extensions_train_parity
        parity(self, reshard_after_forward=True, dim=dim, mesh=self._mesh(), steps=3)


class TestTwoTensorContract(FSDPExtensionContract, FSDPTest):
    def run_test(self, test_name, pipe):
        SHARED_HOOKS.enter(two_tensor_fsdp_pre_all_gather_with_outer_size)
        try:
            super().run_test(test_name, pipe)
        finally:
            SHARED_HOOKS.leave()

    def make_tensor(self, data):
        return TwoTensor(data, data.clone())


class TestBFloat16AllGatherContract(FSDPExtensionContract, FSDPTest):
    """Weights are rounded to eight bits for the all-gather: they, and what ten steps make of that, are that far off."""

    rtol = atol = 0.02

    def make_tensor(self, data):
        return BFloat16AllGatherTensor(data)


if __name__ == "__main__":
    run_tests()
