# Owner(s): ["oncall: distributed"]
"""DTensor's redistribution: between any two placements on any mesh, values, shards and
gradients equal those that slicing the whole tensor gives.
"""

import contextlib
import itertools
import sys

import torch
from torch import distributed as dist
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    disable_redistribute_transform_optimization,
    use_min_cost_redistribution_plan,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, world_mesh
from torch_ext.testing._internal.common_utils import (
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


def local_part(whole, mesh, placements):
    """Return the part of ``whole`` that this rank has; partial values are left out."""
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            number, index = mesh.size(dim), mesh.get_local_rank(dim)
            step = -(-whole.shape[placement.dim] // number)
            start = min(step * index, whole.shape[placement.dim])
            step = min(step, whole.shape[placement.dim] - start)
            whole = whole.narrow(placement.dim, start, step)
    return whole


def strided_part(whole, mesh, dim):
    """Return this rank's part under ``FSDP_OF_TP[dim]``."""
    outer, inner = mesh.get_local_rank(1), mesh.get_local_rank(0)
    return whole.chunk(mesh.size(1), dim)[outer].chunk(mesh.size(0), dim)[inner]


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
        targets = [*itertools.product(PLAIN, repeat=len(sizes))]
        for source, target in itertools.product(sources, targets):
            where = f"{size} on {sizes}: {source} to {target}"
            made = self._source(whole, mesh, source)
            found = made.redistribute(mesh, target)
            self.assertEqual(found.placements, target, where)
            self.assertEqual(found.full_tensor(), whole, f"value, {where}")
            expected = local_part(whole, mesh, target)
            self.assertEqual(found.to_local(), expected, f"part, {where}")
            before = self._source(whole, mesh, source)
            self.assertEqual(made.to_local(), before.to_local(), f"source, {where}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("sizes", [(4,), (2, 2)])
    def test_gradients(self, sizes):
        """Gradients come back in the placements of the source, also of another type."""
        mesh, whole = world_mesh(*sizes), self._whole("uneven")
        factor, factors = self._whole("uneven", 1), {}
        pairs = itertools.product(itertools.product(PLAIN, repeat=len(sizes)), repeat=2)
        for (source, target), half in itertools.product(pairs, (False, True)):
            types = {"forward_dtype": torch.bfloat16, "backward_dtype": torch.float32}
            options = types if half else {}
            where = f"{sizes}: {source} to {target} {options}"
            made = distribute_tensor(whole, mesh, source).requires_grad_()
            found = made.redistribute(mesh, target, async_op=half, **options)
            self.assertEqual(
                found.dtype, torch.bfloat16 if half else whole.dtype, where
            )
            if target not in factors:
                factors[target] = distribute_tensor(factor, mesh, target)
            (found * factors[target]).sum().backward()
            self.assertEqual(made.grad.placements, source, f"gradient, {where}")
            expected = local_part(factor, mesh, source)
            self.assertEqual(made.grad.to_local(), expected, f"gradient, {where}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    @parametrize("dim", [0, 1])
    def test_shards_of_fsdp_over_tensor_parallelism(self, dim):
        """Shards that were cut by the last dimension of the mesh first, to and from
        all others, with gradients."""
        mesh, whole = world_mesh(2, 2), self._whole("even")
        factor = self._whole("even", 1)
        strided = FSDP_OF_TP[dim]
        made = distribute_tensor(whole, mesh, strided)
        self.assertEqual(made.to_local(), strided_part(whole, mesh, dim))
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
            expected = strided_part(whole, mesh, dim)
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
            with CommDebugMode() as log:
                made.redistribute(mesh, [target])
            found = [str(name).rpartition(".")[2] for name in log.get_comm_counts()]
            self.assertEqual(log.get_total_counts(), bool(expected), f"{found}")
            self.assertTrue(not expected or expected in found[0], f"{found}")

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_distribution_takes_rank_0s_values(self):
        mesh, whole = world_mesh(2, 2), self._whole("uneven")
        for placements in itertools.product(PLAIN, repeat=2):
            mine = whole if self.rank == 0 else torch.zeros_like(whole)
            found = distribute_tensor(mine, mesh, placements).full_tensor()
            self.assertEqual(found, whole, f"{placements}")
            with self.assertRaisesRegex(ValueError, "must have the same number|length"):
                distribute_tensor(whole, mesh, placements[:1])


instantiate_parametrized_tests(RedistributeTest)

if __name__ == "__main__":
    run_tests()
