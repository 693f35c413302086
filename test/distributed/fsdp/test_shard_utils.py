# Owner(s): ["oncall: distributed"]
"""How FSDP1 cuts a tensor into ``ShardedTensor`` and ``DTensor``."""

import sys

import torch
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp._shard_utils import (
    _all_gather_dtensor,
    _create_chunk_dtensor,
    _create_chunk_sharded_tensor,
    _get_remote_device_str,
)
from torch.distributed.tensor import Replicate, Shard

from torch_ext.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch_ext.testing._internal.common_fsdp import FSDPTest, world_mesh
from torch_ext.testing._internal.common_utils import run_tests

if not dist.is_available():
    print("Distributed not available, skipping tests", file=sys.stderr)
    sys.exit(0)

HOST = torch.empty(0).device.type.upper()
SHAPES = ((4, 3), (5, 2), (9,), (2, 2), (1, 4, 2), (6, 1))


class TestShardUtilsDistributed(FSDPTest):
    @property
    def world_size(self):
        return 4

    def _whole(self, shape: tuple[int, ...]) -> torch.Tensor:
        numel = torch.Size(shape).numel()
        return torch.arange(float(numel), device=self.device).view(shape)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_create_chunk_sharded_tensor(self):
        """A rank's part is its chunk of the first dimension. All ranks know the place
        of every chunk; a rank without one holds nothing.
        """
        two = dist.new_group([1, 3])
        kind = self.device.type
        for group in (dist.group.WORLD, two):
            if self.rank not in dist.get_process_group_ranks(group):
                continue
            rank, size = group.rank(), group.size()
            for shape in SHAPES:
                whole = self._whole(shape)
                made = _create_chunk_sharded_tensor(whole, rank, size, 2, group)
                where = f"{shape} in {size} parts"
                self.assertIsInstance(made, ShardedTensor)
                self.assertIs(made._process_group, group, where)
                self.assertEqual(made.size(), torch.Size(shape), where)
                self.assertEqual(made.dtype, whole.dtype, where)
                chunks, height, start = whole.chunk(size), -(-shape[0] // size), 0
                local = made.local_shards()
                expected = [chunks[rank]] if rank < len(chunks) else []
                self.assertEqual([each.tensor for each in local], expected, where)
                for each in local:
                    offsets = [rank * height, *(0 for _ in shape[1:])]
                    self.assertEqual(each.metadata.shard_offsets, offsets, where)
                    whole.zero_()
                    self.assertEqual(each.tensor, self._whole(shape).chunk(size)[rank])
                found = made.metadata().shards_metadata
                self.assertEqual(len(found), len(chunks), where)
                for number, (part, chunk) in enumerate(zip(found, chunks, strict=True)):
                    own = dist.get_global_rank(group, number)
                    index = "" if whole.is_cpu else f":{own % 2}"
                    self.assertEqual(part.shard_offsets[0], start, where)
                    self.assertEqual(part.shard_offsets[1:], [0] * (len(shape) - 1))
                    self.assertEqual(part.shard_sizes, [*chunk.shape], where)
                    self.assertEqual(str(part.placement), f"rank:{own}/{kind}{index}")
                    start += chunk.shape[0]
        dist.barrier()

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_create_chunk_dtensor(self):
        """The last dimension of the mesh shards, the others replicate; gathering gives
        the whole tensor. Neither keeps the graph.
        """
        for sizes in ((4,), (2, 2)):
            mesh = world_mesh(*sizes)
            for shape in SHAPES:
                whole = self._whole(shape).requires_grad_()
                made = _create_chunk_dtensor(whole, self.rank, mesh)
                where = f"{shape} on a mesh of {sizes}"
                replicas = [Replicate()] * (len(sizes) - 1)
                self.assertEqual([*made.placements], [*replicas, Shard(0)], where)
                self.assertEqual(made.shape, torch.Size(shape), where)
                self.assertFalse(made.requires_grad)
                chunks, rank = (
                    whole.chunk(sizes[-1]),
                    mesh.get_local_rank(len(sizes) - 1),
                )
                local = chunks[rank] if rank < len(chunks) else whole[:0]
                self.assertEqual(made.to_local(), local.detach(), where)
                gathered = _all_gather_dtensor(made, mesh)
                self.assertEqual(gathered, whole.detach(), where)
                self.assertIs(type(gathered), torch.Tensor)
                self.assertEqual(made.placements[-1], Shard(0))
                other = world_mesh(2, 2) if len(sizes) == 1 else world_mesh(4)
                with self.assertRaisesRegex(AssertionError, "should be a root mesh"):
                    _all_gather_dtensor(made, other)

    @skip_if_lt_x_gpu(4, allow_cpu=True)
    def test_get_remote_device_str(self):
        self.assertEqual(_get_remote_device_str(5, HOST, 4), f"rank:5/{HOST}")
        self.assertEqual(_get_remote_device_str(5, "other", 4), "rank:5/other:1")


if __name__ == "__main__":
    run_tests()
