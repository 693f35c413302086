# Owner(s): ["oncall: distributed"]
"""Gradients accumulate over several backwards before a step: small batches give the
result of one large batch.

Under ``no_sync`` nothing is reduced, and every rank keeps unsharded gradients;
otherwise each backward reduces and adds to the sharded gradient. In any order, the
result must be the gradient of all batches.
"""

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    TransformerWithSharedParams,
    patch_all_reduce,
    patch_reduce_scatter,
    skip_parameter_offload,
)
from torch_ext.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]


@dataclass(frozen=True)
class Accumulation:
    """``num_iters`` consecutive backwards, with or without ``no_sync``."""

    use_no_sync: bool
    num_iters: int

    def __str__(self) -> str:
        return f"{self.num_iters}_{'without' if self.use_no_sync else 'with'}_sync"


UNSYNCED, SYNCED = Accumulation(True, 3), Accumulation(False, 3)
ORDERS = [
    [UNSYNCED],
    [SYNCED],
    [UNSYNCED, SYNCED],
    [SYNCED, UNSYNCED],
    [SYNCED, UNSYNCED, SYNCED],
]


class TestGradAcc(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _model(self, **fsdp_kwargs: Any) -> FSDP:
        cpu_offload = fsdp_kwargs.get("cpu_offload", CPUOffload())
        skip_parameter_offload(cpu_offload)
        return TransformerWithSharedParams.init(
            self.process_group,
            FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_NEVER
            if cpu_offload.offload_params
            else DEVICEInitMode.DEVICE_BEFORE,
            fsdp_kwargs,
            deterministic=True,
            add_bn=False,  # batch norm would distinguish a large batch from small ones
        )

    def _batches(self, model: FSDP, count: int) -> list[tuple[torch.Tensor, ...]]:
        """Return batches that all differ."""
        source, target = model.module.get_input(self.device)
        return [
            tuple((tensor + shift) % 23 for tensor in (source, target))
            for shift in range(count)
        ]

    def _backward(self, model: FSDP, batch: tuple[torch.Tensor, ...]) -> None:
        model.module.get_loss(batch, model(*batch)).backward()

    def _gradients(self, model: FSDP) -> list[torch.Tensor]:
        return [
            param.grad.detach().clone()
            for param in model.parameters()
            if param.grad is not None
        ]

    def _test_grad_acc(self, order: list[Accumulation], **fsdp_kwargs: Any) -> None:
        model = self._model(**fsdp_kwargs)
        count = sum(each.num_iters for each in order) + 1
        batches = self._batches(model, count)

        # One batch of all samples, concatenated along dimension 1. The loss is their
        # sum.
        together = tuple(
            torch.cat(parts, dim=1) for parts in zip(*batches, strict=True)
        )
        self._backward(model, together)
        expected = self._gradients(model)
        self.assertTrue(expected)
        model.zero_grad()

        remaining = iter(batches)
        for each in order:
            with model.no_sync() if each.use_no_sync else contextlib.nullcontext():
                for _ in range(each.num_iters):
                    self._backward(model, next(remaining))
        self._backward(
            model, next(remaining)
        )  # every accumulation ends with a backward that reduces
        accumulated = self._gradients(model)
        self.assertEqual(accumulated, expected, atol=1e-4, rtol=1e-4)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("sharding_strategy", STRATEGIES)
    @parametrize("use_orig_params", [False, True])
    def test_grad_acc(self, sharding_strategy, use_orig_params):
        self.run_subtests(
            {"order": ORDERS},
            self._test_grad_acc,
            sharding_strategy=sharding_strategy,
            use_orig_params=use_orig_params,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_grad_acc_prefetch(self):
        self.run_subtests(
            {
                "order": [[UNSYNCED, SYNCED]],
                "backward_prefetch": [BackwardPrefetch.BACKWARD_POST, None],
            },
            self._test_grad_acc,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("use_orig_params", [False, True])
    def test_grad_acc_cpu_offload(self, use_orig_params):
        """Only under ``no_sync``: otherwise each reduced gradient replaces the previous
        one, as FSDP documents.
        """
        self.run_subtests(
            {"order": [[UNSYNCED]], "sharding_strategy": STRATEGIES},
            self._test_grad_acc,
            cpu_offload=CPUOffload(offload_params=True),
            use_orig_params=use_orig_params,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("sharding_strategy", STRATEGIES)
    def test_no_sync_keeps_gradients_from_the_wire(self, sharding_strategy):
        """Without ``no_sync`` each backward reduces the gradients of each FSDP module
        once; under it, none.
        """
        model = self._model(sharding_strategy=sharding_strategy)
        handles = sum(module._handle is not None for module in FSDP.fsdp_modules(model))
        reductions: list[int] = []
        batches = self._batches(model, 3)

        def counting(original: Any) -> Any:
            def reduce(*args: Any, **kwargs: Any) -> Any:
                reductions.append(1)
                return original(*args, **kwargs)

            return reduce

        reduce_scatter = dist.reduce_scatter_single
        with (
            patch_reduce_scatter(counting(reduce_scatter)),
            patch_all_reduce(counting(dist.all_reduce)),
        ):
            with model.no_sync():
                for batch in batches[:2]:
                    self._backward(model, batch)
            self.assertEqual(len(reductions), 0)
            self._backward(model, batches[2])
            self.assertEqual(len(reductions), handles)

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_whole_gradients_are_kept_by_no_sync_alone(self):
        model = self._model()
        flats = [
            module._flat_param
            for module in FSDP.fsdp_modules(model)
            if module._handle is not None
        ]

        def shapes() -> list[torch.Size | None]:
            return [None if flat.grad is None else flat.grad.shape for flat in flats]

        batches = self._batches(model, 2)
        with model.no_sync():
            self._backward(model, batches[0])
        self.assertEqual(
            shapes(),
            [flat._unpadded_unsharded_size for flat in flats],
            "gradients within no_sync",
        )
        self._backward(model, batches[1])
        self.assertEqual(
            shapes(),
            [flat._sharded_size for flat in flats],
            "gradients after a reduction",
        )


instantiate_parametrized_tests(TestGradAcc)

if __name__ == "__main__":
    run_tests()
