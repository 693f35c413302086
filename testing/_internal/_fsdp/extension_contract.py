"""``FSDPExtensionContract``: the tests that a tensor subclass with all-gather
extensions must pass under FSDP2.
"""

from __future__ import annotations

import functools
import io
import unittest
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ext.testing._internal._fsdp.device import rank_device, world_mesh
from torch_ext.testing._internal._fsdp.extension_hooks import (
    ContractError,
    HookCheck,
    inner_tensors,
    require_hooks,
)
from torch_ext.testing._internal._fsdp.models.base import fully_shard_children
from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu

if TYPE_CHECKING:
    from torch_ext.testing._internal._fsdp.cases import FSDPTest as _FSDPTest
else:
    _FSDPTest = object

__all__ = ["ContractError", "FSDPExtensionContract"]

_STEPS = 10
_FEW_STEPS = 3  # enough to find a weight that is not updated
_BATCH = 2  # rows of input on each rank
_FULL_PRECISION = MixedPrecisionPolicy()

_Tolerances = tuple[float | None, float | None]  # rtol and atol

_LOST = (
    "Its __torch_dispatch__ must wrap the outputs of the operations that FSDP, "
    "to_empty() and optimizers call on "
    "shards, such as split, new_zeros, narrow, view, detach, empty_like and copy_."
)


class FSDPExtensionContract(_FSDPTest):
    """A mixin for ``FSDPTest`` that trains models with your tensor subclass, sharded
    and unsharded, and compares them.

    Define :meth:`make_tensor`, or :meth:`swap_weights` if wrapping each weight is not
    enough. If your subclass rounds, adjust the tolerances. Before training, the hooks
    of every weight are called as FSDP calls them, so that a mistake is an error with a
    name instead of a hang. ``EXTENSIONS.md`` says what you may set.
    """

    dim: int = 8
    uneven_dim: int | None = 5
    rtol: float | None = None
    atol: float | None = None
    param_dtype: torch.dtype = torch.bfloat16
    mixed_precision_rtol: float = 0.05
    mixed_precision_atol: float = 0.05
    learning_rate: float = 0.05

    def make_tensor(self, data: torch.Tensor) -> torch.Tensor:
        """Return your subclass with the values of ``data``, 2D, perhaps on ``meta``."""
        raise TypeError(
            f"{type(self).__name__} defines neither make_tensor(self, data) nor "
            "swap_weights(self, model). The "
            "contract needs one of them to make tensors of your subclass."
        )

    def swap_weights(self, model: nn.Module) -> None:
        """Replace the weights of ``model`` by tensors of your subclass, or its modules.
        Names of parameters must not change.
        """
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                weight = self.make_tensor(parameter.detach())
                setattr(module, name, nn.Parameter(weight))

    def values(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the plain tensors to compare in place of ``tensor``. Override it if
        unsharded tensors and shards have different inner tensors.
        """
        return inner_tensors(tensor)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_hooks(self) -> None:
        """Each hook takes and returns what FSDP expects, in both precisions."""
        for dim in self._dims():
            for policy in (_FULL_PRECISION, self._mixed_precision()):
                self._check_parity(dim, steps=0, mp_policy=policy)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_training_parity(self) -> None:
        """Ten steps equal unsharded training on the data of all ranks."""
        config = {"reshard_after_forward": [True, False]}
        self.run_subtests(config, self._check_parity, dim=self.dim)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_uneven_shards(self) -> None:
        """Three such steps with padded and empty shards."""
        if self.uneven_dim is None:
            why = "sets uneven_dim = None: its subclass shards only evenly"
            raise unittest.SkipTest(f"{type(self).__name__} {why}")
        config = {"reshard_after_forward": [True, False]}
        few = {"dim": self.uneven_dim, "steps": _FEW_STEPS}
        self.run_subtests(config, self._check_parity, **few)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_mixed_precision(self) -> None:
        """Only unsharded weights have ``param_dtype``; results are close."""
        policy = self._mixed_precision()
        model = self._check_parity(self.dim, steps=_FEW_STEPS, mp_policy=policy)
        seen: list[torch.dtype] = []
        for module in model.modules():
            if [*module.parameters(recurse=False)]:
                module.register_forward_pre_hook(
                    lambda module, _: seen.append(next(module.parameters()).dtype)
                )
        model(self._inputs(self.dim, step=0)[self.rank])
        what = "types of unsharded weights in forward"
        self.assertEqual(set(seen), {self.param_dtype}, what)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_hsdp_mesh(self) -> None:
        """Over a 2D mesh, hooks get only its shard dimension."""
        mesh = world_mesh(2, dist.get_world_size() // 2)
        for dim in self._dims():
            self._check_parity(dim, steps=_FEW_STEPS, mesh=mesh)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_meta_device_flow(self) -> None:
        """A model that was created on ``meta`` trains like any other."""
        with torch.device("meta"):
            model = self._whole(self.dim)
        self._check_devices(model, "meta", "before sharding")
        fully_shard_children(model).to_empty(device=self._device)
        self._check_devices(model, self._device.type, "after to_empty()")
        reference = self._whole(self.dim)
        for each in (model, reference):
            for index, parameter in enumerate(each.parameters()):
                nn.init.constant_(parameter, (index + 1) / (4 * parameter.size(1)))
        self._train_both(model, reference, self.dim, _FEW_STEPS, _FULL_PRECISION)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_save_and_load(self) -> None:
        """A state dict from a file restores every shard."""
        for dim in self._dims():
            trained = self._check_parity(dim, steps=_FEW_STEPS)
            file = io.BytesIO()
            torch.save(trained.state_dict(), file)
            file.seek(0)
            restored = fully_shard_children(self._whole(dim, seed=1))
            restored.load_state_dict(torch.load(file, weights_only=False))
            when, exact = "after loading a state dict", (0.0, 0.0)
            for name, loaded in restored.named_parameters():
                mine = _local(loaded, name, when)
                saved = _local(trained.get_parameter(name), name, when)
                complaint = f"{name} {when} is not what was saved. What torch.save() "
                complaint += "pickles must restore every inner tensor"
                self._compare(exact, mine, saved, complaint, check_dtype=True)
            for step in range(2):
                inputs = self._inputs(dim, step)[self.rank]
                got, wanted = restored(inputs), trained(inputs)
                self._check_close(exact, got, wanted, f"the output {when}")

    # Not part of the interface from here on.

    @property
    def _device(self) -> torch.device:
        return rank_device(self.rank)

    def _dims(self) -> list[int]:
        return [self.dim] if self.uneven_dim is None else [self.dim, self.uneven_dim]

    def _tolerances(self, policy: MixedPrecisionPolicy) -> _Tolerances:
        if policy.param_dtype is not None:
            return self.mixed_precision_rtol, self.mixed_precision_atol
        return self.rtol, self.atol

    def _mixed_precision(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(self.param_dtype, reduce_dtype=torch.float32)

    def _whole(self, dim: int, seed: int = 0) -> nn.Module:
        """Return blocks with weights of the subclass, the same on all ranks."""
        torch.manual_seed(seed)
        hidden = 3 * dim if dim % 2 else 4 * dim
        model = nn.Sequential()
        for _ in range(2):
            widen = nn.Linear(dim, hidden, bias=False)
            narrow = nn.Linear(hidden, dim, bias=False)
            model.append(nn.Sequential(widen, nn.Tanh(), narrow))
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.to(self._device)
        self.swap_weights(model)
        require_hooks(model.named_parameters())
        return model

    def _check_parity(
        self,
        dim: int,
        *,
        steps: int = _STEPS,
        mp_policy: MixedPrecisionPolicy = _FULL_PRECISION,
        **options: Any,
    ) -> nn.Module:
        """Check the hooks of a model, train it, and return it."""
        model = fully_shard_children(self._whole(dim), mp_policy=mp_policy, **options)
        self._train_both(model, self._whole(dim), dim, steps, mp_policy)
        return model

    def _train_both(
        self,
        model: nn.Module,
        reference: nn.Module,
        dim: int,
        steps: int,
        policy: MixedPrecisionPolicy,
    ) -> None:
        tolerances = self._tolerances(policy)
        compare = functools.partial(self._compare, tolerances, check_dtype=True)
        for name, shard, whole, mesh in _shards(model, reference, "after sharding"):
            module = model.get_submodule(name.rpartition(".")[0])
            HookCheck(name, shard, whole, module, mesh, policy, compare).run()
        optimizers = [
            torch.optim.SGD(each.parameters(), lr=self.learning_rate, momentum=0.9)
            for each in (model, reference)
        ]
        for step in range(steps):
            inputs = self._inputs(dim, step)
            whole_output = reference(torch.cat(inputs))
            output = model(inputs[self.rank])
            # FSDP averages the means over each rank's rows to the mean over all rows.
            for each in (whole_output, output):
                each.square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            mine = whole_output.narrow(0, self.rank * _BATCH, _BATCH)
            self._check_close(tolerances, output, mine, f"the output of step {step}")
            self._check_weights(tolerances, model, reference, f"after step {step}")

    def _inputs(self, dim: int, step: int) -> list[torch.Tensor]:
        """Return every rank's input of ``step``, ``(_BATCH, dim)`` each."""
        generator = torch.Generator().manual_seed(1000 + step)
        rows = torch.randn(dist.get_world_size() * _BATCH, dim, generator=generator)
        return list(rows.to(self._device).chunk(dist.get_world_size()))

    def _check_devices(self, model: nn.Module, kind: str, when: str) -> None:
        for name, parameter in model.named_parameters():
            shard: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
            parts = [shard, *inner_tensors(shard)]
            if any(part.device.type != kind for part in parts):
                raise ContractError(
                    f"{name} {when}: {type(shard).__name__} has parts on "
                    f"{[str(part.device) for part in parts]}, expected {kind}. Its "
                    "__torch_dispatch__ must apply the operation to every inner tensor."
                )

    def _check_weights(
        self, tolerances: _Tolerances, model: nn.Module, reference: nn.Module, when: str
    ) -> None:
        for name, shard, whole, mesh in _shards(model, reference, when):
            expected = _chunk(whole, mesh)
            if (shard.shape, shard.dtype) != (expected.shape, expected.dtype):
                raise ContractError(
                    f"{name} {when}: this rank's shard is {shard.dtype} "
                    f"{tuple(shard.shape)}, expected "
                    f"{expected.dtype} {tuple(expected.shape)}. {_LOST}"
                )
            self._check_close(tolerances, shard, expected, f"{name} {when}")

    def _check_close(
        self,
        tolerances: _Tolerances,
        got: torch.Tensor,
        expected: torch.Tensor,
        what: str,
    ) -> None:
        complaint = (
            f"{what} is off by more than rtol={tolerances[0]}, atol={tolerances[1]}. "
            "If rounding causes this, raise rtol and atol. A stale value of an "
            "earlier step, kept by a hook or not copied to out, has the same effect"
        )
        self._compare(tolerances, got, expected, complaint, check_dtype=False)

    def _compare(
        self,
        tolerances: _Tolerances,
        got: torch.Tensor,
        expected: torch.Tensor,
        complaint: str,
        check_dtype: bool,
    ) -> None:
        """Compare the :meth:`values` of two tensors.

        Raises:
            ContractError: ``complaint``, and the first difference.
        """
        mine, theirs = self.values(got), self.values(expected)
        if len(mine) != len(theirs):
            made = f"made of {len(mine)} tensors, expected {len(theirs)}"
            raise ContractError(f"{complaint}: {made}")
        rtol, atol = tolerances
        if (rtol is None) != (atol is None):  # assert_close needs both or neither
            rtol, atol = rtol or 0.0, atol or 0.0
        for index, pair in enumerate(zip(mine, theirs, strict=True)):
            try:
                torch.testing.assert_close(
                    *pair, rtol=rtol, atol=atol, check_dtype=check_dtype
                )
            except AssertionError as error:
                which = f" (inner tensor {index})" if len(mine) > 1 else ""
                difference = " ".join(str(error).split())
                raise ContractError(f"{complaint}{which}. {difference}") from None


def _shard_mesh(parameter: Any) -> DeviceMesh:
    mesh: DeviceMesh = parameter.device_mesh
    names = mesh.mesh_dim_names
    return mesh if mesh.ndim == 1 or names is None else mesh[names[-1]]


def _chunk(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the rows of ``whole`` that this rank of ``mesh`` holds, possibly none."""
    rows = -(-whole.size(0) // mesh.size())
    start = min(rows * mesh.get_local_rank(), whole.size(0))
    return whole.narrow(0, start, min(rows, whole.size(0) - start))


def _local(parameter: Any, name: str, when: str) -> torch.Tensor:
    shard: torch.Tensor = parameter._local_tensor
    try:
        require_hooks([(name, shard)])
    except ContractError as error:
        lost = f"{name} has lost its subclass {when}. {_LOST} ({error})"
        raise ContractError(lost) from None
    return shard


def _shards(
    model: nn.Module, reference: nn.Module, when: str
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, DeviceMesh]]:
    """Yield each name with this rank's shard, the whole weight, and the mesh."""
    for name, parameter in model.named_parameters():
        whole = reference.get_parameter(name).detach()
        yield name, _local(parameter, name, when), whole, _shard_mesh(parameter)
