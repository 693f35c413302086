# Owner(s): ["oncall: distributed"]
"""Modules and parameters that FSDP1 ignores: neither sharded nor moved nor cast nor
reduced, at any depth.
"""

import functools
import sys
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp._common_utils import (
    _get_module_fsdp_state,
    clean_tensor_name,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    FSDPTest,
    skip_without_accelerator,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class Scaled(nn.Module):
    """A linear layer, and a buffer that scales its output."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)
        self.register_buffer("scale", torch.full((width_out,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype)) * self.scale


class Nested(nn.Module):
    """Two scaled layers in a block, then one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(Scaled(3, 4), Scaled(4, 3))
        self.last = Scaled(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(x))


class TestFSDPIgnoredModules(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _ignoring(self, modules: list[nn.Module], by: str) -> dict[str, Any]:
        if by == "ignored_modules":
            return {"ignored_modules": modules}
        if by == "modules":
            return {"ignored_states": modules}
        return {
            "ignored_states": [
                param for module in modules for param in module.parameters()
            ]
        }

    def _plain(self, model: nn.Module) -> set[str]:
        """Return the names of the parameters that are not in a flat parameter."""
        named = model.named_parameters()
        return {
            clean_tensor_name(name)
            for name, param in named
            if "_flat_param" not in name
        }

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("ignored_by", ["ignored_modules", "modules", "parameters"])
    def test_ignored_modules_nested(self, ignored_by):
        """Ignoring a module ignores all below it. An outer wrapper ignores the modules
        that an inner wrapper ignores.
        """
        for ignored, wrapped, expected in (
            (
                "block",
                "",
                {
                    f"block.{i}.linear.{kind}"
                    for i in (0, 1)
                    for kind in ("weight", "bias")
                },
            ),
            ("block.1", "", {"block.1.linear.weight", "block.1.linear.bias"}),
            ("block.1", "block", {"block.1.linear.weight", "block.1.linear.bias"}),
            ("last.linear", "block", {"last.linear.weight", "last.linear.bias"}),
        ):
            model = Nested().to(self.device)
            ignoring = self._ignoring([model.get_submodule(ignored)], ignored_by)
            if wrapped and ignored.startswith(wrapped):
                model.block, ignoring = (
                    FSDP(model.block, device_id=self.device, **ignoring),
                    {},
                )
            elif wrapped:
                model.block = FSDP(model.block, device_id=self.device)
            sharded = FSDP(model, device_id=self.device, **ignoring)
            message = (
                f"parameters that are not sharded with {ignored} ignored below "
                f"{wrapped or 'the root'}"
            )
            self.assertEqual(self._plain(sharded), expected, message)
            total = torch.tensor(
                sum(
                    m._flat_param.numel()
                    for m in FSDP.fsdp_modules(sharded)
                    if m._has_params
                )
            )
            total = total.to(self.device)
            dist.all_reduce(total)
            all_of = sum(p.numel() for p in Nested().parameters())
            left = sum(Nested().get_parameter(name).numel() for name in expected)
            # One element of padding for each flat parameter of odd size.
            self.assertTrue(
                all_of - left <= total.item() <= all_of - left + 2,
                f"{total.item()} elements are sharded",
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("ignored_by", ["ignored_modules", "modules", "parameters"])
    def test_ignored_parameters_are_trained_apart(self, ignored_by):
        """Ignored gradients are each rank's own; the others are averaged."""
        model = Chain(device=self.device)
        sharded = FSDP(
            model,
            device_id=self.device,
            use_orig_params=True,
            **self._ignoring([model.b], ignored_by),
        )
        own, reference = Chain(device=self.device), Chain(device=self.device)
        own(
            Chain.rows(self.device, self.world_size, self.rank)
        ).square().mean().backward()
        reference(Chain.rows(self.device, self.world_size)).square().mean().backward()
        sharded(
            Chain.rows(self.device, self.world_size, self.rank)
        ).square().mean().backward()
        found = {"weight": model.b.weight.grad, "bias": model.b.bias.grad}
        expected = {"weight": own.b.weight.grad, "bias": own.b.bias.grad}
        self.assertEqual(found, expected, "gradients of the ignored layer")
        with FSDP.summon_full_params(sharded, with_grads=True):
            found = {
                name: getattr(model, name).weight.grad.clone() for name in ("a", "c")
            }
        expected = {name: getattr(reference, name).weight.grad for name in ("a", "c")}
        self.assertEqual(found, expected, "gradients of the sharded layers")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("ignored_by", ["ignored_modules", "modules"])
    def test_ignored_modules_keep_type_and_device(self, ignored_by):
        """Mixed precision casts neither ignored parameters nor ignored buffers;
        ``device_id`` does not move them.
        """
        low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.float16)
        for below in ("", "block"):
            model = Nested().to(self.device)
            ignoring = self._ignoring([model.block[1]], ignored_by)
            if below:
                model.block = FSDP(
                    model.block, device_id=self.device, mixed_precision=low, **ignoring
                )
                sharded = FSDP(model, device_id=self.device, mixed_precision=low)
                block = model.block.module
            else:
                sharded = FSDP(
                    model, device_id=self.device, mixed_precision=low, **ignoring
                )
                block = model.block
            sharded(
                Chain.rows(self.device, self.world_size, self.rank)
            ).float().sum().backward()
            types = [
                block[0].scale.dtype,
                block[1].scale.dtype,
                block[1].linear.weight.dtype,
                model.last.scale.dtype,
            ]
            expected = [torch.float16, torch.float32, torch.float32, torch.float16]
            self.assertEqual(
                types,
                expected,
                "types of a buffer, an ignored one, an ignored parameter, a buffer",
            )
        model = Nested()
        ignoring = self._ignoring([model.block[1]], ignored_by)
        FSDP(model, device_id=self.device, **ignoring)
        found = {
            name: tensor.device.type
            for name, tensor in model.block[1].state_dict().items()
        }
        self.assertEqual(
            found, dict.fromkeys(found, "cpu"), "devices of ignored parameters"
        )
        self.assertEqual(
            model.block[0].scale.device,
            self.device,
            "device of a buffer that is not ignored",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ignored_modules_are_not_synchronized(self):
        """``sync_module_states`` takes rank 0's parameters, except where they are
        ignored.
        """
        skip_without_accelerator(
            "sync_module_states needs parameters on an accelerator"
        )
        model = Chain(device=self.device, seed=self.rank)
        before = model.b.weight.detach().clone()
        sharded = FSDP(
            model,
            device_id=self.device,
            ignored_states=[model.b],
            sync_module_states=True,
        )
        self.assertEqual(model.b.weight.detach(), before, "ignored parameters")
        with FSDP.summon_full_params(sharded):
            self.assertEqual(
                model.a.weight,
                Chain(device=self.device).a.weight,
                "synchronized parameters",
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ignored_states_auto_wrap(self):
        """A policy does not wrap ignored modules, but finds modules below them."""
        for policy in (
            ModuleWrapPolicy({Scaled}),
            functools.partial(
                transformer_auto_wrap_policy, transformer_layer_cls={Scaled}
            ),
        ):
            model = Nested().to(self.device)
            sharded = FSDP(
                model,
                device_id=self.device,
                ignored_states=[model.block[1]],
                auto_wrap_policy=policy,
            )
            wrapped = [
                clean_tensor_name(name)
                for name, m in sharded.named_modules()
                if isinstance(m, FSDP) and name
            ]
            self.assertEqual(wrapped, ["block.0", "last"], "wrapped modules")
            self.assertEqual(
                self._plain(sharded),
                {"block.1.linear.weight", "block.1.linear.bias"},
                "parameters not sharded",
            )
            self.assertIsNone(_get_module_fsdp_state(model.block[1]))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_diff_ignored_modules_across_ranks(self):
        """Ranks may ignore different modules that hold no parameters of their own to be
        sharded.
        """
        for rank in (0, 1):
            model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.ReLU()).to(
                self.device
            )
            ignored = [model[1]] if self.rank == rank else [model[2]]
            sharded = FSDP(model, device_id=self.device, ignored_modules=ignored)
            sharded(
                Chain.rows(self.device, self.world_size, self.rank)
            ).sum().backward()
            self.assertEqual(sharded._ignored_modules, set(ignored))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ignored_modules_not_under_wrapped_root(self):
        """Ignored modules outside of the wrapped module have no effect."""
        for by in ("ignored_modules", "modules", "parameters"):
            model = Nested().to(self.device)
            model.block = FSDP(
                model.block,
                device_id=self.device,
                **self._ignoring([model.block[0], model.last], by),
            )
            model.last = FSDP(
                model.last,
                device_id=self.device,
                **self._ignoring([model.block.module[0]], by),
            )
            expected = {"block.0.linear.weight", "block.0.linear.bias"}
            self.assertEqual(
                self._plain(model), expected, f"parameters not sharded, ignored by {by}"
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ignored_modules_invalid(self):
        model = Nested().to(self.device)
        wrapped = FSDP(Nested().to(self.device), device_id=self.device)
        for ignored, error, says in (
            (
                [wrapped],
                ValueError,
                "`ignored_modules` should not include FSDP modules",
            ),
            (
                [torch.zeros(1)],
                ValueError,
                r"ignored_modules expects nn.Module list elements but got types "
                r"\[<class",
            ),
        ):
            with self.assertRaisesRegex(error, says):
                FSDP(model, device_id=self.device, ignored_modules=ignored)
        with self.assertWarnsRegex(
            UserWarning, "Trying to ignore the top-level module passed into the FSDP"
        ):
            FSDP(model, device_id=self.device, ignored_modules=[model])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ignored_states_check(self):
        model = Nested().to(self.device)
        with self.assertRaisesRegex(
            ValueError, "Cannot pass both ignored_modules and ignored_states at the"
        ):
            FSDP(
                model,
                device_id=self.device,
                ignored_modules=[model.block],
                ignored_states=[model.block],
            )
        mixed = [model.last, *model.block.parameters()]
        for ignored in (mixed, mixed[::-1]):
            with self.assertRaises((ValueError, TypeError)) as refused:
                FSDP(model, device_id=self.device, ignored_states=ignored)
            self.assertIn(
                "ignored_states expects all nn.Parameter or all nn.Module list",
                str(refused.exception),
            )


instantiate_parametrized_tests(TestFSDPIgnoredModules)

if __name__ == "__main__":
    run_tests()
