"""Peers of a rank that dies or stays away get an error in time, and never hang."""

import gc
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from test.torch_ext.sim import ranks
from test.torch_ext.sim.ranks import full, store

SIM = torch.get_device_module("sim")


# Calls beyond those of test_killed_peers.py; rank 1, whose part the others need, dies before it takes part.
IN_WHAT = {
    "all_gather": lambda: dist.all_gather([full() for _ in range(3)], full()),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(full()[:1], full()),
    "broadcast": lambda: dist.broadcast(full(), 1),
    "all_to_all_single": lambda: dist.all_to_all_single(full(), full()),
    "batch": lambda: [
        work.wait()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, full(), 1), dist.P2POp(dist.irecv, full(), 1)])
    ],
    "object": lambda: dist.all_gather_object([None] * 3, "x"),
}


@pytest.mark.parametrize("name", IN_WHAT)
@ranks.world_of(3, killed=1)
def test_peers_of_a_dead_rank_get_an_error(rank, world_size, name):
    dist.all_reduce(full())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        IN_WHAT[name]()
        SIM.synchronize()  # where waiting orders a stream, the error comes with the result
    ranks.leave()


@ranks.world_of(2)
def test_time_limit_is_the_groups_or_the_argument_of_wait(rank, world_size):
    # All ranks that wait for rank 0 here have the default group's limit.
    assert ranks.SHORT < ranks.GROUP_TIMEOUT
    brief = dist.new_group(timeout=ranks.SHORT)
    changed = dist.new_group()
    waited = dist.new_group()
    changed._get_backend(torch.device("sim")).set_timeout(ranks.SHORT)
    for group in (brief, changed, waited):
        dist.barrier(group=group)
    if rank == 0:
        for group in (brief, changed):
            with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
                dist.all_reduce(full(), group=group)
        work = dist.irecv(full(), 1, group=waited)
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            work.wait(ranks.SHORT)
        store().set("seen", "yes")
    else:
        store().wait(["seen"])
    dist.all_reduce(full())  # the default group has another time limit, and works on
    ranks.leave()


# Works of rank 0 that cannot end, because rank 1 never joins them.
PENDING = {
    "recv": lambda: dist.irecv(full(), 1),
    "batch": lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, full(), 1), dist.P2POp(dist.irecv, full(), 1)])[0],
    "all_reduce": lambda: dist.all_reduce(full(), async_op=True),
    "reduce_scatter": lambda: dist.reduce_scatter(full(), [full(), full()], async_op=True),
    "all_to_all": lambda: dist.all_to_all([full(), full()], [full(), full()], async_op=True),
}


class _Waiter(threading.Thread):
    """Waits for a work and keeps the error of the wait."""

    def __init__(self, work):
        super().__init__()
        self.work, self.error = work, None

    def start_and_block(self):
        """Return when the thread sleeps inside ``wait``, or is about to."""
        self.begun = threading.Event()
        self.start()
        self.begun.wait()
        while Path(f"/proc/self/task/{self.native_id}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            pass

    def run(self):
        self.begun.set()
        try:
            self.work.wait()
            SIM.current_stream().synchronize()
        except BaseException as error:
            self.error = error
        del self.work


@pytest.mark.parametrize("name", PENDING)
@ranks.world_of(2, timeout=timedelta(hours=1))  # beyond the tests' deadline: nothing but the abort can end the wait
def test_abort_ends_what_is_pending(rank, world_size, name):
    if rank == 0:
        work, group = PENDING[name](), c10d._get_default_group()
        waiter = _Waiter(work)
        waiter.start_and_block()
        group.abort()
        waiter.join()
        assert isinstance(waiter.error, RuntimeError) and "was aborted" in str(waiter.error), waiter.error
        assert work.is_completed() and not work.is_success()
        with pytest.raises(RuntimeError, match="was aborted"):
            work.get_future().wait()
        with pytest.raises(RuntimeError, match="Make a new one"):
            dist.all_reduce(full())
        del work, group, waiter
        kept = store()
        dist.destroy_process_group()
        gc.collect()  # the group is destroyed without waiting for abandoned work
        kept.set("seen", "yes")
    else:
        store().wait(["seen"])
    ranks.leave()
