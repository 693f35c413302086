# Owner(s): ["oncall: distributed"]
"""``MixedPrecisionPolicy``: the types of compute, reduction and outputs, and tensors
that keep their type.

Two ranks add two numbers in one order, and halving is exact, so gradients must equal
the reference bit by bit.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    FSDPTest,
    effective_reduce_dtype,
    patch_reduce_scatter,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


class MixedPrecisionCase(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _inputs(self, step: int = 0) -> torch.Tensor:
        torch.manual_seed(10 * step + self.rank)
        return torch.randn(4, 8, device=self.device)

    def _mlps(self) -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(*(MLP(8, self.device) for _ in range(2)))

    def _shard(
        self, model: nn.Sequential, policy: MixedPrecisionPolicy
    ) -> nn.Sequential:
        for module in (*model, model):
            fully_shard(module, mp_policy=policy)
        return model

    def _reduced_in(self, body: Callable[[], Any]) -> set[torch.dtype]:
        """Run ``body`` and return the types in which gradients were reduced."""
        types: set[torch.dtype] = set()
        reduce_scatter = dist.reduce_scatter_single

        def recording(*args: Any, **kwargs: Any) -> Any:
            types.add((args[0] if args else kwargs["output"]).dtype)
            return reduce_scatter(*args, **kwargs)

        with patch_reduce_scatter(recording):
            body()
        return types


class TestFullyShardMixedPrecisionTraining(MixedPrecisionCase):
    """Compares with a reference that implements the policy by hand."""

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("param_dtype", [BRAIN, HALF])
    @parametrize("reduce_dtype", [None, FULL])
    def test_compute_and_reduce_types(self, param_dtype, reduce_dtype):
        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype
        )
        reduced_in = effective_reduce_dtype(policy)
        model = self._shard(self._mlps(), policy)
        reference = self._mlps()
        optims = [
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)
        ]
        for step in range(3):
            inputs = self._inputs(step)
            computing = copy.deepcopy(reference).to(param_dtype)
            losses = [each(inputs.to(param_dtype)).sum() for each in (computing, model)]
            self.assertEqual(losses[1], losses[0], atol=0, rtol=0)
            losses[0].backward()
            self.assertEqual(self._reduced_in(losses[1].backward), {reduced_in})
            for param, half in zip(
                reference.parameters(), computing.parameters(), strict=True
            ):
                grad = half.grad.to(reduced_in)
                dist.all_reduce(grad)
                param.grad = (grad / self.world_size).to(FULL)
            for param, sharded in zip(
                reference.parameters(), model.parameters(), strict=True
            ):
                self.assertEqual(
                    (sharded.dtype, sharded.grad.dtype),
                    (FULL, FULL),
                    "the optimizer's types",
                )
                self.assertEqual(sharded.grad.full_tensor(), param.grad, atol=0, rtol=0)
            for optim in optims:
                optim.step()
                optim.zero_grad()

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("reduce_dtype", [None, FULL])
    def test_gradient_accumulation_in_the_type_of_the_reduction(self, reduce_dtype):
        policy = MixedPrecisionPolicy(param_dtype=BRAIN, reduce_dtype=reduce_dtype)
        reduced_in = effective_reduce_dtype(policy)
        model = self._shard(self._mlps(), policy)
        reference = self._mlps()
        sums = [
            torch.zeros_like(param, dtype=reduced_in)
            for param in reference.parameters()
        ]
        for step in range(4):
            model.set_requires_gradient_sync(step == 3)
            computing = copy.deepcopy(reference).to(BRAIN)
            inputs = self._inputs(step).to(BRAIN)
            computing(inputs).sum().backward()
            for total, param in zip(sums, computing.parameters(), strict=True):
                total.add_(param.grad)
            model(inputs).sum().backward()
        for total, sharded in zip(sums, model.parameters(), strict=True):
            dist.all_reduce(total)
            expected = (total / self.world_size).to(FULL)
            self.assertEqual(sharded.grad.full_tensor(), expected, atol=0, rtol=0)


class Seeing(nn.Module):
    """A linear layer that records the types that it sees. Shapes: ``(*, 8)`` in and
    out.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, device=device)
        self.register_buffer("offset", torch.ones(8, device=device))

    def forward(self, x: torch.Tensor, **others: Any) -> torch.Tensor:
        self.seen = {
            "x": x.dtype,
            "weight": self.layer.weight.dtype,
            "offset": self.offset.dtype,
        }
        self.seen.update(
            {
                name: each.dtype
                for name, each in others.items()
                if isinstance(each, torch.Tensor)
            }
        )
        return self.layer(x)


class TestFullyShardMixedPrecisionCasts(MixedPrecisionCase):
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("output_dtype", [None, FULL, HALF])
    def test_output_dtype(self, output_dtype):
        model = fully_shard(
            Seeing(self.device),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=BRAIN, output_dtype=output_dtype
            ),
        )
        self.assertEqual(model(self._inputs()).dtype, output_dtype or BRAIN)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_inputs_are_cast_where_they_are_floating(self):
        model = fully_shard(
            Seeing(self.device), mp_policy=MixedPrecisionPolicy(param_dtype=BRAIN)
        )
        indices = torch.arange(3, device=self.device)
        model(
            self._inputs(),
            indices=indices,
            mask=indices > 1,
            other=self._inputs().double(),
        )
        expected = {
            "x": BRAIN,
            "weight": BRAIN,
            "offset": FULL,
            "indices": torch.int64,
            "mask": torch.bool,
            "other": BRAIN,
        }
        self.assertEqual(model.seen, expected)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_inputs_are_left_alone_when_asked(self):
        model = fully_shard(
            Seeing(self.device),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=BRAIN, cast_forward_inputs=False
            ),
        )
        with self.assertRaisesRegex(RuntimeError, "same dtype"):
            model(self._inputs())
        model(self._inputs().to(BRAIN))
        self.assertEqual(model.seen["x"], BRAIN)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_a_norm_in_full_precision_between_layers_in_half(self):
        first, norm, last = (
            Seeing(self.device),
            nn.LayerNorm(8, device=self.device),
            Seeing(self.device),
        )
        model = nn.Sequential(first, norm, last)
        fully_shard(norm, mp_policy=MixedPrecisionPolicy(param_dtype=FULL))
        for module in (first, last, model):
            fully_shard(
                module,
                mp_policy=MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL),
            )
        types: list[torch.dtype] = []
        norm.register_forward_hook(
            lambda module, args, output: types.extend(
                (module.weight.dtype, args[0].dtype, output.dtype)
            )
        )
        output = model(self._inputs())
        self.assertEqual(types, [FULL] * 3)
        self.assertEqual(
            (first.seen["weight"], last.seen["x"], output.dtype), (HALF, HALF, HALF)
        )
        self.assertEqual(self._reduced_in(lambda: output.sum().backward()), {FULL})
        self.assertTrue(all(param.grad is not None for param in model.parameters()))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_parameters_of_several_types_in_one_model(self):
        model = nn.Sequential(
            nn.Linear(8, 8, device=self.device),
            nn.Linear(8, 8, device=self.device, dtype=BRAIN),
        )
        fully_shard(model[0], mp_policy=MixedPrecisionPolicy(output_dtype=BRAIN))
        fully_shard(model[1])
        model(self._inputs()).sum().backward()
        self.assertEqual([layer.weight.grad.dtype for layer in model], [FULL, BRAIN])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_frozen_parameters_of_other_types_in_one_group(self):
        """Only floating-point parameters are computed in another type. Those that have
        it already are gathered as they are.
        """
        model = Seeing(self.device)
        tables = [
            torch.arange(3, dtype=dtype, device=self.device)
            for dtype in (torch.int32, BRAIN, torch.float64)
        ]
        for name, table in zip(("a", "b", "c"), tables, strict=True):
            model.register_parameter(name, nn.Parameter(table, requires_grad=False))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BRAIN))
        seen = []
        model.register_forward_hook(
            lambda *_: seen.extend(
                table.clone() for table in (model.a, model.b, model.c)
            )
        )
        weight = model.layer.weight.full_tensor()
        output = model(self._inputs())
        expected = [tables[0], tables[1], tables[2].to(BRAIN)]
        self.assertEqual(seen, expected, atol=0, rtol=0, exact_dtype=True)
        bias = model.layer.bias.to(BRAIN)
        layer = nn.functional.linear(self._inputs().to(BRAIN), weight.to(BRAIN), bias)
        self.assertEqual(output, layer)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_evaluation_without_gradients(self):
        model = self._shard(
            self._mlps(), MixedPrecisionPolicy(param_dtype=BRAIN)
        ).eval()
        with torch.no_grad():
            output = model(self._inputs())
        self.assertEqual(
            output, copy.deepcopy(self._mlps()).to(BRAIN)(self._inputs().to(BRAIN))
        )
        self.assertEqual({param.dtype for param in model.parameters()}, {FULL})


for case in (TestFullyShardMixedPrecisionTraining, TestFullyShardMixedPrecisionCasts):
    instantiate_parametrized_tests(case)

if __name__ == "__main__":
    run_tests()
