"""What every c10d backend must do, as tests that anybody can run on theirs.

    class TestMyBackend(BackendConformance, DistributedTestBase):
        device_type = "mydevice"
        backend_name = "mybackend"

    if __name__ == "__main__":
        run_tests()

Each test runs on ``world_size`` ranks and compares what a collective gives with a value computed in one process, for
every type, reduction and size of the class; what a backend lacks is said in its class, as data. Values are small whole
numbers, exact in every type, so results are compared exactly whatever the order of reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist

__all__ = ["BackendConformance"]

OPS = dist.ReduceOp
Reduction = Any  # dist.ReduceOp.RedOpType, which mypy does not know


class BackendConformance:
    """Tests of one backend. Mixed into a class that starts ranks, such as ``DistributedTestBase``.

    Attributes:
        device_type: of the tensors.
        backend_name: as ``init_process_group`` takes it.
        sizes: numbers of elements that each rank contributes; 0, 1, a prime, and one of 16 MiB in all.
        types: element types.
        unequal_lists: whether lists of tensors of unequal sizes are served, as NCCL does.
        names_disagreement: whether ranks that call different things are told, with both calls.
    """

    device_type: ClassVar[str]
    backend_name: ClassVar[str]
    sizes: ClassVar[tuple[int, ...]] = (0, 1, 13, 1 << 20)
    types: ClassVar[tuple[torch.dtype, ...]] = (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64,
    )  # fmt: skip
    unequal_lists: ClassVar[bool] = True
    names_disagreement: ClassVar[bool] = False

    rank: int
    world_size: int

    def backend(self, device: str) -> str:
        return self.backend_name

    def reductions(self, dtype: torch.dtype) -> list[Reduction]:
        """Return the reductions that this backend has for a type. Override what it lacks."""
        bitwise = [] if dtype.is_floating_point else [OPS.BAND, OPS.BOR, OPS.BXOR]
        return [OPS.SUM, OPS.MIN, OPS.MAX, OPS.PRODUCT, OPS.AVG, *bitwise]

    def grid(self) -> Iterator[tuple[torch.dtype, int]]:
        """Every type at the smaller sizes, and the largest once."""
        *smaller, largest = self.sizes
        yield from ((dtype, size) for dtype in self.types for size in smaller)
        yield self.types[0], largest

    # --- collectives ---

    def test_all_reduce_and_reduce(self) -> None:
        self._start()
        for dtype, size in self.grid():
            rows = self._rows(dtype, size)
            for op in self.reductions(dtype):
                expected = _reduced(rows, op)
                mine = self._to_device(rows[self.rank])
                dist.all_reduce(mine, op)
                self._check(mine, expected, dtype, size, op)
                mine = self._to_device(rows[self.rank])
                dist.reduce(mine, 1, op)
                if self.rank == 1:
                    self._check(mine, expected, dtype, size, op)

    def test_reduce_scatter(self) -> None:
        self._start()
        for dtype, size in self.grid():
            rows = self._rows(dtype, size * self.world_size)
            for op in self.reductions(dtype):
                expected = _reduced(rows, op).view(self.world_size, size)[self.rank]
                mine, out = self._to_device(rows[self.rank]), self._empty(size, dtype)
                dist.reduce_scatter_tensor(out, mine, op)
                self._check(out, expected, dtype, size, op)
                self._check(mine, rows[self.rank], "input", dtype, size, op)

    def test_all_gather(self) -> None:
        self._start()
        for dtype, size in self.grid():
            rows = self._rows(dtype, size)
            mine, whole = self._to_device(rows[self.rank]), self._empty(size * self.world_size, dtype)
            dist.all_gather_into_tensor(whole, mine)
            self._check(whole, rows.flatten(), dtype, size)
            parts = [self._empty(size, dtype) for _ in range(self.world_size)]
            dist.all_gather(parts, mine)
            self._check(torch.stack(parts), rows, dtype, size)
            whole.zero_()
            whole[self.rank * size : (self.rank + 1) * size] = mine
            dist.all_gather_into_tensor(whole, whole[self.rank * size : (self.rank + 1) * size])  # in place
            self._check(whole, rows.flatten(), "in place", dtype, size)

    def test_one_to_all_and_all_to_one(self) -> None:
        self._start()
        for dtype, size in self.grid():
            rows = self._rows(dtype, size)
            for root in range(self.world_size):
                mine = self._to_device(rows[self.rank])
                dist.broadcast(mine, root)
                self._check(mine, rows[root], "broadcast", dtype, size, root)
                is_root, mine = self.rank == root, self._to_device(rows[self.rank])
                gathered = [self._empty(size, dtype) for _ in range(self.world_size)] if is_root else None
                dist.gather(mine, gathered, root)
                if gathered is not None:
                    self._check(torch.stack(gathered), rows, "gather", dtype, size, root)
                out = self._empty(size, dtype)
                dist.scatter(out, [self._to_device(row) for row in rows] if is_root else None, root)
                self._check(out, rows[self.rank], "scatter", dtype, size, root)

    def test_all_to_all(self) -> None:
        self._start()
        for dtype, size in self.grid():
            table = self._rows(dtype, size * self.world_size).view(self.world_size, self.world_size, size)
            out = self._empty(size * self.world_size, dtype)
            dist.all_to_all_single(out, self._to_device(table[self.rank].flatten()))
            self._check(out, table[:, self.rank].flatten(), dtype, size)
        counts = [
            [(sender + 2 * receiver) % 3 for receiver in range(self.world_size)] for sender in range(self.world_size)
        ]
        sent, received = counts[self.rank], [row[self.rank] for row in counts]
        out = torch.empty(sum(received), 2, device=self.device_type)
        dist.all_to_all_single(
            out, torch.full((sum(sent), 2), float(self.rank), device=self.device_type), received, sent
        )
        expected = [float(sender) for sender, count in enumerate(received) for _ in range(count)]
        self._check(out[:, 0], torch.tensor(expected), "splits", sent, received)

    def test_lists_of_unequal_sizes(self) -> None:
        self._start()
        if not self.unequal_lists:
            return
        mine = torch.full((self.rank,), float(self.rank), device=self.device_type)
        outs = [torch.empty(rank, device=self.device_type) for rank in range(self.world_size)]
        dist.all_gather(outs, mine)
        for rank, out in enumerate(outs):
            self._check(out, torch.full((rank,), float(rank)), "all_gather", rank)
        parts = [torch.full((rank,), 1.0, device=self.device_type) for rank in range(self.world_size)]
        out = torch.empty(self.rank, device=self.device_type)
        dist.reduce_scatter(out, parts)
        self._check(out, torch.full((self.rank,), float(self.world_size)), "reduce_scatter")

    # --- transfers, groups, order ---

    def test_transfers(self) -> None:
        self._start()
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        for dtype, size in self.grid():
            rows, out = self._rows(dtype, size), self._empty(size, dtype)
            work = _started(dist.isend(self._to_device(rows[self.rank]), after))
            dist.recv(out, before)
            work.wait()
            self._check(out, rows[before], dtype, size)

    def test_groups_of_some_ranks_do_not_mix(self) -> None:
        self._start()
        pairs = [dist.new_group([first, first + 1]) for first in range(self.world_size - 1)]
        for first, pair in enumerate(pairs):
            x = torch.full((3,), float(self.rank), device=self.device_type)
            if self.rank in (first, first + 1):
                dist.all_reduce(x, group=pair)
                self._check(x, torch.full((3,), 2.0 * first + 1), "pair", first)

    def test_asynchronous_operations_of_a_group_keep_their_order(self) -> None:
        self._start()
        tensors = [torch.full((3,), float(i), device=self.device_type) for i in range(20)]
        works = [_started(dist.all_reduce(tensor, async_op=True)) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        for i, tensor in enumerate(tensors):
            self._check(tensor, torch.full((3,), float(i * self.world_size)), i)

    def test_future_has_the_result(self) -> None:
        self._start()
        x = torch.ones(3, device=self.device_type)
        work = _started(dist.all_reduce(x, async_op=True))
        doubled = work.get_future().then(lambda done: done.value()[0] * 2).wait()
        self._check(doubled, torch.full((3,), 2.0 * self.world_size), "then")

    # --- errors ---

    def test_disagreement_is_named_and_survived(self) -> None:
        self._start()
        if not self.names_disagreement:
            return
        x = torch.ones(3 + self.rank % 2, device=self.device_type)
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            told = str(error)
        else:
            raise AssertionError("nobody said that the ranks' sizes differ")
        for part in ("all_reduce", "3", "4", f"rank {self.rank}"):
            if part not in told:
                raise AssertionError(f"expected {part!r} in: {told}")
        x = torch.ones(3, device=self.device_type)
        dist.all_reduce(x)
        self._check(x, torch.full((3,), float(self.world_size)), "after a disagreement")

    # --- helpers ---

    def _start(self) -> None:
        self.create_pg(self.device_type)  # type: ignore[attr-defined]  # the class that this is mixed into has it

    def _rows(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """What each rank contributes, ``[world_size, numel]`` on the host: 1 to 3, so that no product overflows."""
        rows = [(torch.arange(numel, device="cpu") + rank) % 3 + 1 for rank in range(self.world_size)]
        return torch.stack(rows).to(dtype)

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.device_type, copy=True)

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((numel,), 7, dtype=dtype, device=self.device_type)

    def _check(self, got: torch.Tensor, expected: torch.Tensor, *where: object) -> None:
        if not torch.equal(got.cpu(), expected.to("cpu", got.dtype)):
            raise AssertionError(f"{where}: got {got.cpu()}, expected {expected}")


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise AssertionError("an asynchronous operation gave no work")
    return work


def _reduced(rows: torch.Tensor, op: Reduction) -> torch.Tensor:
    """Reduce over dimension 0, one row after the other."""
    dtype = rows.dtype
    folds: dict[Reduction, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        OPS.SUM: torch.add, OPS.AVG: torch.add, OPS.PRODUCT: torch.mul, OPS.MIN: torch.minimum, OPS.MAX: torch.maximum,
        OPS.BAND: torch.bitwise_and, OPS.BOR: torch.bitwise_or, OPS.BXOR: torch.bitwise_xor,
    }  # fmt: skip
    total = rows[0].clone()
    for row in rows[1:]:
        total = folds[op](total, row)
    if op == OPS.AVG:
        total = total / len(rows) if dtype.is_floating_point else total // len(rows)
    return total.to(dtype)
