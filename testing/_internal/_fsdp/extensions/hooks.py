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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ext.testing._internal._fsdp.extensions.values import (
    ContractError,
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


def require_hooks(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that each tensor has both hooks. They come with the names of parameters.

    Raises:
        ContractError: one lacks a hook.
    """
    for name, tensor in named:
        kind = type(tensor).__name__
        if type(tensor) in (torch.Tensor, nn.Parameter) and not hasattr(tensor, PRE):
            raise ContractError(
                f"{name} is a plain {kind}, expected a tensor with hooks. Check "
                "make_tensor (or swap_weights), and that __torch_dispatch__ wraps what "
                "aten.detach returns, which nn.Parameter calls."
            )
        for hook, signature in ((PRE, _PRE_SIGNATURE), (POST, _POST_SIGNATURE)):
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
    # Returns the plain tensors to compare, within (rtol, atol).
    values: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    tolerances: tuple[float | None, float | None]

    @torch.no_grad()
    def run(self) -> None:
        """Unshard the weight, reshard it, and unshard it again. Collective over the
        default group.

        Raises:
            ContractError: a hook fails a check on this rank.
        """
        require_hooks([(self.name, self.local)])
        inputs, metadata = self._call_pre()
        self._check_ranks_agree(inputs)
        flat = [each.new_empty(self.mesh.size() * each.numel()) for each in inputs]
        self._gather(inputs, flat)
        outputs = tuple(
            each.view(-1, *sent.shape[1:])
            for each, sent in zip(flat, inputs, strict=True)
        )
        unsharded, also_freed = self._first_post(outputs, metadata)
        # See Note [What FSDP2 does with the hooks]: freed memory is allocated again
        # without its contents.
        for tensor in (*outputs, *also_freed):
            scribble(tensor)
        inputs, metadata = self._call_pre()
        self._gather(inputs, outputs)
        self._later_post(outputs, metadata, nn.Parameter(unsharded))

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

    def _count_arguments(self) -> int:
        return len(inspect.signature(getattr(self.local, PRE)).parameters)

    def _call_pre(self) -> tuple[tuple[torch.Tensor, ...], Any]:
        count = self._count_arguments()
        problem = f"takes {count} arguments, expected 1 (mesh) or 5"
        self._require(count in (1, 5), PRE, f"{problem}. Define {_PRE_SIGNATURE}.")
        stride = torch.empty(self.whole.shape, device="meta").stride()
        args = (self.mesh, self.whole.size(), stride, self.module, self.policy)
        with ScribbledEmpty():
            answer = self._call(PRE, *args[:count])
        problem = f"returned {_kind(answer)}, expected a pair. Return "
        is_pair = isinstance(answer, tuple) and len(answer) == 2
        self._require(is_pair, PRE, f"{problem}(all_gather_inputs, metadata).")
        inputs, metadata = answer
        self._check_tensors(PRE, inputs, "all_gather_inputs", at_least=1)
        for index, each in enumerate(inputs):
            self._check_input(index, each)
        return tuple(inputs), metadata

    def _call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self.local, hook)(*args, **kwargs)
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
            if "leaf Variable" in str(error):
                problem += " Decorate the hook with torch.no_grad()."
            raise self._error(hook, problem) from error

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
        self._check_padded(inputs)

    def _check_padded(self, inputs: tuple[torch.Tensor, ...]) -> None:
        # FSDP checks this only on ranks with padding, and only for the signature that
        # takes the outer size.
        if self._count_arguments() != 5:
            return
        padded, sizes = self._padded_size, [tuple(each.size()) for each in inputs]
        self._require(
            self.local.size() == padded or all(size == padded for size in sizes),
            PRE,
            f"returned tensors of sizes {sizes}, expected {tuple(padded)} each, "
            f"because this rank's shard has {self.local.size(0)} rows. Pad to "
            "ceil(outer_size[0] / mesh.size()) rows at the end.",
        )

    def _gather(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        group = self.mesh.get_group()
        for each, output in zip(inputs, outputs, strict=True):
            parts = [torch.empty_like(each.view(-1)) for _ in range(self.mesh.size())]
            dist.all_gather(parts, each.view(-1), group=group)
            output.view(-1).copy_(torch.cat(parts))

    def _first_post(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        with ScribbledEmpty():
            answer = self._call_post(outputs, metadata)
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
        unsharded = self._in_whole_size(unsharded)
        self._check_unsharded(unsharded, "the first all-gather")
        freed = storage_keys([*outputs, *also_freed])
        staying = len(storage_keys(_parts(unsharded)) - freed)
        self._require(
            not staying,
            POST,
            f"keeps {staying} tensor(s) of the unsharded weight in memory after "
            "resharding. Return every new tensor that the result is made of in the "
            "second place of the pair.",
        )
        return unsharded, tuple(also_freed)

    def _later_post(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, out: nn.Parameter
    ) -> None:
        version = out._version
        self._call_post(outputs, metadata, out=out)
        try:
            self._check_unsharded(out.detach(), "a later all-gather into out")
        except ContractError as error:
            raise ContractError(
                f"{error} If out was ignored: copy into what out holds of its own."
            ) from None
        writes = out._version - version
        self._require(
            not writes,
            POST,
            f"wrote into out {writes} time(s) in sight of autograd, so that backward "
            "would refuse the weight that forward saved. Write under "
            "torch.autograd._unsafe_preserve_version_counter(out).",
        )

    @torch.enable_grad()
    def _call_post(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, **out: torch.Tensor
    ) -> Any:
        # FSDP calls this hook during forward, with autograd on, and the other hook with
        # autograd off.
        return self._call(POST, outputs, metadata, self._dtype, **out)

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
            problem = (
                f"returned {_kind(unsharded)} that aten.as_strided cannot view in "
            )
            problem += f"size {tuple(size)}: {error}. Handle it in __torch_dispatch__."
            raise self._error(POST, problem) from error

    def _check_unsharded(self, unsharded: torch.Tensor, when: str) -> None:
        remedy = (
            "Rows must come back in the order of ranks. Check the order of "
            "all_gather_outputs, the use of metadata, that padding is at the end of "
            "each shard and that nothing reads it"
        )
        problem = f"is not equal after the round trip of {when}. {remedy}"
        same = self.whole.dtype == self._dtype
        whole = self.whole if same else self.whole.to(self._dtype)
        check_close(
            self.values(unsharded),
            self.values(whole.detach()),
            tolerances=self.tolerances,
            complaint=str(self._error(POST, problem)),
        )


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    try:
        return inner_tensors(tensor)
    except ContractError:  # without __tensor_flatten__, where values() is overridden
        return []


def _kind(value: object) -> str:
    return f"a {type(value).__name__}" if value is not None else "None"


def _sizes(found: Sequence[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{dtype} {size}" for size, dtype in found)
