"""Ranks that call different collectives get an error at the call or wait that shows both calls, and go on."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from test.torch_ext.sim import ranks

SIM = torch.get_device_module("sim")
HERE = Path(__file__).name


def _x(numel=4, dtype=torch.float32):
    return torch.ones(numel, dtype=dtype, device="sim")


# The calls of two ranks, and the error of both. test_programs.py draws calls that differ in one respect.
PLANTED = {
    "operation": (
        lambda: dist.all_reduce(_x()),
        lambda: dist.broadcast(_x(), 0),
        r"in the operation: .*rank 0 called all_reduce\(SUM\) of 4 x Float at ",
        r"rank 1 called broadcast of 4 x Float, root 0",
    ),
    "uneven lists": (
        lambda: dist.all_gather([_x(1), _x(2)], _x(1)),
        lambda: dist.all_gather([_x(2), _x(2)], _x(2)),
        r"in the number of elements: .*rank 0 called .*\[1, 2\] x Float",
        r"rank 1 called .*\[2, 2\] x Float",
    ),
    "splits": (
        lambda: dist.all_to_all_single(_x(4), _x(4), [2, 2], [2, 2]),
        lambda: dist.all_to_all_single(_x(4), _x(4), [1, 3], [2, 2]),
        r"rank 0 sends 2 to rank 1, which expects 1",
        "",
    ),
}


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("name", PLANTED)
@ranks.world_of(2, backend="simccl")
def test_each_rank_reports_both_calls(rank, world_size, name):
    dist.all_reduce(_x())
    *calls, one, other = PLANTED[name]
    with pytest.raises(RuntimeError, match="simccl on rank") as caught:
        calls[rank]()
    text = str(caught.value)
    assert re.search(one, text) and re.search(other, text), text
    assert text.count(HERE) == 2, text  # both call sites
    x = _x()
    dist.all_reduce(x)  # ranks are in step again
    assert x.tolist() == [2.0] * 4


@pytest.mark.usefixtures("transport")
@ranks.world_of(2)
def test_asynchronous_mismatch_raises_at_the_wait(rank, world_size):
    work = dist.all_reduce(_x(4 + rank), async_op=True)
    with pytest.raises(RuntimeError, match="disagree in the number of elements"):
        work.wait()
        SIM.synchronize()
    assert work.is_completed() and not work.is_success()
    assert "disagree" in str(work.exception())
    assert (_x(4) + 3).tolist() == [4.0] * 4  # the stream raises the error once
    with pytest.raises(RuntimeError, match="disagree in the number of elements"):
        work.wait()
    with pytest.raises(RuntimeError, match="disagree in the number of elements"):
        work.get_future().wait()


@pytest.mark.usefixtures("transport")
@ranks.world_of(2)
def test_receiver_reports_a_differing_size_or_type(rank, world_size):
    if rank == 0:
        dist.send(_x(3), 1)
        dist.send(_x(4, torch.int32), 1)
    else:
        with pytest.raises(
            RuntimeError, match=rf"rank 0 called send of 3 x Float at .*{HERE}.*recv of 4 x Float at .*{HERE}"
        ):
            dist.recv(_x(4), 0)
            SIM.synchronize()
        with pytest.raises(RuntimeError, match=r"send of 4 x Int.*recv of 4 x Float"):
            dist.recv(_x(4), 0)
            SIM.synchronize()


@pytest.mark.usefixtures("transport")
@ranks.world_of(2)
def test_two_ranks_on_one_device_and_tensors_on_two_are_refused(rank, world_size):
    torch.get_device_module("sim").set_device(0)
    with pytest.raises(RuntimeError, match=r"rank 0 and rank 1 both use sim:0 in all_reduce"):
        dist.all_reduce(_x())
    with pytest.raises(ValueError, match=r"got a tensor on sim:2 and one on sim:3; all tensors of a call"):
        dist.all_gather_into_tensor(torch.empty(8, device="sim:2"), torch.ones(4, device="sim:3"))
