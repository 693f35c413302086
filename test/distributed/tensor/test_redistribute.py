# Owner(s): ["oncall: distributed"]
"""DTensor's redistribution: between any two placements on any mesh, values, shards and
gradients equal those that slicing the whole tensor gives.
"""

import contextlib
import itertools
import pickle
import random
import sys
from unittest import mock

import sympy
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch._dynamo.source import ConstantSource
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import (
    DeviceMesh,
    _mesh_resources,
    init_device_mesh,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor._collective_utils import (
    MeshTopoInfo,
    one_step_redistribute_cost,
    redistribute_cost,
)
from torch.distributed.tensor._dtensor_spec import (
    DTensorSpec,
    ShardOrderEntry,
    TensorMeta,
)
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    disable_redistribute_transform_optimization,
    redistribute_local_tensor,
    use_min_cost_redistribution_plan,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._debug_mode import DebugMode

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import (
    FSDPTest,
    first_ranks_mesh,
    world_mesh,
)
from torch_ext.testing._internal.common_utils import (
    TestCase,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

# Of a whole tensor, and how ranks may have parts of its values.
SIZES = {
    "uneven": ((5, 6, 3), "sum"),
    "fewer than ranks": ((1, 2, 3), "max"),
    "even": ((4, 8), "avg"),
}
PLAIN = (Replicate(), Shard(0), Shard(1))
# Of FSDP over tensor parallelism: the second dimension of the mesh cuts first.
FSDP_OF_TP = {dim: (_StridedShard(dim, split_factor=2), Shard(dim)) for dim in (0, 1)}


def cut(whole, dim, number, index):
    """Return part ``index`` of ``number``, of which the last ones may be smaller."""
    step = -(-whole.shape[dim] // number)
    start = min(step * index, whole.shape[dim])
    return whole.narrow(dim, start, min(step, whole.shape[dim] - start))


def local_part(whole, mesh, placements, order=()):
    """Return the part of ``whole`` that this rank has, if dimensions of the mesh cut in
    ``order``; partial values are left out."""
    for mesh_dim in order or range(mesh.ndim):
        placement = placements[mesh_dim]
        place = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
        if isinstance(placement, Shard):
            whole = cut(whole, placement.dim, *place)
        elif isinstance(placement, _StridedShard):
            dim, number = placement.dim, placement.split_factor
            blocks = [cut(whole, dim, number, index) for index in range(number)]
            whole = torch.cat([cut(block, dim, *place) for block in blocks], dim)
    return whole


@contextlib.contextmanager
def planner(name):
    """Plan by the least cost, or the default way, without plans made before."""
    least = use_min_cost_redistribution_plan
    with least() if name == "least cost" else contextlib.nullcontext():
        _gen_transform_infos.cache_clear()
        yield
    _gen_transform_infos.cache_clear()


class RedistributeTest(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _whole(self, size, seed=0):
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randint(-9, 9, SIZES[size][0], generator=generator)
        return whole.float().to(self.device)

    def _source(self, whole, mesh, placements):
        """Return a DTensor of ``whole``; ranks have different partial values."""
        part = local_part(whole, mesh, placements).clone()
        for dim, placement in enumerate(placements):
            index, number = mesh.get_local_rank(dim), mesh.size(dim)
            if placement == Partial("sum"):
                part = part * (1 - 4.0 * (number - 1) if index == 0 else 4.0)
            elif placement == Partial("avg"):
                part = part + 2.0 * index - (number - 1)
            elif placement == Partial("max"):
                part = part - float((index + 1) % number)
        shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize(
        "size,sizes,plan",
        [
            *((size, (4,), "default") for size in SIZES),
            ("uneven", (2, 2), "default"),
            ("uneven", (2, 2), "least cost"),
            ("even", (2, 2), "least cost"),
        ],
    )
    def test_any_placements_to_any(self, size, sizes, plan):
        with planner(plan):
            self._check_any_to_any(size, sizes)

    def _check_any_to_any(self, size, sizes):
        mesh, whole = world_mesh(*sizes), self._whole(size)
        from_any = (*PLAIN, Partial(SIZES[size][1]))
        sources = itertools.product(from_any, repeat=len(sizes))
        self._check(whole, mesh, sources, itertools.product(PLAIN, repeat=len(sizes)))

    def _check(self, whole, mesh, sources, targets):
        """Check the values and parts of redistributions of ``whole`` between each of
        ``sources`` and each of ``targets``."""
        for source, target in itertools.product(sources, targets):
            where = f"{[*whole.shape]} on {mesh}: {source} to {target}"
            made = self._source(whole, mesh, source)
            found = made.redistribute(mesh, target)
            self.assertEqual(found.placements, target, where)
            self.assertEqual(found.full_tensor(), whole, f"value, {where}")
            expected = local_part(whole, mesh, target)
            self.assertEqual(found.to_local(), expected, f"part, {where}")
            before = self._source(whole, mesh, source)
            self.assertEqual(made.to_local(), before.to_local(), f"source, {where}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_shards_of_blocks(self):
        """Shards of several blocks, which no order of cuts gives, to and from all
        others; also where a rank is not part of the mesh."""
        whole = self._whole("uneven")
        blocks = (_StridedShard(0, split_factor=4), _StridedShard(1, split_factor=3))
        # Only the host's collectives have no all-to-all.
        group = dist.new_group(backend="gloo")
        host = DeviceMesh.from_group(group, torch.device("cpu").type)
        for mesh in (world_mesh(4), first_ranks_mesh(3), host):
            whole = whole.to(mesh.device_type)
            if mesh.get_coordinate() is None:
                outside = distribute_tensor(whole, mesh, [Shard(0)])
                self.assertEqual(outside.to_local().numel(), 0)
                outside = outside.redistribute(mesh, [Shard(1)])
                self.assertEqual(outside.to_local().numel(), 0)
                continue
            every = [(each,) for each in (*PLAIN, *blocks)]
            self._check(whole, mesh, (*every, (Partial(),)), every)
        mesh, whole = world_mesh(2, 2), whole.to(self.device)
        for dim, block in enumerate(blocks):
            others = (Replicate(), Shard(1 - dim))
            pairs = [(block, other) for other in others]
            pairs += [pair[::-1] for pair in pairs]
            plain = [*itertools.product((Replicate(), Shard(1 - dim)), repeat=2)]
            self._check(whole, mesh, pairs, plain)
            self._check(whole, mesh, plain, pairs)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_orders_of_cuts(self):
        """Dimensions of the mesh cut in any order, from any to any, also where one has
        a single rank. DebugMode shows the way from the one to the other."""
        whole, names = self._whole("uneven")[..., 0].contiguous(), ("a", "b", "c")
        mesh = init_device_mesh(self.device.type, (2, 1, 2), mesh_dim_names=names)
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        states = []
        for placements in itertools.product(PLAIN, repeat=3):
            for order in itertools.permutations(range(3)):
                entries = [
                    ShardOrderEntry(dim, cuts)
                    for dim in range(2)
                    if (cuts := tuple(i for i in order if placements[i] == Shard(dim)))
                ]
                spec = DTensorSpec(mesh, placements, meta, shard_order=tuple(entries))
                states.append((spec, local_part(whole, mesh, placements, order)))
        for (source, part), (target, expected) in zip(
            *(random.Random(seed).sample(states, 24) for seed in (0, 1)), strict=True
        ):
            where = f"{source.placements}, {source.shard_order} to {target}"
            with DebugMode() as log:
                found = redistribute_local_tensor(part.clone(), source, target)
            self.assertEqual(found, expected, where)
            ends = [
                DTensorSpec.format_shard_order_str(each.placements, each.shard_order)
                for each in (source, target)
            ]
            (line,) = (one for one in log.debug_string().splitlines() if "trace" in one)
            steps = line.partition("trace: ")[2][:-1].replace("-->", "->").split("->")
            self.assertEqual([steps[0], steps[-1]], ends, where)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("sizes", [(4,), (2, 2)])
    def test_partial_values(self, sizes):
        """Values of ranks are summed, averaged, multiplied, or the largest or smallest
        of them counts; whole values become partial ones that give them again."""
        mesh = world_mesh(*sizes)
        generator = torch.Generator().manual_seed(0)
        values = torch.randint(-3, 4, (4, 5, 6, 3), generator=generator).float()
        values = values.to(self.device)
        names = {"sum": "sum", "avg": "mean", "min": "amin", "max": "amax"}
        for kind, name in (names | {"product": "prod"}).items():
            whole, partial = (
                getattr(torch, name)(values, 0),
                (Partial(kind),) * len(sizes),
            )
            made = DTensor.from_local(values[self.rank], mesh, partial)
            for target in itertools.product(PLAIN, repeat=len(sizes)):
                found = made.redistribute(mesh, target)
                expected = local_part(whole, mesh, target)
                self.assertEqual(found.to_local(), expected, f"{kind} to {target}")
            if kind == "product":
                with self.assertRaisesRegex(ValueError, "product.*is not supported"):
                    distribute_tensor(whole, mesh, partial)
            else:
                parts = distribute_tensor(whole, mesh, partial)
                self.assertEqual(parts.full_tensor(), whole, f"{kind} of the whole")
                own = whole / (self.world_size if kind == "sum" else 1)
                self.assertEqual(parts.to_local(), own, f"{kind} of the whole")
        with self.assertRaisesRegex(RuntimeError, "to Partial is for internal use"):
            found.redistribute(mesh, partial)
        if len(sizes) == 2:
            with self.assertRaisesRegex(ValueError, "Mixed Partial reduce types"):
                DTensor.from_local(whole, mesh, (Partial("max"), Partial()))
        spec = DTensorSpec(mesh, (Shard(0),) * len(sizes), found._spec.tensor_meta)
        other = DTensorSpec(mesh, partial, spec.tensor_meta)
        with self.assertRaisesRegex(RuntimeError, "to P.* not supported yet"):
            redistribute_local_tensor(found.to_local(), spec, other)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("sizes", [(4,), (2, 2)])
    def test_gradients_of_gradients(self, sizes):
        """Gradients come back in the placements and the type of the source, and have
        gradients, too. Each is rounded to the type that its collectives have."""
        mesh = world_mesh(*sizes)
        generator = torch.Generator().manual_seed(0)
        whole, factor = torch.rand(2, 5, 6, generator=generator).to(self.device)
        pairs = itertools.product(itertools.product(PLAIN, repeat=len(sizes)), repeat=2)
        types, exact = (None, torch.bfloat16), {"atol": 0, "rtol": 0}
        every = itertools.product(pairs, types, types)
        for (source, target), forward, backward in random.Random(0).sample(
            [*every], 36
        ):
            where = f"{source} to {target}, {forward}, {backward}"
            made = distribute_tensor(whole, mesh, source).requires_grad_()
            options = {"forward_dtype": forward, "backward_dtype": backward}
            found = made.redistribute(mesh, target, async_op=bool(forward), **options)
            forward, backward = forward or whole.dtype, backward or whole.dtype
            self.assertEqual(found.dtype, forward, where)
            self.assertEqual(found.full_tensor(), whole.to(forward), where, **exact)
            weights = distribute_tensor(factor.to(forward), mesh, target)
            weights.requires_grad_()
            (first,) = torch.autograd.grad(
                (found * weights).sum(), made, create_graph=True
            )
            expected = factor.to(forward).to(backward).to(whole.dtype)
            self.assertEqual(first.placements, source, where)
            self.assertEqual(first.dtype, whole.dtype, where)
            self.assertEqual(first.full_tensor(), expected, where, **exact)
            (first * distribute_tensor(whole, mesh, source)).sum().backward()
            expected = whole.to(backward).to(forward)
            self.assertEqual(weights.grad.full_tensor(), expected, where, **exact)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("dim", [0, 1])
    def test_shards_of_fsdp_over_tensor_parallelism(self, dim):
        """Shards that were cut by the last dimension of the mesh first, to and from
        all others, with gradients."""
        mesh, whole = world_mesh(2, 2), self._whole("even")
        factor = self._whole("even", 1)
        strided = FSDP_OF_TP[dim]
        expected = local_part(whole, mesh, (Shard(dim),) * 2, (1, 0))
        made = distribute_tensor(whole, mesh, strided)
        self.assertEqual(made.to_local(), expected)
        self.assertEqual(made.full_tensor(), whole)
        for target in itertools.product(PLAIN, repeat=2):
            where = f"{strided} to {target}"
            from_strided = made.detach().requires_grad_()
            found = from_strided.redistribute(mesh, target)
            self.assertEqual(found.to_local(), local_part(whole, mesh, target), where)
            (found * distribute_tensor(factor, mesh, target)).sum().backward()
            self.assertEqual(from_strided.grad.full_tensor(), factor, where)
            to_strided = found.detach().redistribute(mesh, strided)
            self.assertEqual(to_strided.placements, strided, where)
            self.assertEqual(to_strided.to_local(), expected, f"{target} to {strided}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_flattened_mesh_joins_collectives(self):
        """Where the mesh was flattened, one collective does the work of two, and its
        result is the same."""
        mesh = world_mesh(2, 2)
        mesh._flatten("all")
        both = {
            ((Partial("sum"),) * 2, (Replicate(),) * 2): True,
            ((Partial("avg"),) * 2, (Replicate(),) * 2): True,
            ((Partial("sum"), Partial("avg")), (Replicate(),) * 2): True,
            ((Partial("avg"), Partial("sum")), (Shard(0),) * 2): "even",
            ((Shard(0),) * 2, (Replicate(),) * 2): True,
            ((Shard(0), Shard(1)), (Replicate(),) * 2): False,
            ((Partial("sum"),) * 2, (Shard(0),) * 2): "even",
            ((Partial("sum"),) * 2, (Shard(0), Shard(1))): False,
        }
        for (source, target), joins in both.items():
            # pytorch #194457: a joined all-gather of uneven shards has wrong values.
            is_wrong = joins is True and isinstance(source[0], Shard)
            for size in ("even",) if is_wrong else ("even", "uneven"):
                whole = self._whole(size)
                where, counts = f"{size}: {source} to {target}", []
                optimizations = disable_redistribute_transform_optimization
                for leave in (contextlib.nullcontext(), optimizations()):
                    _gen_transform_infos.cache_clear()
                    made = self._source(whole, mesh, source)
                    with leave, CommDebugMode() as log:
                        found = made.redistribute(mesh, target)
                    counts.append(log.get_total_counts())
                    expected = local_part(whole, mesh, target)
                    self.assertEqual(found.to_local(), expected, where)
                joined = joins is True or joins == size
                self.assertEqual(counts, [1 if joined else 2, 2], where)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_plans_leave_their_options(self):
        """Contexts that an exception leaves change no later plan."""
        mesh, whole = world_mesh(2, 2), self._whole("even")
        source, target = (Shard(0), Shard(1)), (Shard(1), Shard(0))

        def collectives():
            _gen_transform_infos.cache_clear()
            with CommDebugMode() as log:
                distribute_tensor(whole, mesh, source).redistribute(mesh, target)
            return {
                str(name): count
                for name, count in log.get_comm_counts().items()
                if "broadcast" not in str(name) and "scatter" not in str(name)
            }

        default = collectives()
        for context in (
            use_min_cost_redistribution_plan,
            disable_redistribute_transform_optimization,
        ):
            with self.assertRaises(KeyError), context():
                raise KeyError
            self.assertEqual(collectives(), default)
            with context():
                other = collectives()
                with context(False):
                    self.assertEqual(collectives(), default)
                self.assertEqual(collectives(), other)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_costs_are_those_of_rings(self):
        mesh, other = world_mesh(4), world_mesh(2, 2)

        def cost(source, target, gib=1.0, mesh=mesh):
            shape = torch.Size((1024, int(gib * 2**18)))
            meta = TensorMeta(shape, (shape[1], 1), torch.float32)
            specs = [
                DTensorSpec(mesh, placements, tensor_meta=meta)
                for placements in (source, target)
            ]
            return redistribute_cost(*specs)

        replicated, sharded, columns = (Replicate(),), (Shard(0),), (Shard(1),)
        partial = (Partial(),)
        gather = cost(sharded, replicated)
        # Microseconds: a base, and for each of three steps a latency and a quarter,
        # over NVLink or between hosts.
        device = torch.get_device_module(self.device.type)
        is_near = device.device_count() >= mesh.size()
        latency, rate = (0.6, 87.7) if is_near else (2.7, 87.7 * 0.22)
        expected = 6.6 + 3 * latency + 0.75 / rate * 1e6
        self.assertAlmostEqual(gather, expected, places=3)
        scatter = cost(partial, sharded)
        self.assertAlmostEqual(cost(partial, replicated), gather + scatter - 6.6)
        per_gib = cost(sharded, replicated, 2.0) - gather
        self.assertAlmostEqual(cost(sharded, replicated, 3.0), gather + 2 * per_gib)
        # A quarter of it goes to others; plans prefer an all-gather of the same size.
        quarter = cost(sharded, replicated, 0.25)
        self.assertAlmostEqual(cost(sharded, columns), quarter + 1)
        for placements in (replicated, sharded, partial):
            self.assertEqual(cost(replicated, placements), 0)
            self.assertEqual(cost(placements, placements), 0)
        self.assertEqual(cost(sharded, partial), float("inf"))
        # Of two dimensions: the sum of the steps, of which each has its own bytes.
        both = cost(sharded * 2, replicated * 2, mesh=other)
        inner = cost((Replicate(), Shard(0)), replicated * 2, 0.5, mesh=other)
        outer = cost((Shard(0), Replicate()), replicated * 2, mesh=other)
        self.assertAlmostEqual(both, inner + outer)
        meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32)
        here = DTensorSpec(mesh, sharded, tensor_meta=meta)
        there = DTensorSpec(other, sharded * 2, tensor_meta=meta)
        self.assertEqual(redistribute_cost(here, there), float("inf"))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("sizes", [(4,), (2, 2)])
    def test_plans_to_partial_values_and_strides(self, sizes):
        """Both planners find ways to partial values; the one of least cost also from
        shards to them, and to shards of blocks that stand for no order of cuts."""
        mesh, whole = world_mesh(*sizes), self._whole("uneven")
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        rest, blocks = len(sizes) - 1, _StridedShard(1, split_factor=3)
        sources = [*itertools.product((*PLAIN, Partial()), repeat=len(sizes))]
        targets = [(blocks, *(Replicate(),) * rest), (*(Shard(0),) * rest, blocks)]
        for kind in ("sum", "avg", "max"):
            every = itertools.product((Replicate(), Partial(kind)), repeat=len(sizes))
            targets += [each for each in every if Partial(kind) in each]
        every = [*itertools.product(sources, targets, (True, False))]
        for source, target, plan in random.Random(0).sample(every, min(len(every), 60)):
            kinds = {each.reduce_op for each in (*source, *target) if each.is_partial()}
            pairs = [*zip(source, target, strict=True)]
            is_far = any(a.is_shard() and b.is_partial() for a, b in pairs)
            if ("max" in kinds and len(kinds) > 1) or (is_far and not plan):
                continue
            if any(a.is_partial() and b.is_partial() and a != b for a, b in pairs):
                continue
            where = f"{source} to {target}, least cost: {plan}"
            part = self._source(whole, mesh, source).to_local()
            options = {"tensor_meta": meta, "use_strided_shard_as_shard_order": False}
            specs = [DTensorSpec(mesh, each, **options) for each in (source, target)]
            found = redistribute_local_tensor(
                part, *specs, use_graph_based_transform=plan
            )
            if blocks in target:
                self.assertEqual(found, local_part(whole, mesh, target), where)
                back = DTensorSpec(mesh, (Replicate(),) * len(sizes), **options)
                found = redistribute_local_tensor(found, specs[1], back)
            else:
                made = DTensor.from_local(found, mesh, target, run_check=False)
                found = made.full_tensor()
            self.assertEqual(found, whole, where)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_lookups_in_parts(self):
        """Rows of a table, and elements by their indices, are those of the whole; so
        are gradients. Ranks leave out what other ranks have, to be summed."""
        mesh, whole = world_mesh(2, 2), self._whole("uneven")
        generator = torch.Generator().manual_seed(1)
        # torch 2.13 finds other elements if the index is smaller than the table in
        # other dimensions. It raises if a rank has no rows, if two dimensions of the
        # mesh cut the table, or if one that does not is to cut the result.
        lookups = {"rows": (whole.flatten(1), (4, 2, 3))}
        for dim in range(2):
            lookups[dim] = whole, [*whole.shape[:dim], 1, *whole.shape[dim + 1 :]]
        every, seen = (Replicate(),) * 2, []
        for (name, (values, shape)), mesh_dim, target in itertools.product(
            lookups.items(), (0, 1), PLAIN
        ):
            cut_by = [Replicate()] * 2
            cut_by[mesh_dim] = Shard(0 if name == "rows" else name)
            where = f"lookup of {name}, {cut_by} to {target}"
            index = torch.randint(3, shape, generator=generator).to(self.device)

            def lookup(table, index, name=name):
                if name == "rows":
                    return F.embedding(index, table)
                return table.gather(name, index)

            reference = values.clone().requires_grad_()
            expected = lookup(reference, index)
            table = distribute_tensor(values, mesh, cut_by).requires_grad_()
            found = lookup(table, distribute_tensor(index, mesh, every))
            seen += [each for each in found.placements if each.is_partial()]
            ends = [target if each.is_partial() else each for each in found.placements]
            moved = found.redistribute(mesh, ends)
            part = local_part(expected, mesh, ends)
            self.assertEqual(moved.to_local(), part, where)
            factor = torch.arange(1.0, expected.numel() + 1, device=self.device)
            factor = factor.view(expected.shape)
            (expected * factor).sum().backward()
            (moved * distribute_tensor(factor, mesh, ends)).sum().backward()
            self.assertEqual(table.grad.full_tensor(), reference.grad, where)
        # Each kind of lookup leaves out other elements.
        self.assertEqual(len({*seen}), 2 * len(lookups))
        for one, two in itertools.combinations({*seen}, 2):
            self.assertNotEqual(one, two)
        self.assertNotEqual(seen[0], Partial())

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_costs_of_steps_on_hosts(self):
        """The cost of one step follows from its kind, from the bytes that a rank has,
        and from whether the ranks share a host."""
        meta = TensorMeta(torch.Size((64, 64, 256)), (64 * 256, 256, 1), torch.float32)
        kinds = (Replicate(), Shard(0), Shard(1), Partial(), Partial("max"))
        for sizes, near in itertools.product(((4,), (2, 2)), (1, 2, 4)):
            mesh = world_mesh(*sizes)
            count = mock.patch.object(_mesh_resources, "num_devices_per_host")
            with count as devices:
                devices.return_value = near
                MeshTopoInfo.build_from_mesh.cache_clear()
                topology = MeshTopoInfo.build_from_mesh(mesh)
            self.assertEqual(topology.mesh_dim_devices, [*sizes])
            for dim, other, source, target in itertools.product(
                range(len(sizes)), (Replicate(), Shard(2)), kinds, kinds
            ):
                where = f"{source} to {target}, {dim} of {sizes}, {other}, {near}"
                ends = [[other] * len(sizes) for _ in range(2)]
                ends[0][dim], ends[1][dim] = source, target
                specs = [DTensorSpec(mesh, each, tensor_meta=meta) for each in ends]
                number, shards = sizes[dim], specs[0].num_shards
                hops = (number - 1) * (2 if source.is_partial() else 1)
                hops = number - 1 if target.is_shard() else hops
                # Ranks of the last dimensions are neighbours.
                is_near = torch.Size(sizes[dim:]).numel() <= near
                latency, rate = (0.6, 87.7) if is_near else (2.7, 87.7 * 0.22)
                gib = meta.shape.numel() * 4 / 2**30 / shards
                gib *= number if source.is_shard() and target.is_replicate() else 1
                expected = 6.6 + hops * latency + gib * hops / number / rate * 1e6
                expected += source.is_shard() and target.is_shard()
                if source == target or source.is_replicate():
                    expected = 0.0
                elif target.is_partial():
                    expected = float("inf")
                found = one_step_redistribute_cost(*specs)
                self.assertAlmostEqual(found, expected, places=6, msg=where)
                if not target.is_partial():
                    found = redistribute_cost(*specs)
                    self.assertAlmostEqual(found, expected, places=6, msg=where)
        MeshTopoInfo.build_from_mesh.cache_clear()
        both = DTensorSpec(mesh, (Shard(0), Shard(1)), tensor_meta=meta)
        none = DTensorSpec(mesh, (Replicate(),) * 2, tensor_meta=meta)
        with self.assertRaisesRegex(ValueError, "differ by exactly one placement"):
            one_step_redistribute_cost(both, none)
        there = DTensorSpec(world_mesh(4), (Shard(0),), tensor_meta=meta)
        self.assertEqual(one_step_redistribute_cost(both, there), float("inf"))

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_collectives(self):
        """A redistribution costs the one collective that it needs, or none."""
        mesh, whole = world_mesh(4), self._whole("even")
        names = {
            (Replicate(), Shard(0)): "",
            (Shard(0), Shard(0)): "",
            (Shard(1), Replicate()): "all_gather_into_tensor",
            (Partial(), Replicate()): "all_reduce",
            (Partial(), Shard(0)): "reduce_scatter_tensor",
            # gloo has no all-to-all
            (Shard(0), Shard(1)): (
                "all_gather" if dist.get_backend() == "gloo" else "alltoall"
            ),
        }
        for (source, target), expected in names.items():
            made = self._source(whole, mesh, [source])
            for is_async in (True, False):
                with CommDebugMode() as log:
                    found = made.redistribute(mesh, [target], async_op=is_async)
                is_running = isinstance(found._local_tensor, AsyncCollectiveTensor)
                if not is_async or source == Partial():
                    self.assertEqual(is_running, is_async, f"{source} to {target}")
                self.assertEqual(found.full_tensor(), whole)
            found = [str(name).rpartition(".")[2] for name in log.get_comm_counts()]
            self.assertEqual(log.get_total_counts(), bool(expected), f"{found}")
            self.assertTrue(not expected or expected in found[0], f"{found}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_distribution_takes_the_values_of_one_rank(self):
        """Of the first rank of each dimension or of the one named; or its own."""
        mesh = world_mesh(2, 2)
        whole = torch.arange(120.0, device=self.device).view(8, 5, 3)
        blocks = {dim: _StridedShard(dim, split_factor=2) for dim in (-3, 0)}
        every = (*PLAIN, Shard(-1), blocks[-3])
        positive = {Shard(-1): Shard(2), blocks[-3]: blocks[0]}
        for placements in itertools.product(every, repeat=2):
            expected = tuple(positive.get(each, each) for each in placements)
            for rank, other in (({}, 0), (0, 0), (1, 3), (None, self.rank)):
                where = f"{placements}, values of {rank}"
                rank = rank if isinstance(rank, dict) else {"src_data_rank": rank}
                mine = (whole + self.rank).requires_grad_()
                made = distribute_tensor(mine, mesh, placements, **rank)
                self.assertEqual(made.placements, expected, where)
                part = local_part(whole + other, mesh, expected)
                self.assertEqual(made.to_local(), part, where)
                self.assertTrue(made.to_local().is_contiguous(), where)
                self.assertTrue(made.requires_grad, where)
            with self.assertRaisesRegex(ValueError, "must have the same number|length"):
                distribute_tensor(whole, mesh, placements[:1])

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_parts_that_do_not_fit_are_refused(self):
        mesh, whole = world_mesh(4), self._whole("even")
        options = {"run_check": True}
        found = DTensor.from_local(whole + self.rank, mesh, [Replicate()], **options)
        self.assertEqual(found.to_local(), whole, "the values of rank 0 count")
        wrong = whole.to(torch.float64 if self.rank == 2 else whole.dtype)
        longer = whole if self.rank else whole[1:]
        for part in (wrong, longer):
            with self.assertRaisesRegex(ValueError, "Inconsistent tensor metadata"):
                DTensor.from_local(part, mesh, [Replicate()], **options)


class CompiledRedistributeTest(FSDPTest):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2, allow_cpu=True)
    def test_compiled_with_sizes_that_change(self):
        """A whole graph redistributes tensors of sizes that divide and that do not,
        also if nothing is known about a size."""
        mesh, targets = world_mesh(2), (Shard(0), Shard(1))

        def redistributed(whole):
            made = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
            sums = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
            found = [sums.redistribute(mesh, [Shard(0)])]
            for target in targets:
                found.append(made := made.redistribute(mesh, [target]))
            return [each.to_local() for each in found]

        for is_unknown, sizes in ((False, ((5, 6),)), (True, ((8, 4), (5, 3)))):
            torch._dynamo.reset()
            compiled = torch.compile(
                redistributed, backend="aot_eager", dynamic=True, fullgraph=True
            )
            for rows, columns in sizes:
                whole = torch.arange(float(rows * columns), device=self.device)
                whole = whole.view(rows, columns)
                expected = [local_part(whole, mesh, [each]) for each in targets]
                expected.insert(0, 2 * expected[0])
                if is_unknown:
                    torch._dynamo.decorators.mark_unbacked(whole, 0)
                where = f"{rows} rows, unknown: {is_unknown}"
                self.assertEqual(compiled(whole), expected, where)


class PlacementTest(TestCase):
    def test_sizes_and_offsets_of_shards(self):
        """The elements of each rank are those of the chunks of a chunk."""
        grid = itertools.product(range(14), (1, 2, 3, 4, 5), (1, 2, 3))
        for size, number, blocks in grid:
            numbers = torch.arange(size)
            for rank in range(number):
                where = f"{rank} of {number}, {size} elements, {blocks} blocks"
                own = cut(numbers, 0, number, rank)
                start = int(own[0]) if len(own) else size
                found = Shard.local_shard_size_and_offset(size, number, rank)
                self.assertEqual(found, (len(own), start), where)
                if size:
                    strided = _StridedShard(1, split_factor=blocks)
                    parts = [cut(numbers, 0, blocks, each) for each in range(blocks)]
                    parts = [cut(part, 0, number, rank) for part in parts]
                    own = torch.cat(parts).tolist()
                    for mode, offset in enumerate([(own or [-1])[0], own, None]):
                        found = strided.local_shard_size_and_offset(
                            size, number, rank, mode
                        )
                        self.assertEqual(found, (len(own), offset), where)

    def test_placements_are_values(self):
        """They are equal, hash and are written as code by what they say."""
        numbers = ((dim, factor) for dim in (0, 1) for factor in (2, 3))
        every = [_StridedShard(dim, split_factor=factor) for dim, factor in numbers]
        every += [Replicate(), Shard(0), Shard(1), Partial(), Partial("max")]
        for (index, one), (other, two) in itertools.product(enumerate(every), repeat=2):
            self.assertEqual(one == two, index == other, f"{one!r} and {two!r}")
        copies = [pickle.loads(pickle.dumps(one)) for one in every]
        texts = [one.__fx_repr__() for one in every]
        copies += [eval(text, {"torch": torch, **names}) for text, names in texts]
        self.assertEqual(copies, every * 2)
        self.assertEqual(len({*every, *copies}), len(every))
        with self.assertRaisesRegex(TypeError, "both split_factor and sf"):
            _StridedShard(0, sf=2, split_factor=3)

    def test_sizes_that_are_not_known_yet(self):
        """A size that a compiler does not know gives formulas that hold for any size;
        with a hint that parts are even, for the sizes that a check lets pass."""
        grid = itertools.product((None, 36, 37), (1, 2, 3), (1, 2, 3))
        for hint, number, blocks in grid:
            environment = ShapeEnv()
            size = environment.create_unbacked_symint()
            torch._check(size >= 0)
            if hint:
                environment.var_to_hint_override[size.node.expr] = hint
            strided = _StridedShard(0, split_factor=blocks)
            for rank, known in itertools.product(range(number), (0, 1, 5, 8, 36)):
                where = f"{rank} of {number}, {known} elements, {blocks} blocks, {hint}"

                def known_value(found, symbol=size.node.expr, known=known):
                    values = {symbol: sympy.Integer(known)}
                    return found if isinstance(found, int) else found.xreplace(values)

                def known_int(found):
                    if isinstance(found, int):
                        return found
                    return int(known_value(found.node.expr))

                whole = torch.arange(known)
                own = cut(whole, 0, number, rank)
                found = Shard.local_shard_size_and_offset(size, number, rank)
                start = int(own[0]) if len(own) else known
                expected = (len(own), start)
                self.assertEqual(tuple(map(known_int, found)), expected, where)
                parts = [cut(whole, 0, blocks, each) for each in range(blocks)]
                length = sum(len(cut(part, 0, number, rank)) for part in parts)
                for mode, offsets in ((1, []), (2, None)):
                    found, rest = strided.local_shard_size_and_offset(
                        size, number, rank, mode
                    )
                    self.assertEqual(rest, offsets, where)
                    checks = environment.deferred_runtime_asserts.get(
                        size.node.expr, ()
                    )
                    if all(known_value(each.expr) for each in checks):
                        self.assertEqual(known_int(found), length, where)
            is_even = hint == 36 and number * blocks > 1
            checks = environment.deferred_runtime_asserts.get(size.node.expr, ())
            self.assertEqual(len(checks) > 1, is_even, f"{number} {blocks} {hint}")

    def test_ranks_that_are_not_known_yet(self):
        """A part is the same if its rank, or its number of blocks, is a symbol."""
        names = itertools.count()

        def symbol(value, environment):
            source = ConstantSource(f"s{next(names)}")
            made = environment.create_symbol(
                value,
                source=source,
                dynamic_dim=DimDynamic.DYNAMIC,
                constraint_dim=None,
                do_not_specialize_zero_one=True,
            )
            return environment.create_symintnode(made, hint=value, source=source)

        options = {"specialize_zero_one": False, "duck_shape": False}
        # Fewer elements than the last rank's place raise (torch 2.13).
        for size, number in ((6, 3), (5, 3), (7, 4)):
            whole = torch.arange(size * size).view(size, size)
            for dim, rank, copies in itertools.product(
                (0, 1), range(number), (True, False)
            ):
                where = f"{rank} of {number}, dimension {dim} of {size}, {copies}"
                index = symbol(rank, ShapeEnv(**options))
                found = Shard(dim)._select_split_tensor(
                    whole, number, index, with_padding=False, clone=copies
                )
                self.assertEqual(found, cut(whole, dim, number, rank), where)
                self.assertTrue(found.is_contiguous(), where)
                is_view = found.data_ptr() in range(
                    whole.data_ptr(), whole.data_ptr() + whole.nbytes
                )
                self.assertEqual(is_view, not copies and dim == 0, where)
        environment = ShapeEnv(**options)
        blocks = symbol(2, environment)
        strided, same = (_StridedShard(0, split_factor=blocks) for _ in range(2))
        self.assertIs(strided.split_factor, blocks)
        self.assertEqual(strided, same)
        self.assertEqual(hash(strided), hash(same))
        self.assertNotEqual(
            strided, _StridedShard(0, split_factor=symbol(2, environment))
        )
        for known in (strided, _StridedShard(0, split_factor=2)):
            parts, _ = known._split_tensor(torch.arange(8), 2)
            self.assertEqual([*map(list, parts)], [[0, 1, 4, 5], [2, 3, 6, 7]])
        # Code that is generated for two blocks checks that there are two.
        self.assertIn("sf=2", strided.__fx_repr__()[0])
        checks = environment.deferred_runtime_asserts[None]
        self.assertEqual(str(checks[0].expr), f"Eq({blocks}, 2)")
        with self.assertRaisesRegex(RuntimeError, "without a hint"):
            unknown = environment.create_unbacked_symint()
            _StridedShard(0, split_factor=unknown)


instantiate_parametrized_tests(RedistributeTest)

if __name__ == "__main__":
    run_tests()
