# Owner(s): ["oncall: distributed"]
"""Options of ``fully_shard`` together: of any two, every pair of values meets in a
test, which trains for three steps as the unsharded model does.

A step alone would not show an order of prefetching that is wrong, or state that is
left behind, since both come from the step before.
"""

import copy
import itertools
import sys
import unittest
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    CollectiveLog,
    FSDPTest,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

BRAIN, FULL = torch.bfloat16, torch.float32
OPTIONS = {
    "reshard": (True, False, 2),
    "types": (
        "float32",
        "bfloat16 policy",
        "bfloat16 policy, reduced in float32",
        "bfloat16 parameters",
    ),
    "microbatches": ("one", "two, the first without reduction", "two forwards first"),
    "mesh": ((4,), (2, 2)),
    "offloads": (False, True),
    "prefetches": (False, True),
    "dim": (0, 1),
    "freezes": (False, True),
    "recomputes": (False, True),
}
# Of parameters, and of computation and reduction if another.
TYPES = {
    "float32": (FULL, MixedPrecisionPolicy()),
    "bfloat16 policy": (FULL, MixedPrecisionPolicy(BRAIN, BRAIN)),
    "bfloat16 policy, reduced in float32": (FULL, MixedPrecisionPolicy(BRAIN, FULL)),
    "bfloat16 parameters": (BRAIN, MixedPrecisionPolicy()),
}


def works(row: Mapping[str, Any]) -> bool:
    """Whether torch accepts a row, or the part of one that there is yet."""
    # See test_dimension_1_with_a_smaller_mesh_after_forward.
    return (row.get("reshard"), row.get("dim")) != (2, 1)


class Block(nn.Module):
    """A residual block of width 8. With ``dim`` 0, four ranks share ten rows unevenly;
    shards along dimension 1 must be even.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = 12 if dim else 10
        self.wide, self.narrow = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))


class TestFullyShardGrid(FSDPTest):
    @property
    def world_size(self):
        return 4

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("number", range(len(pairwise(OPTIONS, works))))
    def test_training_equals_unsharded_training(self, number):
        row = pairwise(OPTIONS, works)[number]
        reference = self._model(row)
        model = self._sharded(copy.deepcopy(reference).to(TYPES[row["types"]][0]), row)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # Ranks add in another order than the reference.
        bound = 1e-5 if row["types"] == "float32" else 0.03
        calls = []
        for step in range(3):
            where = f"step {step} of {row}"
            expected = self._reference_loss(reference, row, step)
            with CollectiveLog() as log:
                loss = self._backward(
                    model, row, step, model.set_requires_gradient_sync
                )
            calls.append(log.calls)
            self.assertEqual(loss, expected, atol=0, rtol=0, msg=f"loss of {where}")
            for (name, whole), part in zip(
                reference.named_parameters(), model.parameters(), strict=True
            ):
                self.assertEqual(
                    part.grad is None, whole.grad is None, f"{name}, {where}"
                )
                if whole.grad is not None:
                    self._check_close(
                        part.grad, whole.grad, bound, f"gradient of {name}, {where}"
                    )
            before = [self._whole(part) for part in model.parameters()]
            optimizer.step()
            for old, whole, part in zip(
                before, reference.parameters(), model.parameters(), strict=True
            ):
                if whole.grad is not None:
                    self._check_close(
                        part, old - 0.1 * whole.grad, bound, f"parameters after {where}"
                    )
                whole.data.copy_(self._whole(part))
            for each in (model, reference):
                each.zero_grad()
        self.assertEqual(calls[2], calls[1], f"collectives of steps 2 and 1 of {row}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @unittest.expectedFailure  # IndexError in backward, through torch 2.13
    def test_dimension_1_with_a_smaller_mesh_after_forward(self):
        row = {**pairwise(OPTIONS, works)[0], "reshard": 2, "dim": 1}
        model = self._sharded(self._model(row), row)
        self._backward(model, row, 0)

    def _model(self, row: Mapping[str, Any]) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(row["dim"]) for _ in range(3)), nn.Linear(8, 4))
        model[1].wide.requires_grad_(not row["freezes"])
        model.to(self.device)
        return model.to(TYPES[row["types"]][0]).to(FULL)

    def _sharded(self, model: nn.Sequential, row: Mapping[str, Any]) -> nn.Sequential:
        dim, sizes = row["dim"], row["mesh"]
        options = {
            "mesh": world_mesh(*sizes),
            # A mesh of two ranks has no smaller part.
            "reshard_after_forward": row["reshard"]
            if sizes == (4,)
            else bool(row["reshard"]),
            "mp_policy": TYPES[row["types"]][1],
            "offload_policy": CPUOffloadPolicy()
            if row["offloads"]
            else OffloadPolicy(),
            "shard_placement_fn": lambda param: Shard(dim if param.ndim > 1 else 0),
        }
        blocks = model[:3]
        for block in blocks:
            if row["recomputes"]:
                checkpoint(block)
            fully_shard(block, **options)
        fully_shard(model, **options)
        for before, after in itertools.pairwise(blocks) if row["prefetches"] else ():
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        return model

    def _inputs(self, row: Mapping[str, Any], step: int) -> Iterator[torch.Tensor]:
        stored, policy = TYPES[row["types"]]
        computed = policy.param_dtype or stored
        for microbatch in range(1 if row["microbatches"] == "one" else 2):
            yield self.rows(8, 10 * step + microbatch).to(computed)

    def _backward(
        self,
        model: nn.Module,
        row: Mapping[str, Any],
        step: int,
        set_sync=lambda syncs: None,
    ):
        """Run forward and backward; return the loss."""
        inputs = [*self._inputs(row, step)]
        if row["microbatches"] == "two forwards first":
            loss = sum(model(each).float().square().mean() for each in inputs)
            loss.backward()
            return loss.detach()
        total = torch.zeros((), device=self.device)
        for number, each in enumerate(inputs, 1):
            set_sync(number == len(inputs))
            loss = model(each).float().square().mean()
            loss.backward()
            total += loss.detach()
        return total

    def _reference_loss(self, reference: nn.Module, row: Mapping[str, Any], step: int):
        """Give ``reference`` its gradients, averaged over ranks; return its loss."""
        stored, policy = TYPES[row["types"]]
        computing = copy.deepcopy(reference).to(policy.param_dtype or stored)
        loss = self._backward(computing, row, step)
        for whole, computed in zip(
            reference.parameters(), computing.parameters(), strict=True
        ):
            if computed.grad is not None:
                whole.grad = computed.grad.to(FULL)
                dist.all_reduce(whole.grad)
                whole.grad /= self.world_size
        return loss

    def _whole(self, part: Any) -> torch.Tensor:
        return part.detach().to(self.device).full_tensor().to(FULL)

    def _check_close(
        self, part: Any, whole: torch.Tensor, bound: float, what: str
    ) -> None:
        difference = (self._whole(part) - whole).norm() / whole.norm()
        self.assertLessEqual(difference.item(), bound, f"relative difference of {what}")


instantiate_parametrized_tests(TestFullyShardGrid)

if __name__ == "__main__":
    run_tests()
