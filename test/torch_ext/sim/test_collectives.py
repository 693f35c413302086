"""Every collective of ``simccl``, by type and reduction, against gloo on host tensors or a value computed by hand."""

from __future__ import annotations

import io
import os
import signal
import time
import unittest
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_ext.sim  # noqa: F401 - registers the device
from test.torch_ext.sim import ranks

SIM = torch.get_device_module("sim")
OPS = dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TYPES = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64)

# Torch's own notes on calls that newer releases spell otherwise.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


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


# --- coalescing, groups, futures ---


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


def _check_groups(rank: int, world_size: int) -> None:
    pair = dist.new_group([0, 1])
    x = torch.ones(1, device="sim")
    if rank < 2:
        dist.all_reduce(x, group=pair)
    assert x.item() == (2 if rank < 2 else 1)
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    assert half is not None
    y = torch.full((1,), float(rank), device="sim")
    dist.all_reduce(y, group=half)
    assert y.item() == (1 if rank < 2 else 5)


def test_new_and_split_groups() -> None:
    # split_group works on device-bound groups only, hence one bound by hand in each rank.
    ranks.run(4, _bound, _check_groups)


def _bound(rank: int, world_size: int, body: Any) -> None:
    dist.distributed_c10d._get_default_group().bound_device_id = torch.device("sim", rank)
    body(rank, world_size)


def _check_default_backend(rank: int, world_size: int) -> None:
    assert str(dist.get_backend_config()) == "cpu:gloo,sim:simccl"
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, {"rank": rank, "tensor": torch.full((1,), rank, device="sim")})
    assert [one["rank"] for one in gathered] == list(range(world_size))
    assert gathered[1]["tensor"].device.type == "sim"
    only = dist.new_group(backend="simccl")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=only)
    objects = [f"from {rank}"]
    dist.broadcast_object_list(objects, 1, group=only, device=torch.device("sim", rank))
    assert objects == ["from 1"]


def test_default_backend_serves_both_devices_and_device_group_refuses_host() -> None:
    ranks.run(2, _check_default_backend)


def _check_futures(rank: int, world_size: int) -> None:
    x = torch.ones(2, device="sim")
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda done: done.value()[0] * 2).wait()
    assert doubled.tolist() == [4.0, 4.0] and doubled.device.type == "sim"
    assert work.is_completed() and work.is_success()
    averaged = torch.full((2,), float(rank), device="sim")
    (value,) = dist.all_reduce(averaged, OPS.AVG, async_op=True).get_future().wait()
    assert value.tolist() == [0.5, 0.5]  # the division has run by the time the future completes
    sent = dist.isend(x, 1 - rank)
    received = torch.empty(2, device="sim")
    (value,) = dist.irecv(received, 1 - rank).get_future().wait()
    sent.wait()
    assert value.tolist() == [2.0, 2.0]


def test_futures_carry_finished_device_tensors() -> None:
    ranks.run(2, _check_futures)


def _check_inference_mode(rank: int, world_size: int) -> None:
    with torch.inference_mode():
        for dtype in (torch.float32, torch.int16):  # divided in place, and copied back from another type
            x = torch.full((2,), 2 * rank, dtype=dtype, device="sim")
            dist.all_reduce(x, OPS.AVG)
            assert x.tolist() == [1, 1]


def test_results_are_finished_for_inference_tensors() -> None:
    ranks.run(2, _check_inference_mode)


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


# --- faults ---


def _die_inside(rank: int, world_size: int) -> None:
    x = torch.ones(1, device="sim")
    dist.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.all_reduce(x)
    os._exit(0)


def test_peers_of_a_dead_rank_get_an_error() -> None:
    ranks.run(2, _die_inside, expected={1: signal.SIGKILL})


def _never_arrive(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            dist.all_reduce(torch.ones(1, device="sim"))
    else:
        time.sleep(4)
    os._exit(0)


def test_a_collective_that_a_rank_misses_times_out() -> None:
    ranks.run(2, _never_arrive, timeout=timedelta(seconds=2))


def _check_sequence(rank: int, world_size: int) -> None:
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("sim"))
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1, device="sim"))
    dist.all_reduce(torch.ones(1, device="sim"))
    assert backend._get_sequence_number_for_group() == before + 2 and backend.name() == "simccl"


def test_sequence_numbers_count_collectives() -> None:
    ranks.run(2, _check_sequence)


def _check_flight_recorder(rank: int, world_size: int) -> None:
    import json

    dist.all_reduce(torch.ones(3, device="sim"))
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]
    assert any("all_reduce" in entry["profiling_name"] and entry["input_sizes"] == [[3]] for entry in entries)


def test_flight_recorder_sees_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "64")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "64")
    ranks.run(2, _check_flight_recorder)


# --- torch's threaded group ---


def _check_threaded(rank: int, world_size: int) -> None:
    from torch.testing._internal.common_distributed import MultiThreadedTestCase

    class Threads(MultiThreadedTestCase):
        world_size = 2

        def setUp(self) -> None:
            super().setUp()
            self._spawn_threads()

        def test_all_reduce(self) -> None:
            SIM.set_device(self.rank)
            x = torch.full((2,), float(self.rank + 1), device="sim")
            dist.all_reduce(x)
            assert x.device == torch.device("sim", self.rank) and x.tolist() == [3.0, 3.0]

    dist.destroy_process_group()

    result = unittest.TextTestRunner(stream=io.StringIO()).run(Threads("test_all_reduce"))
    assert result.wasSuccessful() and result.testsRun == 1 and not result.skipped, result.errors + result.failures
    os._exit(0)


def test_threaded_group_serves_each_thread_its_device() -> None:
    ranks.run(1, _check_threaded)
