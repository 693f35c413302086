"""Conformance tests of c10d backends, to run on yours.

    class TestMyBackend(BackendConformance, DistributedTestBase):
        device_type = "mydevice"
        backend_name = "mybackend"

    if __name__ == "__main__":
        run_tests()

Each test runs on ``world_size`` ranks and compares what a collective gives with a value
computed in one process, for every type, reduction and size of the class. Values are
small whole numbers, exact in every type, so results are compared exactly whatever the
order of reduction.

The class's ``capabilities`` list its backend's exceptions. ``lacks`` names features of
``FEATURES`` that raise an error or give another result, each with the reason. The tests
run them all the same, and one that works is a failure, so the list stays true.
``avoids`` names features that would hang or end the process; the tests do not run
those. ``python -m torch_ext conformance --tier c10d`` counts the features one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from torch_ext import accelerator
from torch_ext.compat.c10d import _coalescing_manager, _get_default_store

__all__ = [
    "CAPABILITIES",
    "FEATURES",
    "BackendConformance",
    "Capabilities",
    "capabilities_of",
]

OPS = dist.ReduceOp
Reduction = Any  # dist.ReduceOp.RedOpType, which mypy does not know


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do, and why it cannot do the rest.

    Attributes:
        sizes: numbers of elements that each rank contributes; 0, 1, a prime, and one of
            4 MiB.
        types: element types.
        reductions: names of ``ReduceOp``; those of bits are for whole numbers.
        averages_integers: whether ``AVG`` takes them.
        lacks: features that fail, with the reason.
        avoids: features that are not run, with the reason.
        contract: fields of upstream's ``BackendConfig`` that the features do not say.
    """

    sizes: tuple[int, ...] = (0, 1, 13, 1 << 20)
    types: tuple[torch.dtype, ...] = (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.uint8, torch.int8, torch.int32, torch.int64,
    )  # fmt: skip
    reductions: tuple[str, ...] = (
        "SUM", "MIN", "MAX", "PRODUCT", "AVG", "BAND", "BOR", "BXOR",
    )  # fmt: skip
    averages_integers: bool = True
    lacks: Mapping[str, str] = field(default_factory=dict)
    avoids: Mapping[str, str] = field(default_factory=dict)
    contract: Mapping[str, Any] = field(default_factory=dict)


_NO_TRANSFERS = "there are no transfers"
_UNNOTICED = f"{_NO_TRANSFERS}, which ranks that take no part do not notice"
_ONE_RANK = "tells one rank while the others wait"
_MIXED_UP = "ends the process, or mixes up bytes"
_NO_TIMES = "its works have no times"

# Of the backends that torch and this project have, as init_process_group names them.
CAPABILITIES = {
    "simccl": Capabilities(
        types=(*Capabilities.types, torch.bool, torch.complex64),
        reductions=("SUM", "MIN", "MAX", "PRODUCT", "AVG"),
        lacks={
            "dense tensors in another order than row-major": "ProcessGroupNCCL refuses "
            "them",
        },
        avoids={
            "messages by tag": "NCCL has no tags",
            "recv from any rank": "NCCL receives from a given rank only",
        },
        contract={
            "supports_dropped_p2p_work": True,
            "supports_gather_single": True,
            "supports_work_result": True,
            "float8_dtypes": (
                torch.float8_e4m3fn, torch.float8_e5m2,
                torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
            ),
            "premul_sum_dtypes": (torch.float16, torch.float32, torch.float64),
        },
    ),
    "gloo": Capabilities(
        sizes=(1, 13, 1 << 20),  # it reduces no empty tensors
        types=(
            torch.float32, torch.float64, torch.float16,
            torch.uint8, torch.int8, torch.int32, torch.int64,
        ),
        reductions=("SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"),
        lacks={"coalescing": "gloo has none", "collective timing": _NO_TIMES},
        avoids={
            "lists of unequal sizes": _MIXED_UP,
            "disagreement is named": _MIXED_UP,
        },
    ),
    "threaded": Capabilities(
        averages_integers=False,
        lacks={
            "reduce": "not written",
            "send and recv": _NO_TRANSFERS,
            "batch_isend_irecv": _NO_TRANSFERS,
            "coalescing": "not written",
            "sequence numbers": "not written",
            "collective timing": _NO_TIMES,
        },
        avoids={
            "reduce_scatter_tensor": f"knows SUM and AVG alone, and {_ONE_RANK}",
            "messages in order": _UNNOTICED,
            "messages by tag": _UNNOTICED,
            "recv from any rank": _UNNOTICED,
            "disagreement is named": _ONE_RANK,
        },
    ),
}  # fmt: skip
# What serves NCCL's names where the simulated device is CUDA.
CAPABILITIES["nccl"] = CAPABILITIES["simccl"]
# Device tensors of a group of gloo take its simulated half, which is simccl.
CAPABILITIES["gloo on sim"] = replace(
    CAPABILITIES["gloo"],
    lacks={"sequence numbers": "torch shows those of the host's half"},
    avoids={**CAPABILITIES["gloo"].avoids, **CAPABILITIES["simccl"].avoids},
)


def capabilities_of(backend: str, device: str) -> Capabilities:
    """Return what is known of ``backend`` with tensors of ``device``, or all."""
    default = CAPABILITIES.get(backend, Capabilities())
    return CAPABILITIES.get(f"{backend} on {device}", default)


class BackendConformance:
    """Tests of one backend, one for each feature. Mixed into a class that starts ranks,
    such as ``DistributedTestBase``.

    Attributes:
        device_type: of the tensors.
        backend_name: as ``init_process_group`` takes it.
        capabilities: those of ``CAPABILITIES`` for the backend's name, or all.
    """

    device_type: ClassVar[str]
    backend_name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    @classmethod
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "backend_name" in vars(cls) and "capabilities" not in vars(cls):
            device = getattr(cls, "device_type", "")
            cls.capabilities = capabilities_of(cls.backend_name, device)

    rank: int
    world_size: int

    def backend(self, device: str) -> str:
        return self.backend_name

    def reductions(self, dtype: torch.dtype) -> list[Reduction]:
        """Return the reductions of a type. Complex numbers have no order, and two
        truth values no mean."""
        found = set(self.capabilities.reductions)
        if dtype.is_floating_point or dtype.is_complex:
            found -= {"BAND", "BOR", "BXOR"}
        elif dtype == torch.bool or not self.capabilities.averages_integers:
            found -= {"AVG"}
        if dtype.is_complex:
            found &= {"SUM", "AVG"}
        return [getattr(OPS, name) for name in sorted(found)]

    def grid(self) -> Iterator[tuple[torch.dtype, int]]:
        """Every type at the smaller sizes, and the largest once."""
        *smaller, largest = self.capabilities.sizes
        types = self.capabilities.types
        yield from ((dtype, size) for dtype in types for size in smaller)
        yield types[0], largest

    def start_group(self) -> None:
        """Make the default group, unless the class that starts ranks has made it."""
        if not dist.is_initialized():
            self.create_pg(self.device_type)  # type: ignore[attr-defined]  # the class that this is mixed into has it

    def test_all_reduce(self) -> None:
        """all_reduce: for each type, reduction and size."""
        for where, rows, mine, op in self._reductions():
            dist.all_reduce(mine, op)
            self._check(mine, _reduced(rows, op), *where)

    def test_reduce(self) -> None:
        """reduce: to a rank other than 0, likewise."""
        root = self.world_size - 1
        for where, rows, mine, op in self._reductions():
            dist.reduce(mine, root, op)
            if self.rank == root:
                self._check(mine, _reduced(rows, op), *where)

    def test_reduce_scatter_tensor(self) -> None:
        """reduce_scatter_tensor: likewise; the input stays as it was."""
        for where, rows, mine, op in self._reductions(parts=self.world_size):
            expected = _reduced(rows, op).tensor_split(self.world_size)[self.rank]
            out = self._empty(expected.numel(), mine.dtype)
            dist.reduce_scatter_tensor(out, mine, op)
            self._check(out, expected, *where)
            self._check(mine, rows[self.rank], "input", *where)

    def test_all_gather_into_tensor(self) -> None:
        """all_gather_into_tensor: for each type and size."""
        for where, rows, mine in self._cases():
            whole = self._empty(rows.numel(), mine.dtype)
            dist.all_gather_into_tensor(whole, mine)
            self._check(whole, rows.flatten(), *where)

    def test_all_gather_into_tensor_in_place(self) -> None:
        """all_gather_into_tensor in place: where the input is a part of the output."""
        for where, rows, mine in self._cases():
            whole = self._empty(rows.numel(), mine.dtype)
            part = whole.tensor_split(self.world_size)[self.rank]
            part.copy_(mine)
            dist.all_gather_into_tensor(whole, part)
            self._check(whole, rows.flatten(), *where)

    def test_all_gather(self) -> None:
        """all_gather: for each type and size."""
        for where, rows, mine in self._cases():
            parts = [self._empty(mine.numel(), mine.dtype) for _ in rows]
            dist.all_gather(parts, mine)
            self._check(torch.stack(parts), rows, *where)

    def test_broadcast(self) -> None:
        """broadcast: from each rank, for each type and size."""
        for where, rows, mine, root in self._rooted():
            dist.broadcast(mine, root)
            self._check(mine, rows[root], *where)

    def test_gather(self) -> None:
        """gather: to each rank, likewise."""
        for where, rows, mine, root in self._rooted():
            gathered = [self._empty(mine.numel(), mine.dtype) for _ in rows]
            is_root = self.rank == root
            dist.gather(mine, gathered if is_root else None, root)
            if is_root:
                self._check(torch.stack(gathered), rows, *where)

    def test_scatter(self) -> None:
        """scatter: from each rank, likewise."""
        for where, rows, mine, root in self._rooted():
            out = self._empty(mine.numel(), mine.dtype)
            is_root = self.rank == root
            dist.scatter(out, [*self._to_device(rows)] if is_root else None, root)
            self._check(out, rows[self.rank], *where)

    def test_all_to_all_single(self) -> None:
        """all_to_all_single: for each type and size."""
        for where, rows, mine in self._cases(parts=self.world_size):
            out = self._empty(mine.numel(), mine.dtype)
            dist.all_to_all_single(out, mine)
            received = rows.tensor_split(self.world_size, dim=1)[self.rank]
            self._check(out, received.flatten(), *where)

    def test_all_to_all_single_with_splits(self) -> None:
        """all_to_all_single with splits: of unequal sizes, 0 among them."""
        ranks = torch.arange(self.world_size, device="cpu")
        counts = (ranks[:, None] + 2 * ranks) % 3  # [sender, receiver]
        sent, received = counts[self.rank].tolist(), counts[:, self.rank].tolist()
        out = torch.empty(sum(received), 2, device=self.device_type)
        mine = torch.full((sum(sent), 2), float(self.rank), device=self.device_type)
        dist.all_to_all_single(out, mine, received, sent)
        expected = ranks.repeat_interleave(counts[:, self.rank])
        self._check(out[:, 0], expected, sent, received)

    def test_lists_of_unequal_sizes(self) -> None:
        """lists of unequal sizes: all_gather and reduce_scatter, as NCCL has them."""
        outs = [self._full(0, rank) for rank in range(self.world_size)]
        dist.all_gather(outs, self._full(self.rank, self.rank))
        for rank, out in enumerate(outs):
            self._check(out, rank, "all_gather", rank)
        out = self._full(0, self.rank)
        dist.reduce_scatter(out, [torch.ones_like(each) for each in outs])
        self._check(out, self.world_size, "reduce_scatter")

    def test_dense_tensors_in_another_order_than_row_major(self) -> None:
        """dense tensors in another order than row-major: the same on all ranks."""
        rows = self._rows(torch.float32, 12)
        mine = self._to_device(rows[self.rank]).view(3, 4).t()
        expected = _reduced(rows, OPS.SUM).view(3, 4).t()
        dist.all_reduce(mine)
        self._check(mine, expected, "all_reduce")
        dist.broadcast(mine, 0)
        self._check(mine, expected, "broadcast")

    def test_parts_of_a_larger_tensor(self) -> None:
        """parts of a larger tensor: of which nothing else is read or written."""
        whole = self._full(7, 9)
        part = whole[3:6]
        part.fill_(self.rank)
        dist.all_reduce(part)
        total = float(sum(range(self.world_size)))
        self._check(whole, torch.tensor([7.0] * 3 + [total] * 3 + [7.0] * 3))
        dist.broadcast(whole[0], 0)  # of no dimension
        self._check(whole[0], torch.tensor(7.0))

    def test_send_and_recv(self) -> None:
        """send and recv: around a ring, for each type and size."""
        after, before = self._neighbours
        for where, rows, mine in self._cases():
            out = self._empty(mine.numel(), mine.dtype)
            work: Any = dist.isend(mine, after)
            dist.recv(out, before)
            work.wait()
            self._check(out, rows[before], *where)

    def test_messages_in_order(self) -> None:
        """messages in order: as they were sent, whatever the order of waits."""
        if self.rank == 0:
            sends: list[Any] = [dist.isend(self._full(i), 1) for i in range(6)]
            for work in sends:
                work.wait()
        elif self.rank == 1:
            outs = [self._full(-1) for _ in range(6)]
            works: list[Any] = [dist.irecv(out, 0) for out in outs]
            for work in reversed(works):
                work.wait()
            for i, out in enumerate(outs):
                self._check(out, i, i)

    def test_messages_by_tag(self) -> None:
        """messages by tag: received in another order than sent."""
        if self.rank == 0:
            sends: list[Any] = [
                dist.isend(self._full(i), 1, tag=i % 2) for i in range(6)
            ]
            for work in sends:
                work.wait()
        elif self.rank == 1:
            for i in (1, 3, 0, 5, 2, 4):
                out = self._full(-1)
                dist.recv(out, 0, tag=i % 2)
                self._check(out, i, i)

    def test_recv_from_any_rank(self) -> None:
        """recv from any rank: says which one it was."""
        if self.rank == 0:
            seen = set()
            for _ in range(1, self.world_size):
                out = self._full(-1)
                source = dist.recv(out, tag=9)
                self._check(out, source, source)
                seen.add(source)
            if seen != set(range(1, self.world_size)):
                raise AssertionError(f"messages came from {seen}")
        else:
            dist.send(self._full(self.rank), 0, tag=9)

    def test_batch_isend_irecv(self) -> None:
        """batch_isend_irecv: both ways at once."""
        after, before = self._neighbours
        sent, out = self._full(self.rank), self._full(-1)
        ops = dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, out, before)
        for work in dist.batch_isend_irecv([*ops]):
            work.wait()
        self._check(out, before)

    def test_groups_of_some_ranks(self) -> None:
        """groups of some ranks: which share ranks and do not mix."""
        firsts = range(self.world_size - 1)
        pairs = [dist.new_group([first, first + 1]) for first in firsts]
        for first, pair in enumerate(pairs):
            x = self._full(self.rank)
            if self.rank in (first, first + 1):
                dist.all_reduce(x, group=pair)
                self._check(x, 2 * first + 1, first)

    def test_asynchronous_order(self) -> None:
        """asynchronous order: works that are waited for in the opposite order."""
        tensors = [self._full(i) for i in range(20)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        for i, tensor in enumerate(tensors):
            self._check(tensor, i * self.world_size, i)

    def test_futures(self) -> None:
        """futures: have the result, and callbacks can use it."""
        work = dist.all_reduce(self._full(1), async_op=True)
        doubled = work.get_future().then(lambda done: done.value()[0] * 2).wait()
        self._check(doubled, torch.full((3,), 2.0 * self.world_size))

    def test_coalescing(self) -> None:
        """coalescing: several all_reduces in one."""
        tensors = [self._full(i) for i in range(3)]
        with _coalescing_manager(device=torch.device(self.device_type)):
            for tensor in tensors:
                dist.all_reduce(tensor)
        for i, tensor in enumerate(tensors):
            self._check(tensor, i * self.world_size, i)

    def test_barrier(self) -> None:
        """barrier: that no rank passes before all have arrived."""
        store = _get_default_store()
        keys = [f"reached the barrier: {rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], "")
        dist.barrier()
        if missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            raise AssertionError(f"passed the barrier without ranks {missing}")

    def test_objects(self) -> None:
        """objects: all_gather_object and broadcast_object_list."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, {"rank": self.rank})
        objects = [f"from {self.rank}"]
        dist.broadcast_object_list(objects, 0)
        expected = [{"rank": rank} for rank in range(self.world_size)]
        if (gathered, objects) != (expected, ["from 0"]):
            raise AssertionError(f"got {gathered} and {objects}")

    def test_sequence_numbers(self) -> None:
        """sequence numbers: count the group's collectives, alike on each rank."""
        group: Any = dist.group.WORLD
        before = group._get_sequence_number_for_group()
        for _ in range(2):
            dist.all_reduce(self._full(1))
        after = group._get_sequence_number_for_group()
        numbers: list[Any] = [None] * self.world_size
        dist.all_gather_object(numbers, after)
        if after != before + 2 or set(numbers) != {after}:
            raise AssertionError(f"two collectives counted {before} to {numbers}")

    def test_collective_timing(self) -> None:
        """collective timing: a work's duration in ms, once timing is enabled."""
        group: Any = dist.group.WORLD
        group._enable_collectives_timing()
        work: Any = dist.all_reduce(self._full(1), async_op=True)
        work.wait()
        if accelerator.is_accelerator():
            torch.accelerator.synchronize()
        duration_ms = work._get_duration()
        if not 0 <= duration_ms < 60_000:
            raise AssertionError(f"got {duration_ms} ms")

    def test_disagreement_is_named(self) -> None:
        """disagreement is named: unequal sizes get an error with both calls."""
        try:
            dist.all_reduce(self._full(1, 3 + self.rank % 2))
        except RuntimeError as error:
            message = str(error)
        else:
            raise AssertionError("no error although the ranks' sizes differ")
        for part in ("all_reduce", "3", "4", f"rank {self.rank}"):
            if part not in message:
                raise AssertionError(f"expected {part!r} in: {message}")
        x = self._full(1)
        dist.all_reduce(x)
        self._check(x, self.world_size, "after a disagreement")

    # Helpers.

    def _hold_to(self, name: str, body: Callable[[Any], None]) -> None:
        """Start the group and check the feature ``name`` by ``body``."""
        lacks, avoids = self.capabilities.lacks, self.capabilities.avoids
        if unknown := {*lacks, *avoids} - {*FEATURES.values()}:
            kind = type(self).__name__
            raise ValueError(f"{kind} names unknown features: {sorted(unknown)}")
        if name in avoids:
            return
        self.start_group()
        try:
            body(self)
        except Exception:
            if name not in lacks:
                raise
        else:
            if why := lacks.get(name):
                raise AssertionError(
                    f"{name} works; take it off `lacks`, which says: {why}"
                )

    def _cases(
        self, parts: int = 1
    ) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
        """Yield type and size, all ranks' ``parts``, and this rank's on the device."""
        for dtype, size in self.grid():
            rows = self._rows(dtype, parts * size)
            yield (dtype, size), rows, self._to_device(rows[self.rank])

    def _reductions(
        self, parts: int = 1
    ) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor, Reduction]]:
        for where, rows, mine in self._cases(parts):
            for op in self.reductions(mine.dtype):
                yield (*where, op), rows, mine.clone(), op

    def _rooted(self) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor, int]]:
        for where, rows, mine in self._cases():
            for root in range(self.world_size):
                yield (*where, root), rows, mine.clone(), root

    @property
    def _neighbours(self) -> tuple[int, int]:
        """The ranks after and before this one in a ring."""
        return (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size

    def _full(self, value: float, numel: int = 3) -> torch.Tensor:
        return torch.full((numel,), float(value), device=self.device_type)

    def _rows(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return all ranks' values, 1 to 3, so that no product overflows."""
        ranks = torch.arange(self.world_size, device="cpu")[:, None]
        rows = (torch.arange(numel, device="cpu") + ranks) % 3 + 1
        return rows > 1 if dtype == torch.bool else rows.to(dtype)

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.device_type, copy=True)

    def _empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((numel,), 7, dtype=dtype, device=self.device_type)

    def _check(
        self, got: torch.Tensor, expected: torch.Tensor | float, *where: object
    ) -> None:
        if not isinstance(expected, torch.Tensor):
            expected = torch.full(got.shape, float(expected), device="cpu")
        if not torch.equal(got.cpu(), expected.to("cpu", got.dtype)):
            raise AssertionError(f"{where}: got {got.cpu()}, expected {expected}")


def _test_of(feature: str, body: Callable[[Any], None]) -> Callable[[Any], None]:
    return functools.wraps(body)(lambda self: self._hold_to(feature, body))


# Features, by the names of their tests: the first words of the docstrings.
FEATURES = {
    name: str(body.__doc__).partition(":")[0]
    for name, body in vars(BackendConformance).items()
    if name.startswith("test_")
}
for _name, _feature in FEATURES.items():
    _body = vars(BackendConformance)[_name]
    setattr(BackendConformance, _name, _test_of(_feature, _body))


def _reduced(rows: torch.Tensor, op: Reduction) -> torch.Tensor:
    """Reduce over dimension 0, one row after the other."""
    dtype = rows.dtype
    folds: dict[Reduction, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        OPS.SUM: torch.add, OPS.AVG: torch.add, OPS.PRODUCT: torch.mul,
        OPS.MIN: torch.minimum, OPS.MAX: torch.maximum,
        OPS.BAND: torch.bitwise_and, OPS.BOR: torch.bitwise_or,
        OPS.BXOR: torch.bitwise_xor,
    }  # fmt: skip
    total = rows[0].clone()
    for row in rows[1:]:
        total = folds[op](total, row)
    if op == OPS.AVG:
        exact = dtype.is_floating_point or dtype.is_complex
        total = total / len(rows) if exact else total // len(rows)
    return total.to(dtype)
