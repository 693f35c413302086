# Owner(s): ["oncall: distributed"]
"""``FSDP.fsdp_modules`` finds every wrapper below a module, or only the outermost ones,
each once, in order.
"""

import sys

import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._traversal_utils import (
    _get_fsdp_handles,
    _get_fsdp_states_with_modules,
)

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TestTraversal(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _linear(self) -> FSDP:
        return FSDP(nn.Linear(2, 2), device_id=self.device)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_fsdp_modules(self):
        shared, deep, last = self._linear(), self._linear(), self._linear()
        middle = FSDP(nn.Sequential(deep, nn.Linear(2, 2)), device_id=self.device)
        tree = nn.Sequential(nn.Sequential(shared, middle), nn.ReLU(), shared, last)
        names = {
            id(shared): "shared",
            id(deep): "deep",
            id(middle): "middle",
            id(last): "last",
        }

        def found(modules: list[nn.Module]) -> list[str]:
            return [names[id(module)] for module in modules]

        self.assertEqual(
            found(FSDP.fsdp_modules(tree)), ["shared", "middle", "deep", "last"]
        )
        self.assertEqual(found(FSDP.fsdp_modules(middle)), ["middle", "deep"])
        self.assertEqual(found(FSDP.fsdp_modules(middle, root_only=True)), ["middle"])
        self.assertEqual(FSDP.fsdp_modules(nn.Linear(2, 2)), [])
        states, modules = _get_fsdp_states_with_modules(tree)
        self.assertEqual(found(modules), ["shared", "middle", "deep", "last"])
        self.assertEqual(found(states), found(modules))
        handles = [module._handle for module in (shared, middle, deep, last)]
        self.assertEqual(
            [handles.index(handle) for handle in _get_fsdp_handles(tree)], [0, 1, 2, 3]
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_roots_are_known_after_the_first_use(self):
        model = FSDP(
            nn.Sequential(self._linear(), self._linear()), device_id=self.device
        )
        tree = nn.Sequential(model, self._linear())
        for root in (model, tree[1]):
            self.assertTrue(root.check_is_root())
        self.assertEqual(FSDP.fsdp_modules(tree, root_only=True), [model, tree[1]])


if __name__ == "__main__":
    run_tests()
