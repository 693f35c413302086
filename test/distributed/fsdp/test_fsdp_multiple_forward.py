# Owner(s): ["oncall: distributed"]
"""FSDP1 with several forwards of one wrapped module before a single backward, compared
with DDP.

A module that runs twice is unsharded twice, but must reduce its gradient once, after
both uses have contributed. Reducing after the first loses the second, and reducing
twice counts gradients twice. Both change the parameters.
"""

import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, get_full_params
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

NUM_STEPS = 3


class Model(nn.Module):
    """Runs its inner layer ``num_inner`` times in each forward, each time on a
    different input.
    """

    def __init__(self, wrap, num_inner):
        super().__init__()
        torch.manual_seed(0)
        self.inner = wrap(nn.Linear(4, 4))
        self.outer = nn.Linear(4, 5)
        self.num_inner = num_inner

    def forward(self, x):
        return self.outer(sum(self.inner(x + use) for use in range(self.num_inner)))


class TestMultiForward(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _dist_train(self, model, num_root):
        """Train with ``num_root`` forwards of the model for each backward; return the
        gradient of the input.
        """
        optim = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(1 + self.rank)
        in_data = torch.rand(8, 4, device=self.device, requires_grad=True)
        for _ in range(NUM_STEPS):
            outputs = [model((use + 1) * in_data) for use in range(num_root)]
            sum(output.square().sum() for output in outputs).backward()
            optim.step()
            optim.zero_grad()
        return in_data.grad

    def _test_multi_forward(self, num_inner, num_root):
        def wrap(module):
            return FSDP(module.to(self.device), device_id=self.device)

        ddp_model = DDP(Model(nn.Identity(), num_inner).to(self.device))
        fsdp_model = wrap(Model(wrap, num_inner))
        before = get_full_params(fsdp_model)
        expected = self._dist_train(ddp_model, num_root)
        self.assertEqual(self._dist_train(fsdp_model, num_root), expected)
        after = get_full_params(fsdp_model)
        self.assertEqual(after, list(ddp_model.parameters()))
        self.assertNotEqual(after, before)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_multi_forward(self):
        """A submodule runs several times within one forward."""
        self.run_subtests(
            {"num_inner": [2, 3], "num_root": [1]}, self._test_multi_forward
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_multi_root_forward(self):
        """The root runs several times before one backward, and its submodule once or
        twice in each.
        """
        self.run_subtests(
            {"num_inner": [1, 2], "num_root": [2, 3]}, self._test_multi_forward
        )


if __name__ == "__main__":
    run_tests()
