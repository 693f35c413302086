# Owner(s): ["oncall: distributed"]
"""FSDP2 over tensor parallelism, also with replicas: what is split twice or three times
learns what the whole model does, and its state is the whole model's.
"""

import contextlib
import copy
import itertools
import sys

import torch
import torch.nn as nn
from torch import distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import (
    _localize_dtensor,
    _pre_dp_module_transform,
)
from torch.distributed.tensor.parallel.fsdp import (
    DTensorExtensions,
    _create_shard_md_from_dt,
    _create_sharded_tensor_md_from_dt,
    _get_box,
    _get_dt_pg,
    _get_local_box,
    _rewrite_spec_if_needed,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    first_ranks_mesh,
    get_devtype,
)
from torch_ext.testing._internal.common_utils import run_tests
from torch_ext.testing._internal.hypothesis_utils import pairwise

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

OPTIONS = {
    "is_sequence_parallel": (False, True),
    "reshard_after_forward": (True, False),
    "unit": ("block", "root", "layer"),
    "dtype": (None, torch.bfloat16),
    "batches": (1, 2),  # that one step accumulates
}
WIDTH, POSITIONS, ROWS, STEPS = 8, 4, 2, 3
FULL = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def split(model, mesh, is_sequence_parallel):
    """Split the blocks of ``model`` over the ranks of ``mesh``."""
    part = Shard(1) if is_sequence_parallel else Replicate()
    plan = {}
    for index in range(len(model)):
        norm = {f"{index}.norm": SequenceParallel()} if is_sequence_parallel else {}
        plan |= norm | {
            f"{index}.up": ColwiseParallel(input_layouts=part),
            f"{index}.down": RowwiseParallel(output_layouts=part),
        }
    parallelize_module(model, mesh, plan)
    if is_sequence_parallel:
        to_parts = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=part, use_local_output=True
        )
        to_whole = PrepareModuleOutput(
            output_layouts=part, desired_output_layouts=Replicate()
        )
        parallelize_module(model[0], mesh, to_parts)
        parallelize_module(model[-1], mesh, to_whole)


class CompositionTest(FSDPTest):
    def _rows(self, number, replica):
        generator = torch.Generator().manual_seed(100 * number + replica)
        rows = torch.randn(ROWS, POSITIONS, WIDTH, generator=generator)
        return rows.to(self.device)

    def _models(self):
        """Return a model and its copy, the same on all ranks."""
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(3)))
        model = model.to(self.device)
        return copy.deepcopy(model), model

    def _shard(self, model, mesh, unit, **options):
        units = {
            "root": [],
            "block": [*model],
            "layer": [layer for block in model for layer in block.children()],
        }
        for module in units[unit]:
            fully_shard(module, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    def _check(self, model, reference, where, **tolerances):
        found = get_model_state_dict(model, options=FULL)
        self.assertEqual(list(found), list(reference.state_dict()), where)
        for name, value in reference.state_dict().items():
            got = found[name].to(value.device)
            self.assertEqual(got, value, f"{name}, {where}", **tolerances)

    def _step(self, model, optimizer, replicas, row, step):
        """Train on the rows of ``replicas``. Return the loss, and the norm that clips
        the gradients; without sequence parallelism, meshes differ and none can.
        """
        batches, total = row["batches"], torch.zeros((), device=self.device)
        for batch in range(batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(batch == batches - 1)
            for replica in replicas:
                rows = self._rows(step * batches + batch, replica)
                loss = model(rows).float().square().mean() / (len(replicas) * batches)
                loss.backward()
                total += loss.detach()
        if row["is_sequence_parallel"]:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        return total, norm if row["is_sequence_parallel"] else None

    def _train_both(self, mesh, shards, row, where):
        dtype = row["dtype"]
        reference, model = self._models()
        split(model, mesh["tp"], row["is_sequence_parallel"])
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        options = {"reshard_after_forward": row["reshard_after_forward"]}
        self._shard(model, shards, row["unit"], mp_policy=policy, **options)
        rates = {"lr": 0.1, "momentum": 0.9}
        optimizer = torch.optim.SGD(model.parameters(), **rates)
        other = torch.optim.SGD(reference.parameters(), **rates)
        tolerances = {} if dtype is None else {"rtol": 0.05, "atol": 0.02}
        replica = self.rank // mesh["tp"].size()
        for step in range(STEPS):
            loss, norm = self._step(model, optimizer, [replica], row, step)
            dist.all_reduce(loss)
            found = loss / self.world_size, norm
            expected = self._step(reference, other, range(shards.size()), row, step)
            self.assertEqual(found, expected, f"{step}, {where}", **tolerances)
        self._check(model, reference, where, **tolerances)
        return model, optimizer, reference, other


class Test2dComposability(CompositionTest):
    @property
    def world_size(self):
        return 4

    def _mesh(self):
        return init_device_mesh(get_devtype().type, (2, 2), mesh_dim_names=("dp", "tp"))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_training_parity(self):
        mesh = self._mesh()
        for row in pairwise(OPTIONS):
            self._train_both(mesh, mesh["dp"], row, f"{row}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_state_is_the_whole_models(self):
        """Layouts of parameters, gradients and optimizer state; saved state loads."""
        mesh = self._mesh()
        row = {name: values[0] for name, values in OPTIONS.items()}
        row["is_sequence_parallel"] = True
        model, optimizer, reference, other = self._train_both(
            mesh, mesh["dp"], row, "state"
        )
        strided = _StridedShard(0, split_factor=2)
        layouts = {
            "0.norm.weight": (Shard(0), Replicate()),
            "0.up.weight": (strided, Shard(0)),
            "0.up.bias": (strided, Shard(0)),
            "0.down.weight": (Shard(0), Shard(1)),
            "0.down.bias": (Shard(0), Replicate()),
        }
        model(self._rows(99, mesh["dp"].get_local_rank())).sum().backward()
        for name, placements in layouts.items():
            parameter = model.get_parameter(name)
            self.assertEqual(parameter.placements, placements, name)
            self.assertEqual(parameter.grad.placements, placements, f"{name}.grad")
            momentum = optimizer.state[parameter]["momentum_buffer"]
            self.assertEqual(momentum.placements, placements, f"momentum of {name}")
        found = get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
        for name, parameter in reference.named_parameters():
            expected = other.state[parameter]["momentum_buffer"]
            got = found[name]["momentum_buffer"].to(expected.device)
            self.assertEqual(got, expected, f"momentum of {name}")
        _, fresh = self._models()
        nn.init.zeros_(fresh[0].up.weight)
        split(fresh, mesh["tp"], is_sequence_parallel=True)
        self._shard(fresh, mesh["dp"], "block")
        set_model_state_dict(fresh, reference.state_dict(), options=FULL)
        self._check(fresh, reference, "loaded")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_replicas_by_ddp(self):
        """DDP averages the gradients of parts, which are whole to it."""
        mesh = self._mesh()
        reference, model = self._models()
        split(model, mesh["tp"], is_sequence_parallel=False)
        layouts = {
            name: value.placements
            for name, value in model.named_parameters()
            if isinstance(value, DTensor)
        }
        kept = {model[0].up.weight}
        _localize_dtensor(model, ignored_params=kept)
        self.assertEqual({*model.parameters()} & kept, kept)
        _pre_dp_module_transform(model)
        # The first forward replaces them in their modules.
        parameters = dict(model.named_parameters())
        ids = None if self.device.index is None else [self.device.index]
        replicas = DDP(model, ids, process_group=mesh["dp"].get_group())
        optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.1) for each in (replicas, reference)
        ]
        for step in range(STEPS):
            rows = self._rows(step, mesh["dp"].get_local_rank())
            replicas(rows).square().mean().backward()
            for replica in range(2):
                (reference(self._rows(step, replica)).square().mean() / 2).backward()
            for name, whole in reference.named_parameters():
                for kind in ("data", "grad"):
                    expected, where = getattr(whole, kind), f"{kind} of {name}, {step}"
                    if layout := layouts.get(name):
                        expected = distribute_tensor(expected, mesh["tp"], layout)
                        expected = expected.to_local()
                    found = getattr(parameters[name], kind)
                    self.assertNotIsInstance(found, DTensor, where)
                    self.assertEqual(found, expected, where)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_fsdp1_shards_of_parts(self):
        """A sharded tensor of a part says where the part lies in the whole, and holds
        a sharded tensor of the part; loading gets the shard of this rank."""
        # With groups of the whole world, because torch 2.13 names ranks of a group
        # as if they were those of the world.
        mesh, group = init_device_mesh(get_devtype().type, (4,)), dist.group.WORLD
        whole = torch.arange(128.0, dtype=torch.float64, device=self.device)
        whole = whole.view(16, 8)
        extension = DTensorExtensions(torch.get_device_module(self.device))
        numbers = self.rank, 4, 4, group
        found = extension.chunk_tensor(whole, *numbers)
        self.assertEqual(found.local_tensor(), whole.chunk(4)[self.rank])
        for placement in (Shard(0), Shard(1), Replicate()):
            where, starts = f"{placement}", [[0, 0]]
            made = distribute_tensor(whole, mesh, [placement]).requires_grad_()
            part = made.to_local().detach()
            if isinstance(placement, Shard):
                step = whole.shape[placement.dim] // 4
                starts = [
                    [index * step * (dim == placement.dim) for dim in (0, 1)]
                    for index in range(4)
                ]
            outer = extension.chunk_tensor(made, *numbers)
            (shard,), metadata = outer.local_shards(), copy.deepcopy(outer.metadata())
            metadata.tensor_properties.requires_grad = True
            plain = ShardedTensor._init_from_local_shards_and_global_metadata(
                [type(shard)(part.clone().requires_grad_(), shard.metadata)],
                sharded_tensor_metadata=metadata,
                process_group=group,
            )
            with torch.no_grad():
                again = extension.chunk_tensor(plain, *numbers)
            for each in (made, made.detach()):
                properties = _create_sharded_tensor_md_from_dt(each, group)
                properties = properties.tensor_properties
                self.assertEqual(properties.requires_grad, each.requires_grad)
            for found in (outer, again):
                (shard,), metadata = found.local_shards(), found.metadata()
                self.assertEqual(metadata.size, whole.shape, where)
                self.assertEqual(metadata.tensor_properties.dtype, whole.dtype, where)
                self.assertFalse(metadata.tensor_properties.requires_grad, where)
                offsets = starts[self.rank % len(starts)]
                self.assertEqual(shard.metadata.shard_offsets, offsets, where)
                self.assertEqual(shard.metadata.shard_sizes, [*part.shape], where)
                self.assertEqual(shard.metadata.placement.rank(), self.rank, where)
                every = [each.shard_offsets for each in metadata.shards_metadata]
                self.assertEqual(every, starts, where)
                self.assertEqual(found._process_group.size(), 4, where)
                inner, shards = extension.pre_load_state_dict_transform(found)
                self.assertIsInstance(inner, ShardedTensor)
                self.assertEqual(inner.metadata().size, part.shape, where)
                self.assertEqual(len(shards), 1, where)
                expected = part.chunk(4)[self.rank]
                self.assertEqual(shards[0].tensor, expected, where)
            self.assertIs(extension.pre_load_state_dict_transform(inner)[0], inner)
            shards = extension.pre_load_state_dict_transform(inner)[1]
            self.assertEqual(shards[0].tensor, expected, where)
        # Fewer rows than ranks: the last have none.
        found = extension.chunk_tensor(whole[:3], *numbers)
        _, shards = extension.pre_load_state_dict_transform(found)
        self.assertEqual(len(shards), self.rank < 3)
        if self.rank == 3:
            with self.assertRaises(AssertionError):
                extension.chunk_tensor(found, *numbers)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_fsdp1_chunks_on_two_dimensions(self):
        """A chunk of a part is a DTensor of both meshes; a sharded tensor is one of a
        single dimension."""
        mesh, group = self._mesh(), dist.group.WORLD
        whole = torch.arange(128.0, device=self.device).view(16, 8)
        extension = DTensorExtensions(torch.get_device_module(self.device))
        numbers = self.rank, 4, 4, group
        twice = distribute_tensor(whole, mesh, [Replicate()] * 2)
        with self.assertRaisesRegex(AssertionError, "Only 1D"):
            extension.chunk_tensor(twice, *numbers)
        for place in (
            _get_box,
            _get_local_box,
            _get_dt_pg,
            lambda each: _create_shard_md_from_dt(each, self.rank),
        ):
            with self.assertRaisesRegex(AssertionError, "Only 1D"):
                place(twice)
        smaller = distribute_tensor(whole, first_ranks_mesh(3), [Replicate()])
        if self.rank == 3:
            with self.assertRaises(AssertionError):
                _get_local_box(smaller)
        names = ("replicate", "shard", "tp")
        large = init_device_mesh(get_devtype().type, (1, 2, 2), mesh_dim_names=names)
        for each, layout in ((mesh, ()), (large, (Replicate(),))):
            rank = each.get_local_rank(-2)
            for placement in (Shard(0), Shard(1), Replicate()):
                part = distribute_tensor(whole, each["tp"], [placement])
                part.requires_grad_()
                with CommDebugMode() as log:
                    made = extension.chunk_dtensor(part, rank, each)
                # A chunk of chunks of the same dimension needs the whole.
                self.assertEqual(log.get_total_counts(), placement == Shard(0))
                layouts = (*layout, Shard(0), placement)
                self.assertEqual(made.placements, layouts)
                self.assertFalse(made.requires_grad)
                expected = whole.chunk(2)[rank]
                if isinstance(placement, Shard):
                    tp = each.get_local_rank("tp")
                    expected = expected.chunk(2, placement.dim)[tp]
                self.assertEqual(made.to_local(), expected, f"{layouts}")
                found = extension.all_gather_dtensor(made, each)
                self.assertEqual(found, part.to_local(), f"{layouts}")
            made = extension.chunk_dtensor(whole.requires_grad_(), rank, each)
            self.assertFalse(made.requires_grad)
            self.assertEqual(made.full_tensor(), whole)
        row = init_device_mesh(get_devtype().type, (1, 4), mesh_dim_names=names[1:])
        part = distribute_tensor(whole, row["tp"], [Shard(1)])
        made = extension.chunk_dtensor(part, 0, row)
        made.to_local().zero_()
        self.assertEqual(part.full_tensor(), whole, "a chunk has its own memory")
        with self.assertRaisesRegex(RuntimeError, "ndim=1"):
            alone = init_device_mesh(get_devtype().type, (4,))
            extension.chunk_dtensor(whole, self.rank, alone)
        with self.assertRaisesRegex(RuntimeError, "No parent device_mesh"):
            extension.chunk_dtensor(whole, self.rank, None)
        with self.assertRaises(AssertionError):
            extension.all_gather_dtensor(made, mesh["tp"])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_places_of_shards_follow_their_device(self):
        """The place of this rank's shard is the device of a tensor that has moved; the
        places of all other ranks stay, and a spec that fits stays as it is."""
        here = torch.zeros(1, device=self.device)
        others = [f"rank:{rank}/meta" for rank in range(4)]
        for own, rank in itertools.product((here.device, "meta"), range(4)):
            where, places = f"{own} of {rank}", list(others)
            places[rank] = f"rank:{rank}/{own}"
            spec = ChunkShardingSpec(0, list(places))
            found = _rewrite_spec_if_needed(spec, here, rank)
            self.assertEqual(found is spec, own == here.device, where)
            self.assertEqual([str(each) for each in spec.placements], places, where)
            places[rank] = f"rank:{rank}/{here.device}"
            self.assertEqual([str(each) for each in found.placements], places, where)
            self.assertEqual(found.dim, 0)
        other = EnumerableShardingSpec([ShardMetadata([0], [1])])
        self.assertIs(_rewrite_spec_if_needed(other, here, 0), other)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_fsdp1_parts_on_the_stream_of_computation(self):
        """Parts come back, and gradients that are on their way are waited for, on the
        stream of computation; without one, on the current stream."""
        mesh, streams, seen = self._mesh()["tp"], [], []

        class Device:
            current_stream = staticmethod(lambda: "current")

            @staticmethod
            @contextlib.contextmanager
            def stream(name):
                streams.append(name)
                yield
                streams.append(f"end of {name}")

        extension, whole = DTensorExtensions(Device), self._rows(0, 0)[0]
        for name in (None, "computation"):
            if name:
                extension.compute_stream = name
            made = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]))
            part, spec = extension.pre_flatten_transform(made)
            self.assertTrue(part.requires_grad)
            self.assertEqual(extension.pre_flatten_transform(whole), (whole, None))
            leaf = part.detach().clone().requires_grad_()
            leaf.register_hook(lambda grad: all_reduce(grad, "sum", mesh))
            found = extension.post_unflatten_transform(leaf, spec)
            leaf.register_hook(lambda grad: seen.append(type(grad)))
            self.assertEqual(
                (found.placements, found.shape), ((Shard(1),), whole.shape)
            )
            self.assertEqual(found.full_tensor(), whole)
            self.assertTrue(_is_fsdp_flattened(found))
            (found * 3).to_local().sum().backward()
            self.assertEqual(leaf.grad, torch.full_like(part, 6))
        used = ["current", "computation", "computation"]
        self.assertEqual([each for each in streams if " " not in each], used)
        self.assertEqual(seen, [torch.Tensor] * 2)
        # Parts of different sizes give the whole shape, and need no gradient.
        uneven = distribute_tensor(whole[:3], mesh, [Shard(0)])
        part, spec = extension.pre_flatten_transform(uneven)
        fixed = extension.post_unflatten_transform(part.detach(), spec)
        self.assertFalse(fixed.requires_grad)
        self.assertEqual(fixed.shape, whole[:3].shape)
        self.assertEqual(fixed.full_tensor(), whole[:3])


class Test3dComposability(CompositionTest):
    @property
    def world_size(self):
        return 8

    @skip_if_lt_x_gpu(8, allow_cpu=True)
    def test_replicas_of_shards_of_tensor_parallelism(self):
        names = ("replicate", "shard", "tp")
        mesh = init_device_mesh(get_devtype().type, (2, 2, 2), mesh_dim_names=names)
        row = {name: values[-1] for name, values in OPTIONS.items()}
        row |= {"unit": "block", "dtype": None}
        self._train_both(mesh, mesh["replicate", "shard"], row, f"{row}")


if __name__ == "__main__":
    run_tests()
