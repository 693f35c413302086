# Owner(s): ["oncall: distributed"]
"""At the debug level DETAIL, FSDP1 warns when ranks, or steps of a rank, run their
modules in another order.
"""

import sys
import warnings

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, compute_device
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class Branches(nn.Module):
    """Layers of equal shapes, in the order ``order``, so that a wrong order causes no
    hang.
    """

    def __init__(self, strategy: ShardingStrategy) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            FSDP(
                nn.Linear(4, 4), device_id=compute_device(), sharding_strategy=strategy
            )
            for _ in range(3)
        )
        self.order = [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


class TestFSDPExecOrder(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _model(self, sharding_strategy: ShardingStrategy) -> FSDP:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        return FSDP(
            Branches(sharding_strategy),
            device_id=self.device,
            sharding_strategy=sharding_strategy,
        )

    def _step(self, model: FSDP) -> list[str]:
        """Run a step and return its warnings about the order."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(2, 4, device=self.device)).sum().backward()
        return [
            str(each.message)
            for each in caught
            if "Forward order differs" in str(each.message)
        ]

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize(
        "sharding_strategy",
        [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
    )
    def test_invalid_first_iter_order(self, sharding_strategy):
        """The warning names ranks that begin with different modules."""
        model = self._model(sharding_strategy)
        model.module.order = [1, 0, 2] if self.rank == 0 else [1, 2, 0]
        names = [
            rf"\[\[?'layers.{index}.weight', 'layers.{index}.bias'\]\]?"
            for index in (0, 2)
        ]
        expected = (
            "Forward order differs across ranks: rank 0 is all-gathering parameters "
            "for "
            f"{names[0]} while rank 1 is all-gathering parameters for {names[1]}"
        )
        with self.assertRaisesRegex(
            RuntimeError, expected.replace(r"layers.", r"layers\.\S*")
        ):
            self._step(model)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize(
        "sharding_strategy",
        [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
    )
    @parametrize("iters_before_path_change", [1, 2])
    def test_invalid_later_iter_order(
        self, sharding_strategy, iters_before_path_change
    ):
        """A step that differs from the first causes one warning, with the module
        expected and the one found.
        """
        for order, says in (
            (
                [0, 2, 1],
                r"Expected to all-gather for .*layers\.1\..* but trying to "
                r"all-gather .*layers\.2\.",
            ),
            (
                [0, 1, 2, 2],
                r"Expected to not all-gather any more parameters .* but trying "
                r".*layers\.2\.",
            ),
        ):
            model = self._model(sharding_strategy)
            for _ in range(iters_before_path_change):
                self.assertEqual(
                    self._step(model), [], "warnings of steps in the first order"
                )
            model.module.order = order
            warned = self._step(model)
            self.assertTrue(warned, f"no warning of a step in the order {order}")
            first, *more = warned
            self.assertRegex(
                first, f"differs from that of the first iteration on rank {self.rank}"
            )
            self.assertRegex(first, says)
            self.assertLess(len(more), len(order), "warnings of one step")
            self.assertEqual(
                self._step(model), [], "warnings of the step after the one that warned"
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize(
        "sharding_strategy",
        [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
    )
    def test_train_eval(self, sharding_strategy):
        """Evaluation between steps, in any order, is not counted."""
        model = self._model(sharding_strategy)
        for _ in range(3):
            model.train()
            self.assertEqual(self._step(model), [], "warnings of training")
            model.eval()
            with torch.no_grad():
                for model.module.order in ([2, 1, 0], [0]):
                    model(torch.ones(2, 4, device=self.device))
            model.module.order = [0, 1, 2]


instantiate_parametrized_tests(TestFSDPExecOrder)

if __name__ == "__main__":
    run_tests()
