# Owner(s): ["oncall: distributed"]
"""ZeroRedundancyOptimizer: each rank keeps the state of its share of the parameters,
and all train as one optimizer over all of them would, also inside of DDP's backward.
"""

import copy
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    DDPTest,
    skip_without_accelerator,
)
from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

OPTIMIZERS = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9},
    torch.optim.Adam: {"lr": 0.05},
}
OVERLAP = {
    "hook": (hook_with_zero_step, hook_with_zero_step_interleaved),
    "shard_buckets": (False, True),
    "static_graph": (False, True),
    "gradient_as_bucket_view": (False, True),
    "bucket_cap_mb": (25, 1e-5),
    "kind": tuple(OPTIMIZERS),
}


class Overlapped(ZeroRedundancyOptimizer):
    """Waits for the copies of parameters to buckets, which torch 2.13 makes on the
    default stream in the first step. The interleaved hook steps on another stream.
    """

    def _init_zero_for_overlap(self):
        super()._init_zero_for_overlap()
        torch.accelerator.synchronize()


class TestZeroRedundancyOptimizerDistributed(DDPTest):
    def net(self):
        # The first weight has more than half of all elements: torch shares out a bucket
        # to two ranks only where the part after the first half is a single parameter.
        torch.manual_seed(0)
        layers = nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)
        return nn.Sequential(*layers).to(self.device)

    def backward(self, model, step=0):
        model(self.rows(8, step)).square().sum().backward()

    def _train_reference(self, model, optimizer, step):
        """Train with the average of all ranks' gradients."""
        self.backward(model, step)
        for name, average in self.averaged(model).items():
            model.get_parameter(name).grad.copy_(average)
        optimizer.step()
        optimizer.zero_grad()

    def _check_parameters(self, model, reference, where):
        for name, expected in reference.named_parameters():
            self.assertEqual(model.get_parameter(name), expected, f"{name}, {where}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_step(self):
        """Every parameter has its state on one rank. The consolidated state loads into
        the plain optimizer, and that of the plain optimizer into ZeRO.
        """
        grid = {"parameters_as_bucket_view": (False, True), "kind": tuple(OPTIMIZERS)}
        for row in pairwise(grid):
            model, reference = self.net(), self.net()
            kind = row.pop("kind")
            options = OPTIMIZERS[kind]
            zero = ZeroRedundancyOptimizer(model.parameters(), kind, **row, **options)
            optimizer = kind(reference.parameters(), **options)
            ddp = DDP(model)
            for step in range(3):
                self.backward(ddp, step)
                zero.step()
                zero.zero_grad()
                self._train_reference(reference, optimizer, step)
                self._check_parameters(model, reference, f"step {step}, {kind} {row}")
            owned = [None] * self.world_size
            dist.all_gather_object(owned, len(zero.optim.state))
            self.assertEqual(sum(owned), 4, f"states of parameters, {row}")
            self.assertGreater(min(owned), 0, f"states of each rank, {row}")
            zero.consolidate_state_dict(to=1)
            if self.rank == 1:
                state, expected = zero.state_dict(), optimizer.state_dict()
                self.assertEqual(state["state"], expected["state"], f"state, {row}")
                optimizer.load_state_dict(copy.deepcopy(state))
            zero.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            self.backward(ddp, 3)
            zero.step()
            self._train_reference(reference, optimizer, 3)
            self._check_parameters(model, reference, f"after loading, {kind} {row}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_ddp_zero_overlap(self):
        """The first two steps of a backward that steps, three with a static graph,
        change nothing, as documented; later steps train like the plain optimizer.
        """
        skip_without_accelerator("torch refuses gloo here")
        for row in pairwise(OVERLAP):
            self._test_ddp_zero_overlap(**row)

    def _test_ddp_zero_overlap(self, hook, shard_buckets, kind, **options):
        where = f"{hook.__name__}, shard_buckets={shard_buckets}, {kind} {options}"
        model, reference = self.net(), self.net()
        ddp = DDP(model, **options)
        zero = Overlapped(
            ddp.parameters(), kind, overlap_with_ddp=True, **OPTIMIZERS[kind]
        )
        ddp.register_comm_hook(None, hook(allreduce_hook, ddp, zero, shard_buckets))
        expected = kind(reference.parameters(), **OPTIMIZERS[kind])
        idle = 3 if options["static_graph"] else 2
        for step in range(idle + 3):
            ddp.zero_grad()
            self.backward(ddp, step)
            if step >= idle:
                self._train_reference(reference, expected, step)
            self._check_parameters(model, reference, f"step {step}, {where}")
        # A bucket is one rank's unless buckets are shared out.
        owned = [None] * self.world_size
        dist.all_gather_object(owned, len(zero.optim.state))
        alone = not shard_buckets and options["bucket_cap_mb"] == 25
        if kind is torch.optim.Adam:
            self.assertEqual(sorted(owned)[0] == 0, alone, f"{owned} states, {where}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_overlap_that_cannot_work_is_refused(self):
        ddp = DDP(self.net())
        plain = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        late = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        for hook in (hook_with_zero_step, hook_with_zero_step_interleaved):
            with self.assertRaisesRegex(ValueError, "overlap_with_ddp=True"):
                hook(allreduce_hook, ddp, plain)
            if dist.get_backend() == "gloo":
                with self.assertRaisesRegex(RuntimeError, "Gloo backend"):
                    hook(allreduce_hook, ddp, late)
        for forbidden in (late.consolidate_state_dict, late.state_dict):
            with self.assertRaisesRegex(RuntimeError, "not been fully initialized|has"):
                forbidden()


if __name__ == "__main__":
    run_tests()
