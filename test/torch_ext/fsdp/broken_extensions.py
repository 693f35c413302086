"""Tensor subclasses that each break the contract of all-gather extensions in one way, with the contract's tests.

``test_extension_contract.py`` runs this file in a separate folder and checks the failures' messages.
"""

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from torch_ext.testing.fsdp_extension_contract import FSDPExtensionContract, FSDPTest, run_tests


class Sound(torch.Tensor):
    """Wraps a tensor. It is gathered minus an offset and divided by a scale, which are the metadata."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data):
        self._data = data

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        rows = -(-outer_size[0] // mesh.size())
        sent = self._data.new_empty((rows, *outer_size[1:]))
        sent[: self._data.size(0)].copy_((self._data - 1.0) / 2.0)
        return (sent,), (1.0, 2.0)

    @torch.no_grad()
    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        (gathered,), (offset, scale) = all_gather_outputs, metadata
        result = (gathered * scale + offset).to(param_dtype)
        if out is None:
            return result, (result,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(result[: out.size(0)])
        return None

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda tensor: tensor._data, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def __tensor_flatten__(self):
        return ["_data"], None


class Contract(FSDPExtensionContract):
    kind = None
    world_size = 2  # enough for every fault but one
    rtol, atol = 1e-4, 1e-5

    def make_tensor(self, data):
        return self.kind(data)


class TestSound(Contract, FSDPTest):
    world_size = 4
    kind = Sound


class TestNoPost(Contract, FSDPTest):
    class kind(Sound):
        fsdp_post_all_gather = None


class TestPlain(Contract, FSDPTest):
    def make_tensor(self, data):
        return data


class TestUndefined(Contract, FSDPTest):
    make_tensor = FSDPExtensionContract.make_tensor


class TestLosesClass(Contract, FSDPTest):
    class kind(Sound):
        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs=None):
            args, kwargs = pytree.tree_map_only(cls, lambda tensor: tensor._data, (args, kwargs or {}))
            return func(*args, **kwargs)


class TestSilent(Contract, FSDPTest):
    class kind(Sound):
        __tensor_flatten__ = None


class TestBareTensor(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
            return self._data, None


class TestNoPair(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_pre_all_gather(self, mesh):
            return [self._data]


class TestThreeArguments(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_pre_all_gather(self, mesh, outer_size, module):
            raise AssertionError("never called")


class TestSendsSubclass(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_pre_all_gather(self, mesh):
            return (self,), None


class TestUnpadded(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
            return ((self._data - 1.0) / 2.0,), (1.0, 2.0)


class TestNumberOfInputsByRank(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
            sent, metadata = Sound.fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy)
            return sent * (1 + (mesh.get_local_rank() == 1)), metadata


class TestPaddedInFront(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
            (sent,), metadata = Sound.fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy)
            return (sent.roll(sent.size(0) - self._data.size(0), dims=0),), metadata


class TestPaddingLeaks(Contract, FSDPTest):
    class kind(Sound):
        @torch.no_grad()
        def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
            (gathered,) = all_gather_outputs
            gathered.mul_(gathered.amax() / gathered.amax())
            return Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, out=out)


class TestMetadataSwapped(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
            swapped = metadata[1], metadata[0]
            return Sound.fsdp_post_all_gather(self, all_gather_outputs, swapped, param_dtype, out=out)


class TestNumberOfOutputs(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
            data, scales = all_gather_outputs
            return data * scales, ()


class TestNoUnshardedTensor(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
            return None


class TestNothingToFree(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
            answer = Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, out=out)
            return answer and (answer[0], ())


class TestWrongType(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
            return Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, torch.float32, out=out)


class TestWrongSize(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
            flat = (all_gather_outputs[0].flatten(),)
            return Sound.fsdp_post_all_gather(self, flat, metadata, param_dtype, out=out)


class TestOutIgnored(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
            if out is None:
                return Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype)
            return None


class TestOutSeenByAutograd(Contract, FSDPTest):
    class kind(Sound):
        @torch.no_grad()
        def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
            if out is None:
                return Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype)
            result, _ = Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype)
            out.copy_(result[: out.size(0)])
            return None


class TestAutogradOn(Contract, FSDPTest):
    class kind(Sound):
        def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
            if out is None:
                return Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype)
            out.copy_(all_gather_outputs[0][: out.size(0)])
            return None


class TestStale(Contract, FSDPTest):
    """Keeps sending the values that a weight had when it was first gathered after the check of the hooks."""

    class kind(Sound):
        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
            if not hasattr(module, "kept"):
                module.kept = Sound.fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy)
            return module.kept


class TestStaysOnMeta(Contract, FSDPTest):
    class kind(Sound):
        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs=None):
            if func is torch.ops.aten.empty_like.default:
                return cls(args[0]._data.clone())
            return super().__torch_dispatch__(func, types, args, kwargs)


class TestNotInTheFile(Contract, FSDPTest):
    class kind(Sound):
        def __reduce_ex__(self, protocol):
            return type(self), (torch.zeros(self.shape, device=self._data.device),)


class TestWholeWorld(Contract, FSDPTest):
    """Pads for all ranks of the world instead of those of the mesh."""

    world_size = 4

    class kind(Sound):
        def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
            rows = -(-outer_size[0] // dist.get_world_size())
            sent = self._data.new_empty((max(rows, self._data.size(0)), *outer_size[1:]))
            sent[: self._data.size(0)].copy_((self._data - 1.0) / 2.0)
            return (sent,), (1.0, 2.0)


if __name__ == "__main__":
    run_tests()
