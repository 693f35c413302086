"""Every collective of ``simccl``, by type and reduction, against gloo on host tensors or a value computed by hand."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional  # here, so that ranks need not load it

import torch_ext.sim  # noqa: F401 - registers the device
from test.torch_ext.sim import ranks

SIM = torch.get_device_module("sim")
OPS = dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TYPES = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64)


def _values(rank: int, dtype: torch.dtype, numel: int = 6) -> torch.Tensor:
    """Host values that differ between ranks and are exact in every type."""
    return ((torch.arange(numel) + 3 * rank) % 4).to(dtype)


def _every_rank(world_size: int, dtype: torch.dtype, numel: int = 6) -> torch.Tensor:
    return torch.stack([_values(rank, dtype, numel) for rank in range(world_size)])


def _reduced(stacked: torch.Tensor, op: Any) -> torch.Tensor:
    """What a reduction over dimension 0 must give, computed in one process."""
    dtype = stacked.dtype
    if dtype == torch.bool:
        folds = {OPS.SUM: torch.any, OPS.MAX: torch.any, OPS.BOR: torch.any}
        if op == OPS.BXOR:
            return stacked.sum(0) % 2 == 1
        return folds.get(op, torch.all)(stacked, 0)
    if op in (OPS.SUM, OPS.AVG):
        total = stacked.sum(0).to(dtype)
        exact = dtype.is_floating_point or dtype.is_complex
        return total if op == OPS.SUM else (total / len(stacked) if exact else total // len(stacked))
    if op == OPS.PRODUCT:
        return stacked.prod(0).to(dtype)
    if op in (OPS.MIN, OPS.MAX):
        return stacked.amin(0) if op == OPS.MIN else stacked.amax(0)
    fold = {OPS.BAND: torch.bitwise_and, OPS.BOR: torch.bitwise_or, OPS.BXOR: torch.bitwise_xor}[op]
    result = stacked[0]
    for row in stacked[1:]:
        result = fold(result, row)
    return result


def _reductions(dtype: torch.dtype) -> list[Any]:
    if dtype.is_complex:
        return [OPS.SUM, OPS.AVG]
    bitwise = [] if dtype.is_floating_point else [OPS.BAND, OPS.BOR, OPS.BXOR]
    return [OPS.SUM, OPS.MIN, OPS.MAX, OPS.PRODUCT, *([] if dtype == torch.bool else [OPS.AVG]), *bitwise]


def _check_reductions(rank: int, world_size: int) -> None:
    for dtype in TYPES:
        stacked = _every_rank(world_size, dtype, 2 * world_size)
        for op in _reductions(dtype):
            expected = _reduced(stacked, op)
            mine = stacked[rank].to("sim")

            everywhere = mine.clone()
            dist.all_reduce(everywhere, op)
            assert torch.equal(everywhere.cpu(), expected), (dtype, op, everywhere, expected)

            to_root = mine.clone()
            dist.reduce(to_root, 1, op)
            assert torch.equal(to_root.cpu(), expected if rank == 1 else stacked[rank]), (dtype, op)

            part = torch.empty(2, dtype=dtype, device="sim")
            dist.reduce_scatter_tensor(part, mine, op)
            assert torch.equal(part.cpu(), expected.view(world_size, 2)[rank]), (dtype, op)

            part.zero_()
            dist.reduce_scatter(part, list(mine.clone().chunk(world_size)), op)
            assert torch.equal(part.cpu(), expected.view(world_size, 2)[rank]), (dtype, op)


@pytest.mark.parametrize("world_size", [2, 4])
def test_reductions_by_type_and_operation(world_size: int) -> None:
    ranks.run(world_size, _check_reductions)


def _check_equal_to_gloo(rank: int, world_size: int) -> None:
    for op in (OPS.SUM, OPS.MIN, OPS.MAX, OPS.PRODUCT):
        host = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
        device = host.to("sim")
        dist.all_reduce(host, op)
        dist.all_reduce(device, op)
        assert torch.equal(host, device.cpu())


def test_all_reduce_is_bit_for_bit_gloos() -> None:
    ranks.run(2, _check_equal_to_gloo)


def _check_movement(rank: int, world_size: int) -> None:
    for dtype in TYPES:
        stacked = _every_rank(world_size, dtype)
        mine = stacked[rank].to("sim")

        whole = torch.empty(world_size, 6, dtype=dtype, device="sim")
        dist.all_gather_into_tensor(whole, mine)
        assert torch.equal(whole.cpu(), stacked)

        listed = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(listed, mine)
        assert torch.equal(torch.stack(listed).cpu(), stacked)

        sent = mine.clone() if rank == 1 else torch.zeros_like(mine)
        dist.broadcast(sent, 1)
        assert torch.equal(sent.cpu(), stacked[1])

        collected = [torch.empty_like(mine) for _ in range(world_size)] if rank == 0 else None
        dist.gather(mine, collected, 0)
        assert collected is None or torch.equal(torch.stack(collected).cpu(), stacked)

        if hasattr(dist, "gather_single"):  # torch 2.15
            whole = torch.empty(world_size, 6, dtype=dtype, device="sim")
            dist.gather_single(mine, whole if rank == 0 else None, 0)
            assert rank != 0 or torch.equal(whole.cpu(), stacked)

        own = torch.empty_like(mine)
        dist.scatter(own, [stacked[r].to("sim") for r in range(world_size)] if rank == 0 else None, 0)
        assert torch.equal(own.cpu(), stacked[rank])

        table = torch.stack([_values(r, dtype, world_size) for r in range(world_size)])  # [sender, receiver]
        flat = torch.empty(world_size, dtype=dtype, device="sim")
        dist.all_to_all_single(flat, table[rank].to("sim"))
        assert torch.equal(flat.cpu(), table[:, rank])

        outputs = [torch.empty(r + 1, dtype=dtype, device="sim") for r in range(world_size)]
        dist.all_to_all(outputs, [_values(rank, dtype, rank + 1).to("sim") for _ in range(world_size)])
        for r, output in enumerate(outputs):
            assert torch.equal(output.cpu(), _values(r, dtype, r + 1))

        uneven = [torch.empty(r + 1, dtype=dtype, device="sim") for r in range(world_size)]
        dist.all_gather(uneven, _values(rank, dtype, rank + 1).to("sim"))
        for r, output in enumerate(uneven):
            assert torch.equal(output.cpu(), _values(r, dtype, r + 1))


@pytest.mark.parametrize("world_size", [2, 4])
def test_transfers_by_type(world_size: int) -> None:
    ranks.run(world_size, _check_movement)


def _check_uneven_splits(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bool):
        sent = torch.full((3, 2), rank, dtype=dtype, device="sim")
        splits = [1, 2] if rank == 0 else [2, 1]
        received = torch.empty(3, 2, dtype=dtype, device="sim")
        dist.all_to_all_single(received, sent, splits, splits)
        assert received.cpu().tolist() == [[r, r] for r, rows in enumerate(splits) for _ in range(rows)]
        # one dimension of a type that travels as bytes
        line = torch.empty(3, dtype=dtype, device="sim")
        dist.all_to_all_single(line, torch.full((3,), rank, dtype=dtype, device="sim"), splits, splits)
        assert line.cpu().tolist() == [r for r, rows in enumerate(splits) for _ in range(rows)]


def test_all_to_all_with_unequal_splits() -> None:
    ranks.run(2, _check_uneven_splits)


def _check_premul(rank: int, world_size: int) -> None:
    for factor in (0.25, torch.tensor([0.25], device="sim")):
        op = dist._make_nccl_premul_sum(factor)
        x = torch.full((2,), float(rank + 1), device="sim")
        dist.all_reduce(x, op)
        assert x.tolist() == [0.75, 0.75]
        given = torch.full((4,), float(rank + 1), device="sim")
        part = torch.empty(2, device="sim")
        dist.reduce_scatter_tensor(part, given, op)
        assert part.tolist() == [0.75, 0.75] and given.tolist() == [float(rank + 1)] * 4


def test_premultiplied_sum_scales_and_keeps_its_input() -> None:
    ranks.run(2, _check_premul)


def _check_meaningless(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="bitwise"):
        dist.all_reduce(torch.ones(1, device="sim"), OPS.BAND)
    with pytest.raises(ValueError, match=r"ReduceOp.AVG"):
        dist.all_reduce(torch.ones(1, device="sim", dtype=torch.bool), OPS.AVG)
    with pytest.raises((RuntimeError, ValueError), match="contiguous"):
        dist.all_reduce(torch.ones(4, 4, device="sim")[:, ::2])


def test_reductions_without_meaning_are_refused() -> None:
    ranks.run(2, _check_meaningless)


# --- several at once ---


def _check_coalescing(rank: int, world_size: int) -> None:
    device = torch.device("sim", rank)
    a, b = torch.ones(3, device=device), torch.full((2,), 2.0, device=device)
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    assert a.tolist() == [world_size] * 3 and b.tolist() == [2.0 * world_size] * 2

    wholes = [torch.empty(world_size, device=device) for _ in range(2)]
    parts = [torch.empty(1, device=device) for _ in range(2)]
    with dist._coalescing_manager(device=device):
        for i, whole in enumerate(wholes):
            dist.all_gather_into_tensor(whole, torch.full((1,), float(rank + i), device=device))
    assert [w.tolist() for w in wholes] == [[r + i for r in range(world_size)] for i in range(2)]
    with dist._coalescing_manager(device=device):
        for part, whole in zip(parts, wholes, strict=True):
            dist.reduce_scatter_tensor(part, whole)
    assert [p.item() for p in parts] == [world_size * (rank + i) for i in range(2)]


def test_coalesced_collectives() -> None:
    ranks.run(2, _check_coalescing)


def _check_coalesced_calls(rank: int, world_size: int) -> None:
    warnings.filterwarnings("ignore", ranks.COALESCED_WARNING, FutureWarning)
    mine = [_values(rank, torch.float32, n).to("sim") for n in (3, 4)]
    every = [_every_rank(world_size, torch.float32, n) for n in (3, 4)]
    group = dist.group.WORLD
    assert group is not None
    default = group._get_backend(torch.device("sim"))

    for op in (OPS.SUM, OPS.AVG):
        summed = [one.clone() for one in mine]
        dist.all_reduce_coalesced(summed, op)
        assert all(torch.equal(a.cpu(), _reduced(b, op)) for a, b in zip(summed, every, strict=True))
    lists = [[torch.empty_like(one) for one in mine] for _ in range(world_size)]
    dist.all_gather_coalesced(lists, mine)
    for r, row in enumerate(lists):
        assert all(torch.equal(a.cpu(), b[r]) for a, b in zip(row, every, strict=True))

    sums = functional.all_reduce_coalesced(mine, "sum", group)
    assert all(torch.equal(a.cpu(), b.sum(0)) for a, b in zip(sums, every, strict=True))
    wholes = functional.all_gather_into_tensor_coalesced(mine, group)
    assert all(torch.equal(a.cpu(), b.flatten()) for a, b in zip(wholes, every, strict=True))
    parts = functional.reduce_scatter_tensor_coalesced(list(wholes), "sum", [0, 0], group)
    assert all(torch.equal(a.cpu(), world_size * b[rank]) for a, b in zip(parts, every, strict=True))

    copies = [one.clone() for one in mine]
    dist._broadcast_coalesced(group, copies, 1 << 20, 1)
    assert all(torch.equal(a.cpu(), b[1]) for a, b in zip(copies, every, strict=True))
    assert default.supports_coalescing and default.supports_splitting


def test_coalesced_calls() -> None:
    ranks.run(2, _check_coalesced_calls)


# --- unequal sizes ---


def _check_uneven_lists(rank: int, world_size: int) -> None:
    def block(sender: int, receiver: int) -> torch.Tensor:
        return _values(sender, torch.float32, (sender + 2 * receiver) % 4)  # some are empty

    outputs = [torch.empty_like(block(r, rank), device="sim") for r in range(world_size)]
    dist.all_to_all(outputs, [block(rank, r).to("sim") for r in range(world_size)])
    for r, output in enumerate(outputs):
        assert torch.equal(output.cpu(), block(r, rank))

    part = torch.empty(rank + 1, device="sim")
    dist.reduce_scatter(part, [torch.full((r + 1,), float(rank + r), device="sim") for r in range(world_size)])
    assert part.tolist() == [float(sum(range(world_size)) + world_size * rank)] * (rank + 1)


def test_lists_of_unequal_sizes() -> None:
    ranks.run(3, _check_uneven_lists)


def _check_unequal_to_one(rank: int, world_size: int) -> None:
    # NCCL refuses these too, at the root, which alone sees all sizes.
    unequal = [torch.ones(r + 1, device="sim") for r in range(world_size)]
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"invalid tensor size at index 1 \(expected \(1\), got \(2\)\)"):
            dist.gather(unequal[0], unequal, 0)
        with pytest.raises(RuntimeError, match=r"invalid tensor size at index 1 \(expected \(1\), got \(2\)\)"):
            dist.scatter(unequal[0].clone(), unequal, 0)
        store.set("seen", "yes")
    else:
        store.wait(["seen"])
    ranks.leave()


def test_gather_and_scatter_of_unequal_sizes_are_refused_at_the_root() -> None:
    ranks.run(2, _check_unequal_to_one)


# --- point to point ---


def _check_p2p(rank: int, world_size: int) -> None:
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    big = torch.full((1 << 20,), float(rank), device="sim")
    received = torch.empty_like(big)
    work = dist.isend(big, after)  # every rank sends first: a send that blocks never returns
    dist.recv(received, before)
    work.wait()
    assert received.eq(before).all().item()

    received.zero_()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, big, after), dist.P2POp(dist.irecv, received, before)])
    for one in works:
        one.wait()
    assert received.eq(before).all().item()

    polled = torch.empty(1, device="sim")
    work = dist.irecv(polled, before, tag=7)
    dist.barrier()
    assert not work.is_completed()
    dist.barrier()  # nobody sends before everybody has looked
    dist.send(big[:1], after, tag=7)
    deadline = time.monotonic() + 20
    while not work.is_completed():  # nobody waits: the state must change by itself
        assert time.monotonic() < deadline
    assert work.is_success() and polled.item() == before
    if rank == 0:
        sources = {dist.recv(polled) for _ in range(world_size - 1)}
        assert sources == set(range(1, world_size))
    else:
        dist.send(big[:1], 0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_point_to_point_patterns(world_size: int) -> None:
    ranks.run(world_size, _check_p2p)
