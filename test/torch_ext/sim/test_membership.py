"""Groups of ``simccl`` whose members change: by ``shrink_group``, and from torch 2.15 on by ``reconfigure``."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed import distributed_c10d as c10d

from test.torch_ext.sim import ranks
from test.torch_ext.sim.ranks import full
from torch_ext.sim import _native

SHRINKS = hasattr(dist, "shrink_group")
RECONFIGURES = hasattr(dist, "_reconfigure")
ABORTS = 1  # torch.distributed's SHRINK_ABORT
needs_reconfigure = pytest.mark.skipif(not RECONFIGURES, reason="torch.distributed has no _reconfigure before 2.15")


def backend(group=None):
    return (group or c10d._get_default_group())._get_backend(torch.device("sim"))


def segments():
    """Count the memory of ranks that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:")


def total(group=None):
    x = full(dist.get_rank(group) + 1.0)
    dist.all_reduce(x, group=group)
    return x[0].item()


# --- shrink ---


def _go_on_without(rank, world_size, victim, is_bound):
    before = segments()
    assert total() == 10.0
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=f"rank {victim}"):
        while True:
            total()
    group = dist.shrink_group([victim], shrink_flags=ABORTS)
    assert group is dist.group.WORLD and dist.get_world_size() == world_size - 1
    assert dist.get_rank() == rank - (rank > victim)
    assert [total() for _ in range(3)] == [6.0] * 3
    dist.barrier()
    gathered = [None] * (world_size - 1)
    dist.all_gather_object(gathered, rank)
    assert gathered == [each for each in range(world_size) if each != victim]
    again = dist.new_group([0, 1])
    assert dist.get_rank() > 1 or total(again) == 3.0
    # The memory of the dead and of its old peers is gone: what is mapped belongs to the new groups.
    assert segments() <= before + (2 if dist.get_rank() < 2 else 0) * 2


@pytest.mark.parametrize("is_bound", [True, False])
@pytest.mark.parametrize("victim", [1, 3])
def test_survivors_of_a_killed_rank_shrink_their_group_and_go_on(victim, is_bound):
    ranks.run(4, _go_on_without, victim, is_bound, killed=victim, bound=is_bound, backend="simccl")


def _shrink_twice(rank, world_size):
    pending = dist.all_reduce(full(), async_op=True)  # shrinking without the flag leaves it alone
    mine = backend()
    if rank == 3:
        with pytest.raises(ValueError, match="rank 3 is among the excluded ranks 3"):
            mine.shrink([3], 0)
    else:
        smaller = mine.shrink([3], 0)
        assert (smaller.rank(), smaller.size()) == (rank, 3)
        if rank != 1:
            smallest = smaller.shrink([1], 0)
            assert (smallest.rank(), smallest.size()) == (rank // 2, 2)
            x = full(rank + 1.0)
            smallest.allreduce([x]).wait()
            assert x[0].item() == 4.0
    pending.wait()
    assert total() == 10.0  # the group itself goes on
    with pytest.raises(ValueError, match="Invalid rank 7"):
        mine.shrink([7], 0)


def test_a_group_that_is_shrunk_without_a_fault_goes_on_beside_the_smaller_ones():
    ranks.run(4, _shrink_twice, backend="simccl", bound=True)


def _abort_by_shrinking(rank, world_size):
    mine = backend()
    stuck = dist.all_reduce(full(), async_op=True) if rank == 0 else None
    if rank < 2:
        smaller = mine.shrink([2], ABORTS)
        with pytest.raises(RuntimeError, match=r"was aborted"):
            total()
        if stuck is not None:
            with pytest.raises(RuntimeError, match=r"all_reduce was aborted"):
                stuck.wait()
        x = full(rank + 1.0)
        smaller.allreduce([x]).wait()
        assert x[0].item() == 3.0
        assert mine.get_error() == c10d_error("COMM_ERROR") and smaller.get_error() == c10d_error("SUCCESS")
    ranks.leave()


def c10d_error(name):
    return getattr(torch._C._distributed_c10d.ErrorType, name)


def test_shrinking_with_abort_fails_what_is_under_way_in_the_old_group():
    ranks.run(3, _abort_by_shrinking, backend="simccl", bound=True)


# --- reconfigure ---


def reconfigured(store, rank, uuid, members, key):
    handle = backend().get_reconfigure_handle()
    store.set(f"{key} {rank}", handle)
    handles = [store.get(f"{key} {member}").decode() for member in members]
    dist._reconfigure(uuid, handles, timeout=timedelta(seconds=30)).wait()


def _replace_the_dead(rank, world_size, victim):
    store = ranks.store()
    with pytest.raises(RuntimeError, match="no members before its first reconfigure"):
        total()
    reconfigured(store, rank, 1, range(world_size), "all")
    assert total() == 10.0
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=f"rank {victim}"):
        while True:
            total()
    alive = [each for each in reversed(range(world_size)) if each != victim]
    reconfigured(store, rank, 2, alive, "alive")  # in another order
    assert dist.get_rank() == alive.index(rank) and dist.get_world_size() == 3
    assert total() == 6.0 and backend().get_error() == c10d_error("SUCCESS")
    mapped = segments()
    handles = {store.get(f"alive {member}").decode() for member in alive}
    dist._reconfigure(3, handles).wait()  # a set: in order of the ranks
    assert dist.get_rank() == sorted(alive).index(rank) and total() == 6.0
    assert segments() <= mapped  # each membership lets go of the memory of the last
    with pytest.raises(RuntimeError, match="already used the uuid 3"):
        dist._reconfigure(3, handles)
    with pytest.raises(ValueError, match="lack this rank's"):
        dist._reconfigure(4, ["9:9:9"])
    assert total() == 6.0  # what was refused has changed nothing


@needs_reconfigure
def test_survivors_of_a_killed_rank_reconfigure_their_group():
    ranks.run(4, _replace_the_dead, 1, killed=1, backend="simccl", enable_reconfigure=True)


def _revoke(rank, world_size):
    store = ranks.store()
    reconfigured(store, rank, 1, range(world_size), "all")
    mine, revoked = backend(), threading.Event()
    assert mine.supports_abort_hooks
    mine.set_timeout(timedelta(seconds=0.5))
    seen = []
    mine.register_abort_hook(1, lambda: (seen.append(mine.get_error()), revoked.set()))
    if rank:
        work = dist.all_reduce(full(), async_op=True)  # nobody waits for it
        assert revoked.wait(30)
        assert seen[0] == c10d_error("TIMEOUT") == mine.get_error()
        with pytest.raises(RuntimeError, match="aborted when an operation timed out"):
            total()
        del work
    else:
        time.sleep(1.5)
        assert not revoked.is_set()
    mine.unregister_abort_hook(1)
    mine.set_timeout(timedelta(seconds=30))
    reconfigured(store, rank, 2, range(world_size), "again")
    assert total() == 6.0
    mine.register_abort_hook(2, revoked.clear)
    revoked.set()
    mine.abort()
    assert not revoked.is_set() and mine.get_error() == c10d_error("COMM_ERROR")
    reconfigured(store, rank, 3, range(world_size), "last")
    assert total() == 6.0


@needs_reconfigure
def test_an_operation_that_nobody_waits_for_revokes_its_group_at_its_limit():
    ranks.run(3, _revoke, backend="simccl", enable_reconfigure=True)


def _refuse(rank, world_size):
    with pytest.raises(RuntimeError, match=r"cannot be reconfigured: make it with"):
        backend().get_reconfigure_handle()


@needs_reconfigure
def test_other_groups_cannot_be_reconfigured():
    ranks.run(2, _refuse, backend="simccl")


# --- what a work answers ---


@ranks.world_of(2, backend="simccl")
def test_a_work_has_a_result_and_a_barrier_waits_for_the_stream(rank, world_size):
    work = dist.all_reduce(full(), async_op=True)
    assert work.get_future_result().wait() == 0 and work.is_completed()
    stream = torch.sim.current_stream()
    torch.sim._sleep(200_000_000)
    assert not stream.query()
    dist.barrier()
    assert stream.query()
    with _functional_collectives.allow_inflight_collective_as_graph_input_ctx():
        before = torch._C._distributed_c10d._get_work_registry_size()
        work = dist.all_reduce(full(), async_op=True)
        work.wait()
        assert torch._C._distributed_c10d._get_work_registry_size() == before
    for splits, text in (([-1, 3], "Split sizes"), ([1], "Split sizes"), ([3, 3], "Split sizes")):
        with pytest.raises(RuntimeError, match=text):
            dist.all_to_all_single(full(numel=2), full(numel=2), [1, 1], splits)
    assert isinstance(backend(), _native.ProcessGroupSimCCL)
