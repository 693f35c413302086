"""FSDP1 against DDP: both train the same model on the same inputs, and the results are
compared.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext import accelerator
from torch_ext.compat import fsdp as private
from torch_ext.testing._internal._fsdp import device
from torch_ext.testing._internal._fsdp.models.base import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTestModel,
)
from torch_ext.testing._internal._fsdp.state import _zero_model, get_full_params

__all__ = ["check_ddp_parity"]

_LEARNING_RATE = 1e-2


@dataclass
class Trainer:
    """Trains ``model``, which wraps the test model, by SGD with momentum. Adam would
    hide a wrong scale.

    The other fields are arguments of ``FSDPTestMixin._train_for_several_steps``.
    """

    case: Any
    model: Any
    autocast: bool
    lr: float
    fsdp_cpu_offload: CPUOffload | None
    save_model: bool
    mixed_precision: MixedPrecision | None
    enable_sharded_grad_scaler: bool
    use_pure_fp16: bool
    sharded_grad_scaler_kwargs: dict[str, Any] | None

    def __post_init__(self) -> None:
        self.is_fsdp = isinstance(self.model, FSDP)
        self.offloads = self.is_fsdp and offloads_parameters(self.fsdp_cpu_offload)
        self.mixed_type = mixed_type(self.mixed_precision)
        self.loss_device = next(self.model.parameters()).device
        # With momentum, each step depends on all gradients so far.
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=self.lr, momentum=0.9
        )
        options: dict[str, Any] = {"device": device.get_devtype().type}
        options |= self.sharded_grad_scaler_kwargs or {}
        self.scaler = ShardedGradScaler(
            enabled=self.enable_sharded_grad_scaler, **options
        )

    def train(self, num_steps: int) -> torch.Tensor:
        """Run ``num_steps`` steps and return the last loss, with the scale that its
        backward used.

        Raises:
            ValueError: ``num_steps`` is below 1.
        """
        if num_steps < 1:
            raise ValueError(f"got num_steps={num_steps}, expected at least 1")
        for _ in range(num_steps):
            loss = self._step()
        if self.is_fsdp:
            self.model._assert_state(private.TrainingState.IDLE)
        return loss.detach()

    def _step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.scaler.scale(self._loss())
        self._check_loss_type(loss)
        self.model.module.run_backward(loss)
        if self.offloads:
            check_parameters_on_host(self.case, self.model)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.save_model:
            self._save_and_load()
        return loss

    def _loss(self) -> torch.Tensor:
        compute, test_model = device.get_devtype(), self.model.module
        with torch.amp.autocast(
            compute.type, dtype=self.mixed_type, enabled=self.autocast
        ):
            # Inputs are on the compute device even if the parameters are offloaded.
            inputs = self._in_precision(test_model.get_input(compute))
            output = self.model(*inputs)
            if self.offloads and self._reshards_after_forward():
                check_parameters_on_host(self.case, self.model)
            return test_model.get_loss(inputs, output).to(self.loss_device)

    def _in_precision(self, inputs: Any) -> tuple[torch.Tensor, ...]:
        tensors = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        # Under mixed precision FSDP casts its inputs itself; other wrappers do not.
        target = None if self.is_fsdp else self.mixed_type
        if self.use_pure_fp16:
            target = torch.float16
        return tuple(
            tensor.to(target) if target and tensor.is_floating_point() else tensor
            for tensor in tensors
        )

    def _reshards_after_forward(self) -> bool:
        strategy: Any = getattr(self.model, "sharding_strategy", None)
        return strategy not in private.NO_RESHARD_AFTER_FORWARD_STRATEGIES

    def _check_loss_type(self, loss: torch.Tensor) -> None:
        expected = torch.float32  # in which autocast computes losses too
        if self.use_pure_fp16:
            expected = torch.float16
        elif self.is_fsdp:
            expected = self.mixed_type or expected
        self.case.assertEqual(loss.dtype, expected)

    def _save_and_load(self) -> None:
        state = {
            name: tensor.clone() for name, tensor in self.model.state_dict().items()
        }
        # A state that was not saved, or not loaded, then changes the next step.
        _zero_model(self.model)
        self.model.load_state_dict(state)


def offloads_parameters(cpu_offload: CPUOffload | None) -> bool:
    return cpu_offload is not None and cpu_offload.offload_params


def mixed_type(mixed: MixedPrecision | None) -> torch.dtype | None:
    """Return the type in which mixed precision computes; None is the parameters'."""
    return None if mixed is None else mixed.param_dtype


def check_parameters_on_host(case: Any, model: nn.Module) -> None:
    """Check that every parameter of ``model`` is in host memory, as offloading requires
    between uses.
    """
    for parameter in model.parameters():
        case.assertEqual(parameter.device, torch.device(accelerator.HOST))


@dataclass(frozen=True)
class ParityCheck:
    """One comparison. ``FSDPTestMixin._test_fsdp_parity`` documents the fields."""

    case: Any
    model_class: type[FSDPTestModel]
    fsdp_init_mode: FSDPInitMode
    device_init_mode: DEVICEInitMode
    ref_init_fn: Callable[[nn.Module], nn.Module] | None
    num_iters: int
    save_model: bool
    use_pure_fp16: bool
    scaling: dict[str, Any]  # options of _train_for_several_steps
    init_kwargs: dict[str, Any]
    fsdp_kwargs: dict[str, Any]

    def run(self) -> None:
        if self.fsdp_init_mode == FSDPInitMode.NO_FSDP:
            raise ValueError(
                "got FSDPInitMode.NO_FSDP, expected a mode that wraps: there is no "
                "FSDP model to compare"
            )
        reference = self._reference_model()
        autocast = mixed_type(self._mixed_precision) is not None
        reference_loss = self._train(reference, autocast=autocast, save_model=False)
        sharded = self._fsdp_model()
        if self._offloads and not self._moves_offloaded:
            check_parameters_on_host(self.case, sharded)
        with self._expected_error():
            loss = self._train(sharded, autocast=False, save_model=self.save_model)
        if not self._moves_offloaded:
            self._compare(reference, reference_loss, sharded, loss)

    @property
    def _mixed_precision(self) -> MixedPrecision | None:
        return self.fsdp_kwargs["mixed_precision"]

    @property
    def _offloads(self) -> bool:
        return offloads_parameters(self.fsdp_kwargs["cpu_offload"])

    @property
    def _moves_offloaded(self) -> bool:
        """Whether offloaded parameters are moved to the device after wrapping, which
        FSDP must refuse.
        """
        return self._offloads and self.device_init_mode == DEVICEInitMode.DEVICE_AFTER

    def _expected_error(self) -> AbstractContextManager[Any]:
        if not self._moves_offloaded:
            return nullcontext()
        refusal = (
            "An FSDP-managed module with parameter CPU offloading enabled has "
            "parameters on "
        )
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
        return model.half() if self.use_pure_fp16 else model

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
            raise ValueError(
                f"{self.model_class.__name__}.init with {self.fsdp_kwargs} raised: "
                f"{error}"
            ) from error
        if not isinstance(model, FSDP):
            # The reference reduces all gradients, so FSDP must manage every parameter.
            model = FSDP(model, group, **device.with_compute_device(self.fsdp_kwargs))
        if self.use_pure_fp16:
            model.half()
        if self.device_init_mode == DEVICEInitMode.DEVICE_AFTER:
            model.to(device.device_type())
        return model

    def _train(
        self, model: nn.Module, *, autocast: bool, save_model: bool
    ) -> torch.Tensor:
        return self.case._train_for_several_steps(
            model,
            self.num_iters,
            autocast=autocast,
            lr=_LEARNING_RATE,
            fsdp_cpu_offload=self.fsdp_kwargs["cpu_offload"],
            save_model=save_model,
            mixed_precision=self._mixed_precision,
            use_pure_fp16=self.use_pure_fp16,
            **self.scaling,
        )

    def _compare(
        self,
        reference: nn.Module,
        expected: torch.Tensor,
        sharded: FSDP,
        loss: torch.Tensor,
    ) -> None:
        if self._offloads:
            check_parameters_on_host(self.case, sharded)
            loss = loss.to(device.device_type())
        # Collective, so it must come before anything that may fail on one rank only.
        full = get_full_params(sharded)
        # Under mixed precision only the reference has a float32 loss.
        torch.testing.assert_close(loss, expected, check_dtype=False)
        # In half precision the two optimizers round differently, so only the losses are
        # compared.
        if self._mixed_precision is None and not self.use_pure_fp16:
            self.case.assertEqual(
                full,
                list(reference.parameters()),
                exact_device=True,
                msg=lambda text: f"FSDP did not match the reference: {text}",
            )


def _ddp(model: nn.Module) -> DDP:
    if not device.is_accelerator():
        return DDP(model)
    own = next(model.parameters()).device
    return DDP(model, device_ids=[own], output_device=own)


def check_ddp_parity(
    case: Any,
    make: Callable[[Callable[[nn.Module], nn.Module]], nn.Module],
    train: Callable[[nn.Module], Any],
) -> None:
    """Check that training with FSDP ends with DDP's parameters and input gradients, and
    moves parameters. Collective.

    ``make`` builds the model, equal in each call, and may wrap submodules with its
    argument. ``train`` returns the gradients of its inputs.
    """
    ddp_model = DDP(make(lambda module: module).to(device.compute_device()))
    fsdp_model = _wrap(make(_wrap))
    before = get_full_params(fsdp_model)
    expected = train(ddp_model)
    case.assertEqual(train(fsdp_model), expected, "gradients of the inputs")
    after = get_full_params(fsdp_model)
    case.assertEqual(after, list(ddp_model.parameters()))
    case.assertNotEqual(after, before)


def _wrap(module: nn.Module) -> FSDP:
    own = device.compute_device()
    return FSDP(module.to(own), device_id=own)
