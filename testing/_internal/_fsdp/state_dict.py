"""The base class for tests of FSDP1 state dicts, with its helpers."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel

from torch_ext import accelerator
from torch_ext.compat import fsdp as private
from torch_ext.testing._internal._fsdp.cases import FSDPTest
from torch_ext.testing._internal._fsdp.device import compute_device
from torch_ext.testing._internal._fsdp.models.base import fsdp_on_device
from torch_ext.testing._internal._fsdp.models.state_dict import FSDPContainer, StateDictModel, linear
from torch_ext.testing._internal._fsdp.state import _broadcast_state_dict
from torch_ext.testing._internal._fsdp.subtests import skip_parameter_offload, skip_without_accelerator

__all__ = [
    "STATE_DICT_MAPPING",
    "FSDPStateDictTest",
    "identity",
    "skip_offload_of_full_state",
    "skip_unsupported_state_dict",
    "train_on_random_batches",
]

_HOST = torch.device(accelerator.HOST)
_FP32_MIXED_PRECISION = MixedPrecision(
    param_dtype=torch.float32, reduce_dtype=torch.float32, buffer_dtype=torch.float32
)

# The three types, by upstream's names.
STATE_DICT_MAPPING = {
    "state_dict": StateDictType.FULL_STATE_DICT,
    "local_state_dict": StateDictType.LOCAL_STATE_DICT,
    "sharded_state_dict": StateDictType.SHARDED_STATE_DICT,
}


def identity(module: nn.Module) -> nn.Module:
    """Return ``module``; stands in for a wrapper."""
    return module


def skip_offload_of_full_state() -> None:
    """Skip the running subtest where the device uses the host's memory.

    FSDP frees the unsharded storage, which the state dict still views if the "copy" to the host is not a copy.
    """
    skip_without_accelerator("a full state dict offloaded to the host needs memory apart from the host's")


def skip_unsupported_state_dict(
    state_dict_type: str, rank0_and_offload: bool, use_orig_params: bool = False, cpu_offload: CPUOffload | None = None
) -> None:
    """Skip the running subtest if FSDP does not support the combination.

    Args:
        state_dict_type: a key of ``STATE_DICT_MAPPING``.
        rank0_and_offload: the state dict goes to the host, on rank 0 only.
        use_orig_params, cpu_offload: of the model.

    Raises:
        unittest.SkipTest: with the reason.
    """
    if rank0_and_offload and state_dict_type != "state_dict":
        raise unittest.SkipTest("rank0_only is an option of full state dicts only")
    if rank0_and_offload:
        skip_offload_of_full_state()
    if use_orig_params and state_dict_type == "local_state_dict":
        raise unittest.SkipTest("a local state dict does not load with use_orig_params=True and a sharded strategy")
    skip_parameter_offload(cpu_offload)


def train_on_random_batches(model: nn.Module, *batch_shape: int, steps: int) -> list[torch.Tensor]:
    """Train on random batches of ``batch_shape``, the same on all ranks, and return the loss of each step."""
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(torch.rand(*batch_shape, device=compute_device(), requires_grad=True)).sum()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach())
    return losses


def _enum_value(state_dict_type: str) -> StateDictType:
    if state_dict_type not in STATE_DICT_MAPPING:
        raise ValueError(f"got state_dict_type {state_dict_type!r}, expected one of {sorted(STATE_DICT_MAPPING)}")
    return STATE_DICT_MAPPING[state_dict_type]


class FSDPStateDictTest(FSDPTest):
    """Two ranks; methods that build models, get and load state dicts, and compare them."""

    @property
    def world_size(self) -> int:
        return 2

    def _broadcast_state_dict(
        self, model: nn.Module, state_dict: dict[str, torch.Tensor] | None
    ) -> dict[str, torch.Tensor]:
        return _broadcast_state_dict(self.rank, state_dict)

    def _state_compare(
        self,
        model: nn.Module,
        model_new: nn.Module,
        assert_fn: Callable[..., None],
        state_generator: str = "parameters",
    ) -> None:
        base, new = (list(getattr(which, state_generator)()) for which in (model, model_new))
        self.assertEqual(len(base), len(new))
        assert_fn(base, new)

    def _compare_models(
        self,
        model: nn.Module,
        model_new: nn.Module,
        assert_fn: Callable[..., None],
        check_fp16: bool = False,
        check_buffers: bool = True,
    ) -> None:
        """Compare all unsharded parameters, and all buffers if there are any."""
        self.assertIn(assert_fn, (self.assertEqual, self.assertNotEqual))
        with FSDP.summon_full_params(model), FSDP.summon_full_params(model_new):
            self._state_compare(model, model_new, assert_fn)
            has_buffers = any(True for which in (model, model_new) for _ in which.buffers())
            if check_buffers and has_buffers:
                self._state_compare(model, model_new, assert_fn, state_generator="buffers")
            if check_fp16:
                self.assertEqual({param.dtype for param in model_new.parameters()}, {torch.float16})

    def _get_simple_nested_model(
        self, *fsdp_args: Any, wrap: bool = True, checkpoint_wrap: bool = False, **fsdp_kwargs: Any
    ) -> nn.Module:
        if not wrap:
            return nn.Sequential(linear(), linear())
        checkpoint = private.checkpoint_wrapper if checkpoint_wrap else identity
        inner = fsdp_on_device(checkpoint(linear()), *fsdp_args, **fsdp_kwargs)
        return fsdp_on_device(checkpoint(nn.Sequential(inner, checkpoint(linear()))), *fsdp_args, **fsdp_kwargs)

    def _get_simple_model(self, *fsdp_args: Any, checkpoint_wrap: bool = False, **fsdp_kwargs: Any) -> FSDP:
        layer = private.checkpoint_wrapper(linear()) if checkpoint_wrap else linear()
        return fsdp_on_device(layer, *fsdp_args, **fsdp_kwargs)

    def _get_multibuffer_nested_model(
        self, *fsdp_args: Any, wrap: bool = True, checkpoint_wrap: bool = False, **fsdp_kwargs: Any
    ) -> nn.Module:
        """Return two layers with a batch norm between them, which stays in full precision."""
        layers: list[nn.Module] = [linear(), nn.BatchNorm1d(10, device=compute_device()), linear()]
        if not wrap:
            return nn.Sequential(*layers)
        precision = fsdp_kwargs.pop("mixed_precision", None)
        if checkpoint_wrap:
            layers = [private.checkpoint_wrapper(layer) for layer in layers]
        first = fsdp_on_device(layers[0], *fsdp_args, mixed_precision=precision, **fsdp_kwargs)
        norm = fsdp_on_device(
            layers[1], *fsdp_args, mixed_precision=_FP32_MIXED_PRECISION if precision else None, **fsdp_kwargs
        )
        sequence = nn.Sequential(first, norm, layers[2])
        return fsdp_on_device(
            private.checkpoint_wrapper(sequence) if checkpoint_wrap else sequence, *fsdp_args, **fsdp_kwargs
        )

    def _get_non_fsdp_root_module(self, *fsdp_args: Any, wrap: bool = True, **fsdp_kwargs: Any) -> FSDPContainer:
        nested = partial(self._get_simple_nested_model, *fsdp_args, wrap=wrap, **fsdp_kwargs)
        return FSDPContainer(nested(), nested())

    def _get_state_dict_mgr(
        self, model: nn.Module, state_dict_type: str, state_dict_rank0_and_offload: bool
    ) -> AbstractContextManager[None]:
        """Set the type of ``model``'s state dicts. If asked, they go to the host, and full ones to rank 0 only."""
        configs: dict[str, Callable[..., Any]] = {
            "state_dict": partial(FullStateDictConfig, rank0_only=state_dict_rank0_and_offload),
            "local_state_dict": LocalStateDictConfig,
            "sharded_state_dict": ShardedStateDictConfig,
        }
        if state_dict_type not in configs:
            raise ValueError(f"got state_dict_type {state_dict_type!r}, expected one of {sorted(configs)}")
        config = configs[state_dict_type](offload_to_cpu=state_dict_rank0_and_offload)
        return FSDP.state_dict_type(model, STATE_DICT_MAPPING[state_dict_type], config)

    def _validate_state_dict_contents(
        self,
        model: nn.Module,
        fsdp_state_dict: Mapping[str, Any],
        state_dict_rank0_and_offload: bool,
        ignore_keys: Iterable[str] = (),
    ) -> None:
        """Check that a full state dict for rank 0 is on the host there, and has no entries of FSDP on other ranks."""
        if not state_dict_rank0_and_offload:
            self.assertNotEqual(fsdp_state_dict, {})
        elif self.rank == 0:
            managed = {name: state for name, state in fsdp_state_dict.items() if name not in set(ignore_keys)}
            self.assertNotEqual(managed, {})
            for name, state in managed.items():
                self.assertEqual(state.device, _HOST, f"{name} is on {state.device}, expected the host")
        else:
            # A root that is not wrapped has its own parameters on every rank.
            self.assertEqual(sorted(fsdp_state_dict), [] if isinstance(model, FSDP) else sorted(ignore_keys))

    def _initialize_model(self, wrap_fsdp: bool, wrap_ddp: bool = True, register_buffers: bool = False) -> nn.Module:
        torch.manual_seed(0)
        model = StateDictModel(wrap_fsdp, register_buffers=register_buffers).to(compute_device())
        if wrap_fsdp:
            return fsdp_on_device(model)
        return DistributedDataParallel(model) if wrap_ddp else model

    @staticmethod
    def _state_dict(model: nn.Module, state_dict_type: str) -> dict[str, Any]:
        with FSDP.state_dict_type(model, _enum_value(state_dict_type)):
            state_dict: dict[str, Any] = model.state_dict()
        return state_dict

    @staticmethod
    def _load_state_dict(model: nn.Module, state_dict_type: str, state_dict: dict[str, Any]) -> Any:
        with FSDP.state_dict_type(model, _enum_value(state_dict_type)):
            return model.load_state_dict(state_dict, strict=True)
