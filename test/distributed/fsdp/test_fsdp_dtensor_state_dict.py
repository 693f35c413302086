# Owner(s): ["oncall: distributed"]
"""Sharded state dicts of FSDP1 over a device mesh: each tensor is a DTensor that holds
this rank's rows.
"""

import sys
from typing import Any

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    Chain,
    FSDPTest,
    get_full_params,
    skip_known_defect,
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

SHARDED = StateDictType.SHARDED_STATE_DICT


class TestFSDPWithDeviceMeshAndDTensor(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _trained(
        self, offload_to_cpu: bool = False, seed: int = 0, use_orig_params: bool = False
    ) -> tuple[FSDP, torch.optim.Optimizer]:
        """Return a model over a mesh after a step, with the type of its state dicts
        set.
        """
        options = {
            "device_id": self.device,
            "device_mesh": world_mesh(self.world_size),
            "use_orig_params": use_orig_params,
        }
        module = Chain(lambda layer: FSDP(layer, **options), self.device, seed)
        model = FSDP(module, **options)
        FSDP.set_state_dict_type(
            model,
            SHARDED,
            ShardedStateDictConfig(offload_to_cpu=offload_to_cpu),
            ShardedOptimStateDictConfig(offload_to_cpu=offload_to_cpu),
        )
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        model(
            Chain.rows(self.device, self.world_size, self.rank)
        ).square().mean().backward()
        optim.step()
        return model, optim

    def _reference(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Chain(device=self.device)
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        model(Chain.rows(self.device, self.world_size)).square().mean().backward()
        optim.step()
        return model, optim

    def _own_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows, as ``torch.chunk`` divides them. Shape: as ``whole``
        but for the first dimension.
        """
        chunks = whole.detach().chunk(self.world_size)
        return chunks[self.rank] if self.rank < len(chunks) else whole.detach()[:0]

    def _check(self, label: str, found: Any, whole: torch.Tensor) -> None:
        self.assertIsInstance(found, DTensor, f"{label} is no DTensor")
        self.assertEqual(list(found.placements), [Shard(0)], f"placements of {label}")
        self.assertEqual(found.shape, whole.shape, f"shape of {label}")
        self.assertEqual(
            found.to_local(),
            self._own_rows(whole),
            f"shard of {label}",
            exact_device=False,
        )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("offload_to_cpu", [True, False])
    def test_dtensor_sharded_tensor_state_dict_identical(self, offload_to_cpu):
        """Each rank's part is its rows of the unsharded parameter, on the host if asked
        for.
        """
        model, _ = self._trained(offload_to_cpu)
        expected = self._reference()[0].state_dict()
        state = model.state_dict()
        self.assertEqual(list(state), list(expected))
        for name, whole in expected.items():
            self._check(name, state[name], whole)
            kind = "cpu" if offload_to_cpu else self.device.type
            self.assertEqual(
                state[name].to_local().device.type, kind, f"device of {name}"
            )

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("use_orig_params", [False, True])
    @parametrize("offload_to_cpu", [True, False])
    def test_fsdp_init_with_device_mesh(self, use_orig_params, offload_to_cpu):
        """With a mesh, state dicts hold DTensors, those of optimizers too."""
        if use_orig_params:
            skip_known_defect("optimizer_state_on_the_host")
        model, optim = self._trained(offload_to_cpu, use_orig_params=use_orig_params)
        reference, reference_optim = self._reference()
        state = FSDP.optim_state_dict(model, optim)["state"]
        kind = "cpu" if offload_to_cpu else self.device.type
        for name, param in reference.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                label, found = f"{key} of {name}", state[name][key]
                self._check(label, found, reference_optim.state[param][key])
                device = found.to_local().device.type
                self.assertEqual(device, kind, f"device of {label}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    @parametrize("offload_to_cpu", [True, False])
    @parametrize("use_orig_params", [False, True])
    def test_dtensor_sharded_model_load_state_dict(
        self, offload_to_cpu, use_orig_params
    ):
        """A model that loads the state of model and optimizer trains identically."""
        if use_orig_params:
            skip_known_defect("optimizer_state_on_the_host")
        options = {"use_orig_params": use_orig_params}
        model, optim = self._trained(offload_to_cpu, **options)
        other, other_optim = self._trained(offload_to_cpu, seed=1, **options)
        other.load_state_dict(model.state_dict())
        saved = FSDP.optim_state_dict(model, optim)
        other_optim.load_state_dict(
            FSDP.optim_state_dict_to_load(other, other_optim, saved)
        )
        self.assertEqual(
            get_full_params(other), get_full_params(model), "loaded parameters"
        )
        for each, its_optim in ((model, optim), (other, other_optim)):
            its_optim.zero_grad()
            each(
                Chain.rows(self.device, self.world_size, self.rank, 1)
            ).square().mean().backward()
            its_optim.step()
        self.assertEqual(
            get_full_params(other),
            get_full_params(model),
            "parameters after the next step",
        )


instantiate_parametrized_tests(TestFSDPWithDeviceMeshAndDTensor)

if __name__ == "__main__":
    run_tests()
