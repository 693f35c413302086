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
    _redistribute,
    distribute_tensor,
)
from torch.distributed.tensor._collective_utils import (
    MeshTopoInfo,
    mesh_broadcast,
    mesh_scatter,
    one_step_redistribute_cost,
    pad_tensor,
    redistribute_cost,
    spec_to_bytes,
    unpad_tensor,
)
from torch.distributed.tensor._dtensor_spec import (
    DTensorSpec,
    ShardOrderEntry,
    TensorMeta,
)
from torch.distributed.tensor._redistribute import (
    DTensorRedistributePlanner,
    Redistribute,
    _FlattenedTransformInfo,
    _gen_transform_infos,
    _TransformInfo,
    clear_redistribute_planner_cache,
    disable_redistribute_transform_optimization,
    get_redistribute_planner,
    redistribute_local_tensor,
    use_min_cost_redistribution_plan,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
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
    slowTest,
)

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

# Of a whole tensor, and how ranks may have parts of its values.
SIZES = {
    "uneven": ((5, 6, 3), "sum"),
    "fewer than ranks": ((1, 2, 3), "max"),
    "even": ((4, 8), "avg"),
    "long": ((301, 2), "sum"),
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


SYMBOLS = {"specialize_zero_one": False, "duck_shape": False}
symbol_names = itertools.count()


def symbol(value, environment):
    """Return a symbol of ``environment`` that is ``value`` now."""
    source = ConstantSource(f"s{next(symbol_names)}")
    made = environment.create_symbol(
        value,
        source=source,
        dynamic_dim=DimDynamic.DYNAMIC,
        constraint_dim=None,
        do_not_specialize_zero_one=True,
    )
    return environment.create_symintnode(made, hint=value, source=source)


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
        targets = itertools.product(PLAIN, repeat=len(sizes))
        every = [*itertools.product(sources, targets)]
        pairs = random.Random(0).sample(every, min(len(every), 48))
        self._check(whole, mesh, pairs)

    def _check(self, whole, mesh, pairs):
        """Check the values and parts of ``whole`` that each of ``pairs`` redistributes
        between its placements."""
        for source, target in pairs:
            where = f"{[*whole.shape]} on {mesh}: {source} to {target}"
            made = self._source(whole, mesh, source)
            found = made.redistribute(mesh, target)
            self.assertEqual(found.placements, target, where)
            self.assertEqual(found.full_tensor(), whole, f"value, {where}")
            expected = local_part(whole, mesh, target)
            self.assertEqual(found.to_local(), expected, f"part, {where}")
            if all(each.is_replicate() for each in target):
                self.assertTrue(found.to_local().is_contiguous(), where)
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
            pairs = itertools.product((*every, (Partial(),)), every)
            self._check(whole, mesh, pairs)
        mesh, whole = world_mesh(2, 2), whole.to(self.device)
        for dim, block in enumerate(blocks):
            others = (Replicate(), Shard(1 - dim))
            cut = [(block, other) for other in others]
            cut += [each[::-1] for each in cut]
            plain = [*itertools.product((Replicate(), Shard(1 - dim)), repeat=2)]
            self._check(whole, mesh, itertools.product(cut, plain))
            self._check(whole, mesh, itertools.product(plain, cut))

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
            *(random.Random(seed).sample(states, 16) for seed in (0, 1)), strict=True
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
            [*every], 24
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
        """Contexts that an exception leaves change no later plan. DebugMode shows the
        plans, and that the user asked for them."""
        mesh, whole = world_mesh(2, 2), self._whole("even")
        mesh._flatten("all")
        source = (Shard(0),) * 2

        def plans():
            _gen_transform_infos.cache_clear()
            made = distribute_tensor(whole, mesh, source)
            with DebugMode() as log:
                for target in ((Replicate(),) * 2, (Replicate(), Shard(1))):
                    found = made.redistribute(mesh, target)
                    expected = local_part(whole, mesh, target)
                    self.assertEqual(found.to_local(), expected, f"{target}")
            lines = log.debug_string().splitlines()
            lines = [each for each in lines if "trace: " in each]
            self.assertEqual(["[explicit]" in each for each in lines], [True] * 2)
            return [each.partition("trace: ")[2] for each in lines]

        default = plans()
        for context in (
            use_min_cost_redistribution_plan,
            disable_redistribute_transform_optimization,
        ):
            with self.assertRaises(KeyError), context():
                raise KeyError
            self.assertEqual(plans(), default)
            with context():
                other = plans()
                self.assertNotEqual(other, default)
                with context(False):
                    self.assertEqual(plans(), default)
                self.assertEqual(plans(), other)
        made = distribute_tensor(whole, mesh, source)
        with DebugMode() as log:
            target = DTensorSpec(mesh, (Replicate(),) * 2, made._spec.tensor_meta)
            redistribute_local_tensor(made.to_local(), made._spec, target)
        self.assertNotIn("[explicit]", log.debug_string())

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_plans_as_text(self):
        """The text names the state before and after each step; steps that do not fit
        the state are refused. Planners are kept for a mesh and a kind of tensor."""
        mesh, write = (
            world_mesh(2, 2),
            DTensorRedistributePlanner.stringify_transform_infos,
        )
        rows, none, shape = (Shard(0),) * 2, (Replicate(),) * 2, [4, 8]
        orders = {each: (ShardOrderEntry(0, each),) for each in ((0, 1), (1, 0))}
        gathers = [_TransformInfo(dim, (rows[0], none[0]), shape) for dim in (0, 1)]
        for (outer, inner), order in orders.items():
            steps = [gathers[inner], gathers[outer]]
            text = write(mesh, steps, rows, order)
            first = DTensorSpec.format_shard_order_str(rows, order)
            self.assertTrue(text.startswith(f"{first}->"), text)
            last = DTensorSpec.format_shard_order_str(none, ())
            self.assertTrue(text.endswith(f"->{last}"), text)
            self.assertEqual(text.count("->"), 2, text)
            if outer == 0:
                self.assertEqual(write(mesh, steps, rows), text, "the default order")
            else:
                strided = FSDP_OF_TP[0]
                self.assertEqual(write(mesh, steps, strided, None, True), text)
            with self.assertRaisesRegex(ValueError, "Mismatch between expected and re"):
                write(mesh, steps[::-1], rows, order)
            with self.assertRaisesRegex(ValueError, "No entries left to pop .* 0"):
                write(mesh, [*steps, steps[0]], rows, order)
        with self.assertRaisesRegex(AssertionError, "dimensions mismatch 1 vs 2"):
            write(mesh, [], rows[:1])
        metas = [
            TensorMeta(torch.Size((size, 2)), (2, 1), torch.float32) for size in (4, 5)
        ]
        clear_redistribute_planner_cache()
        first, second = (get_redistribute_planner(mesh, meta) for meta in metas)
        self.assertIs(get_redistribute_planner(mesh, metas[0]), first)
        self.assertIsNot(first, second)
        self.assertIsNot(get_redistribute_planner(world_mesh(4), metas[0]), first)
        clear_redistribute_planner_cache()
        self.assertIsNot(get_redistribute_planner(mesh, metas[0]), first)
        with self.assertRaises(AssertionError):
            DTensorRedistributePlanner(mesh, None)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_collectives_that_are_not_joined_are_named_once(self):
        """A warning says why two collectives do not become one, once for each mesh and
        reason, and the dimensions to flatten by their names if they have some."""
        _redistribute._warned_flatten_issues.clear()
        logger = _redistribute.logger
        kind, partial, whole = self.device.type, (Partial(),) * 2, (Replicate(),) * 2
        named = init_device_mesh(kind, (2, 2), mesh_dim_names=("up", "down"))
        flat = init_device_mesh(kind, (2, 2), mesh_dim_names=("left", "right"))
        flat._flatten("all")
        nameless = DeviceMesh(kind, torch.arange(4).view(2, 2))
        for mesh, size, target, texts in (
            (named, "even", whole, ("2 sequential all_reduce", '\\["up", "down"\\]')),
            (nameless, "even", whole, ("all_reduce", "dims 0, 1 of ")),
            (flat, "uneven", (Shard(0),) * 2, ("2 sequential reduce_sc", "not evenly")),
            (flat, "even", whole, ()),
        ):
            made = self._source(self._whole(size), mesh, partial)
            for is_first in (True, False):
                with contextlib.ExitStack() as stack:
                    warns = is_first and bool(texts)
                    check = self.assertLogs if warns else self.assertNoLogs
                    log = stack.enter_context(check(logger, "WARNING"))
                    found = made.redistribute(mesh, target)
                expected = local_part(self._whole(size), mesh, target)
                self.assertEqual(found.to_local(), expected)
                for text in texts if warns else ():
                    self.assertRegex("".join(log.output), text)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_parts_with_other_strides(self):
        """Parts may lie in memory in any order of their dimensions."""
        whole = self._whole("uneven")
        for sizes in ((4,), (2, 2)):
            mesh = world_mesh(*sizes)
            sources = itertools.product((*PLAIN, Partial()), repeat=len(sizes))
            targets = itertools.product(PLAIN, repeat=len(sizes))
            every = [*itertools.product(sources, targets)]
            for source, target in random.Random(0).sample(every, min(len(every), 40)):
                part = self._source(whole, mesh, source).to_local()
                part = part.transpose(0, 2).contiguous().transpose(0, 2)
                shape = {"shape": whole.shape, "stride": whole.stride()}
                made = DTensor.from_local(part, mesh, source, run_check=False, **shape)
                found = made.redistribute(mesh, target).to_local()
                expected = local_part(whole, mesh, target)
                self.assertEqual(found, expected, f"{source} to {target}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_collectives_round_in_their_type(self):
        """Values are rounded before ranks reduce them, not after: also in backward, and
        if the result is to have another type than the collective."""
        mesh, low = world_mesh(4), torch.bfloat16
        # Rounded, the first is the negative of the second.
        mine = [1 + 2.0**-9, -1.0, 0.0, 0.0][self.rank]
        mine = torch.full((8, 4), mine, device=self.device)
        for dtype, out in ((None, None), (low, None), (low, torch.float32)):
            expected = 0.0 if dtype else 2.0**-9
            for target in (Replicate(), Shard(0)):
                where = f"{dtype}, {out}, {target}"
                made = DTensor.from_local(mine, mesh, [Partial()])
                if out is None:
                    found = made.redistribute(mesh, [target], forward_dtype=dtype)
                else:
                    back = {"op_dtype": dtype, "out_dtype": out}
                    options = back | {"backward_options": back}
                    found = Redistribute.apply(made, mesh, (target,), False, options)
                local = found.to_local()
                self.assertEqual(local, torch.full_like(local, expected), where)
                types = {found.dtype, local.dtype, found._spec.tensor_meta.dtype}
                self.assertEqual(types, {out or dtype or torch.float32}, where)
                self.assertEqual(found._spec.tensor_meta.shape, made.shape, where)
            if out is None:
                made = distribute_tensor(torch.ones_like(mine), mesh, [Shard(0)])
                made.requires_grad_()
                found = made.redistribute(mesh, [Replicate()], backward_dtype=dtype)
                found = found.to_local(grad_placements=[Partial()])
                (found * mine).sum().backward()
                local = made.grad.to_local()
                self.assertEqual(local, torch.full_like(local, expected), where)
                self.assertEqual(local.dtype, torch.float32, where)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_collectives_of_a_dimension_of_the_mesh(self):
        """One rank of each line of the mesh sends; an asynchronous call returns a work.
        Ranks send nothing of the meta device."""
        mesh = world_mesh(2, 2)
        for dim, source, is_async in itertools.product((0, 1), (0, 1), (False, True)):
            where, index = f"{dim}, {source}", mesh.get_local_rank(dim)
            place = list(mesh.get_coordinate())
            place[dim] = source
            sender = float(mesh.mesh[tuple(place)])
            options = {"mesh_dim": dim, "async_op": is_async, "group_src": source}
            mine = torch.full((3,), float(self.rank), device=self.device)
            parts, received = [mine + 10, mine + 20], torch.empty_like(mine)
            works = [mesh_broadcast(mine, mesh, **options)]
            works += [mesh_scatter(received, parts, mesh, **options)]
            for work in works:
                self.assertEqual(work is not None, is_async, where)
                if is_async:
                    work.wait()
            self.assertEqual(mine, torch.full_like(mine, sender), where)
            expected = torch.full_like(mine, sender + 10 * (index + 1))
            self.assertEqual(received, expected, where)
        meta = torch.empty(3, device="meta")
        with CommDebugMode() as log:
            self.assertIsNone(mesh_broadcast(meta, mesh, async_op=True))
            self.assertIsNone(mesh_scatter(meta, [meta], mesh, async_op=True))
        self.assertEqual(log.get_total_counts(), 0)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_ranks_outside_of_the_mesh(self):
        """They hold empty parts, which need a gradient if the whole does, and neither
        send nor plan."""
        mesh, whole = first_ranks_mesh(3), self._whole("uneven")
        strided = _StridedShard(0, split_factor=2)
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        sharded, replicated = (
            DTensorSpec(mesh, (each,), tensor_meta=meta)
            for each in (Shard(0), Replicate())
        )
        mask = _MaskPartial("sum", offset_shape=whole.shape, offset_dim=0)
        is_outside = self.rank == 3
        cost = redistribute_cost(sharded, replicated)
        self.assertEqual(cost == 0, is_outside)
        for requires_grad in (False, True):
            mine = (whole + self.rank).requires_grad_(requires_grad)
            source = mine.detach().clone().requires_grad_(requires_grad)
            with torch.no_grad():
                copy = Replicate()._replicate_tensor(source, mesh, 0, 1)
                if not is_outside:
                    self.assertEqual(copy, whole + 1)
                    continue
                parts = [copy, Shard(1)._shard_tensor(mine, mesh, 0)]
                parts += [strided._shard_tensor(mine, mesh, 0)]
            for part in parts:
                self.assertEqual(part.numel(), 0)
                self.assertEqual(part.requires_grad, requires_grad)
            self.assertIs(Shard(0)._reduce_shard_tensor(mine, mesh, "sum", 0), mine)
            shape = whole.shape
            self.assertIs(Shard(0)._to_new_shard_dim(mine, mesh, 0, shape, 1), mine)
            with self.assertRaisesRegex(AssertionError, "rank is not part of mesh"):
                mask._partition_value(mine, mesh, 0)
            with self.assertRaises(AssertionError):
                DTensorRedistributePlanner(mesh, meta)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_masks_of_lookups(self):
        """Indices of a rank's rows become local, all other indices 0 and masked; the
        mask counts for one reduction."""
        mesh = world_mesh(4)
        for size, moved in itertools.product((8, 7), (False, True)):
            whole = torch.arange(10.0, 10.0 + size, device=self.device)
            index = torch.arange(size, device=self.device)
            mask = _MaskPartial("sum", offset_shape=torch.Size((2, size)), offset_dim=1)
            local = cut(whole, 0, 4, self.rank)
            found = mask._partition_value(index, mesh, 0)
            own = index - 2 * self.rank
            own[(own < 0) | (own >= len(local))] = 0
            self.assertEqual(found, own)
            self.assertEqual(index, torch.arange(size, device=self.device))
            found = local[found]
            if moved:
                found = mask._reduce_shard_value(found, mesh, 0, Shard(0))
                self.assertEqual(found, local)
            else:
                self.assertEqual(mask._reduce_value(found, mesh, 0), whole)
            self.assertIsNone(mask.mask_buffer.data)
            with self.assertRaises(AssertionError):
                mask._reduce_value(found, mesh, 0)
            with self.assertRaises(AssertionError):
                mask._reduce_shard_value(found, mesh, 0, Shard(0))
        text, names = mask.__fx_repr__()
        self.assertIn("offset_shape=torch.Size([2, 7]), offset_dim=1", text)
        self.assertEqual(names, {})
        with self.assertRaisesRegex(AssertionError, "offset_shape needs to be set"):
            _MaskPartial("sum")._partition_value(index, mesh, 0)

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
        # Blocks that stand for no order of cuts have no cost that is known.
        blocks = (_StridedShard(0, split_factor=3),)
        for ends in ((sharded, blocks), (blocks, sharded)):
            self.assertEqual(cost(*ends), float("inf"), f"{ends}")
        self.assertEqual(cost(blocks, blocks), 0)
        there = DTensorSpec(other, sharded * 2, tensor_meta=meta)
        with self.assertRaisesRegex(NotImplementedError, "Cross device mesh"):
            redistribute_local_tensor(torch.empty(4), here, there)
        with self.assertRaisesRegex(AssertionError, "should have tensor meta"):
            spec_to_bytes(DTensorSpec(mesh, sharded))
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

    @slowTest
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
                shard, name = Shard(0), "local_shard_size_and_offset"
                name = f"_{name}" if blocks == 2 else name
                found = getattr(shard, name)(size, number, rank)
                self.assertEqual(found, (len(own), start), where)
                if size:
                    strided = _StridedShard(1, split_factor=blocks)
                    parts = [cut(numbers, 0, blocks, each) for each in range(blocks)]
                    parts = [cut(part, 0, number, rank) for part in parts]
                    own = torch.cat(parts).tolist()
                    for mode, offset in enumerate([(own or [-1])[0], own, None]):
                        found = getattr(strided, name)(size, number, rank, mode)
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

    def test_steps_that_do_nothing_are_refused(self):
        one, two = (Partial(), Replicate()), (Shard(0), Shard(0))
        with self.assertRaises(AssertionError):
            _TransformInfo(-1, one, [4])
        with self.assertRaisesRegex(AssertionError, "not a no-op"):
            _TransformInfo(0, two, [4])
        flat = (None, (0, 1))
        with self.assertRaisesRegex(AssertionError, "not a no-op"):
            _FlattenedTransformInfo(0, two, [4], *flat)
        with self.assertRaisesRegex(AssertionError, "must be > 1 if set, got 1"):
            _FlattenedTransformInfo(0, one, [4], *flat, avg_scale=1)
        self.assertEqual(_FlattenedTransformInfo(0, one, [4], *flat, 2).avg_scale, 2)

    @slowTest
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

    def test_padding(self):
        """Zeros follow the elements, and can be removed; a dimension that a tensor
        lacks is refused."""
        for dim, size in itertools.product((0, 1), (0, 2)):
            where, whole = f"{size}, dimension {dim}", torch.ones(3, 4)
            shape = [3, 4]
            shape[dim] = size
            expected = torch.cat((whole, torch.zeros(shape)), dim)
            padded = pad_tensor(whole, dim, size)
            self.assertEqual(padded, expected, where)
            back = unpad_tensor(padded, dim, size)
            self.assertEqual(back, whole, where)
            if not size:
                self.assertIs(padded, whole, where)
                self.assertIs(back, whole, where)
        for placement in (Shard(3), _StridedShard(3, split_factor=2)):
            for index in (0, symbol(0, ShapeEnv(**SYMBOLS))):
                with self.assertRaisesRegex(AssertionError, "dim 3 greater.* 2"):
                    placement._select_split_tensor(whole, 2, index, with_padding=False)
        with self.assertRaises(IndexError):
            Shard(2)._split_tensor(whole, 2)

    @slowTest
    def test_ranks_that_are_not_known_yet(self):
        """A part is the same if its rank is a symbol, and a view if it may be one."""
        # Fewer elements than the last rank's place raise (torch 2.13).
        for size, number in ((6, 3), (5, 3), (7, 4)):
            whole = torch.arange(size * size).view(size, size)
            for dim, rank, copies in itertools.product(
                (0, 1), range(number), (True, False)
            ):
                where = f"{rank} of {number}, dimension {dim} of {size}, {copies}"
                for index, dense in itertools.product(
                    (symbol(rank, ShapeEnv(**SYMBOLS)), rank), (True, False)
                ):
                    given = {"clone": copies, "contiguous": dense}
                    found = Shard(dim)._select_split_tensor(
                        whole, number, index, with_padding=False, **given
                    )
                    self.assertEqual(found, cut(whole, dim, number, rank), where)
                    is_view = found.data_ptr() in range(
                        whole.data_ptr(), whole.data_ptr() + whole.nbytes
                    )
                    is_dense = dense or copies
                    viewed = not copies and (dim == 0 or not is_dense)
                    self.assertEqual(is_view, viewed, where)
                    if is_dense or dim == 0:
                        self.assertTrue(found.is_contiguous(), where)

    def test_blocks_that_are_not_known_yet(self):
        environment = ShapeEnv(**SYMBOLS)
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
