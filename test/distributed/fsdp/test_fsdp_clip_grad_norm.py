# Owner(s): ["oncall: distributed"]
"""``FSDP.clip_grad_norm_``: the norm of all gradients, sharded, replicated and
unmanaged, and the clipped gradients.

Sharded gradients count on all ranks, replicated ones once. The reference is an
unsharded model on all rows.
"""

import math
import sys
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    FSDPTest,
    get_full_params,
    skip_parameter_offload,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

NORM_TYPES = [1, 2, 2.5, math.inf]
SHARDED, REPLICATED, UNMANAGED = "sharded", "replicated", "unmanaged"
# How each layer is managed.
LAYOUTS = [
    (SHARDED, SHARDED, SHARDED),
    (SHARDED, REPLICATED, SHARDED),
    (SHARDED, SHARDED, UNMANAGED),
    (UNMANAGED, SHARDED, REPLICATED),
    (REPLICATED, REPLICATED, REPLICATED),
    (REPLICATED, REPLICATED, UNMANAGED),
]
LARGE = 1e3  # a gradient of this size dominates every norm
CLIPS, DOES_NOT_CLIP = 0.05, 1e6


class TestClipGradNorm(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _pair(self, layout: tuple[str, ...], **fsdp_kwargs: Any) -> tuple[Chain, FSDP]:
        """Return an unsharded model, and one whose layers are managed as ``layout``
        says.
        """
        module = Chain(device=self.device)
        unmanaged = []
        for name, managed in zip(Chain.LAYERS, layout, strict=True):
            layer = getattr(module, name)
            if managed == UNMANAGED:
                unmanaged.append(layer)
            else:
                strategy = (
                    ShardingStrategy.FULL_SHARD
                    if managed == SHARDED
                    else ShardingStrategy.NO_SHARD
                )
                setattr(
                    module,
                    name,
                    FSDP(
                        layer,
                        device_id=self.device,
                        sharding_strategy=strategy,
                        **fsdp_kwargs,
                    ),
                )
        return Chain(device=self.device), FSDP(
            module, device_id=self.device, ignored_states=unmanaged, **fsdp_kwargs
        )

    def _backward(
        self, reference: nn.Module, model: FSDP, layout: tuple[str, ...]
    ) -> None:
        reference(Chain.rows(self.device, self.world_size)).square().mean().backward()
        model(
            Chain.rows(self.device, self.world_size, self.rank)
        ).square().mean().backward()
        for name, managed in zip(Chain.LAYERS, layout, strict=True):
            if managed == UNMANAGED:  # only the test reduces these
                for param in getattr(model.module, name).parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= self.world_size

    def _gradients(self, model: FSDP) -> list[torch.Tensor]:
        """Return all gradients in full, as the change of a step of size one."""
        before = get_full_params(model)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return [
            old - new for old, new in zip(before, get_full_params(model), strict=True)
        ]

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("norm_type", NORM_TYPES)
    def test_ddp_parity(self, norm_type):
        self.run_subtests(
            {
                "layout": LAYOUTS,
                "max_norm": [CLIPS, DOES_NOT_CLIP],
                "use_orig_params": [False, True],
            },
            self._test_ddp_parity,
            norm_type=norm_type,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_offloaded_gradients(self):
        self.run_subtests(
            {
                "layout": LAYOUTS[:2],
                "norm_type": [2, math.inf],
                "use_orig_params": [False, True],
            },
            self._test_ddp_parity,
            max_norm=CLIPS,
            cpu_offload=CPUOffload(offload_params=True),
        )

    def _test_ddp_parity(
        self,
        layout: tuple[str, ...],
        norm_type: float,
        max_norm: float,
        use_orig_params: bool,
        cpu_offload: CPUOffload | None = None,
    ) -> None:
        skip_parameter_offload(cpu_offload)
        reference, model = self._pair(
            layout, use_orig_params=use_orig_params, cpu_offload=cpu_offload
        )
        self._backward(reference, model, layout)
        expected = torch.nn.utils.clip_grad_norm_(
            reference.parameters(), max_norm, norm_type
        )
        found = model.clip_grad_norm_(max_norm, norm_type)
        self.assertEqual(
            found, expected, f"norm {norm_type} of all gradients", exact_device=False
        )
        gradients = [param.grad for param in reference.parameters()]
        self.assertEqual(
            self._gradients(model),
            gradients,
            "gradients after clipping",
            atol=1e-6,
            rtol=1e-4,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_norm_is_that_of_the_largest(self):
        """The infinity norm is the largest of all elements, on whichever rank."""
        self.run_subtests(
            {"layout": LAYOUTS[2:4], "layer": Chain.LAYERS},
            self._test_norm_is_that_of_the_largest,
        )

    def _test_norm_is_that_of_the_largest(
        self, layout: tuple[str, ...], layer: str
    ) -> None:
        reference, model = self._pair(layout, use_orig_params=True)
        self._backward(reference, model, layout)
        for param in getattr(model.module, layer).parameters():
            if param.grad is not None and param.grad.numel():
                param.grad[..., -1] = -LARGE
        self.assertEqual(
            model.clip_grad_norm_(1.0, math.inf).item(), LARGE, "infinity norm"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_non_root(self):
        """Only the root sees all gradients."""
        _, model = self._pair(LAYOUTS[0])
        model(Chain.rows(self.device, self.world_size, self.rank)).sum().backward()
        with self.assertRaises((RuntimeError, AttributeError)) as refused:
            model.module.a.clip_grad_norm_(max_norm=1.0)
        self.assertIn(
            "should only be called on the root FSDP instance", str(refused.exception)
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_low_precision_grads(self):
        """The norm is computed in float32, and returned in the largest type of the
        gradients.
        """
        self.run_subtests(
            {"use_orig_params": [False, True], "max_norm": [CLIPS, DOES_NOT_CLIP]},
            self._test_low_precision_grads,
        )

    def _test_low_precision_grads(self, use_orig_params: bool, max_norm: float) -> None:
        half = {
            "param_dtype": torch.float16,
            "reduce_dtype": torch.float16,
            "keep_low_precision_grads": True,
        }
        low = MixedPrecision(**half, cast_forward_inputs=True)
        single = MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True)
        for mixed in (False, True):
            module = Chain(device=self.device)
            for name in Chain.LAYERS:
                precision = single if mixed and name == "b" else low
                layer = FSDP(
                    getattr(module, name),
                    device_id=self.device,
                    mixed_precision=precision,
                    use_orig_params=use_orig_params,
                )
                setattr(module, name, layer)
            model = FSDP(module, device_id=self.device, use_orig_params=use_orig_params)
            # Squares of these gradients overflow float16, and so would the norm of the
            # second kind.
            model(Chain.rows(self.device, self.world_size, self.rank)).float().mul(
                2000
            ).sum().backward()
            grads = [
                param.grad for param in model.parameters() if param.grad is not None
            ]
            total = sum(grad.double().square().sum() for grad in grads)
            dist.all_reduce(total)
            norm = total.sqrt()
            clipped = [
                grad * min(1.0, max_norm / (norm.item() + 1e-6)) for grad in grads
            ]
            found = model.clip_grad_norm_(max_norm)
            # Rounding to float16 costs up to 5e-4, and must happen only at the end.
            rtol = 1e-5 if mixed else 1e-3
            self.assertEqual(
                found.dtype,
                torch.float32 if mixed else torch.float16,
                "type of the norm",
            )
            self.assertEqual(
                found.double(),
                norm,
                "norm of gradients in low precision",
                atol=0,
                rtol=rtol,
            )
            self.assertEqual(
                grads,
                clipped,
                "clipped gradients in low precision",
                atol=1e-4,
                rtol=1e-2,
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_no_gradients(self):
        """A rank without gradients says so, takes part and returns the norm of the
        others.
        """
        self.run_subtests({"use_orig_params": [False, True]}, self._test_no_gradients)

    def _test_no_gradients(self, use_orig_params: bool) -> None:
        _, model = self._pair(LAYOUTS[0], use_orig_params=use_orig_params)
        with self.assertWarnsRegex(
            UserWarning,
            rf"on rank {self.rank} with no gradients -- returning the total norm",
        ):
            self.assertEqual(
                model.clip_grad_norm_(1.0), torch.zeros((), device=self.device)
            )
        if self.rank == 0:
            first = next(param for param in model.parameters() if param.numel())
            first.grad = torch.full_like(first, 3.0)
        own = torch.tensor(
            float(first.numel() if self.rank == 0 else 0), device=self.device
        )
        dist.all_reduce(own)
        expected = 3.0 * own.sqrt()
        self.assertEqual(
            model.clip_grad_norm_(1.0), expected, "norm of the gradients of rank 0"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_clipping_leaves_the_next_step_alone(self):
        """Several steps with clipping train like the reference."""
        layout = LAYOUTS[3]
        reference, model = self._pair(layout, use_orig_params=True)
        optims = [
            torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
            for each in (reference, model)
        ]
        for _ in range(3):
            self._backward(reference, model, layout)
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            model.clip_grad_norm_(0.1)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        expected = list(reference.parameters())
        self.assertEqual(
            get_full_params(model), expected, "parameters after training with clipping"
        )


instantiate_parametrized_tests(TestClipGradNorm)

if __name__ == "__main__":
    run_tests()
