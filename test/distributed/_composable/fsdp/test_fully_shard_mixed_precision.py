# Owner(s): ["oncall: distributed"]
"""``MixedPrecisionPolicy``: in which type parameters are gathered, computed with, reduced, accumulated and kept.

References compute in the low type by hand: parameters cast once, gradients reduced in the type of the policy, and the
step taken in full precision. Inputs and weights are chosen so that rounding in the wrong place changes the result.
"""

import copy
import functools
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_ext.testing._internal._fsdp.beside import BesideTest
from torch_ext.testing._internal._fsdp.collectives import ALL_GATHER, REDUCE_SCATTER
from torch_ext.testing._internal._fsdp.four_ranks import mesh_of
from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    check_sharded_parity,
    patch_all_gather,
    patch_reduce_scatter,
    reduce_scatter_with_assert,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

WIDTH = 8
LOW = torch.bfloat16

# Four ranks' bfloat16 gradients are summed in an order that a backend is free to choose: 8 bits, a few roundings.
REDUCED_IN_LOW = {"atol": 2e-2, "rtol": 2e-2}


class MixedPrecisionTest(BesideTest):
    def models(self, policy, **options):
        torch.manual_seed(0)
        model = nn.Sequential(MLP(WIDTH), MLP(WIDTH))
        reference = self.replica(model)
        model.to(self.device)
        for module in (*model, model):
            fully_shard(module, mesh=options.pop("mesh", mesh_of(4)), mp_policy=policy, **options)
        return reference, model

    def low_gradients(self, reference, rows):
        """Return the loss and gradients of a low-precision copy, as this rank alone has them."""
        low = copy.deepcopy(reference).to(LOW)
        loss = low(rows.to(LOW)).sum()
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in low.parameters()]

    def reduce_into(self, reference, gradients, dtype):
        for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
            total = gradient.to(dtype)
            dist.all_reduce(total)
            parameter.grad = (total / self.world_size).to(parameter.dtype)

    def step_types(self, model, run):
        """Return the types that ``run`` gathers and reduces in."""
        gathered, reduced = set(), set()
        gather, scatter = getattr(dist, ALL_GATHER), getattr(dist, REDUCE_SCATTER)

        def all_gather(*args, **kwargs):
            gathered.add((args[0] if args else next(iter(kwargs.values()))).dtype)
            return gather(*args, **kwargs)

        note = functools.partial(reduce_scatter_with_assert, self, scatter, lambda output: reduced.add(output.dtype))
        with patch_all_gather(all_gather), patch_reduce_scatter(note):
            run()
        return gathered, reduced


class TestFullyShardMixedPrecisionTraining(MixedPrecisionTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_compute_dtype(self):
        """Parameters are gathered in the low type and kept, with gradients and updates, in full precision."""
        self.run_subtests(
            {"reduce_dtype": [None, torch.float32], "reshard_after_forward": [True, False]}, self._test_compute_dtype
        )

    def _test_compute_dtype(self, reduce_dtype, reshard_after_forward):
        policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=reduce_dtype)
        reference, model = self.models(policy, reshard_after_forward=reshard_after_forward)
        optimizers = [self.optimizer(each) for each in (reference, model)]
        dtype = reduce_dtype or LOW
        tolerance = {} if reduce_dtype else REDUCED_IN_LOW
        for step in range(2):
            loss, gradients = self.low_gradients(reference, self.rows(WIDTH, step))
            found = []
            types = self.step_types(model, lambda step=step, found=found: self._run(model, step, found))
            self.assertEqual(types, ({LOW}, {dtype}))
            self.check_equal("loss", found[0], loss, **tolerance)
            self.reduce_into(reference, gradients, dtype)
            for (name, expected), parameter in zip(reference.named_parameters(), model.parameters(), strict=True):
                self.assertEqual((parameter.dtype, parameter.grad.dtype), (torch.float32, torch.float32), name)
                self.check_equal(
                    name, parameter.grad.full_tensor(), expected.grad, **(tolerance or {"atol": 1e-6, "rtol": 1e-5})
                )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def _run(self, model, step, found):
        loss = model(self.rows(WIDTH, step)).sum()
        found.append(loss.detach())
        loss.backward()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_reduce_dtype(self):
        """Only the reduction is low: each rank's gradient is rounded before it is summed."""
        reference, model = self.models(MixedPrecisionPolicy(reduce_dtype=LOW))
        types = self.step_types(model, lambda: self._run(model, 0, []))
        self.assertEqual(types, ({torch.float32}, {LOW}))
        reference(self.rows(WIDTH)).sum().backward()
        self.reduce_into(reference, [parameter.grad for parameter in reference.parameters()], LOW)
        for expected, parameter in zip(reference.parameters(), model.parameters(), strict=True):
            self.assertEqual(parameter.grad.dtype, torch.float32)
            self.assertEqual(parameter.grad.full_tensor(), expected.grad, **REDUCED_IN_LOW)
            self.assertEqual(parameter.grad.to_local(), parameter.grad.to_local().to(LOW).float(), atol=2**-7, rtol=0)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_reduce_dtype_over_replicas(self):
        """On a hybrid mesh the all-reduce follows the reduce-scatter in the same type."""
        policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
        reference, model = self.models(policy, mesh=mesh_of(2, 2))
        _, gradients = self.low_gradients(reference, self.rows(WIDTH))
        model(self.rows(WIDTH)).sum().backward()
        self.reduce_into(reference, gradients, torch.float32)
        for expected, parameter in zip(reference.parameters(), model.parameters(), strict=True):
            self.assertEqual(parameter.grad.full_tensor(), expected.grad)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_grad_acc_with_reduce_dtype(self):
        """Gradients that wait for their reduction accumulate in the type of the reduction, not of the compute."""
        for reshard in (True, False):
            policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
            reference, model = self.models(policy, reshard_after_forward=reshard)
            total = None
            for micro in range(6):
                model.set_requires_gradient_sync(micro == 5)
                _, gradients = self.low_gradients(reference, self.rows(WIDTH, micro))
                gradients = [gradient.float() for gradient in gradients]
                total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
                model(self.rows(WIDTH, micro)).sum().backward()
            self.reduce_into(reference, total, torch.float32)
            check_sharded_parity(self, reference, model)


class TestFullyShardMixedPrecisionCasts(MixedPrecisionTest):
    """Types of a module's inputs, parameters and outputs, seen from inside."""

    def _seen(self, model, rows):
        seen = {}

        def note(name):
            def hook(module, args, output):
                seen[name] = (args[0].dtype, next(module.parameters()).dtype, output.dtype)

            return hook

        for name, module in model.named_children():
            module.register_forward_hook(note(name))
        return seen, model(rows)

    def _layers(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).to(self.device)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_float16_on_one_module(self):
        """A submodule with a policy casts its own inputs; the rest stays as it was."""
        model = self._layers()
        fully_shard(model[2], mp_policy=MixedPrecisionPolicy(param_dtype=LOW))
        fully_shard(model)
        seen, output = self._seen(model, self.rows(WIDTH))
        self.assertEqual(seen["0"], (torch.float32,) * 3)
        # The hook was registered before sharding could cast; it sees what the layer computed with.
        self.assertEqual(seen["2"], (LOW,) * 3)
        self.assertEqual(output.dtype, LOW)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_submodules_with_external_inputs(self):
        """Inputs that a child gets from elsewhere than its parent are cast by the child."""

        class Parent(nn.Module):
            def __init__(self, layer, outside):
                super().__init__()
                self.layer, self.outside, self.types = layer, outside, None

            def forward(self, x):
                self.types = (x.dtype, self.outside.dtype)
                return self.layer(x + 1) + self.layer(self.outside)

        outside = torch.ones(WIDTH, device=self.device)
        model = Parent(nn.Linear(WIDTH, WIDTH, device=self.device), outside)
        policy = MixedPrecisionPolicy(param_dtype=LOW)
        fully_shard(model.layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        self.assertEqual(model(self.rows(WIDTH)).dtype, LOW)
        self.assertEqual(model.types, (LOW, torch.float32))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_norm_modules_kept(self):
        """A norm with a policy of its own computes in full precision among low ones, and casts what it passes on."""
        model = self._layers()
        low = MixedPrecisionPolicy(param_dtype=LOW)
        fully_shard(model[1], mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=LOW))
        for module in (model[0], model[2], model):
            fully_shard(module, mp_policy=low)
        inside = []
        model[1].register_forward_pre_hook(lambda module, args: inside.append(module.weight.dtype))
        seen, output = self._seen(model, self.rows(WIDTH))
        self.assertEqual((inside, seen["1"][:2]), ([torch.float32], (torch.float32, torch.float32)))
        self.assertEqual((seen["0"], seen["2"], output.dtype), ((LOW,) * 3, (LOW,) * 3, LOW))
        output.sum().backward()
        self.assertEqual({parameter.grad.dtype for parameter in model.parameters()}, {torch.float32})

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_output_dtype(self):
        for output_dtype in (None, torch.float32, torch.float64):
            model = self._layers()
            fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=LOW, output_dtype=output_dtype))
            self.assertEqual(model(self.rows(WIDTH)).dtype, output_dtype or LOW)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_cast_forward_inputs(self):
        """Switched off, inputs pass as they are, and a linear layer refuses two types."""
        for cast in (True, False):
            model = fully_shard(
                nn.Linear(WIDTH, WIDTH, device=self.device),
                mp_policy=MixedPrecisionPolicy(param_dtype=LOW, cast_forward_inputs=cast),
            )
            if cast:
                self.assertEqual(model(self.rows(WIDTH)).dtype, LOW)
            else:
                with self.assertRaisesRegex(RuntimeError, "dtype"):
                    model(self.rows(WIDTH))
                self.assertEqual(model(self.rows(WIDTH).to(LOW)).dtype, LOW)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_integer_inputs_are_not_cast(self):
        model = fully_shard(nn.Embedding(5, WIDTH, device=self.device), mp_policy=MixedPrecisionPolicy(param_dtype=LOW))
        self.assertEqual(model(torch.tensor([4, 0], device=self.device)).dtype, LOW)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_buffers_are_not_cast(self):
        model = fully_shard(
            MLP(WIDTH, with_buffer=True).to(self.device), mp_policy=MixedPrecisionPolicy(param_dtype=LOW)
        )
        self.assertEqual(model(self.rows(WIDTH)).dtype, torch.float32)
        self.assertEqual(model.buffer.dtype, torch.float32)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_clamp_reduce_dtype(self):
        """A reduction type that says nothing new is dropped, so that no cast is paid for it."""
        model = self._layers()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=LOW))
        model(self.rows(WIDTH)).sum().backward()
        self.assertIsNone(model._get_fsdp_state()._fsdp_param_group._reduce_dtype)


if __name__ == "__main__":
    run_tests()
