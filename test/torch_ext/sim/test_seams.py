"""Faults injected into a rank's communication happen at the chosen call, and have the documented effect."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from test.torch_ext.sim import ranks
from test.torch_ext.sim.ranks import full, store
from torch_ext.sim import faults


@ranks.world_of(2, timeout=ranks.SHORT)
def test_delay(rank, world_size):
    if rank == 1:
        faults.delay(at=2, by=timedelta(milliseconds=100))
        faults.delay(at=4, by=timedelta(hours=1))
    for _ in range(3):
        x = full()
        dist.all_reduce(x)
        assert x.tolist() == [2.0] * 3
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"timed out: .* rank 1, which has not called it"):
            dist.all_reduce(full())
        store().set("failed", "")
    else:
        late = threading.Thread(target=lambda: dist.all_reduce(full()), daemon=True)
        late.start()
        store().wait(["failed"])
        assert late.is_alive()
    ranks.leave()


@pytest.mark.usefixtures("transport")
@ranks.world_of(2, timeout=ranks.SHORT)
def test_drop_of_a_collective(rank, world_size):
    if rank == 1:
        faults.drop(at=2)
    dist.all_reduce(full())
    with pytest.raises(RuntimeError, match=r"dropped by a planted fault" if rank == 1 else r"(?i)timed? ?out"):
        dist.all_reduce(full())
    store().set(f"failed {rank}", "")
    store().wait(["failed 0", "failed 1"])  # else one rank's exit could be the other's error
    ranks.leave()


@ranks.world_of(2)
def test_drop_of_a_send_loses_the_message(rank, world_size):
    if rank == 0:
        faults.drop(at=1)
        dist.send(full(1.0), 1)
        dist.send(full(2.0), 1)
    else:
        x = full(0.0)
        dist.recv(x, 0)
        assert x.tolist() == [2.0] * 3


@pytest.mark.usefixtures("transport")
@ranks.world_of(2)
def test_corrupt_of_what_a_rank_sends(rank, world_size):
    if rank == 1:
        faults.corrupt(at=2)
    results = []
    for _ in range(3):
        mine, whole = full(rank + 1.0), torch.empty(3 * world_size, device="sim")
        dist.all_gather_into_tensor(whole, mine)
        assert mine.tolist() == [rank + 1.0] * 3  # its own input stays
        results.append(whole.view(world_size, 3).tolist())
    sent = [[1.0] * 3, [2.0] * 3]
    assert results[0] == results[2] == sent
    assert results[1][0] == sent[0] and results[1][1][1:] == sent[1][1:]
    assert results[1][1][0] == 0.0  # 2.0 is the one bit that was flipped


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("corrupts", [0, 1])
@ranks.world_of(2)
def test_corrupt_of_what_a_root_sends_or_a_rank_receives(rank, world_size, corrupts):
    if rank == corrupts:
        faults.corrupt(at=1)
    x = full(2.0)
    dist.broadcast(x, 0)
    assert x.tolist() == ([0.0, 2.0, 2.0] if rank == 1 else [2.0] * 3)


@ranks.world_of(2)
def test_a_fault_is_one_groups_and_can_be_cleared(rank, world_size):
    other = dist.new_group(backend="simccl")
    if rank == 1:
        faults.corrupt(at=1, group=other.group_name)
    for group, expected in ((c10d._get_default_group(), 4.0), (other, 2.0)):
        x = full(2.0)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [expected, 4.0, 4.0]
    faults.clear()
    if rank == 1:
        faults.corrupt(at=2)
        faults.clear()
    x = full()
    dist.all_reduce(x, group=other)
    assert x.tolist() == [2.0] * 3


@pytest.mark.parametrize("at", [0, -1, True, 1.5])
def test_calls_are_counted_from_one(at):
    with pytest.raises(ValueError, match="counted from 1"):
        faults.drop(at=at)
