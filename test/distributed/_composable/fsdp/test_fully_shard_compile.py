# Owner(s): ["oncall: distributed"]
"""Modules compiled under ``fully_shard`` train like eager ones, and really are
compiled.

``compiled_fsdp_test`` runs a body eagerly and then with its modules compiled; each test
counts graphs in both modes. Inductor generates C++ for the host and the simulated
accelerator, and Triton where it is available. Other accelerators stop after
AOTAutograd, which runs the same graphs op by op.
"""

import copy
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch.distributed.fsdp import fully_shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    FSDPTest,
    check_train_parity,
    compile_backend,
    compiled_fsdp_test,
)
from torch_ext.testing._internal.common_utils import run_tests, slowTest

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

WIDTH = 5


class TestFullyShardCompileCompute(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _models(self):
        torch.manual_seed(0)
        model = nn.Sequential(MLP(WIDTH), nn.Linear(WIDTH, WIDTH))
        return copy.deepcopy(model).to(self.device), model.to(self.device)

    def _count_graphs(self):
        """Return how many graphs Dynamo captured and AOTAutograd traced since the last
        call.
        """
        counts = counters["stats"]["unique_graphs"], counters["aot_autograd"]["total"]
        counters.clear()
        return counts

    def _check_runs(self, body):
        """Run ``body`` in both modes, check that eager mode has no graphs, and return
        those of compiled mode.
        """
        self.graphs = []
        self._count_graphs()
        metrics.reset()
        body()
        self.assertEqual(len(self.graphs), 2, "a mode was left out")
        eager, compiled = self.graphs
        self.assertEqual(eager, (0, 0))
        self.assertGreater(min(compiled), 0)
        self.assertEqual(
            metrics.generated_kernel_count > 0, compile_backend() == "inductor"
        )
        return compiled

    @slowTest
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_compiled_training_equals_eager_training(self):
        """Three steps: later steps reuse the code compiled in the first one, with new
        shards each time.
        """
        self._check_runs(self._train)

    @compiled_fsdp_test()
    def _train(self):
        reference, model = self._models()
        fully_shard(model[0])
        fully_shard(model)
        check_train_parity(self, reference, model, [self.rows(WIDTH)])
        first = counters["stats"]["unique_graphs"]
        check_train_parity(
            self, reference, model, [self.rows(WIDTH, step) for step in range(2)]
        )
        self.assertEqual(
            counters["stats"]["unique_graphs"], first, "recompiled after the first step"
        )
        self.graphs.append(self._count_graphs())

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_only_modules_of_a_class_are_compiled(self):
        """The root and its other child stay eager."""
        self._check_runs(self._train_some)

    @compiled_fsdp_test(compile_compute_on_module=MLP)
    def _train_some(self):
        reference, model = self._models()
        fully_shard(model[0])
        fully_shard(model)
        compiled = [
            module._compiled_call_impl is not None
            for module in (model[0], model[1], model)
        ]
        self.assertIn(compiled, ([False] * 3, [True, False, False]))
        check_train_parity(self, reference, model, [self.rows(WIDTH)])
        self.graphs.append(self._count_graphs())


if __name__ == "__main__":
    run_tests()
