# Owner(s): ["oncall: distributed"]
"""All-gather extensions of FSDP2: two hooks of a shard choose the tensors to gather and
build the unsharded weight.

Tests a subclass of two tensors, plain tensors patched with hooks, and a subclass that
gathers in bfloat16. Every rank checks that its hooks ran, because FSDP also gathers
tensors without hooks.
"""

import contextlib
import copy
import threading
import weakref

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

LEARNING_RATE = 1e-2


def two_tensor_fsdp_pre_all_gather(self, mesh):
    """The signature with one argument, which FSDP still supports. It cannot pad, so
    shards must be even.
    """
    return (self.a, self.b), None


def two_tensor_fsdp_pre_all_gather_with_outer_size(
    self, mesh, outer_size, outer_stride, module, mp_policy
):
    """The signature with five arguments. The outer size tells how many rows each rank
    must return.
    """
    rows = -(-outer_size[0] // mesh.size())
    return tuple(padded(inner, rows) for inner in (self.a, self.b)), None


def two_tensor_fsdp_post_all_gather(
    self, all_gather_outputs, metadata, param_dtype, *, out=None
):
    assert metadata is None, f"metadata of another weight: {metadata}"
    gathered_a, gathered_b = all_gather_outputs
    if out is None:
        a, b = (gathered.to(param_dtype) for gathered in all_gather_outputs)
        return TwoTensor(a, b), (gathered_a, gathered_b, a, b)
    assert type(out) in (TwoTensor, nn.Parameter), (
        f"unsharded weight has become a {type(out)}"
    )
    for gathered, inner in ((gathered_a, out.a), (gathered_b, out.b)):
        assert inner.dtype == param_dtype, f"{inner.dtype} in place of {param_dtype}"
        if gathered.dtype == param_dtype:
            assert (
                inner.untyped_storage().data_ptr()
                == gathered.untyped_storage().data_ptr()
            )
        else:
            inner.copy_(gathered[: inner.size(0)])
    return None


def padded(shard, rows):
    """Return ``shard``, padded with uninitialized memory to ``rows`` rows."""
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
    """Adds hooks to ``TwoTensor`` while any rank needs them, also if ranks are threads
    of one process.

    The first rank to enter sets them and the last to leave removes them, because others
    may still train when one is done.
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
    """Holds a tensor of any type that is gathered in bfloat16. Unsharded, it is a plain
    tensor of the original type.
    """

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            data.stride(),
            data.storage_offset(),
            dtype=data.dtype,
            device=data.device,
        )

    def __init__(self, data):
        self._data = data

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mesh.ndim == 1, f"{mesh}"
        return (
            padded(self._data.to(torch.bfloat16), -(-outer_size[0] // mesh.size())),
        ), None

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, all_gather_outputs, metadata, param_dtype, *, out=None
    ):
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
        args, kwargs = pytree.tree_map_only(
            cls, lambda tensor: tensor._data, (args, kwargs or {})
        )
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def __tensor_flatten__(self):
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner_tensors, metadata, outer_size, outer_stride):
        return BFloat16AllGatherTensor(inner_tensors["_data"])

    def __repr__(self):
        return f"BFloat16AllGatherTensor({self._data})"


class PatchedHooks:
    """Hooks that are bound to single plain tensors as methods, and count their calls.

    With ``metadata`` each tensor passes its scale as metadata and is scaled back by the
    metadata it gets. Metadata of another weight would change the values.
    """

    def __init__(self):
        self.calls, self.meshes = [], []

    def patch(self, tensor, name, scale=1.0):
        calls, meshes = self.calls, self.meshes

        def fsdp_pre_all_gather(
            self, mesh, outer_size, outer_stride, module, mp_policy
        ):
            calls.append((name, "pre"))
            meshes.append(mesh)
            return ((self / scale).to(torch.bfloat16),), (name, scale)

        @torch.no_grad()
        def fsdp_post_all_gather(
            self, all_gather_outputs, metadata, param_dtype, *, out=None
        ):
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

        # On the local tensor itself: to_local() returns a new object each time, which
        # FSDP never sees.
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
        """Collective: no rank continues with other hooks before all are done with
        these.
        """
        SHARED_HOOKS.enter(PRE_ALL_GATHER[num_arguments])
        try:
            yield
        finally:
            SHARED_HOOKS.leave()
        dist.barrier()

    def _init_two_tensor_mlp(self, dim=8):
        # The gradient of a bias would be a TwoTensor in the reference, but not under
        # FSDP.
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
        """Train by Adam and return the losses."""
        optim = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, foreach=True)
        inp, losses = self._input(), []
        for _ in range(num_steps):
            loss = model(inp).sum()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.detach())
        return losses

    def _average_gradients(self, model):
        # One inner tensor at a time, because a caller waits only for one of a
        # TwoTensor's two reductions.
        for param in model.parameters():
            for inner in (param.grad.a, param.grad.b):
                dist.all_reduce(inner)
                inner.div_(self.world_size)


class TestFullyShardAllGatherExtensionsMultiProcess(
    TestFullyShardAllGatherExtensionsCommon, FSDPTest
):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_all_gather_extensions_train_parity(self):
        """A sharded TwoTensor model trains like a replicated one for ten steps, with
        either signature.
        """
        for num_arguments in PRE_ALL_GATHER:
            with self._patch_two_tensor_fsdp_all_gather(num_arguments):
                self.run_subtests(
                    {"reshard_after_forward": [True, False]},
                    self._test_all_gather_extensions_train_parity,
                )

    def _test_all_gather_extensions_train_parity(
        self, reshard_after_forward, dim=8, mesh=None, steps=10
    ):
        torch.manual_seed(42)
        model = self._init_two_tensor_mlp(dim)
        ref_model = copy.deepcopy(model).to(self.device)
        self._shard(model, reshard_after_forward=reshard_after_forward, mesh=mesh)
        models = (ref_model, model)
        optims = [
            torch.optim.Adam(each.parameters(), lr=1e-2, foreach=True)
            for each in models
        ]
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
        """As above with first dimensions that two ranks cannot share evenly. No rank
        may see rank 1's padding.
        """
        with self._patch_two_tensor_fsdp_all_gather(num_arguments=5):
            self.run_subtests(
                {"reshard_after_forward": [True, False], "dim": [3], "steps": [3]},
                self._test_all_gather_extensions_train_parity,
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_uneven_shards_without_padding_are_refused(self):
        """FSDP's error names the padded size. Only the rank with the small shard raises
        it.
        """
        with self._patch_two_tensor_fsdp_all_gather(num_arguments=5):
            model = self._shard(self._init_two_tensor_mlp(3))
            model(
                self._input(3)
            )  # the first use replaces local tensors that need padding
            weight = model[0].out_proj.weight._local_tensor
            weight.fsdp_pre_all_gather = unpadded_pre_all_gather.__get__(weight)
            if weight.size(0) == 2:
                return
            with self.assertRaisesRegex(
                AssertionError, r"padded sharded size torch.Size\(\[2, 12\]\)"
            ):
                model[0].unshard()


def unpadded_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
    return (self.a, self.b), None


class TestFullyShardAllGatherExtensionsMultiThread(
    TestFullyShardAllGatherExtensionsCommon, FSDPTestMultiThread
):
    @property
    def device(self):
        # One for all ranks: threads share DTensor's caches, which keep the device that
        # was current.
        return rank_device(0)

    def perThreadSetUp(self):
        super().perThreadSetUp()
        if self.device.index is not None:
            torch.accelerator.set_device_index(
                self.device.index
            )  # otherwise a new mesh sets it by rank

    def _input(self, dim=8):
        # Inputs here, and weights below, are positive, so that ReLU passes every
        # gradient.
        return super()._input(dim).abs()

    def _initialize(self, param):
        # Patch the local tensor, because threads share DTensor's cached devices.
        with torch.no_grad():
            nn.init.uniform_(param._local_tensor, 0.01, 0.1)

    def _check_falling(self, losses):
        """Every gradient is positive, so each step lowers the loss. Weights that are
        not trained leave it as it is.
        """
        self.assertEqual(losses, sorted(losses, reverse=True))
        self.assertEqual(
            len({loss.item() for loss in losses}), len(losses), f"{losses}"
        )

    def _materialize(self, dim=8, **options):
        """Return a sharded model that was created on ``meta`` and materialized on the
        device.
        """
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
        """Give each local tensor its own hooks, with its own scale as metadata."""
        hooks = PatchedHooks()
        for index, (name, param) in enumerate(model.named_parameters()):
            hooks.patch(param._local_tensor, name, scale=2.0**index)
        return hooks

    def _check_hooks_ran(self, hooks, model, num_unshards):
        """Check that on this rank each weight was gathered ``num_unshards`` times
        through its own hooks.
        """
        for name, _ in model.named_parameters():
            calls = [call for owner, call in hooks.calls if owner == name]
            expected = {
                "pre": num_unshards,
                "post": 1,
                "post into out": num_unshards - 1,
            }
            found = {hook: calls.count(hook) for hook in expected}
            self.assertEqual(
                found,
                expected,
                f"calls of the hooks of {name}: found {found}, expected {expected}",
            )

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_all_gather_extensions_end_to_end(self):
        """A model created on the meta device trains in mixed precision, with either
        signature.
        """
        for num_arguments in PRE_ALL_GATHER:
            with self._patch_two_tensor_fsdp_all_gather(num_arguments):
                self.run_subtests(
                    {"reshard_after_forward": [True, False]},
                    self._test_all_gather_extensions_end_to_end,
                )

    def _test_all_gather_extensions_end_to_end(self, reshard_after_forward):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = self._materialize(
            reshard_after_forward=reshard_after_forward, mp_policy=policy
        )
        before = [
            (param._local_tensor.a.clone(), param._local_tensor.b.clone())
            for param in model.parameters()
        ]
        losses = self._train(model)
        self.assertEqual({loss.dtype for loss in losses}, {torch.bfloat16})
        for inner in ("a", "b"):
            self._check_falling([getattr(loss, inner) for loss in losses])
        for (name, param), old in zip(model.named_parameters(), before, strict=True):
            local = param._local_tensor
            self.assertIs(type(local), TwoTensor, name)
            self.assertEqual(local.dtype, torch.float32, name)
            # The optimizer adds the same to both, but to different values, so the sums
            # round differently.
            of_a, of_b = (
                inner - was for inner, was in zip((local.a, local.b), old, strict=True)
            )
            self.assertEqual(of_b, of_a, rtol=0, atol=1e-6, msg=name)
            self.assertLess(of_a.max().item(), -LEARNING_RATE, name)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_all_gather_extensions_monkey_patch(self):
        """Hooks of single tensors, without a subclass: float32 weights, gathered in
        bfloat16.
        """
        model = nn.Sequential(
            *[MLP(8, bias=False, device=torch.device("meta")) for _ in range(3)]
        )
        self._shard(model).to_empty(device=self.device)
        for param in model.parameters():
            self._initialize(param)
        # After to_empty(), which replaces the local tensors.
        hooks = self._patch_weights(model)
        before = [param.to_local().clone() for param in model.parameters()]
        self._check_falling(self._train(model, num_steps=3))
        # Each step unshards in forward and in backward, but the root reshards only
        # after backward.
        self._check_hooks_ran(hooks, model, num_unshards=6)
        for param, old in zip(model.parameters(), before, strict=True):
            self.assertTrue(
                bool((param.to_local() < old).all()), "every gradient is positive"
            )

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_patched_result_of_to_local_is_never_called(self):
        """The local tensor itself must be patched: ``to_local()`` returns another
        object, whose hooks never run.
        """
        model = fully_shard(MLP(8, bias=False).to(self.device))
        hooks = PatchedHooks()
        for name, param in model.named_parameters():
            hooks.patch(param.to_local(), name)
        self._train(model, num_steps=1)
        self.assertEqual(hooks.calls, [])

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_metadata_belongs_to_its_weight(self):
        """Each weight of a group gets its own metadata, and unshards to its own rounded
        values.
        """
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
    def test_inner_tensors_keep_their_places(self):
        """Each inner tensor of the unsharded weight has this rank's rows of the same
        inner tensor of the shard.
        """
        with self._patch_two_tensor_fsdp_all_gather(num_arguments=5):
            model = MLP(8, bias=False)
            wrap_weights(
                model,
                lambda data: TwoTensor(data.to(self.device), -data.to(self.device)),
            )
            fully_shard(model)
            shards = {
                name: param._local_tensor for name, param in model.named_parameters()
            }
            for _ in range(2):  # made by the first, filled by the second
                model.unshard()
                for name, param in model.named_parameters():
                    for inner in ("a", "b"):
                        shard = getattr(shards[name], inner)
                        own = (
                            getattr(param, inner)
                            .detach()
                            .chunk(self.world_size)[self.rank]
                        )
                        self.assertEqual(
                            own,
                            shard,
                            msg=lambda text, label=f"{inner} of {name}": (
                                f"{label}: {text}"
                            ),
                        )
                model.reshard()

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_arguments_of_the_hooks(self):
        """The whole weight's size and stride, the module that owns it, and the policy;
        then the type to unshard to.
        """
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = fully_shard(MLP(6, bias=False).to(self.device), mp_policy=policy)
        seen = {}
        for name, param in model.named_parameters():
            note_arguments(param._local_tensor, seen.setdefault(name, {}))
        model(self._input(6))
        model.reshard()
        model.unshard()  # into the memory of the first
        for name, size in (("in_proj.weight", (24, 6)), ("out_proj.weight", (6, 24))):
            expected = {
                "size": torch.Size(size),
                "stride": (size[1], 1),
                "module": model.get_submodule(name.partition(".")[0]),
                "policy": policy,
                "types": [torch.bfloat16] * 2,
            }
            for label, value in expected.items():
                self.assertEqual(seen[name][label], value, f"{label} of {name}")
            kept = [each for each in seen[name]["metadata"] if each() is not None]
            self.assertEqual(kept, [], "metadata that is kept after its use")

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
        with self.assertRaisesRegex(
            AssertionError, "Both fsdp_pre_all_gather and fsdp_post_all_gather"
        ):
            fully_shard(model)


class Metadata:
    pass


def note_arguments(tensor, notes):
    """Give ``tensor`` hooks that gather it as it is and keep what FSDP passes
    to them.
    """

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        notes.update(
            size=outer_size, stride=outer_stride, module=module, policy=mp_policy
        )
        metadata = Metadata()
        notes.setdefault("metadata", []).append(weakref.ref(metadata))
        return (self,), metadata

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, all_gather_outputs, metadata, param_dtype, *, out=None
    ):
        notes.setdefault("types", []).append(param_dtype)
        unsharded = all_gather_outputs[0].to(torch.bfloat16)
        return unsharded, (unsharded,)

    tensor.fsdp_pre_all_gather = fsdp_pre_all_gather.__get__(tensor)
    tensor.fsdp_post_all_gather = fsdp_post_all_gather.__get__(tensor)


class OnlyPreAllGather(TwoTensor):
    @staticmethod
    def fsdp_pre_all_gather(self, mesh):
        return (self.a,), None


class TestFullyShardAllGatherExtensionsHSDP(
    TestFullyShardAllGatherExtensionsCommon, FSDPTest
):
    @property
    def world_size(self):
        return 4

    def _mesh(self):
        return init_device_mesh(
            get_devtype().type, (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_all_gather_extension_hsdp_mesh(self):
        """Hooks get only the shard dimension of the mesh, and the unsharded weight is
        complete.
        """
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
        suite = TestFullyShardAllGatherExtensionsMultiProcess
        suite._test_all_gather_extensions_train_parity(
            self, reshard_after_forward=True, dim=dim, mesh=self._mesh(), steps=3
        )


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
    """Weights are rounded to eight bits in the all-gather. The tolerances allow for
    that over ten steps.
    """

    rtol = atol = 0.02

    def make_tensor(self, data):
        return BFloat16AllGatherTensor(data)


if __name__ == "__main__":
    run_tests()
