# Owner(s): ["oncall: distributed"]
"""The result of ``fully_shard`` on a module: its class, its state, and the errors."""

import copy
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard, share_comm_ctx
from torch.distributed.fsdp._fully_shard._fully_shard import (
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
)

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    FSDPTestMultiThread,
    rank_device,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TestFullyShardState(FSDPTestMultiThread):
    @property
    def world_size(self):
        return 1

    @property
    def device(self):
        return rank_device(0)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_fully_shard_state(self):
        """Each call makes one state, which its module knows, and plain modules have
        none.
        """
        model = nn.Sequential(MLP(4), MLP(4)).to(self.device)
        fully_shard(model[0])
        fully_shard(model)
        outer, inner = (fully_shard.state(module) for module in (model, model[0]))
        self.assertIsNot(outer, inner)
        self.assertIs(outer, model._get_fsdp_state())
        self.assertIs(inner, model[0]._get_fsdp_state())
        self.assertNotIsInstance(model[1], FSDPModule)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_fully_shard_reapply(self):
        model = fully_shard(MLP(4).to(self.device))
        with self.assertRaisesRegex(
            AssertionError,
            "Each distinct composable distributed API can only be applied to",
        ):
            fully_shard(model)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_fully_shard_cls(self):
        """A module gets a new class, derived from the original and named after it,
        which all modules of that class share.
        """
        model, other = (fully_shard(MLP(4).to(self.device)) for _ in range(2))
        found = [each.__name__ for each in type(model).__mro__[:3]]
        self.assertEqual(found, ["FSDPMLP", "FSDPModule", "MLP"], f"classes {found}")
        self.assertIs(type(model), type(other))

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_slice_of_a_container_is_plain(self):
        model = nn.Sequential(MLP(4), MLP(4), MLP(4)).to(self.device)
        fully_shard(model[0])
        fully_shard(model)
        self.assertIs(
            type(model[:2]), nn.Sequential, f"class of a slice: {type(model[:2])}"
        )
        self.assertIsInstance(model[:2][0], FSDPModule)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_containers_may_be_made_without_their_constructor(self):
        model = fully_shard(nn.Sequential(MLP(4)).to(self.device))
        with self.assertRaises(KeyError), disable_fsdp_module_new_init():
            self.assertNotIn("_modules", vars(type(model)()))
            raise KeyError
        self.assertIn("_modules", vars(type(model)()))
        self.assertIs(get_cls_to_fsdp_cls()[nn.Sequential], type(model))

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_fully_shard_unsupported_module_cls(self):
        for container in (nn.ModuleList([MLP(4)]), nn.ModuleDict({"mlp": MLP(4)})):
            with self.assertRaisesRegex(
                ValueError,
                "fully_shard does not support containers that do not implement forward",
            ):
                fully_shard(container)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_fully_shard_deepcopy(self):
        model = fully_shard(nn.Sequential(nn.Linear(4, 4)).to(self.device))
        with self.assertRaisesRegex(
            AssertionError, "FSDP does not support deepcopy. Please use state dict"
        ):
            copy.deepcopy(model)

    @skip_if_lt_x_gpu(1, allow_cpu=True)
    def test_setters_refuse_wrong_values(self):
        model = fully_shard(MLP(4).to(self.device))
        with self.assertRaisesRegex(TypeError, "max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(True)
        with self.assertRaisesRegex(
            ValueError, "max_input_buffers must be a positive int, got 0"
        ):
            model.set_reduce_scatter_max_input_buffers(0)
        with self.assertRaisesRegex(ValueError, "should be a bool"):
            model.set_reshard_after_forward(1)
        share_comm_ctx([])
        with self.assertRaisesRegex(ValueError, "list of FSDPModules but got Linear"):
            share_comm_ctx([model, nn.Linear(2, 2)])
        self.assertEqual(model(torch.ones(2, 4, device=self.device)).shape, (2, 4))


if __name__ == "__main__":
    run_tests()
