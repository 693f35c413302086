# Owner(s): ["oncall: distributed"]
"""FSDP's mixed precision: in what type it computes, reduces, keeps buffers and gradients, and what it leaves alone."""

import sys
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    get_full_params,
    leave_out_without_accelerator,
    patch_reduce_scatter,
    rank_device,
)
from torch_ext.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
COMBINATIONS = {
    "all_half": MixedPrecision(param_dtype=HALF, reduce_dtype=HALF, buffer_dtype=HALF),
    "params_only": MixedPrecision(param_dtype=BRAIN),
    "reduce_only": MixedPrecision(reduce_dtype=HALF),
    "buffers_only": MixedPrecision(buffer_dtype=HALF),
    "reduce_wider": MixedPrecision(param_dtype=HALF, reduce_dtype=FULL),
    "nothing": MixedPrecision(),
}
named_combinations = parametrize("combination", list(COMBINATIONS))


class Recorder(nn.Module):
    """A linear layer that keeps the types of what it computed with in its last forward. Shapes: ``(*, 8)``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("offset", torch.ones(8))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {
            "param": self.layer.weight.dtype,
            "input": x.dtype,
            "buffer": self.offset.dtype,
            "steps": self.steps.dtype,
        }
        return self.layer(x) + self.offset.to(x.dtype)


class MixedPrecisionCase(FSDPTest):
    @property
    def world_size(self) -> int:
        return 2

    @property
    def device(self) -> torch.device:
        return rank_device(self.rank)

    def _input(self) -> torch.Tensor:
        return torch.rand(4, 8, device=self.device)

    def _fsdp(self, module: nn.Module, **fsdp_kwargs: Any) -> FSDP:
        return FSDP(module.to(self.device), device_id=self.device, **fsdp_kwargs)

    def _reduced_in(self, model: nn.Module) -> set[torch.dtype]:
        """Run forward and backward; return the types in which gradients went over the wire."""
        types: set[torch.dtype] = set()
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # by release of torch

        def recording(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            types.update({output.dtype, input.dtype})
            return reduce_scatter(output, input, *args, **kwargs)

        with patch_reduce_scatter(recording):
            model(self._input()).sum().backward()
        return types


class TestMixedPrecision(MixedPrecisionCase):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @named_combinations
    @parametrize("use_orig_params", [False, True])
    @parametrize("sharding_strategy", STRATEGIES)
    def test_types_of_a_step(self, combination, use_orig_params, sharding_strategy):
        precision = COMBINATIONS[combination]
        model = self._fsdp(
            Recorder(),
            mixed_precision=precision,
            use_orig_params=use_orig_params,
            sharding_strategy=sharding_strategy,
        )
        computed = precision.param_dtype or FULL
        self.assertEqual(self._reduced_in(model), {precision.reduce_dtype or computed})
        self.assertEqual(
            model.module.seen,
            {"param": computed, "input": computed, "buffer": precision.buffer_dtype or FULL, "steps": torch.int64},
        )
        self.assertEqual({param.dtype for param in model.parameters()}, {FULL}, "the optimizer's copy")
        self.assertEqual({param.grad.dtype for param in model.parameters() if param.grad is not None}, {FULL})
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        before = get_full_params(model)
        optim.step()
        self.assertNotEqual(get_full_params(model), before)
        with FSDP.summon_full_params(model):
            self.assertEqual({param.dtype for param in model.parameters()}, {FULL})

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("use_orig_params", [False, True])
    def test_buffers_are_saved_in_their_own_type(self, use_orig_params):
        model = self._fsdp(Recorder(), mixed_precision=COMBINATIONS["all_half"], use_orig_params=use_orig_params)
        model(self._input())
        saved = model.state_dict()
        self.assertEqual((saved["offset"].dtype, saved["steps"].dtype), (FULL, torch.int64))
        model(self._input())
        self.assertEqual(model.module.seen["buffer"], HALF, "saving changed what the model computes with")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("keep", [False, True])
    @parametrize("offload", [False, True])
    def test_keep_low_precision_grads(self, keep, offload):
        if offload:
            leave_out_without_accelerator("CPUOffload(offload_params=True) needs an accelerator to offload from")
        precision = MixedPrecision(param_dtype=HALF, keep_low_precision_grads=keep)
        model = self._fsdp(
            nn.Linear(8, 8), mixed_precision=precision, cpu_offload=CPUOffload(offload), use_orig_params=True
        )
        model(self._input()).sum().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        self.assertTrue(grads)
        # The parameter's own type is demanded of its gradient by autograd, so only the wish to keep it changes it.
        self.assertEqual({grad.dtype for grad in grads}, {HALF if keep else FULL})
        self.assertEqual({grad.device.type for grad in grads}, {"cpu" if offload else self.device.type})

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("cast_forward_inputs", [False, True])
    def test_cast_forward_inputs(self, cast_forward_inputs):
        precision = MixedPrecision(
            param_dtype=HALF, cast_forward_inputs=cast_forward_inputs, cast_root_forward_inputs=False
        )
        model = self._fsdp(Recorder(), mixed_precision=precision)
        if cast_forward_inputs:
            self.assertEqual(model(self._input()).dtype, HALF)
            return
        with self.assertRaisesRegex(RuntimeError, "same dtype|must have the same"):
            model(self._input())
        self.assertEqual(model(self._input().to(HALF)).dtype, HALF)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("cast_root_forward_inputs", [False, True])
    def test_only_the_root_casts_by_default(self, cast_root_forward_inputs):
        inner = self._fsdp(Recorder(), mixed_precision=MixedPrecision(param_dtype=HALF, cast_forward_inputs=False))
        root = self._fsdp(
            nn.Sequential(nn.Identity(), inner),
            mixed_precision=MixedPrecision(param_dtype=HALF, cast_root_forward_inputs=cast_root_forward_inputs),
        )
        if cast_root_forward_inputs:
            self.assertEqual(root(self._input()).dtype, HALF)
        else:
            with self.assertRaisesRegex(RuntimeError, "same dtype|must have the same"):
                root(self._input())

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_evaluation_in_the_types_of_training(self):
        model = self._fsdp(Recorder(), mixed_precision=COMBINATIONS["all_half"])
        for train in (True, False, True):
            model.train(train)
            self.assertEqual(model(self._input()).dtype, HALF)
            self.assertEqual(model.module.seen["param"], HALF)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_modules_of_unlike_precision_under_one_root(self):
        types = {"half": HALF, "brain": BRAIN, "full": FULL}
        inner = {
            name: self._fsdp(Recorder(), mixed_precision=MixedPrecision(param_dtype=dtype, cast_forward_inputs=True))
            for name, dtype in types.items()
        }
        model = self._fsdp(nn.Sequential(*inner.values()))
        self.assertEqual(self._reduced_in(model), {HALF, BRAIN, FULL})
        for name, expected in types.items():
            seen = inner[name].module.seen
            self.assertEqual((seen["param"], seen["input"]), (expected, expected), name)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_batch_norm_is_kept_in_full_precision(self):
        """Automatic wrapping gives batch norms modules of their own without mixed precision, unless told otherwise."""
        layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        with self.assertWarnsRegex(UserWarning, "mixed precision and an auto_wrap_policy"):
            model = self._fsdp(
                layers, mixed_precision=MixedPrecision(param_dtype=HALF), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
            )
        norm = model.module[1]
        self.assertIsInstance(norm, FSDP)
        self.assertIsNone(norm.mixed_precision.param_dtype)
        output = model(self._input())
        self.assertEqual((output.dtype, norm.module.weight.dtype), (HALF, FULL))
        self.assertEqual(norm.module.running_mean.dtype, FULL)

        one = MixedPrecision(param_dtype=HALF, buffer_dtype=HALF, _module_classes_to_ignore=())
        together = self._fsdp(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
            mixed_precision=one,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
        self.assertNotIsInstance(together.module[1], FSDP)
        together(self._input())
        self.assertEqual(together.module[1].running_mean.dtype, HALF)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("use_orig_params", [False, True])
    def test_gradient_of_an_input_in_the_inputs_type(self, use_orig_params):
        model = self._fsdp(
            nn.Linear(8, 8), mixed_precision=MixedPrecision(param_dtype=HALF), use_orig_params=use_orig_params
        )
        inputs = self._input().requires_grad_()
        model(inputs).sum().backward()
        self.assertEqual(inputs.grad.dtype, FULL)


instantiate_parametrized_tests(TestMixedPrecision)

if __name__ == "__main__":
    run_tests()
