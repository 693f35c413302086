"""Training steps of a wrapped model, checked on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torch_ext import accelerator
from torch_ext.compat import fsdp as private
from torch_ext.testing._internal._fsdp import device
from torch_ext.testing._internal._fsdp.state import _zero_model

__all__ = ["Precision", "Trainer", "check_parameters_on_host"]


@dataclass(frozen=True)
class Precision:
    """What a training run computes in.

    Attributes:
        mixed: FSDP's mixed precision, or ``None``.
        pure_fp16: parameters, inputs and loss are float16.
        scale_gradients: scale the loss by a :class:`ShardedGradScaler`.
        scaler_kwargs: for its constructor.
    """

    mixed: MixedPrecision | None = None
    pure_fp16: bool = False
    scale_gradients: bool = False
    scaler_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def mixed_type(self) -> torch.dtype | None:
        """The type that mixed precision computes in, or ``None`` where it computes in the parameters' own."""
        return None if self.mixed is None else self.mixed.param_dtype


class Trainer:
    """Trains ``model``, whose test model is ``model.module``, by SGD with momentum (Adam would hide a wrong scale).

    Args:
        case: the test case, for its assertions.
        model: an FSDP or DDP model over an :class:`FSDPTestModel`.
        autocast: run forward and loss under autocast.
        lr: learning rate.
        offloads: FSDP keeps parameters in host memory.
        save_model: after each step save the state, zero the model and load the state again.
        precision: what is computed in.
    """

    def __init__(
        self,
        case: Any,
        model: nn.Module,
        *,
        autocast: bool,
        lr: float,
        offloads: bool,
        save_model: bool,
        precision: Precision,
    ) -> None:
        self.case, self.model, self.precision = case, model, precision
        self.autocast, self.save_model = autocast, save_model
        self.is_fsdp = isinstance(model, FSDP)
        self.offloads = offloads and self.is_fsdp
        self.loss_device = next(model.parameters()).device
        # momentum makes a step depend on all gradients so far
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        scaler_kwargs = {"device": device.get_devtype().type, **precision.scaler_kwargs}
        self.scaler = ShardedGradScaler(enabled=precision.scale_gradients, **scaler_kwargs)

    def train(self, num_steps: int) -> torch.Tensor:
        """Run ``num_steps`` steps and return the last loss, scaled as its backward saw it.

        Raises:
            ValueError: there is no step to take.
        """
        if num_steps < 1:
            raise ValueError(f"got num_steps={num_steps}, expected at least 1: there would be no loss to return")
        for _ in range(num_steps):
            loss = self._step()
        if isinstance(self.model, FSDP):
            self.model._assert_state(private.TrainingState.IDLE)
        return loss.detach()

    def _step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.scaler.scale(self._loss())
        self._check_loss_type(loss)
        self._test_model.run_backward(loss)
        if self.offloads:
            check_parameters_on_host(self.case, self.model)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.save_model:
            self._save_and_load()
        return loss

    @property
    def _test_model(self) -> Any:
        return self.model.module

    def _loss(self) -> torch.Tensor:
        compute = device.get_devtype()
        with torch.amp.autocast(compute.type, dtype=self.precision.mixed_type, enabled=self.autocast):
            # Inputs live on the compute device wherever the parameters are kept.
            inputs = self._in_precision(self._test_model.get_input(compute))
            output = self.model(*inputs)
            if self.offloads and self._reshards_after_forward():
                check_parameters_on_host(self.case, self.model)
            return self._test_model.get_loss(inputs, output).to(self.loss_device)

    def _in_precision(self, inputs: Any) -> tuple[torch.Tensor, ...]:
        tensors = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        # FSDP casts its inputs itself under mixed precision; nobody else does.
        target = torch.float16 if self.precision.pure_fp16 else None if self.is_fsdp else self.precision.mixed_type
        return tuple(tensor.to(target) if target and tensor.is_floating_point() else tensor for tensor in tensors)

    def _reshards_after_forward(self) -> bool:
        strategy: Any = getattr(self.model, "sharding_strategy", None)
        return strategy not in private.NO_RESHARD_AFTER_FORWARD_STRATEGIES

    def _check_loss_type(self, loss: torch.Tensor) -> None:
        if self.precision.pure_fp16:
            self.case.assertEqual(loss.dtype, torch.float16)
        elif self.is_fsdp:
            self.case.assertEqual(loss.dtype, self.precision.mixed_type or torch.float32)
        else:
            # Parameters are float32, and so is what autocast computes a loss in.
            self.case.assertEqual(loss.dtype, torch.float32)

    def _save_and_load(self) -> None:
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        # So that a state that was not saved, or not loaded, is missed in the next step.
        _zero_model(self.model)
        self.model.load_state_dict(state)


def check_parameters_on_host(case: Any, model: nn.Module) -> None:
    """Check that every parameter of ``model`` is in host memory, where offloading keeps it between uses."""
    for parameter in model.parameters():
        case.assertEqual(parameter.device, torch.device(accelerator.HOST))
