# Owner(s): ["oncall: distributed"]
"""DTensor's redistribution: between any two placements on any mesh, values, shards and
gradients equal those that slicing the whole tensor gives.
"""

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
from torch.distributed.tensor.debug import CommDebugMode

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
    @parametrize("size,sizes", [*((size, (4,)) for size in SIZES), ("uneven", (2, 2))])
    def test_any_placements_to_any(self, size, sizes):
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
