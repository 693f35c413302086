"""Groups of ``simccl``: which backends they get, how they split, count and call back."""

import contextlib
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from test.torch_ext.sim import ranks

OPS = dist.ReduceOp


def _run_generation(rank, world_size, life, path):
    dist.destroy_process_group()
    os.environ.update(TORCHELASTIC_RESTART_COUNT=str(life), GROUP_WORLD_SIZE="1")
    store = dist.FileStore(path, -1)
    dist.init_process_group("simccl", rank=rank, world_size=world_size, store=store)
    x = torch.ones(1, device="sim")
    dist.all_reduce(x)
    assert x.item() == 2.0


def test_a_job_that_starts_again_meets_in_the_store_of_its_first_life(tmp_path):
    for life in (0, 1):
        ranks.run(2, _run_generation, life, str(tmp_path / "kept"))
        assert (tmp_path / "kept").exists()


# --- which backends ---


@ranks.world_of(2)
def test_default_backend_serves_both_devices_and_device_group_refuses_host(rank, world_size):
    assert str(dist.get_backend_config()) == "cpu:gloo,sim:simccl"
    gathered = [None] * world_size
    dist.all_gather_object(gathered, {"rank": rank, "tensor": torch.full((1,), rank, device="sim")})
    assert [one["rank"] for one in gathered] == list(range(world_size))
    assert gathered[1]["tensor"].device.type == "sim"
    only = dist.new_group(backend="simccl")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=only)
    objects = [f"from {rank}"]
    dist.broadcast_object_list(objects, 1, group=only, device=torch.device("sim", rank))
    assert objects == ["from 1"]


@ranks.world_of(4, bound=True)  # torch splits no others
def test_group_bound_to_a_device_serves_it_alone_and_splits_after_unlike_histories(rank, world_size):
    assert str(dist.get_backend_config()) == "sim:simccl" and dist.get_backend() == "simccl"
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    gathered = [None] * world_size
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(world_size))
    dist.barrier()  # on the bound device, without an argument
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)  # ranks 2 and 3 never hear of it

    def total(ranks, parent=None):
        group = dist.split_group(parent, split_ranks=ranks)
        x = torch.full((1,), float(rank), device="sim")
        # The return value on other ranks differs between releases, but is no group.
        assert isinstance(group, dist.ProcessGroup) == any(rank in part for part in ranks)
        if isinstance(group, dist.ProcessGroup):
            dist.all_reduce(x, group=group)
        return x.item()

    assert total([[0, 2], [1, 3]]) == (2 if rank in (0, 2) else 4)
    assert total([[0, 2], [1, 3]]) == (2 if rank in (0, 2) else 4)
    assert total([[0, 3]]) == (3 if rank in (0, 3) else rank)
    assert total([[0, 1], [2, 3]]) == (1 if rank < 2 else 5)  # a part of the previous group, and the rest
    whole = dist.split_group(split_ranks=[[0, 1, 2, 3]])
    assert total([[0, 2], [1, 3]], whole) == (2 if rank in (0, 2) else 4)


# --- futures ---


@ranks.world_of(2)
def test_futures_carry_finished_device_tensors(rank, world_size):
    averaged = torch.full((2,), float(rank), device="sim")
    (value,) = dist.all_reduce(averaged, OPS.AVG, async_op=True).get_future().wait()
    assert value.tolist() == [0.5, 0.5]  # the division has run by the time the future completes
    sent = dist.isend(averaged, 1 - rank)
    (value,) = dist.irecv(torch.empty(2, device="sim"), 1 - rank).get_future().wait()
    sent.wait()
    assert value.tolist() == [0.5, 0.5] and value.device.type == "sim"
    parts = [torch.empty(2, device="sim") for _ in range(2)]
    rows = dist.all_gather(parts, averaged + rank, async_op=True).get_future()
    # One tensor with a row for each rank, as NCCL's futures hold it: hooks index it by rank and then by position.
    assert rows.then(lambda done: done.value()[0][1, 0]).wait().item() == 1.5 and rows.wait()[0].shape == (2, 2)


@ranks.world_of(2)
def test_results_are_finished_for_inference_tensors(rank, world_size):
    with torch.inference_mode():
        for dtype in (torch.float32, torch.float8_e4m3fn):  # divided in place, and copied back from another type
            x = torch.full((2,), 2 * rank, dtype=dtype, device="sim")
            dist.all_reduce(x, OPS.AVG)
            assert x.tolist() == [1, 1]


# --- objects ---


@ranks.world_of(3)
def test_object_collectives_on_both_kinds_of_group(rank, world_size):
    for group in (None, dist.new_group(backend="simccl")):
        collected = [None] * world_size if rank == 0 else None
        dist.gather_object({"from": rank}, collected, 0, group=group)
        assert collected is None or collected == [{"from": r} for r in range(world_size)]
        own = [None]
        dist.scatter_object_list(own, [f"to {r}" for r in range(world_size)] if rank == 0 else None, 0, group=group)
        assert own == [f"to {rank}"]
        here = torch.device("sim", rank)
        if rank == 0:
            dist.send_object_list(["text", torch.ones(1, device=here)], 1, group=group, device=here)
        elif rank == 1:
            received = [None, None]
            dist.recv_object_list(received, 0, group=group, device=here)
            assert received[0] == "text" and received[1].device == torch.device("sim:0")


# --- counting, calling back ---


@ranks.world_of(3)
def test_sequence_numbers_count_collectives_alone(rank, world_size):
    group = c10d._get_default_group()
    number = group._get_sequence_number_for_group
    start, x = number(), torch.ones(world_size, device="sim")
    dist.all_reduce(x)
    dist.reduce_scatter(x[:1].clone(), list(x.chunk(world_size)))  # as many transfers as ranks, and one collective
    assert number() == start + 2
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
    assert number() == start + 2  # ranks must agree, and rank 2 has sent nothing
    with dist._coalescing_manager(device=torch.device("sim", rank)):
        dist.all_reduce(x)
        dist.all_reduce(x)
    assert number() == start + 3
    backend = group._get_backend(torch.device("sim"))
    assert backend._get_sequence_number_for_group() == start + 3 and backend.name() == "simccl"
    fresh = dist.new_group()
    before = fresh._get_sequence_number_for_group()
    assert dist.all_reduce(x, group=fresh) is None and fresh._get_sequence_number_for_group() == before + 1


@ranks.world_of(2)
def test_completion_hook_is_called_once_for_each_work_waited_for_or_not(rank, world_size):
    group, seen = c10d._get_default_group(), []
    group._register_on_completion_hook(lambda info: seen.append((info.op_type, info.seq)))
    assert group._has_hooks()
    x = torch.ones(2, device="sim")
    dist.all_reduce(x)
    dist.all_gather([torch.empty_like(x) for _ in range(world_size)], x)
    assert [kind.name for kind, _ in seen] == ["ALLREDUCE", "ALLGATHER"]
    first, second = (number for _, number in seen)
    assert second == first + 1
    dist.all_reduce(x, async_op=True)
    dist.isend(x, 1 - rank)
    dist.irecv(x.clone(), 1 - rank)
    group._wait_for_pending_works()  # no wait for these three, two of which complete only in a wait
    assert len(seen) == 5
    dist.reduce_scatter(x[:1].clone(), list(x.chunk(world_size)))  # as many transfers as ranks, and one collective
    assert len(seen) == 6 and seen[-1][0].name == "REDUCE_SCATTER"


@ranks.world_of(2, timeout=ranks.SHORT)
def test_completion_hook_is_called_for_a_failed_work_too(rank, world_size):
    group, seen = c10d._get_default_group(), []
    group._register_on_completion_hook(lambda info: seen.append(info.op_type))
    dist.all_reduce(torch.ones(1, device="sim"))
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1, device="sim"))
        assert len(seen) == 2
        c10d._get_default_store().set("seen", "yes")
    else:
        c10d._get_default_store().wait(["seen"])
    ranks.leave()


@ranks.world_of(2)
def test_barriers_are_on_the_device_and_monitored_ones_on_the_host(rank, world_size):
    refusal = "only implemented for GLOO|requires a group with a CPU-capable backend"
    with pytest.raises(ValueError, match=refusal):  # as for NCCL
        dist.monitored_barrier(dist.new_group(backend="simccl"))
    # Torch 2.15 takes a group's backend of the host, where there is one beside the device's.
    served = torch.__version__ >= (2, 15)
    with contextlib.nullcontext() if served else pytest.raises(ValueError, match=refusal):
        dist.monitored_barrier()
    dist.monitored_barrier(dist.new_group(backend="gloo"))
    group = dist.new_group(backend="simccl")
    group.barrier().wait()
    group.barrier(timeout=timedelta(seconds=60)).wait()
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=60)
    group.barrier(options).wait()
    dist.group.WORLD.barrier().wait()
    dist.new_group(backend="gloo").barrier().wait()
    assert group._get_backend(torch.device("sim"))._get_sequence_number_for_group() == 3


@ranks.world_of(2)
def test_detail_mode_finds_ranks_that_call_differently(rank, world_size, tmp_path):
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    store = dist.FileStore(str(tmp_path / "store"), world_size)
    dist.init_process_group(rank=rank, world_size=world_size, store=store)
    x = torch.ones(2, device="sim")
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="mismatch between collectives"):
        dist.all_reduce(torch.ones(2 + rank, device="sim"))
    ranks.leave()
