# Owner(s): ["oncall: distributed"]
"""State dicts of ``fully_shard`` models: sharded, full through the checkpoint helpers,
and loading both.

Every rank checks loaded values, which differ between shards. So a load that reaches
only rank 0, or that swaps shards, is found.
"""

import copy
import re
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    MLP,
    FSDPTest,
    get_devtype,
    skip_without_accelerator,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

WIDTH = 6


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        MLP(WIDTH, dim_multiplier=3, with_buffer=True),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 3),
    )


def full_state(model):
    """Return the whole state of ``model`` on the host. Buffers are no DTensors.
    Collective.
    """
    state = model.state_dict().items()
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).cpu()
        for name, each in state
    }


class StateDictTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def shard(self, model, mesh=None, **options):
        mesh = mesh or world_mesh(4)
        fully_shard(model[0], mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    def sharded(self, seed, mesh=None, **options):
        return self.shard(make_model(seed).to(self.device), mesh, **options)

    def check_is(self, model, seed):
        """Check on every rank that the full parameters are those of
        ``make_model(seed)``.
        """
        expected = make_model(seed).state_dict()
        found = full_state(model)
        self.assertEqual(list(found), list(expected))
        for name, tensor in expected.items():
            self.assertEqual(found[name], tensor, name, atol=0, rtol=0)


class TestFullyShardStateDictMultiProcess(StateDictTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_dp_state_dict_save_load(self):
        """Names are those of the plain model, and tensors are DTensors that share
        memory with the parameters.
        """
        self.run_subtests(
            {"mesh_shape": [(4,), (2, 2)], "reshard_after_forward": [True, False]},
            self._test_save_load,
        )

    def _test_save_load(self, mesh_shape, reshard_after_forward):
        mesh = world_mesh(*mesh_shape)
        model = self.sharded(0, mesh, reshard_after_forward=reshard_after_forward)
        # Even if parameters stay gathered, the state dict is sharded.
        model(self.rows(WIDTH))
        state = model.state_dict()
        self.assertEqual(list(state), list(make_model().state_dict()))
        for name, parameter in model.named_parameters():
            self.assertIsInstance(state[name], DTensor, name)
            self.assertEqual(state[name].device_mesh, mesh)
            self.assertEqual(
                state[name].to_local().data_ptr(), parameter.to_local().data_ptr(), name
            )
        self.check_is(model, 0)
        other = self.sharded(1, mesh)
        self.assertNotEqual(
            other[2].weight.full_tensor(), model[2].weight.full_tensor()
        )
        other.load_state_dict(state)
        self.check_is(other, 0)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_plain_tensors_are_refused_by_a_sharded_model(self):
        """A plain tensor must be distributed before it is loaded; FSDP does not scatter
        it silently.
        """
        model = self.sharded(0)
        with self.assertRaisesRegex(
            (RuntimeError, NotImplementedError),
            "mixed torch.Tensor and DTensor|size mismatch",
        ):
            model.load_state_dict(make_model(1).to(self.device).state_dict())
        distributed = {
            name: distribute_tensor(
                tensor.to(self.device), model.state_dict()[name].device_mesh, [Shard(0)]
            )
            if isinstance(model.state_dict()[name], DTensor)
            else tensor
            for name, tensor in make_model(1).state_dict().items()
        }
        model.load_state_dict(distributed)
        self.check_is(model, 1)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_wrong_names_and_shapes_are_reported(self):
        model = self.sharded(0)
        state = model.state_dict()
        missing = {name: tensor for name, tensor in state.items() if name != "2.bias"}
        with self.assertRaisesRegex(RuntimeError, 'Missing key.*"2.bias"'):
            model.load_state_dict(missing)
        with self.assertRaisesRegex(RuntimeError, 'Unexpected key.*"2.extra"'):
            model.load_state_dict({**state, "2.extra": state["2.bias"]})
        result = model.load_state_dict(missing, strict=False)
        self.assertEqual(result.missing_keys, ["2.bias"])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_dp_state_dict_cpu_offload(self):
        """The state of an offloaded model is on the host and loads into the memory that
        the optimizer refers to.
        """
        self.run_subtests({"mesh_shape": [(4,), (2, 2)]}, self._test_cpu_offload)

    def _test_cpu_offload(self, mesh_shape):
        skip_without_accelerator(
            "CPUOffloadPolicy needs an accelerator to offload from"
        )
        mesh, policy = world_mesh(*mesh_shape), CPUOffloadPolicy()
        model = self.shard(make_model(0), mesh, offload_policy=policy)
        model[0].buffer = model[0].buffer.to(self.device)
        model(self.rows(WIDTH)).sum().backward()
        for name, parameter in model.named_parameters():
            self.assertFalse(parameter.to_local().device == self.device, name)
            self.assertEqual(model.state_dict()[name].device, parameter.device)
        saved = {
            name: tensor.detach().clone() for name, tensor in model.state_dict().items()
        }
        other = self.shard(make_model(1), mesh, offload_policy=policy)
        other.load_state_dict(saved, assign=True)
        for name, parameter in other.named_parameters():
            self.assertEqual(
                parameter.to_local().detach(), saved[name].to_local(), name
            )
        other[0].buffer = other[0].buffer.to(self.device)
        self.assertEqual(other(self.rows(WIDTH)), model(self.rows(WIDTH)))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_2d_state_dict_save_load(self):
        mesh = init_device_mesh(get_devtype().type, (2, 2), mesh_dim_names=("dp", "tp"))
        models = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = MLP(8).to(self.device)
            plan = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            models.append(fully_shard(model, mesh=mesh["dp"]))
        torch.manual_seed(0)
        expected = MLP(8).state_dict()
        source, target = models
        for model in (source, target):
            if model is target:
                model.load_state_dict(source.state_dict())
            found = full_state(model)
            self.assertEqual(found, expected, atol=0, rtol=0)
        self.assertEqual(source.state_dict()["in_proj.weight"].device_mesh.ndim, 2)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_hooks_on_state_dict_see_sharded_parameters(self):
        """FSDP's own hooks reshard first, when parameters have stayed gathered since
        forward.
        """
        model = self.sharded(0, reshard_after_forward=False)
        seen = []

        def note(when):
            seen.append(
                (when, {type(parameter) for parameter in model[2].parameters()})
            )

        model(self.rows(WIDTH))
        note("after forward")
        model[2].register_state_dict_pre_hook(lambda *_: note("before saving"))
        state = model.state_dict()
        self.assertEqual(
            seen,
            [("after forward", {nn.Parameter}), ("before saving", {DTensor})],
            "before saving",
        )
        model(self.rows(WIDTH))
        model[2].register_load_state_dict_pre_hook(lambda *_: note("before loading"))
        model.load_state_dict(state)
        self.assertEqual(seen[2:], [("before loading", {DTensor})], "before loading")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_rank0_loads_for_all_on_meta(self):
        """After a model on the meta device is materialized, rank 0's values are loaded
        into the shards of all ranks.
        """
        with torch.device("meta"):
            model = make_model()
        self.shard(model).to_empty(device=self.device)
        full = make_model(3).state_dict() if self.rank == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, full, options=options)
        self.check_is(model, 3)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_assign_sharded_state_to_a_meta_model(self):
        with torch.device("meta"):
            model = make_model()
        self.shard(model)
        source = self.sharded(2)
        model.load_state_dict(source.state_dict(), assign=True)
        self.check_is(model, 2)
        self.assertEqual(model(self.rows(WIDTH)), source(self.rows(WIDTH)))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_meta_model_refuses_to_run(self):
        with torch.device("meta"):
            model = make_model()
        self.shard(model)
        still_on_meta = (
            "FSDP parameters should be materialized from meta device before training, "
            "but the following were still on meta device: "
        )
        names = [
            "1.weight",
            "1.bias",
            "2.weight",
            "2.bias",
        ]  # of the root's group, which comes first
        with self.assertRaisesRegex(RuntimeError, re.escape(f"{still_on_meta}{names}")):
            model(self.rows(WIDTH))
        with self.assertRaisesRegex(RuntimeError, re.escape(still_on_meta)):
            model[0].unshard()


class TestFullyShardCheckpoint(StateDictTest):
    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_full_state_dict(self):
        """Full tensors on all ranks, or with offloading on rank 0 only and on
        the host.
        """
        model = self.sharded(0)
        full = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True)
        )
        expected = make_model(0).state_dict()
        self.assertEqual(
            {name: tensor.cpu() for name, tensor in full.items()},
            expected,
            atol=0,
            rtol=0,
        )
        self.assertFalse(any(isinstance(tensor, DTensor) for tensor in full.values()))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        offloaded = get_model_state_dict(model, options=options)
        if self.rank:
            self.assertEqual(offloaded, {})
        else:
            self.assertEqual(dict(offloaded), expected, atol=0, rtol=0)
            self.assertEqual(
                {tensor.device for tensor in offloaded.values()},
                {torch.empty(0).device},
            )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_full_state_dict_into_a_sharded_model(self):
        model = self.sharded(0)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, make_model(1).state_dict(), options=options)
        self.check_is(model, 1)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_round_trip_across_meshes(self):
        """A checkpoint in files is saved under one mesh and loaded under another."""
        self.run_subtests(
            {"meshes": [((4,), (2, 2)), ((2, 2), (4,))]}, self._test_round_trip
        )

    def _test_round_trip(self, meshes):
        folder = self.shared_folder()
        saved, loaded = (world_mesh(*shape) for shape in meshes)
        dcp.save(get_model_state_dict(self.sharded(0, saved)), checkpoint_id=folder)
        model = self.sharded(1, loaded)
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state)
        self.check_is(model, 0)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_optimizer_state_round_trip(self):
        """Training continues after a load as it would have without it."""
        self.run_subtests({"full": [True, False]}, self._test_optimizer_round_trip)

    def _test_optimizer_round_trip(self, full):
        options = StateDictOptions(full_state_dict=full)
        model, other = self.sharded(0), self.sharded(1)
        optimizer, other_optimizer = (
            torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, other)
        )
        self._train(model, optimizer, steps=2)
        set_model_state_dict(
            other, get_model_state_dict(model, options=options), options=options
        )
        # Sharded state is not copied, so copy it, as a file would.
        state = copy.deepcopy(
            get_optimizer_state_dict(model, optimizer, options=options)
        )
        set_optimizer_state_dict(other, other_optimizer, state, options=options)
        for each, of_each in ((model, optimizer), (other, other_optimizer)):
            self._train(each, of_each, steps=1, start=2)
        for (name, found), expected in zip(
            other.named_parameters(), model.parameters(), strict=True
        ):
            self.assertEqual(
                found.to_local().detach(),
                expected.to_local().detach(),
                name,
                atol=0,
                rtol=0,
            )

    def _train(self, model, optimizer, steps, start=0):
        for step in range(start, start + steps):
            model(self.rows(WIDTH, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    run_tests()
