# Owner(s): ["oncall: distributed"]
"""``FSDP.apply`` shows whole parameters to the function, module by module, and keeps
its changes.
"""

import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    NestedWrappedModule,
    TransformerWithSharedParams,
    get_full_params,
    refused_while_unsharded,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TestApply(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _check_apply(self, fsdp: FSDP, plain: nn.Module) -> None:
        """Fill each linear layer with its own numbers, on both sides."""
        seen: dict[bool, list[torch.Size]] = {True: [], False: []}

        def fill(module: nn.Module) -> None:
            if type(module) is nn.Linear:
                sharded = module not in reference_modules
                seen[sharded].append(module.weight.shape)
                self.assertEqual(module.weight.device, self.device)
                with torch.no_grad():
                    module.weight.copy_(
                        torch.arange(module.weight.numel()).view(module.weight.shape)
                    )
                    module.bias.fill_(float(module.weight.numel()))

        reference_modules = set(plain.modules())
        plain.apply(fill)
        self.assertIs(fsdp.apply(fill), fsdp)
        self.assertEqual(
            sorted(seen[True]), sorted(seen[False]), "shapes that the function saw"
        )
        self.assertEqual(
            get_full_params(fsdp), list(plain.parameters()), "parameters after apply"
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_nested_module_apply(self):
        self.run_subtests(
            {"use_orig_params": [False, True]}, self._test_nested_module_apply
        )

    def _test_nested_module_apply(self, use_orig_params: bool) -> None:
        def build(mode: FSDPInitMode) -> nn.Module:
            kwargs = {"use_orig_params": use_orig_params, "device_id": self.device}
            return NestedWrappedModule.init(
                self.process_group,
                mode,
                DEVICEInitMode.DEVICE_BEFORE,
                kwargs,
                deterministic=True,
            )

        fsdp = FSDP(
            build(FSDPInitMode.RECURSIVE),
            device_id=self.device,
            use_orig_params=use_orig_params,
        )
        self._check_apply(fsdp, build(FSDPInitMode.NO_FSDP))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_transformer_module_apply(self):
        def build(mode: FSDPInitMode) -> nn.Module:
            return TransformerWithSharedParams.init(
                self.process_group,
                mode,
                DEVICEInitMode.DEVICE_BEFORE,
                {"device_id": self.device},
                deterministic=True,
            )

        self._check_apply(build(FSDPInitMode.RECURSIVE), build(FSDPInitMode.NO_FSDP))

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_apply_in_summon_raises_error(self):
        fsdp = FSDP(nn.Linear(3, 3), device_id=self.device)
        with refused_while_unsharded(self, fsdp, "test_fsdp_apply.py"):
            fsdp.apply(lambda module: None)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_apply_to_a_part_makes_it_no_root(self):
        """A part may be initialized alone, and then trained in the whole."""
        inner = FSDP(nn.Linear(3, 3), device_id=self.device)
        inner.apply(lambda module: None)
        self.assertIsNone(inner._is_root, "apply decided which module is the root")
        model = FSDP(nn.Sequential(inner, nn.Linear(3, 3)), device_id=self.device)
        model(torch.ones(1, 3, device=self.device)).sum().backward()
        for each in (inner, model):
            self.assertEqual((model._is_root, inner._is_root), (True, False))
            each.apply(lambda module: None)
        self.assertEqual((model._is_root, inner._is_root), (True, False))


if __name__ == "__main__":
    run_tests()
