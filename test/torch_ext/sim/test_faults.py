"""What is wrong shows: a rank that dies or stays away gives its peers an error in time, and never a hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import torch_ext.sim  # noqa: F401 - registers the device
from test.torch_ext.sim import ranks

SIM = torch.get_device_module("sim")


def _x() -> torch.Tensor:
    return torch.ones(3, device="sim")


# What each of three ranks is in when rank 1, whose part they need, dies before it takes part.
IN_WHAT: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(_x()),
    "all_gather": lambda: dist.all_gather([_x() for _ in range(3)], _x()),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(9, device="sim"), _x()),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(_x()[:1], _x()),
    "broadcast": lambda: dist.broadcast(_x(), 1),
    "all_to_all_single": lambda: dist.all_to_all_single(_x(), _x()),
    "barrier": lambda: dist.barrier(),
    "recv": lambda: dist.recv(_x(), 1),
    "batch": lambda: [
        work.wait()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, _x(), 1), dist.P2POp(dist.irecv, _x(), 1)])
    ],
    "object": lambda: dist.all_gather_object([None] * 3, "x"),
}


def _die_inside(rank: int, world_size: int, name: str) -> None:
    dist.all_reduce(_x())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        IN_WHAT[name]()
    ranks.leave()


@pytest.mark.parametrize("name", IN_WHAT)
def test_peers_of_a_dead_rank_get_an_error(name: str) -> None:
    ranks.run(3, _die_inside, name, expected={1: signal.SIGKILL})


def _never_arrive(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            dist.all_reduce(_x())
        _store().set("seen", "yes")
    else:
        _store().wait(["seen"])
    ranks.leave()


def _store() -> dist.Store:
    return c10d._get_default_store()


def test_a_collective_that_a_rank_misses_times_out() -> None:
    ranks.run(2, _never_arrive, timeout=ranks.SHORT)


def _own_timeouts(rank: int, world_size: int) -> None:
    brief = dist.new_group(timeout=ranks.SHORT)
    changed = dist.new_group()
    waited = dist.new_group()
    changed._get_backend(torch.device("sim")).set_timeout(ranks.SHORT)
    for group in (brief, changed, waited):
        dist.barrier(group=group)
    if rank == 0:
        for group in (brief, changed):
            with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
                dist.all_reduce(_x(), group=group)
        work = dist.irecv(_x(), 1, group=waited)
        assert work is not None
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            work.wait(ranks.SHORT)
        _store().set("seen", "yes")
    else:
        _store().wait(["seen"])
    dist.all_reduce(_x())  # the default group has another time limit, and works on
    ranks.leave()


def test_time_limit_is_the_groups_or_what_wait_is_told() -> None:
    # The default group's limit is the one of all ranks that wait for rank 0 here.
    assert ranks.SHORT < ranks.GROUP_TIMEOUT
    ranks.run(2, _own_timeouts)
