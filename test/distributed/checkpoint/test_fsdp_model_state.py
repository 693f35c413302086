# Owner(s): ["oncall: distributed"]
"""State dicts of wrapped models have the names and values of the plain model."""

import copy
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, world_mesh
from torch_ext.testing._internal.common_utils import run_tests, slowTest
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

FULL = StateDictOptions(full_state_dict=True)


class TestFsdpModelStateCheckpoint(FSDPTest):
    LAYERS = {
        "plain": lambda layer: layer,
        "checkpointed": checkpoint_wrapper,
        "compiled": torch.compile,
    }
    # The first is the reference.
    MODELS = (
        "plain", "ddp", "compiled ddp", "ddp compiled", "fsdp", "fsdp of layers",
        "fsdp of parameters", "fsdp with a mesh", "fsdp within",
    )  # fmt: skip

    @property
    def world_size(self):
        return 2

    def _wrapped(self, model, kind):
        if kind == "plain":
            return model
        if "ddp" in kind:
            model = torch.compile(model) if kind == "ddp compiled" else model
            model = DDP(model)
            return torch.compile(model) if kind == "compiled ddp" else model
        kwargs = {"device_id": self.device}
        if kind in ("fsdp of layers", "fsdp within"):
            for index, layer in enumerate(model):
                model[index] = FSDP(layer, **kwargs)
        if kind == "fsdp within":
            return model
        kwargs["use_orig_params"] = kind in ("fsdp of parameters", "fsdp with a mesh")
        mesh = world_mesh(2) if kind == "fsdp with a mesh" else None
        return FSDP(model, device_mesh=mesh, **kwargs)

    def _trained(self, seed, steps, layers, kind):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1))
        model[1].register_buffer("kept", torch.full((2,), float(seed)))
        for index, layer in enumerate(model):
            model[index] = self.LAYERS[layers](layer)
        model = self._wrapped(model.to(self.device), kind)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + seed))
        self._train(model, optimizer, range(steps))
        return model, optimizer

    def _train(self, model, optimizer, steps):
        """All ranks have the same rows, so all wrappers train as without."""
        for step in steps:
            rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            with torch.compiler.set_stance("force_eager"):
                model(rows.to(self.device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def _works(self, layers="plain", kind="plain", on_rank_0=False):
        # Torch 2.13 does not remove wrappers from the names in a flat parameter.
        if kind in ("fsdp", "fsdp of layers", "fsdp within") and layers != "plain":
            return False
        # Without a device's own memory, offloading a full state is no copy.
        on_host = self.device == torch.device("cpu")
        return not (on_rank_0 and "fsdp" in kind and on_host)

    @slowTest
    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_full_state_of_wrapped_models(self):
        """The full state of a wrapped model equals the plain model's, and loads from
        all ranks or from the first.
        """
        reference = self._trained(0, 2, "plain", "plain")
        expected = copy.deepcopy(get_state_dict(*reference, options=FULL))
        self._train(*reference, range(2, 3))
        trained = get_state_dict(*reference, options=FULL)
        rows = {
            "layers": [*self.LAYERS],
            "kind": self.MODELS,
            "on_rank_0": (False, True),
        }
        for row in pairwise(rows, lambda row: self._works(**row)):
            on_rank_0, label = row.pop("on_rank_0"), f"{row}"
            options = StateDictOptions(full_state_dict=True, cpu_offload=on_rank_0)
            state = get_state_dict(*self._trained(0, 2, **row), options=options)
            if on_rank_0 and self.rank:
                self.assertEqual([len(each.get("state", ())) for each in state], [0, 0])
                state = {}, {}
            else:
                self.assertEqual(state, expected, f"saved, {label}", exact_device=False)
            model, optimizer = self._trained(1, 1, **row)
            options = StateDictOptions(
                full_state_dict=True, broadcast_from_rank0=on_rank_0
            )
            set_model_state_dict(model, copy.deepcopy(state[0]), options=options)
            set_optimizer_state_dict(model, optimizer, state[1], options=options)
            self._train(model, optimizer, range(2, 3))
            found = get_state_dict(model, optimizer, options=FULL)
            self.assertEqual(found, trained, f"trained on, {label}")

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_state_that_cannot_be_loaded(self):
        """The error says why: the state is empty, lacks a name, or the options exclude
        each other.
        """
        model, optimizer = self._trained(0, 1, "plain", "ddp")
        state, _ = get_state_dict(model, optimizer)
        part = {name: each for name, each in state.items() if name != "0.bias"}
        broadcast = StateDictOptions(broadcast_from_rank0=True)
        for call, text in (
            ((set_model_state_dict, model, {}), "model state_dict is empty"),
            ((set_optimizer_state_dict, model, optimizer, {}), "optim state_dict is"),
            ((set_model_state_dict, model, dict(part)), "Missing key: 0.bias"),
        ):
            with self.assertRaisesRegex(RuntimeError, text):
                call[0](*call[1:])
        with self.assertRaisesRegex(ValueError, "full_state_dict must be True"):
            get_model_state_dict(model, options=broadcast)
        found = set_model_state_dict(
            model, part, options=StateDictOptions(strict=False)
        )
        self.assertEqual([*found.missing_keys], ["module.0.bias"])


if __name__ == "__main__":
    run_tests()
