"""Tensor subclasses that each break the contract of all-gather extensions in one way, with the contract's tests.

``test_extension_contract.py`` runs this file in a separate folder and checks the failures' messages.
"""

import inspect

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from torch_ext.testing.fsdp_extension_contract import FSDPExtensionContract, FSDPTest, run_tests


class Sound(torch.Tensor):
    """Wraps a tensor. The all-gather transfers it minus an offset and divided by a scale, which are the metadata."""

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


BROKEN = []  # the test case, the test, and what its failure's message must contain


def broken(message, test="test_hooks"):
    """Register a test case. If a hook is given, make a class with it; its second parameter shows which hook it is."""

    def make(given):
        BROKEN.append((given.__name__, test, message))
        if isinstance(given, type):
            return given
        name = "fsdp_pre_all_gather" if "mesh" in inspect.signature(given).parameters else "fsdp_post_all_gather"
        kind = type("kind", (Sound,), {name: given})
        return type(given.__name__, (Contract, FSDPTest), {"kind": kind, "__module__": __name__})

    return make


class TestSound(Contract, FSDPTest):
    world_size = 4
    kind = Sound


@broken(r"0\.0\.weight: kind has no fsdp_post_all_gather; .* Define fsdp_post_all")
class TestNoPost(Contract, FSDPTest):
    class kind(Sound):
        fsdp_post_all_gather = None


@broken(r"is a plain Parameter, expected a tensor with hooks\. Check make_tensor")
class TestPlain(Contract, FSDPTest):
    def make_tensor(self, data):
        return data


@broken(r"TestUndefined defines neither make_tensor\(self, data\) nor swap_weights")
class TestUndefined(Contract, FSDPTest):
    make_tensor = FSDPExtensionContract.make_tensor


@broken(r"detach\(\) returns an instance of the same type")
class TestLosesClass(Contract, FSDPTest):
    class kind(Sound):
        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs=None):
            args, kwargs = pytree.tree_map_only(cls, lambda tensor: tensor._data, (args, kwargs or {}))
            return func(*args, **kwargs)


@broken(r"kind has no __tensor_flatten__, .* or override values\(tensor\)")
class TestSilent(Contract, FSDPTest):
    class kind(Sound):
        __tensor_flatten__ = None


@broken(r"returned a Tensor as all_gather_inputs, expected a tuple\. Return \(tensor,\)")
def TestBareTensor(self, mesh, outer_size, outer_stride, module, mp_policy):
    return self._data, None


@broken(r"returned a list, expected a pair\. Return \(all_gather_inputs, metadata\)")
def TestNoPair(self, mesh):
    return [self._data]


@broken(r"takes 3 arguments, expected 1 \(mesh\) or 5\. Define fsdp_pre_all_gather")
def TestThreeArguments(self, mesh, outer_size, module):
    raise AssertionError("never called")


@broken(r"returned a kind as all_gather_inputs\[0\], expected a plain tensor")
def TestSendsSubclass(self, mesh):
    return (self,), None


@broken(r"\(7, 5\) on rank 1 but .* \(8, 5\) on rank 0\. .* pad the shard to 8x5 at")
def TestUnpadded(self, mesh, outer_size, outer_stride, module, mp_policy):
    return ((self._data - 1.0) / 2.0,), (1.0, 2.0)


@broken(r"on rank 1 but .* on rank 0\. Return the same number of tensors")
def TestNumberOfInputsByRank(self, mesh, outer_size, outer_stride, module, mp_policy):
    sent, metadata = Sound.fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy)
    return sent * (1 + (mesh.get_local_rank() == 1)), metadata


@broken(r"\(15x5 over 2 ranks\) is not equal .* padding is at the end of each shard")
def TestPaddedInFront(self, mesh, outer_size, outer_stride, module, mp_policy):
    (sent,), metadata = Sound.fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy)
    return (sent.roll(sent.size(0) - self._data.size(0), dims=0),), metadata


@broken(r"\(15x5 over 2 ranks\) is not equal .* nothing reads it\. .* difference: nan")
@torch.no_grad()
def TestPaddingLeaks(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    (gathered,) = all_gather_outputs
    gathered.mul_(gathered.amax() / gathered.amax())
    return Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, out=out)


@broken(r"\(32x8 .* is not equal after the round trip of .* metadata")
def TestMetadataSwapped(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    swapped = metadata[1], metadata[0]
    return Sound.fsdp_post_all_gather(self, all_gather_outputs, swapped, param_dtype, out=out)


@broken(r"fsdp_post_all_gather .* raised ValueError: not enough values to unpack")
def TestNumberOfOutputs(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    data, scales = all_gather_outputs
    return data * scales, ()


@broken(r"returned None when called without out, expected a pair")
def TestNoUnshardedTensor(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    return None


@broken(r"keeps 1 tensor\(s\) of the unsharded weight in memory after resharding")
def TestNothingToFree(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    answer = Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, out=out)
    return answer and (answer[0], ())


@broken(r"returned torch\.float32, expected param_dtype torch\.bfloat16\. Cast")
def TestWrongType(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    return Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, torch.float32, out=out)


@broken(r"returned size \(256,\), expected \(32, 8\)")
def TestWrongSize(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    flat = (all_gather_outputs[0].flatten(),)
    return Sound.fsdp_post_all_gather(self, flat, metadata, param_dtype, out=out)


@broken(r"a later all-gather into out\. If out was ignored: copy into what out holds")
def TestOutIgnored(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    if out is None:
        return Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype)
    return None


@broken(r"wrote into out 1 time\(s\) visible to autograd, .*_unsafe_preserve")
@torch.no_grad()
def TestOutSeenByAutograd(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    if out is None:
        return Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype)
    result, _ = Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype)
    out.copy_(result[: out.size(0)])
    return None


@broken(r"leaf Variable .* Decorate the hook with torch\.no_grad\(\)")
def TestAutogradOn(self, all_gather_outputs, metadata, param_dtype, *, out=None):
    if out is None:
        return Sound.fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype)
    out.copy_(all_gather_outputs[0][: out.size(0)])
    return None


@broken(r"the output of step 1 is off by more than .* kept by a hook", "test_training_parity")
def TestStale(self, mesh, outer_size, outer_stride, module, mp_policy):
    """Keeps sending the values that a weight had when it was first gathered after the check of the hooks."""
    if not hasattr(module, "kept"):
        module.kept = Sound.fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy)
    return module.kept


@broken(r"after to_empty\(\): kind has parts on \['meta', 'meta'\], expected", "test_meta_device_flow")
class TestStaysOnMeta(Contract, FSDPTest):
    class kind(Sound):
        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs=None):
            if func is torch.ops.aten.empty_like.default:
                return cls(args[0]._data.clone())
            return super().__torch_dispatch__(func, types, args, kwargs)


@broken(r"after loading a state dict is not what was saved\. What torch\.save", "test_save_and_load")
class TestNotInTheFile(Contract, FSDPTest):
    class kind(Sound):
        def __reduce_ex__(self, protocol):
            return type(self), (torch.zeros(self.shape, device=self._data.device),)


@broken(r"\(15x5 over 2 ranks\) .* \(7, 5\) on rank 1 but .* pad the shard to 8x5", "test_hsdp_mesh")
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
