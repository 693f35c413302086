"""FSDP training against DDP training of the same model on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffload
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal._fsdp import device
from torch_ext.testing._internal._fsdp.models.base import FSDPTestModel
from torch_ext.testing._internal._fsdp.modes import DEVICEInitMode, FSDPInitMode
from torch_ext.testing._internal._fsdp.state import get_full_params
from torch_ext.testing._internal._fsdp.training import Precision, check_parameters_on_host

__all__ = ["ParityCheck"]

_LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class ParityCheck:
    """One comparison; see ``FSDPTestMixin._test_fsdp_parity`` for what the fields mean."""

    case: Any
    model_class: type[FSDPTestModel]
    fsdp_init_mode: FSDPInitMode
    device_init_mode: DEVICEInitMode
    ref_init_fn: Callable[[nn.Module], nn.Module] | None
    num_iters: int
    save_model: bool
    cpu_offload: CPUOffload | None
    precision: Precision
    init_kwargs: dict[str, Any] = field(default_factory=dict)
    fsdp_kwargs: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Train both models and compare losses, parameters and where parameters live.

        Raises:
            AssertionError: FSDP differs.
            ValueError: the mode wraps nothing, or the model cannot be built.
        """
        if self.fsdp_init_mode == FSDPInitMode.NO_FSDP:
            raise ValueError("got FSDPInitMode.NO_FSDP, expected a mode that wraps: there is no FSDP model to compare")
        reference = self._reference_model()
        reference_loss = self._train(reference, autocast=self.precision.mixed_type is not None, save_model=False)
        sharded = self._fsdp_model()
        if self._offloads and not self._moves_offloaded:
            check_parameters_on_host(self.case, sharded)
        with self._expected_error():
            loss = self._train(sharded, autocast=False, save_model=self.save_model)
        if not self._moves_offloaded:
            self._compare(reference, reference_loss, sharded, loss)

    @property
    def _offloads(self) -> bool:
        return self.cpu_offload is not None and self.cpu_offload.offload_params

    @property
    def _moves_offloaded(self) -> bool:
        """Whether parameters that FSDP keeps on the host are moved off it behind its back, which it must refuse."""
        return self._offloads and self.device_init_mode == DEVICEInitMode.DEVICE_AFTER

    def _expected_error(self) -> AbstractContextManager[Any]:
        if not self._moves_offloaded:
            return nullcontext()
        refusal = "An FSDP-managed module with parameter CPU offloading enabled has parameters on "
        return self.case.assertRaisesRegex(RuntimeError, refusal + device.device_type())

    def _reference_model(self) -> nn.Module:
        plain = self.model_class.init(
            self.case.process_group,
            FSDPInitMode.NO_FSDP,
            DEVICEInitMode.DEVICE_BEFORE,
            deterministic=True,
            **self.init_kwargs,
        )
        model = (self.ref_init_fn or _ddp)(plain)
        return model.half() if self.precision.pure_fp16 else model

    def _fsdp_model(self) -> FSDP:
        group = self.case.process_group
        try:
            model = self.model_class.init(
                group,
                self.fsdp_init_mode,
                self.device_init_mode,
                dict(self.fsdp_kwargs),
                deterministic=True,
                **self.init_kwargs,
            )
        except Exception as error:
            raise ValueError(f"{self.model_class.__name__}.init with {self.fsdp_kwargs} raised: {error}") from error
        if not isinstance(model, FSDP):
            # The reference reduces all gradients, so no parameter may stay outside FSDP.
            model = FSDP(model, group, **device.with_compute_device(self.fsdp_kwargs))
        if self.precision.pure_fp16:
            model.half()
        if self.device_init_mode == DEVICEInitMode.DEVICE_AFTER:
            model.to(device.device_type())
        return model

    def _train(self, model: nn.Module, *, autocast: bool, save_model: bool) -> torch.Tensor:
        return self.case._train_for_several_steps(
            model,
            self.num_iters,
            autocast=autocast,
            lr=_LEARNING_RATE,
            fsdp_cpu_offload=self.cpu_offload,
            save_model=save_model,
            mixed_precision=self.precision.mixed,
            enable_sharded_grad_scaler=self.precision.scale_gradients,
            use_pure_fp16=self.precision.pure_fp16,
            sharded_grad_scaler_kwargs=self.precision.scaler_kwargs,
        )

    def _compare(self, reference: nn.Module, expected: torch.Tensor, sharded: FSDP, loss: torch.Tensor) -> None:
        if self._offloads:
            check_parameters_on_host(self.case, sharded)
            loss = loss.to(device.device_type())
        # The loss of mixed precision is float32 in the reference alone.
        torch.testing.assert_close(loss, expected, check_dtype=False)
        full = get_full_params(sharded)
        # In half precision the two optimisers round differently; the losses above are what is left to compare.
        if self.precision.mixed is None and not self.precision.pure_fp16:
            self.case.assertEqual(
                full, list(reference.parameters()), exact_device=True, msg=_explain("FSDP did not match the reference")
            )


def _explain(reason: str) -> Callable[[str], str]:
    return lambda difference: f"{reason}: {difference}"


def _ddp(model: nn.Module) -> DDP:
    if not device.is_accelerator():
        return DDP(model)
    own = next(model.parameters()).device
    return DDP(model, device_ids=[own], output_device=own)
