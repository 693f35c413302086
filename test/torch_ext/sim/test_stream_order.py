"""Operations of ``simccl`` are ordered as NCCL's are: by streams, while the host goes on (csrc/work.h)."""

import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from test.torch_ext.sim import ranks
from test.torch_ext.sim.ranks import full, store
from torch_ext.world import threads
from torch_ext.world.operations import WaitPage, waits_of_threads

SIM = torch.get_device_module("sim")


def _reduce(x, group=None):
    return dist.all_reduce(x, group=group, async_op=True)


# --- wait ---


def _event():
    event = SIM.Event()
    event.record()
    return event


def _on_another_stream(x):
    side = SIM.Stream()
    side.wait_event(_event())
    with SIM.stream(side):
        return x.clone()


# Operations that need the result of an all-reduce of ones, for which the current stream waits.
_NEEDS = {
    "kernel": lambda x: x + 1 - 1,
    "kernel in place": lambda x: x.mul_(1),
    "read": lambda x: x.tolist(),
    "copy that does not block": lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True),
    "kernel on a stream that waits": _on_another_stream,
    "stream": lambda x: SIM.current_stream().synchronize(),
    "device": lambda x: SIM.synchronize(),
    "event": lambda x: _event().synchronize(),
    "collective": lambda x: dist.all_reduce(x, dist.ReduceOp.MAX),
    "growing": lambda x: x.resize_(10_000),
}


@ranks.world_of(2)
def test_wait_returns_at_once_and_the_next_read_waits_without_the_gil(rank, world_size):
    for number, (name, need) in enumerate(_NEEDS.items()):
        x = full()
        if rank == 0:
            work = _reduce(x)
            work.wait()
            assert not work.is_completed(), name
            teller = threading.Timer(0.05, store().set, (f"go {number}", ""))  # needs the GIL while this thread blocks
            teller.start()
            result = need(x)
            assert work.is_completed(), name
            if isinstance(result, torch.Tensor):
                assert result[:3].tolist() == [2.0] * 3, name
            assert x[:3].tolist() == [2.0] * 3, name
            teller.join()
        else:
            store().wait([f"go {number}"])
            _reduce(x).wait()
            if name == "collective":
                dist.all_reduce(x, dist.ReduceOp.MAX)


@ranks.world_of(2)
def test_other_streams_do_not_wait_and_events_show_completion_and_time(rank, world_size):
    x, y, side = full(), full(4.0), SIM.Stream()
    if rank == 0:
        start, event = (SIM.Event(enable_timing=True) for _ in range(2))
        start.record()
        _reduce(x).wait()
        event.record()
        with SIM.stream(side):
            assert (y + 1).tolist() == [5.0] * 3  # blocks for ever if it waits for rank 1
            assert side.query()
        assert not SIM.current_stream().query() and not event.query()
        store().set("go", "")
        assert x.tolist() == [2.0] * 3
        assert SIM.current_stream().query() and event.query() and start.elapsed_time(event) > 0
    else:
        store().wait(["go"])
        dist.all_reduce(x)


@ranks.world_of(2)
def test_receives_do_not_block_the_host_and_its_device_synchronizes_all(rank, world_size):
    x, y, z = full(), full(0.0), full(0.0)
    if rank == 0:
        dist.all_reduce(x, async_op=True)  # and lets go of the work
        received = dist.irecv(y, 1)
        dist.recv(z, 1)
        store().set("go", "")
        assert (z + 1).tolist() == [5.0] * 3
        SIM.synchronize()
        assert received.is_completed()
    else:
        store().wait(["go"])
        dist.all_reduce(x)
        dist.send(full(3.0), 0)
        dist.send(full(4.0), 0)
    assert x.tolist() == [2.0] * 3 and (rank == 1 or y.tolist() == [3.0] * 3)


# --- calls that are no asynchronous ones ---


@ranks.world_of(2)
def test_dispatcher_operator_is_done_before_the_next_one(rank, world_size):
    group = c10d._get_default_group().boxed()
    minute = 60_000
    for number in range(20):
        whole, mine = full(0.0, 6), full(100.0 * (rank + 1) + number)
        torch.ops.c10d._allgather_base_(whole, mine, group, False, minute)
        assert whole.tolist() == [100.0 + number] * 3 + [200.0 + number] * 3


@pytest.mark.parametrize("name", ["TORCH_EXT_SIM_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"])
@ranks.world_of(2)
def test_blocking_wait_blocks_the_host(rank, world_size, name):
    os.environ[name] = "1"
    group = dist.new_group()
    x = full()
    if rank == 0:
        work = _reduce(x, group)
        threading.Timer(0.05, store().set, ("go", "")).start()
        work.wait()
        assert work.is_completed()
    else:
        store().wait(["go"])
        dist.all_reduce(x, group=group)


# --- errors ---


@pytest.mark.parametrize("name", ["kernel", "kernel on a stream that waits", "read", "stream", "device", "event"])
@ranks.world_of(2)
def test_a_missed_operation_times_out_where_its_result_is_due(rank, world_size, name):
    group = dist.new_group(timeout=ranks.SHORT)
    dist.barrier(group=group)
    if rank == 0:
        x = full()
        _reduce(x, group).wait()
        with pytest.raises(RuntimeError, match=r"all_reduce at .*test_stream_order.py:\d+ timed out: .*for rank 1"):
            _NEEDS[name](x)
        store().set("seen", "")
    else:
        store().wait(["seen"])
    ranks.leave()


@ranks.world_of(2)
def test_wait_page_names_the_operation_that_a_read_waits_for(rank, world_size):
    if rank == 1:
        store().wait(["seen"])
        dist.all_reduce(full())
        return
    page = WaitPage()
    os.environ["TORCH_EXT_WAIT_PAGE"] = str(page.descriptor)

    def read():
        x = full()
        _reduce(x).wait()
        x.tolist()

    reading = threading.Thread(target=read)
    reading.start()
    while not (entries := waits_of_threads()):
        assert reading.is_alive()
    (entry,) = entries.values()
    words = rf"#1 all_reduce in group {c10d._get_default_group().group_name}, called at {re.escape(__file__)}:\d+"
    assert re.fullmatch(words, entry.wait.description) and entry.wait.peers == (1,) and entry.tid == reading.native_id
    assert 0 < entry.until_s - time.monotonic() <= ranks.GROUP_TIMEOUT.total_seconds()
    # Its frame is in x.tolist(), which is not an operation.
    (task,) = (task for task in threads._threads(0) if task.tid == reading.native_id)
    assert task.operation.limit_s == entry.until_s
    store().set("seen", "")
    reading.join()
    assert page.waits() == ()


# --- futures and hooks ---


@ranks.world_of(2)
def test_futures_are_complete_once_launched_and_callbacks_run_where_they_are_added(rank, world_size):
    x, here = full(), threading.get_ident()
    ran = []

    def halve(done):
        ran.append(threading.get_ident())
        assert SIM.current_stream() != SIM.default_stream()
        return done.value()[0] / 2

    if rank == 0:
        future = _reduce(x).get_future()
        assert future.done()
        future.wait()  # orders the stream
        store().set("go", "")
        assert x.tolist() == [2.0] * 3
    else:
        store().wait(["go"])
        _reduce(x).wait()
    halved = _reduce(x).get_future().then(halve)
    assert ran == [here] and halved.done()
    assert halved.wait().tolist() == [2.0] * 3


@ranks.world_of(2)
def test_a_completion_hook_that_raises_leaves_no_work_unfinished(rank, world_size):
    group = c10d._get_default_group()

    def refuse(info):
        raise ValueError("no hooks today")

    group._register_on_completion_hook(refuse)
    x = full()
    work = _reduce(x)
    with pytest.raises(RuntimeError, match="no hooks today"):
        work.wait()
        x.tolist()
    assert work.is_completed() and x.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="no hooks today"):
        dist.all_reduce(x)
    assert x.tolist() == [4.0] * 3
    ranks.leave()


@ranks.world_of(2)
def test_completion_hook_may_read_results_that_the_stream_waits_for(rank, world_size):
    group, seen, x = c10d._get_default_group(), [], full()
    group._register_on_completion_hook(lambda info: seen.append(x.tolist()))  # on the stream that waits for the work
    _reduce(x).wait()
    assert (x + 1).tolist() == [3.0] * 3 and seen == [[2.0] * 3]


# --- which references are held, and by which object ---


@ranks.world_of(2)
def test_tensors_are_held_until_the_wait_however_late_the_peer_is(rank, world_size):
    mine, whole = full(1.0, 1000), torch.empty(1000 * world_size, device="sim")
    before = SIM.memory_allocated()
    if rank == 0:
        work = dist.all_gather_into_tensor(whole, mine, async_op=True)
        del mine
        assert SIM.memory_allocated() == before
        work.wait()
        assert SIM.memory_allocated() < before
        store().set("go", "")
    else:
        store().wait(["go"])
        work = dist.all_gather_into_tensor(whole, mine, async_op=True)
        SIM.synchronize()
        del mine
        assert SIM.memory_allocated() == before  # complete, without a wait
        work.wait()
        assert SIM.memory_allocated() < before


@ranks.world_of(2)
def test_several_threads_may_wait_on_one_stream(rank, world_size):
    works = [(x, _reduce(x)) for x in (full(float(i)) for i in range(40))]

    def read(start):
        for number, (x, work) in enumerate(works[start::4]):
            work.wait()
            assert x.tolist() == [2.0 * (start + 4 * number)] * 3

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
