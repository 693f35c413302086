"""Calls the two hooks of a sharded weight as FSDP2 calls them, and checks what they
return. Also: the inner tensors of a tensor subclass.

Note [What FSDP2 does with the hooks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Unsharding flattens each tensor that ``fsdp_pre_all_gather`` of the local shard returns
and all-gathers it over the shard mesh. The first time, ``fsdp_post_all_gather`` returns
the unsharded tensor, which FSDP views in the size of the weight, and any other tensors
to free. Resharding frees these and the gathered tensors. Each later time their memory
is allocated again without its contents, the all-gather fills the gathered tensors, and
``fsdp_post_all_gather(out=...)`` must fill the rest. Autograd must not see these
writes, because the weight may be saved for a backward that is still to come.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ext.testing._internal.common_utils import DeterministicGuard

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_SIGNATURES = {
    PRE: f"{PRE}(self, mesh, outer_size, outer_stride, module, mp_policy)",
    POST: f"{POST}(self, all_gather_outputs, metadata, param_dtype, *, out=None)",
}


class ContractError(AssertionError):
    """A tensor subclass breaks the contract of all-gather extensions."""


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors in ``tensor``, and in its nested subclasses, detached.

    Raises:
        ContractError: a subclass has no ``__tensor_flatten__``.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [tensor.detach()]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        raise ContractError(
            f"{type(tensor).__name__} has no __tensor_flatten__, so its values cannot "
            "be read. Define __tensor_flatten__ and __tensor_unflatten__, or override "
            "values(tensor) in the test class."
        )
    names, _ = flatten()
    return [each for name in names for each in inner_tensors(getattr(tensor, name))]


def require_hooks(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that each of the named parameters has both hooks."""
    for name, tensor in named:
        kind = type(tensor).__name__
        if type(tensor) in (torch.Tensor, nn.Parameter) and not hasattr(tensor, PRE):
            raise ContractError(
                f"{name} is a plain {kind}, expected a tensor with hooks. Check "
                "make_tensor (or swap_weights), and that __torch_dispatch__ wraps what "
                "aten.detach returns, which nn.Parameter calls."
            )
        for hook, signature in _SIGNATURES.items():
            if not callable(getattr(tensor, hook, None)):
                raise ContractError(
                    f"{name}: {kind} has no {hook}; FSDP needs both hooks. Define "
                    f"{signature}."
                )


@dataclass(frozen=True)
class HookCheck:
    """One weight to check."""

    name: str  # of the parameter, for messages
    local: torch.Tensor  # this rank's shard, unpadded
    whole: torch.Tensor  # the same weight, unsharded
    module: nn.Module  # that owns the parameter
    mesh: DeviceMesh  # 1D, over which the weight is sharded
    policy: MixedPrecisionPolicy
    # Raises ContractError, with the third argument, if two tensors differ.
    compare: Callable[[torch.Tensor, torch.Tensor, str], None]

    @torch.no_grad()
    def run(self) -> None:
        """Unshard the weight, reshard it, and unshard it again. Collective.

        Raises:
            ContractError: a hook fails a check on this rank.
        """
        # Uninitialized memory holds NaN meanwhile, or the maximum of other types.
        with DeterministicGuard(True, warn_only=True):
            inputs, metadata = self._call_pre()
            self._check_ranks_agree(inputs)
            outputs = [
                each.new_empty(self.mesh.size() * each.numel()).view(
                    -1, *each.shape[1:]
                )
                for each in inputs
            ]
            self._gather(inputs, outputs)
            unsharded, also_freed = self._first_post(outputs, metadata)
            # Freed memory is allocated again without its contents.
            for tensor in (*outputs, *also_freed):
                tensor.copy_(torch.empty_like(tensor))
            inputs, metadata = self._call_pre()
            self._gather(inputs, outputs)
            self._later_post(outputs, metadata, nn.Parameter(unsharded))

    @property
    def _dtype(self) -> torch.dtype:
        return self.policy.param_dtype or self.whole.dtype

    def _error(self, hook: str, problem: str) -> ContractError:
        kind, size = type(self.local).__name__, "x".join(map(str, self.whole.shape))
        where = f"{self.name} ({size} over {self.mesh.size()} ranks)"
        return ContractError(f"{kind}.{hook} for {where} {problem}")

    def _require(self, holds: bool, hook: str, problem: str) -> None:
        if not holds:
            raise self._error(hook, problem)

    def _call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self.local, hook)(*args, **kwargs)
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
            if "leaf Variable" in str(error):
                problem += " Decorate the hook with torch.no_grad()."
            raise self._error(hook, problem) from error

    def _check_pair(self, hook: str, answer: Any, when: str, pair: str) -> None:
        problem = f"returned {_kind(answer)}{when}, expected a pair. Return {pair}."
        self._require(isinstance(answer, tuple) and len(answer) == 2, hook, problem)

    def _check_tensors(self, hook: str, found: Any, what: str) -> None:
        problem = f"returned {_kind(found)} as {what}, expected a tuple. Return "
        self._require(isinstance(found, (tuple, list)), hook, f"{problem}(tensor,).")
        for index, each in enumerate(found):
            problem = f"returned {_kind(each)} as {what}[{index}], expected a plain "
            problem += "tensor. Return inner tensors."
            self._require(type(each) is torch.Tensor, hook, problem)

    @property
    def _arguments_of_pre(self) -> int:
        return len(inspect.signature(getattr(self.local, PRE)).parameters)

    def _call_pre(self) -> tuple[Sequence[torch.Tensor], Any]:
        count, signature = self._arguments_of_pre, _SIGNATURES[PRE]
        problem = f"takes {count} arguments, expected 1 (mesh) or 5. Define "
        self._require(count in (1, 5), PRE, f"{problem}{signature}.")
        stride = torch.empty(self.whole.shape, device="meta").stride()
        args = (self.mesh, self.whole.size(), stride, self.module, self.policy)
        answer = self._call(PRE, *args[:count])
        self._check_pair(PRE, answer, "", "(all_gather_inputs, metadata)")
        inputs, metadata = answer
        self._check_tensors(PRE, inputs, "all_gather_inputs")
        self._require(len(inputs) > 0, PRE, "returned no tensor, expected one or more.")
        for index, each in enumerate(inputs):
            returned, wanted = f"returned all_gather_inputs[{index}]", self.local.device
            problem = f"{returned} on {each.device}, expected {wanted}. Move it there."
            self._require(each.device.type == wanted.type, PRE, problem)
            problem = f"{returned} that is not contiguous. Call contiguous()."
            self._require(each.is_contiguous(), PRE, problem)
        return inputs, metadata

    def _check_ranks_agree(self, inputs: Sequence[torch.Tensor]) -> None:
        """Check that inputs are as an all-gather requires."""
        mine = ", ".join(f"{each.dtype} {tuple(each.shape)}" for each in inputs)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        rows = -(-self.whole.size(0) // self.mesh.size())
        padded = torch.Size([rows, *self.whole.shape[1:]])
        remedy = "Return the same number of tensors, sizes and types whatever the rank."
        if self.whole.size(0) % self.mesh.size():
            remedy = "The first dimension shards unevenly: pad the shard to "
            remedy += f"{'x'.join(map(str, padded))} at its end, on every rank."
        for rank, theirs in enumerate(found):
            problem = f"returned {theirs} on rank {rank} but {found[0]} on rank 0. "
            self._require(theirs == found[0], PRE, problem + remedy)
        # FSDP checks this only on ranks with padding, and only for the signature that
        # takes the outer size.
        self._require(
            self._arguments_of_pre != 5
            or self.local.size() == padded
            or all(each.size() == padded for each in inputs),
            PRE,
            f"returned tensors of sizes {mine}, expected {tuple(padded)} each, "
            f"because this rank's shard has {self.local.size(0)} rows. Pad to "
            "ceil(outer_size[0] / mesh.size()) rows at the end.",
        )

    def _gather(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        for each, output in zip(inputs, outputs, strict=True):
            parts = [torch.empty_like(each.view(-1)) for _ in range(self.mesh.size())]
            dist.all_gather(parts, each.view(-1), group=self.mesh.get_group())
            output.view(-1).copy_(torch.cat(parts))

    @torch.enable_grad()
    def _call_post(
        self, outputs: Sequence[torch.Tensor], metadata: Any, **out: torch.Tensor
    ) -> Any:
        # FSDP calls this hook during forward, with autograd on, and the other hook with
        # autograd off.
        return self._call(POST, tuple(outputs), metadata, self._dtype, **out)

    def _first_post(
        self, outputs: Sequence[torch.Tensor], metadata: Any
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        answer = self._call_post(outputs, metadata)
        pair = "(unsharded tensor, tensors whose memory FSDP frees with it)"
        self._check_pair(POST, answer, " when called without out", pair)
        unsharded, also_freed = answer
        problem = f"returned {_kind(unsharded)} as the unsharded tensor."
        self._require(isinstance(unsharded, torch.Tensor), POST, problem)
        self._check_tensors(POST, also_freed, "tensors to free")
        unsharded = self._in_whole_size(unsharded)
        self._check_unsharded(unsharded, "the first all-gather")
        try:
            parts = inner_tensors(unsharded)
        except ContractError:  # no __tensor_flatten__, where values() is overridden
            parts = []
        staying = len(_storages(parts) - _storages([*outputs, *also_freed]))
        self._require(
            not staying,
            POST,
            f"keeps {staying} tensor(s) of the unsharded weight in memory after "
            "resharding. Return every new tensor that the result is made of in the "
            "second place of the pair.",
        )
        return unsharded, also_freed

    def _later_post(
        self, outputs: Sequence[torch.Tensor], metadata: Any, out: nn.Parameter
    ) -> None:
        version = out._version
        self._call_post(outputs, metadata, out=out)
        hint = ". If out was ignored: copy into what out holds of its own"
        self._check_unsharded(out.detach(), f"a later all-gather into out{hint}")
        writes = out._version - version
        self._require(
            not writes,
            POST,
            f"wrote into out {writes} time(s) visible to autograd, so that backward "
            "would refuse the weight that forward saved. Write under "
            "torch.autograd._unsafe_preserve_version_counter(out).",
        )

    def _in_whole_size(self, unsharded: torch.Tensor) -> torch.Tensor:
        found, size = unsharded.shape, self.whole.size()
        problem = f"returned {unsharded.dtype}, expected param_dtype {self._dtype}. "
        problem += "Cast the result to param_dtype."
        self._require(unsharded.dtype == self._dtype, POST, problem)
        self._require(
            len(found) == len(size) and found[1:] == size[1:] and found[0] >= size[0],
            POST,
            f"returned size {tuple(found)}, expected {tuple(size)} (or more rows of "
            "padding at the end). all_gather_outputs hold the ranks' inputs, "
            "concatenated along dimension 0.",
        )
        try:
            stride = torch.empty(size, device="meta").stride()
            return torch.as_strided(unsharded, size, stride, storage_offset=0)
        except Exception as error:
            problem = f"returned {_kind(unsharded)} that aten.as_strided cannot view "
            problem += f"in size {tuple(size)}: {error}. Handle it in "
            raise self._error(POST, f"{problem}__torch_dispatch__.") from error

    def _check_unsharded(self, unsharded: torch.Tensor, when: str) -> None:
        problem = f"is not equal after the round trip of {when}. Rows must come back "
        problem += "in the order of ranks. Check the order of all_gather_outputs, the "
        problem += "use of metadata, that padding is at the end of each shard and that "
        problem += "nothing reads it"
        whole = self.whole.to(self._dtype).detach()
        self.compare(unsharded, whole, str(self._error(POST, problem)))


def _storages(tensors: Sequence[torch.Tensor]) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors if each.numel() > 0}


def _kind(value: object) -> str:
    return f"a {type(value).__name__}" if value is not None else "None"
