"""An FSDP1 model trained beside the same model under DDP, on the same data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal._fsdp.fixed_worlds import TwoRankTest
from torch_ext.testing._internal._fsdp.state import get_full_params

__all__ = ["BesideDDPTest"]


class BesideDDPTest(TwoRankTest):
    """Two ranks, on which each test trains one model both ways."""

    def check_trains_as_ddp(
        self, make: Callable[[Callable[[nn.Module], nn.Module]], nn.Module], train: Callable[[nn.Module], Any]
    ) -> None:
        """Check that FSDP's training gives DDP's parameters and gradients of inputs, and moves parameters. Collective.

        Args:
            make: makes the model, the same each time; may wrap parts of it by the function that it is given.
            train: trains a model and returns the gradients that reached its inputs.
        """
        ddp_model = DDP(make(lambda module: module).to(self.device))
        fsdp_model = self._fsdp(make(self._fsdp))
        before = get_full_params(fsdp_model)
        expected = train(ddp_model)
        self.assertEqual(train(fsdp_model), expected, "gradients of the inputs")
        after = get_full_params(fsdp_model)
        self.assertEqual(after, list(ddp_model.parameters()))
        self.assertNotEqual(after, before)

    def _fsdp(self, module: nn.Module) -> FSDP:
        return FSDP(module.to(self.device), device_id=self.device)
