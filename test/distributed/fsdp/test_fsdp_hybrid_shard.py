# Owner(s): ["oncall: distributed"]
"""Hybrid sharding of FSDP1: shards within a group, replicas across groups, and one
average over all.
"""

import sys
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._init_utils import _init_intra_and_inter_node_groups
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    FSDPTest,
    get_full_params,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

HYBRID = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]


class TestFSDPHybridShard(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return the groups of ranks 0 and 1, or 2 and 3, and of ranks 0 and 2, or 1
        and 3.
        """
        return _init_intra_and_inter_node_groups(dist.group.WORLD, 2)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_groups(self):
        """Ranks of a node shard together; ranks at the same place of their nodes
        replicate.
        """
        within, across = self._groups()
        first = 2 * (self.rank // 2)
        self.assertEqual(
            dist.get_process_group_ranks(within),
            [first, first + 1],
            "ranks that shard together",
        )
        place = self.rank % 2
        self.assertEqual(
            dist.get_process_group_ranks(across),
            [place, place + 2],
            "ranks that replicate",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("sharding_strategy", HYBRID)
    def test_fsdp_hybrid_shard_parity(self, sharding_strategy):
        """However the groups are given, training equals that without sharding, and
        replicas stay equal.
        """
        groups = self._groups()
        for given in ({"process_group": groups}, {"device_mesh": world_mesh(2, 2)}):
            for use_orig_params in (False, True):
                options = {
                    "sharding_strategy": sharding_strategy,
                    "use_orig_params": use_orig_params,
                    **given,
                }
                self._check_parity(**options)

    def _check_parity(self, **options: Any) -> None:
        reference = Chain(device=self.device)
        model = FSDP(
            Chain(
                lambda layer: FSDP(layer, device_id=self.device, **options), self.device
            ),
            device_id=self.device,
            **options,
        )
        for module, rank in ((reference, None), (model, self.rank)):
            optim = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            for step in range(3):
                module(
                    Chain.rows(self.device, self.world_size, rank, step)
                ).square().mean().backward()
                optim.step()
                optim.zero_grad()
        self.assertEqual(
            get_full_params(model),
            list(reference.parameters()),
            "parameters after training",
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_fsdp_hybrid_shard_basic_setup(self):
        """Wrapped by a policy, all modules use the groups of the root, and hold one
        half each.
        """
        groups = self._groups()
        model = FSDP(
            Chain(device=self.device),
            device_id=self.device,
            process_group=groups,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
        for module in FSDP.fsdp_modules(model):
            self.assertIs(module.process_group, groups[0])
            self.assertIs(module._inter_node_pg, groups[1])
            self.assertEqual(
                module._gradient_predivide_factor * module._gradient_postdivide_factor,
                4,
            )
        self.assertEqual(
            [layer._flat_param.numel() for layer in (model.module.a, model.module.b)],
            [8, 8],
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("sharding_strategy", HYBRID)
    def test_groups_of_a_policy(self, sharding_strategy):
        """Without groups, a policy shards within nodes, which have as many ranks as
        devices, and replicates across them. Wrappers share the groups.
        """
        device = self.device
        devices = torch.get_device_module(device)
        with mock.patch.object(devices, "device_count", return_value=2):
            model = FSDP(
                Chain(device=device),
                device_id=device,
                sharding_strategy=sharding_strategy,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            )
        first, place = 2 * (self.rank // 2), self.rank % 2
        for module in FSDP.fsdp_modules(model):
            self.assertIs(module.process_group, model.process_group)
            self.assertIs(module._inter_node_pg, model._inter_node_pg)
            self.assertEqual(
                dist.get_process_group_ranks(module.process_group), [first, first + 1]
            )
            self.assertEqual(
                dist.get_process_group_ranks(module._inter_node_pg), [place, place + 2]
            )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("sharding_strategy", HYBRID)
    def test_hsdp_sync_module_state(self, sharding_strategy):
        """Rank 0's parameters and buffers reach every rank, of other groups too."""
        skip_without_accelerator(
            "sync_module_states needs parameters on an accelerator"
        )
        module = Chain(device=self.device, seed=self.rank)
        module.register_buffer(
            "number", torch.full((2,), float(self.rank), device=self.device)
        )
        model = FSDP(
            module,
            device_id=self.device,
            device_mesh=world_mesh(2, 2),
            sharding_strategy=sharding_strategy,
            sync_module_states=True,
        )
        expected = list(Chain(device=self.device).parameters())
        self.assertEqual(get_full_params(model), expected, "synchronized parameters")
        self.assertEqual(
            module.number, torch.zeros(2, device=self.device), "synchronized buffer"
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_raises_manual_wrap_hybrid_shard_when_none_policy(self):
        for sharding_strategy in HYBRID:
            with self.assertRaisesRegex(
                ValueError,
                "requires explicit specification of process group or device_mesh",
            ):
                FSDP(
                    Chain(device=self.device),
                    device_id=self.device,
                    sharding_strategy=sharding_strategy,
                )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_invalid_pg_specification_raises(self):
        strategy = ShardingStrategy.HYBRID_SHARD
        with self.assertRaisesRegex(
            ValueError, "Expected process_group to be passed in as either None or"
        ):
            FSDP(
                Chain(device=self.device),
                device_id=self.device,
                process_group=dist.group.WORLD,
                sharding_strategy=strategy,
            )
        with self.assertRaises((ValueError, IndexError)) as refused:
            FSDP(
                Chain(device=self.device),
                device_id=self.device,
                device_mesh=world_mesh(4),
                sharding_strategy=strategy,
            )
        self.assertIn("Expected device_mesh to have ndim=2", str(refused.exception))
        with self.assertRaisesRegex(
            ValueError, "Cannot pass both process_group and device_mesh"
        ):
            FSDP(
                Chain(device=self.device),
                device_id=self.device,
                process_group=self._groups(),
                device_mesh=world_mesh(2, 2),
            )


instantiate_parametrized_tests(TestFSDPHybridShard)

if __name__ == "__main__":
    run_tests()
