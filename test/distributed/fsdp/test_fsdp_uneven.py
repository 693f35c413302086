# Owner(s): ["oncall: distributed"]
"""A parameter whose elements the world size does not divide, or that has fewer than
there are ranks.
"""

import sys
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, get_full_params
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)


class TestUnevenParamShard(FSDPTest):
    @property
    def world_size(self) -> int:
        return 3

    def _weight(self, numel: int) -> torch.Tensor:
        return torch.arange(1.0, numel + 1).view(1, numel)

    def _model(self, numel: int, **fsdp_kwargs: Any) -> FSDP:
        linear = nn.Linear(numel, 1, bias=False)
        with torch.no_grad():
            linear.weight.copy_(self._weight(numel))
        return FSDP(linear, device_id=self.device, **fsdp_kwargs)

    @skip_if_lt_x_gpu(3, allow_cpu=True)
    def test_one_iteration(self):
        """Each rank's gradient is its input; a step subtracts the mean of all."""
        self.run_subtests(
            {
                "numel": [1, 2, 4, 5, 7],
                "use_orig_params": [False, True],
                "sharding_strategy": [
                    ShardingStrategy.FULL_SHARD,
                    ShardingStrategy.SHARD_GRAD_OP,
                ],
            },
            self._test_one_iteration,
        )

    def _test_one_iteration(self, numel: int, **fsdp_kwargs: Any) -> None:
        model = self._model(numel, **fsdp_kwargs)
        inputs = [torch.arange(float(numel)) * (rank + 1) for rank in range(3)]
        optim = torch.optim.SGD(model.parameters(), lr=1.0)
        output = model(inputs[self.rank].to(self.device).unsqueeze(0))
        self.assertEqual(
            output.item(), (self._weight(numel) @ inputs[self.rank]).item(), "output"
        )
        output.sum().backward()
        optim.step()
        (weight,) = get_full_params(model)
        expected = self._weight(numel) - sum(inputs) / 3
        self.assertEqual(
            weight.detach().cpu().view(1, -1), expected, "weight after a step"
        )

    @skip_if_lt_x_gpu(3, allow_cpu=True)
    def test_shards(self):
        """Shards have one size except for the padding of the last; ranks beyond the end
        hold only padding.
        """
        for numel, expected in (
            (1, [[1], [], []]),
            (4, [[1, 2], [3, 4], []]),
            (7, [[1, 2, 3], [4, 5, 6], [7]]),
        ):
            flat = self._model(numel)._flat_param
            held = flat.numel() - flat._shard_numel_padded
            self.assertEqual(
                flat.detach()[:held].tolist(),
                expected[self.rank],
                f"shard of {numel} elements",
            )
            self.assertEqual(
                flat.numel(),
                -(-numel // 3),
                f"size of a shard of {numel} elements with its padding",
            )


if __name__ == "__main__":
    run_tests()
