"""Calls the two hooks of a sharded weight as FSDP2 calls them, and checks what they
return.

Note [What FSDP2 does with the hooks] ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~ Unsharding
calls ``fsdp_pre_all_gather`` of the local shard. FSDP flattens each tensor that it
returns and all-gathers it over the shard mesh. The first time, ``fsdp_post_all_gather``
builds the unsharded tensor from the gathered tensors, and returns it with any other
tensors to free on reshard. FSDP views the result in the size of the unsharded weight.
Resharding frees the gathered tensors and those others. Each later time their memory is
allocated again without its contents, the all-gather fills the gathered tensors, and
``fsdp_post_all_gather(out=...)`` must fill the rest. Autograd must not see these
writes, because the weight may be saved for a backward that is still to come.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ext.testing._internal._fsdp.extensions.errors import ContractError, together
from torch_ext.testing._internal._fsdp.extensions.values import (
    ScribbledEmpty,
    check_close,
    inner_tensors,
    scribble,
    storage_keys,
)

__all__ = ["HookCheck", "require_hooks"]

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_PRE_SIGNATURE = f"{PRE}(self, mesh, outer_size, outer_stride, module, mp_policy)"
_POST_SIGNATURE = (
    f"{POST}(self, all_gather_outputs, metadata, param_dtype, *, out=None)"
)


def require_hooks(tensor: torch.Tensor, name: str) -> None:
    """Check that ``tensor`` has both hooks.

    Raises:
        ContractError: it lacks one or both.
    """
    kind = type(tensor).__name__
    if type(tensor) in (torch.Tensor, nn.Parameter) and not hasattr(tensor, PRE):
        raise ContractError(
            f"{name} is a plain {kind}, expected a tensor with hooks. Check "
            "make_tensor (or swap_weights), and that "
            "__torch_dispatch__ wraps what aten.detach returns, which nn.Parameter "
            "calls."
        )
    for hook, signature in ((PRE, _PRE_SIGNATURE), (POST, _POST_SIGNATURE)):
        if not callable(getattr(tensor, hook, None)):
            raise ContractError(
                f"{name}: {kind} has no {hook}; FSDP needs both hooks. Define "
                f"{signature}."
            )


@dataclass(frozen=True)
class _Gather:
    """The inputs that the hook returned, and the gathered outputs, ``(*,
    *inputs[i].shape[1:])``.
    """

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    metadata: Any


@dataclass(frozen=True)
class HookCheck:
    """One weight to check."""

    name: str  # of the parameter, for messages
    local: torch.Tensor  # this rank's shard, unpadded
    whole: torch.Tensor  # the same weight, unsharded
    module: nn.Module  # that owns the parameter
    mesh: DeviceMesh  # 1D, over which the weight is sharded
    policy: MixedPrecisionPolicy
    # Returns the plain tensors to compare, within (rtol, atol).
    values: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    tolerances: tuple[float | None, float | None]

    @torch.no_grad()
    def run(self) -> None:
        """Unshard the weight, reshard it, and unshard it again. Collective over the
        default group.

        Raises:
            ContractError: on every rank, if a hook fails a check on any.
        """
        together(lambda: require_hooks(self.local, self.name))
        inputs, metadata = together(self._call_pre)
        self._check_ranks_agree(inputs)
        gather = self._gather(inputs, metadata)
        unsharded, also_freed = together(lambda: self._first_post(gather))
        together(lambda: self._check_unsharded(unsharded, "the first all-gather"))
        together(
            lambda: self._check_nothing_stays(unsharded, [*gather.outputs, *also_freed])
        )
        self._check_out(gather, unsharded, also_freed)

    @property
    def _dtype(self) -> torch.dtype:
        return self.policy.param_dtype or self.whole.dtype

    @property
    def _padded_size(self) -> torch.Size:
        rows = math.ceil(self.whole.size(0) / self.mesh.size())
        return torch.Size([rows, *self.whole.shape[1:]])

    def _error(self, hook: str, problem: str) -> ContractError:
        kind, size = type(self.local).__name__, "x".join(map(str, self.whole.shape))
        return ContractError(
            f"{kind}.{hook} for {self.name} ({size} over {self.mesh.size()} ranks) "
            f"{problem}"
        )

    def _require(self, holds: bool, hook: str, problem: str) -> None:
        if not holds:
            raise self._error(hook, problem)

    def _call_pre(self) -> tuple[tuple[torch.Tensor, ...], Any]:
        hook = getattr(self.local, PRE)
        count = len(inspect.signature(hook).parameters)
        problem = f"takes {count} arguments, expected 1 (mesh) or 5"
        self._require(count in (1, 5), PRE, f"{problem}. Define {_PRE_SIGNATURE}.")
        stride = torch.empty(self.whole.shape, device="meta").stride()
        args = (self.mesh, self.whole.size(), stride, self.module, self.policy)
        with ScribbledEmpty():
            answer = self._call(hook, PRE, *args[:count])
        problem = f"returned {_kind(answer)}, expected a pair. Return "
        is_pair = isinstance(answer, tuple) and len(answer) == 2
        self._require(is_pair, PRE, f"{problem}(all_gather_inputs, metadata).")
        inputs, metadata = answer
        self._check_tensors(PRE, inputs, "all_gather_inputs", at_least=1)
        for index, each in enumerate(inputs):
            self._check_input(index, each)
        return tuple(inputs), metadata

    def _call(
        self, hook: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            raise self._error(
                name, f"raised {type(error).__name__}: {error}{_advice(error)}"
            ) from error

    def _check_tensors(self, hook: str, found: Any, what: str, at_least: int) -> None:
        problem = f"returned {_kind(found)} as {what}, expected a tuple. Return "
        is_list = isinstance(found, (tuple, list))
        self._require(is_list, hook, f"{problem}(tensor,) for one.")
        problem = f"returned no {what}, expected at least {at_least}."
        self._require(len(found) >= at_least, hook, problem)
        for index, each in enumerate(found):
            problem = f"returned {_kind(each)} as {what}[{index}], expected a plain "
            is_plain = type(each) is torch.Tensor
            self._require(is_plain, hook, f"{problem}tensor. Return inner tensors.")

    def _check_input(self, index: int, each: torch.Tensor) -> None:
        returned, wanted = f"returned all_gather_inputs[{index}]", self.local.device
        problem = f"{returned} on {each.device}, expected {wanted}. Move it there."
        self._require(each.device.type == wanted.type, PRE, problem)
        problem = f"{returned} that is not contiguous. Call contiguous()."
        self._require(each.is_contiguous(), PRE, problem)

    def _check_ranks_agree(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Check what an all-gather requires: the same number of tensors, sizes and
        types on every rank.
        """
        mine = [(tuple(each.shape), str(each.dtype)) for each in inputs]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        padded = "x".join(map(str, self._padded_size))
        remedy = "Return the same number of tensors, sizes and types whatever the rank."
        if self.whole.size(0) % self.mesh.size():
            remedy = "The first dimension shards unevenly: pad the shard to "
            remedy += f"{padded} at its end, on every rank."
        for rank, theirs in enumerate(found):
            problem = f"returned {_sizes(theirs)} on rank {rank} but "
            problem += f"{_sizes(found[0])} on rank 0. {remedy}"
            self._require(theirs == found[0], PRE, problem)
        together(lambda: self._check_padded(inputs))

    def _check_padded(self, inputs: tuple[torch.Tensor, ...]) -> None:
        # FSDP checks this only on ranks with padding, and only for the signature that
        # takes the outer size.
        if len(inspect.signature(getattr(self.local, PRE)).parameters) != 5:
            return
        padded, sizes = self._padded_size, [tuple(each.size()) for each in inputs]
        self._require(
            self.local.size() == padded or all(size == padded for size in sizes),
            PRE,
            f"returned tensors of sizes {sizes}, expected {tuple(padded)} each, "
            f"because this rank's shard has {self.local.size(0)} rows. Pad to "
            "ceil(outer_size[0] / mesh.size()) rows at the end.",
        )

    def _gather(self, inputs: tuple[torch.Tensor, ...], metadata: Any) -> _Gather:
        ranks = self.mesh.size()
        outputs = tuple(each.new_empty(ranks * each.numel()) for each in inputs)
        self._fill(inputs, outputs)
        shaped = (
            flat.view(-1, *each.shape[1:])
            for flat, each in zip(outputs, inputs, strict=True)
        )
        return _Gather(inputs, tuple(shaped), metadata)

    def _fill(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        group = self.mesh.get_group()
        for each, output in zip(inputs, outputs, strict=True):
            parts = [torch.empty_like(each.view(-1)) for _ in range(self.mesh.size())]
            dist.all_gather(parts, each.view(-1), group=group)
            output.view(-1).copy_(torch.cat(parts))

    def _first_post(
        self, gather: _Gather
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        with ScribbledEmpty():
            answer = self._call_post(gather.outputs, gather.metadata)
        self._require(
            isinstance(answer, tuple) and len(answer) == 2,
            POST,
            f"returned {_kind(answer)} when called without out, expected a pair. "
            "Return (unsharded tensor, tensors whose memory FSDP frees with it).",
        )
        unsharded, also_freed = answer
        problem = f"returned {_kind(unsharded)} as the unsharded tensor, expected a "
        is_tensor = isinstance(unsharded, torch.Tensor)
        self._require(is_tensor, POST, f"{problem}tensor.")
        self._check_tensors(POST, also_freed, "tensors to free", at_least=0)
        return self._in_whole_size(unsharded), tuple(also_freed)

    @torch.enable_grad()
    def _call_post(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, **out: torch.Tensor
    ) -> Any:
        # FSDP calls this hook during forward, with autograd on, and the other hook with
        # autograd off.
        return self._call(
            getattr(self.local, POST), POST, outputs, metadata, self._dtype, **out
        )

    def _in_whole_size(self, unsharded: torch.Tensor) -> torch.Tensor:
        size = self.whole.size()
        self._require(
            unsharded.dtype == self._dtype,
            POST,
            f"returned {unsharded.dtype}, expected param_dtype {self._dtype}. "
            "Cast the result to param_dtype.",
        )
        found = unsharded.shape
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
            raise self._error(
                POST,
                f"returned a {type(unsharded).__name__} that aten.as_strided cannot "
                f"view in size {tuple(size)}: "
                f"{error}. Handle aten.as_strided in __torch_dispatch__.",
            ) from error

    def _check_unsharded(self, unsharded: torch.Tensor, when: str) -> None:
        remedy = (
            "Rows must come back in the order of ranks. Check the order of "
            "all_gather_outputs, the use of metadata, "
            "that padding is at the end of each shard and that nothing reads it"
        )
        found = self._error(
            POST, f"is not equal after the round trip of {when}. {remedy}"
        )
        same = self.whole.dtype == self._dtype
        whole = self.whole if same else self.whole.to(self._dtype)
        check_close(
            self.values(unsharded),
            self.values(whole.detach()),
            tolerances=self.tolerances,
            complaint=str(found),
        )

    def _check_nothing_stays(
        self, unsharded: torch.Tensor, freed: Sequence[torch.Tensor]
    ) -> None:
        staying = storage_keys(_parts(unsharded)) - storage_keys(freed)
        self._require(
            not staying,
            POST,
            f"keeps {len(staying)} tensor(s) of the unsharded weight in memory after "
            "resharding. Return every new tensor that the result is made of in the "
            "second place of the pair.",
        )

    def _check_out(
        self,
        gather: _Gather,
        unsharded: torch.Tensor,
        also_freed: Sequence[torch.Tensor],
    ) -> None:
        # See Note [What FSDP2 does with the hooks]: freed memory is allocated again
        # without its contents.
        for tensor in (*gather.outputs, *also_freed):
            scribble(tensor)
        inputs, metadata = together(self._call_pre)
        self._fill(inputs, gather.outputs)
        out = nn.Parameter(unsharded)
        version = out._version
        together(lambda: self._call_post(gather.outputs, metadata, out=out))
        together(lambda: self._check_filled(out))
        together(lambda: self._check_version(out._version - version))

    def _check_filled(self, out: torch.Tensor) -> None:
        try:
            self._check_unsharded(out.detach(), "a later all-gather into out")
        except ContractError as error:
            raise ContractError(
                f"{error} If out was ignored: copy into what out holds of its own."
            ) from None

    def _check_version(self, writes: int) -> None:
        self._require(
            not writes,
            POST,
            f"wrote into out {writes} time(s) in sight of autograd, so that backward "
            "would refuse the weight that forward saved. Write under "
            "torch.autograd._unsafe_preserve_version_counter(out).",
        )


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    try:
        return inner_tensors(tensor)
    except ContractError:  # without __tensor_flatten__, where values() is overridden
        return []


def _advice(error: Exception) -> str:
    is_leaf = "leaf Variable" in str(error)
    return " Decorate the hook with torch.no_grad()." if is_leaf else ""


def _kind(value: object) -> str:
    return f"a {type(value).__name__}" if value is not None else "None"


def _sizes(found: Sequence[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{dtype} {size}" for size, dtype in found)
