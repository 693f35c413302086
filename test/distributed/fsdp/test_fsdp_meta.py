# Owner(s): ["oncall: distributed"]
"""FSDP1 makes parameters of modules on the meta device: each once, by the module's own
or the user's function.
"""

import sys
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, get_full_params
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class Counted(nn.Module):
    """A weight and a buffer, and a function that fills them with a given value and
    counts its calls. FSDP calls it without gradients, so it writes in place.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.resets = value, 0
        self.weight = nn.Parameter(torch.empty(3, 3))
        self.register_buffer("shift", torch.empty(3))

    def reset_parameters(self) -> None:
        self.resets += 1
        self.weight.fill_(self.value)
        self.shift.fill_(self.value / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.weight.dtype) @ self.weight + self.shift.to(self.weight.dtype)


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(Counted(1.0), nn.Sequential(Counted(2.0), Counted(3.0)))


class TestFSDPWithMetaDevice(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _counted(self, model: nn.Module) -> list[Counted]:
        return [module for module in model.modules() if isinstance(module, Counted)]

    def _check(self, model: FSDP, resets: list[int], values: list[float]) -> None:
        counted = self._counted(model)
        self.assertEqual(
            [module.resets for module in counted],
            resets,
            "times that each module was reset",
        )
        expected = [torch.full((3, 3), value, device=self.device) for value in values]
        self.assertEqual(get_full_params(model), expected, "parameters")
        shifts = [module.shift.float() for module in counted]
        expected = [
            torch.full((3,), value / 10, device=self.device) for value in values
        ]
        self.assertEqual(shifts, expected, "buffers", rtol=1e-3, atol=0)
        output = model(torch.ones(1, 3, device=self.device))
        self.assertEqual(output.device, self.device)
        output.sum().backward()

    def _wrap(
        self, model: nn.Module, auto_wrap: bool, nested: bool, **options: Any
    ) -> FSDP:
        if auto_wrap:
            return FSDP(
                model,
                device_id=self.device,
                auto_wrap_policy=ModuleWrapPolicy({Counted}),
                **options,
            )
        if nested:
            model[1] = FSDP(model[1], device_id=self.device, **options)
        return FSDP(model, device_id=self.device, **options)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("auto_wrap", [False, True])
    def test_nested_model_with_meta_device_default_init(self, auto_wrap):
        for nested in (False, True):
            self._check(
                self._wrap(on_meta(), auto_wrap, nested), [1, 1, 1], [1.0, 2.0, 3.0]
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("auto_wrap", [False, True])
    def test_nested_model_with_meta_device_reset_params(self, auto_wrap):
        """The user's function is called with each module that the wrapper must
        materialize, and no other function is called.
        """
        for nested in (False, True):
            called: list[nn.Module] = []

            def fill(module: nn.Module, called: list[nn.Module] = called) -> None:
                called.append(module)
                if isinstance(module, Counted):
                    module.to_empty(device=self.device, recurse=False)
                    with torch.no_grad():
                        module.weight.fill_(7.0)
                        module.shift.fill_(0.7)

            model = on_meta()
            plain = [
                module for module in model.modules() if isinstance(module, Counted)
            ]
            wrapped = self._wrap(model, auto_wrap, nested, param_init_fn=fill)
            calls = [sum(each is module for each in called) for module in plain]
            self.assertEqual(
                calls, [1, 1, 1], "times that the function was called with each"
            )
            self._check(wrapped, [0, 0, 0], [7.0, 7.0, 7.0])

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_simple_model_with_meta_device_default_init(self):
        """An ignored module stays on the meta device, also within one that is made;
        one that has buffers alone is made.
        """
        on_host = self.device == torch.device("cpu")
        for device_id in (self.device,) if on_host else (self.device, None):
            model = on_meta()
            with torch.device("meta"):
                ignored = model[0].inner = Counted(4.0)
                norm = nn.BatchNorm1d(3, affine=False)
            model.append(norm)
            wrapped = FSDP(model, device_id=device_id, ignored_states=[ignored])
            types = {each.device.type for each in ignored.state_dict().values()}
            self.assertEqual(types, {"meta"}, "modules that stay on the meta device")
            resets = [module.resets for module in self._counted(wrapped)]
            self.assertEqual(resets, [1, 0, 1, 1])
            made = {*wrapped.parameters(), *norm.buffers()} - {ignored.weight}
            self.assertEqual({each.device for each in made}, {self.device})
            self.assertEqual(norm.running_var, torch.ones(3, device=self.device))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_meta_device_with_mixed_precision(self):
        """Parameters are made in full precision, and computed with in the lower one."""
        precision = MixedPrecision(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            buffer_dtype=torch.float16,
        )
        model = FSDP(on_meta(), device_id=self.device, mixed_precision=precision)
        self._check(model, [1, 1, 1], [1.0, 2.0, 3.0])
        self.assertEqual(
            {param.dtype for param in model.parameters()},
            {torch.float32},
            "types of parameters",
        )
        self.assertEqual(
            {module.shift.dtype for module in self._counted(model)},
            {torch.float16},
            "types of buffers",
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_bad_arg_meta(self):
        with self.assertRaisesRegex(
            ValueError, "Expected 42 to be callable but got <class 'int'>"
        ):
            FSDP(on_meta(), device_id=self.device, param_init_fn=42)
        with torch.device("meta"):
            cannot = nn.Sequential(nn.Linear(2, 2))
            cannot.register_parameter("own", nn.Parameter(torch.empty(2)))
        with self.assertWarnsRegex(
            UserWarning, r"Unable to call `reset_parameters\(\)` for module on meta"
        ):
            with self.assertRaisesRegex(AttributeError, "reset_parameters"):
                FSDP(cannot, device_id=self.device)


instantiate_parametrized_tests(TestFSDPWithMetaDevice)

if __name__ == "__main__":
    run_tests()
