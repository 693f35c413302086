"""FSDP1 against DDP: both train the same model on the same inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
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

if TYPE_CHECKING:
    from torch_ext.testing._internal.common_utils import TestCase as _TestCase
else:
    _TestCase = object

__all__: list[str] = []  # upstream's classes have these methods

_ON_DEVICE = CPUOffload()


class TrainingMixin(_TestCase):
    """Trains FSDP1 models, and compares them with a reference."""

    process_group: Any

    def _check_cpu_offload(self, fsdp_model: Any, cpu_offload: Any) -> None:
        self.assertEqual(fsdp_model.cpu_offload, cpu_offload)

    def _check_backward_prefetch(self, fsdp_model: Any, backward_prefetch: Any) -> None:
        self.assertEqual(fsdp_model.backward_prefetch, backward_prefetch)

    def _check_forward_prefetch(self, fsdp_model: Any, forward_prefetch: Any) -> None:
        self.assertEqual(fsdp_model.forward_prefetch, forward_prefetch)

    def _check_on_host(self, model: nn.Module) -> None:
        """Check that all parameters of ``model`` are in host memory."""
        devices = {parameter.device for parameter in model.parameters()}
        self.assertEqual(devices, {torch.device(accelerator.HOST)})

    def _train_for_several_steps(  # noqa: PLR0913
        self,
        model: nn.Module,
        num_steps: int,
        autocast: bool,
        lr: float = 0.01,
        fsdp_cpu_offload: CPUOffload | None = None,
        save_model: bool = False,
        mixed_precision: MixedPrecision | None = None,
        enable_sharded_grad_scaler: bool = False,
        use_pure_fp16: bool = False,
        sharded_grad_scaler_kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Train ``model``, which wraps an :class:`FSDPTestModel`, by SGD with momentum.
        Return the last loss, detached, with the scale that its backward used.

        Checks the type of each loss, and that FSDP is idle at the end. With offloading,
        FSDP's parameters must be on the host after backward, and after forward if the
        strategy reshards there.

        ``fsdp_cpu_offload`` and ``mixed_precision`` are those of an FSDP model's
        constructor; other models' inputs are cast to ``mixed_precision.param_dtype``.
        With ``save_model``, each step saves the state, zeroes the model and loads it.

        Raises:
            ValueError: ``num_steps`` is below 1.
        """
        if num_steps < 1:
            raise ValueError(f"got num_steps={num_steps}, expected at least 1")
        is_fsdp, compute = isinstance(model, FSDP), device.get_devtype()
        mixed_type = mixed_precision.param_dtype if mixed_precision else None
        # Under mixed precision FSDP casts its inputs itself; other wrappers do not.
        input_type = None if is_fsdp else mixed_type
        # Autocast computes losses in float32 too.
        loss_type = (is_fsdp and mixed_type) or torch.float32
        if use_pure_fp16:
            input_type = loss_type = torch.float16
        offloads = is_fsdp and _offloads(fsdp_cpu_offload)
        strategy = getattr(model, "sharding_strategy", None)
        reshards = strategy not in private.NO_RESHARD_AFTER_FORWARD_STRATEGIES
        test_model: Any = model.module
        loss_device = next(model.parameters()).device
        # With momentum, each step depends on all gradients so far. Adam would hide a
        # wrong scale.
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        options = {"device": compute.type, **(sharded_grad_scaler_kwargs or {})}
        scaler = ShardedGradScaler(enabled=enable_sharded_grad_scaler, **options)
        for _ in range(num_steps):
            optimizer.zero_grad()
            with torch.amp.autocast(compute.type, dtype=mixed_type, enabled=autocast):
                # Inputs are on the compute device even if parameters are offloaded.
                inputs = _cast(test_model.get_input(compute), input_type)
                output = model(*inputs)
                if offloads and reshards:
                    self._check_on_host(model)
                loss = test_model.get_loss(inputs, output).to(loss_device)
            loss = scaler.scale(loss)
            self.assertEqual(loss.dtype, loss_type)
            test_model.run_backward(loss)
            if offloads:
                self._check_on_host(model)
            scaler.step(optimizer)
            scaler.update()
            if save_model:
                _save_and_load(model)
        if is_fsdp:
            fsdp: Any = model
            fsdp._assert_state(private.TrainingState.IDLE)
        return loss.detach()

    def _test_fsdp_parity(  # noqa: PLR0913
        self,
        model_class: type[FSDPTestModel],
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        ref_init_fn: Callable[[nn.Module], nn.Module] | None = None,
        num_iters: int = 2,
        save_model: bool = True,
        cpu_offload: CPUOffload = _ON_DEVICE,
        backward_prefetch: BackwardPrefetch | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        mixed_precision: MixedPrecision | None = None,
        forward_prefetch: bool = False,
        use_orig_params: bool = False,
        enable_sharded_grad_scaler: bool = False,
        use_pure_fp16: bool = False,
        init_kwargs: dict[str, Any] | None = None,
        sharded_grad_scaler_kwargs: dict[str, Any] | None = None,
        **fsdp_kwargs: Any,
    ) -> None:
        """Check that FSDP trains like a reference: DDP, or what ``ref_init_fn`` makes,
        with an attribute ``module``, of the plain model on the device.

        Compares the last loss and, in full precision, all parameters. Offloaded
        parameters must be on the host before and after training. FSDP must refuse
        offloading with ``DEVICE_AFTER``.

        Both sides build ``model_class`` deterministically, with ``init_kwargs``. A root
        that ``fsdp_init_mode`` does not wrap is wrapped here. Options that
        :meth:`_train_for_several_steps` lacks are for FSDP's constructor.

        Raises:
            AssertionError: FSDP differs.
            ValueError: the mode is ``NO_FSDP``, or building the FSDP model failed.
        """
        if fsdp_init_mode == FSDPInitMode.NO_FSDP:
            raise ValueError("got FSDPInitMode.NO_FSDP, expected a mode that wraps")
        fsdp_kwargs |= {
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "sharding_strategy": sharding_strategy,
            "mixed_precision": mixed_precision,
            "forward_prefetch": forward_prefetch,
            "use_orig_params": use_orig_params,
        }
        train = functools.partial(
            self._train_for_several_steps,
            num_steps=num_iters,
            fsdp_cpu_offload=cpu_offload,
            mixed_precision=mixed_precision,
            enable_sharded_grad_scaler=enable_sharded_grad_scaler,
            use_pure_fp16=use_pure_fp16,
            sharded_grad_scaler_kwargs=sharded_grad_scaler_kwargs,
        )
        init_kwargs = {"deterministic": True, **(init_kwargs or {})}
        modes = FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE
        plain = model_class.init(self.process_group, *modes, **init_kwargs)
        reference = (ref_init_fn or _ddp)(plain)
        if use_pure_fp16:
            reference.half()
        autocast = bool(mixed_precision and mixed_precision.param_dtype)
        expected = train(reference, autocast=autocast)

        modes = fsdp_init_mode, device_init_mode
        sharded = self._fsdp_model(model_class, modes, fsdp_kwargs, init_kwargs)
        if use_pure_fp16:
            sharded.half()
        if device_init_mode == DEVICEInitMode.DEVICE_AFTER:
            sharded.to(device.device_type())
            if _offloads(cpu_offload):
                refusal = "An FSDP-managed module with parameter CPU offloading "
                refusal += f"enabled has parameters on {device.device_type()}"
                with self.assertRaisesRegex(RuntimeError, refusal):
                    train(sharded, autocast=False, save_model=save_model)
                return
        if _offloads(cpu_offload):
            self._check_on_host(sharded)
        loss = train(sharded, autocast=False, save_model=save_model)
        if _offloads(cpu_offload):
            self._check_on_host(sharded)
            loss = loss.to(device.device_type())
        # Collective, so before what may fail on one rank only.
        full = get_full_params(sharded)
        # Under mixed precision only the reference has a float32 loss.
        torch.testing.assert_close(loss, expected, check_dtype=False)
        # In half precision the two optimizers round differently, so only the losses are
        # compared.
        if mixed_precision is None and not use_pure_fp16:
            wanted = list(reference.parameters())
            message = "FSDP did not match the reference: {}".format
            self.assertEqual(full, wanted, exact_device=True, msg=message)

    def _fsdp_model(
        self,
        model_class: type[FSDPTestModel],
        modes: tuple[FSDPInitMode, DEVICEInitMode],
        fsdp_kwargs: dict[str, Any],
        init_kwargs: dict[str, Any],
    ) -> FSDP:
        try:
            group = self.process_group
            model = model_class.init(group, *modes, dict(fsdp_kwargs), **init_kwargs)
        except Exception as error:
            what = f"{model_class.__name__}.init with {fsdp_kwargs}"
            raise ValueError(f"{what} raised: {error}") from error
        if isinstance(model, FSDP):
            return model
        # The reference reduces all gradients, so FSDP must manage every parameter.
        own = device.with_compute_device(fsdp_kwargs)
        return FSDP(model, self.process_group, **own)


def _offloads(cpu_offload: CPUOffload | None) -> bool:
    return cpu_offload is not None and cpu_offload.offload_params


def _cast(
    inputs: torch.Tensor | tuple[torch.Tensor, ...], to: torch.dtype | None
) -> tuple[torch.Tensor, ...]:
    tensors = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    return tuple(
        tensor.to(to) if to and tensor.is_floating_point() else tensor
        for tensor in tensors
    )


def _save_and_load(model: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # A state that was not saved, or not loaded, then changes the next step.
    _zero_model(model)
    model.load_state_dict(state)


def _ddp(model: nn.Module) -> DDP:
    if not device.is_accelerator():
        return DDP(model)
    own = next(model.parameters()).device
    return DDP(model, device_ids=[own], output_device=own)
