"""Operations of ``simccl`` are ordered as NCCL's are: by streams, while the host goes on (csrc/work.h)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import torch_ext.sim  # noqa: F401 - registers the device
from test.torch_ext.sim import ranks
from test.torch_ext.sim.waits_told import Page
from torch_ext.world import threads

SIM: Any = torch.get_device_module("sim")


def _x(value: float = 1.0, numel: int = 3) -> torch.Tensor:
    return torch.full((numel,), value, device="sim")


def _store() -> dist.Store:
    return c10d._get_default_store()


def _reduce(x: torch.Tensor) -> Any:
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    return work


# --- wait ---


def _wait_returns(rank: int, world_size: int) -> None:
    x = _x()
    if rank == 0:
        work = _reduce(x)
        work.wait()
        assert not work.is_completed()
        _store().set("go", "")
    else:
        _store().wait(["go"])
        _reduce(x).wait()
    assert x.tolist() == [2.0] * 3


def test_wait_returns_at_once_and_reads_get_the_result() -> None:
    ranks.run(2, _wait_returns)


def _receive_returns(rank: int, world_size: int) -> None:
    x = _x(0.0)
    if rank == 0:
        dist.recv(x, 1)
        _store().set("go", "")
        assert (x + 1).tolist() == [6.0] * 3
        assert dist.recv(x) == 1  # asks where it came from
    else:
        _store().wait(["go"])
        dist.send(_x(5.0), 0)
        dist.send(_x(6.0), 0)


def test_receives_do_not_block_the_host_either() -> None:
    ranks.run(2, _receive_returns)


# What needs the result of an all-reduce of ones that the current stream waits for.
_NEEDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "kernel": lambda x: (x + 1).cpu() - 1,
    "kernel in place": lambda x: x.mul_(1),
    "read": lambda x: x.tolist(),
    "copy that does not block": lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True),
    "kernel on a stream that waits": lambda x: _on_another_stream(x),
    "stream": lambda x: SIM.current_stream().synchronize(),
    "device": lambda x: SIM.synchronize(),
    "event": lambda x: _event().synchronize(),
    "collective": lambda x: dist.all_reduce(x, dist.ReduceOp.MAX),
    "growing": lambda x: x.resize_(10_000),
}


def _event() -> Any:
    event = SIM.Event()
    event.record()
    return event


def _on_another_stream(x: torch.Tensor) -> torch.Tensor:
    side = SIM.Stream()
    side.wait_event(_event())
    with SIM.stream(side):
        return x.clone()


def _need(rank: int, world_size: int) -> None:
    for number, (name, need) in enumerate(_NEEDS.items()):
        x = _x()
        if rank == 0:
            work = _reduce(x)
            work.wait()
            teller = threading.Timer(0.05, _store().set, (f"go {number}", ""))  # needs the GIL while this thread blocks
            teller.start()
            result = need(x)
            assert work.is_completed(), name
            if isinstance(result, torch.Tensor):
                assert result[:3].tolist() == [2.0] * 3, name
            assert x[:3].tolist() == [2.0] * 3, name
            teller.join()
        else:
            _store().wait([f"go {number}"])
            _reduce(x).wait()
            if name == "collective":
                dist.all_reduce(x, dist.ReduceOp.MAX)


def test_whatever_comes_next_on_the_stream_waits_without_the_gil() -> None:
    ranks.run(2, _need)


def _other_streams_go_on(rank: int, world_size: int) -> None:
    x, y, side = _x(), _x(4.0), SIM.Stream()
    if rank == 0:
        event, work = SIM.Event(), _reduce(x)
        work.wait()
        event.record()
        with SIM.stream(side):
            assert (y + 1).tolist() == [5.0] * 3  # blocks for ever if it waits for rank 1
            assert side.query()
        assert not SIM.current_stream().query() and not event.query()
        _store().set("go", "")
        assert x.tolist() == [2.0] * 3
        assert SIM.current_stream().query() and event.query()
    else:
        _store().wait(["go"])
        dist.all_reduce(x)


def test_other_streams_do_not_wait_and_queries_tell() -> None:
    ranks.run(2, _other_streams_go_on)


def _nobody_waits(rank: int, world_size: int) -> None:
    x, y = _x(), _x(0.0)
    if rank == 0:
        dist.all_reduce(x, async_op=True)  # and lets go of the work
        received = dist.irecv(y, 1)
        _store().set("go", "")
        SIM.synchronize()
        assert received is not None and received.is_completed()
    else:
        _store().wait(["go"])
        dist.all_reduce(x)
        dist.send(_x(3.0), 0)
    assert x.tolist() == [2.0] * 3 and (rank == 1 or y.tolist() == [3.0] * 3)


def test_device_synchronize_covers_what_nobody_waits_for() -> None:
    ranks.run(2, _nobody_waits)


def _times(rank: int, world_size: int) -> None:
    start, end = SIM.Event(enable_timing=True), SIM.Event(enable_timing=True)
    x = _x()
    start.record()
    work = _reduce(x)
    work.wait()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0


def test_events_around_an_operation_time_it() -> None:
    ranks.run(2, _times)


# --- calls that are no asynchronous ones ---


def _direct(rank: int, world_size: int) -> None:
    group = c10d._get_default_group().boxed()
    minute = 60_000
    for number in range(20):
        whole, mine = _x(0.0, 6), _x(100.0 * (rank + 1) + number)
        torch.ops.c10d._allgather_base_(whole, mine, group, False, minute)
        assert whole.tolist() == [100.0 + number] * 3 + [200.0 + number] * 3


def test_the_dispatchers_operator_is_done_for_what_comes_next() -> None:
    ranks.run(2, _direct)


def _blocking_by_variable(rank: int, world_size: int, name: str) -> None:
    os.environ[name] = "1"
    group = dist.new_group()
    x = _x()
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        threading.Timer(0.05, _store().set, ("go", "")).start()
        work.wait()
        assert work.is_completed()
    else:
        _store().wait(["go"])
        dist.all_reduce(x, group=group)


@pytest.mark.parametrize("name", ["TORCH_EXT_SIM_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"])
def test_blocking_wait_blocks_the_host(name: str) -> None:
    ranks.run(2, _blocking_by_variable, name)


def _barrier(rank: int, world_size: int) -> None:
    if rank == 0:
        threading.Timer(0.05, _store().set, ("go", "")).start()
        dist.barrier()
        assert _store().check(["go"])
    else:
        _store().wait(["go"])
        dist.barrier()


def test_a_barrier_blocks_the_host() -> None:
    ranks.run(2, _barrier)


# --- errors ---


def _disagree(rank: int, world_size: int) -> None:
    x = _x(1.0, 3 + rank)
    work = _reduce(x)
    with pytest.raises(RuntimeError, match=r"disagree in the number of elements: .*all_reduce\(SUM\)"):
        work.wait()
        x.tolist()
    assert work.is_completed() and not work.is_success()
    assert "disagree" in str(work.exception())
    assert _x(4.0).tolist() == [4.0] * 3  # it is told once
    with pytest.raises(RuntimeError, match="disagree in the number of elements"):
        work.wait()
    with pytest.raises(RuntimeError, match="disagree in the number of elements"):
        work.get_future().wait()
    y = _x()
    dist.all_reduce(y)
    assert y.tolist() == [2.0] * 3


def test_an_error_is_told_at_the_wait_or_where_the_result_is_due() -> None:
    ranks.run(2, _disagree)


_DUE: dict[str, Callable[[torch.Tensor], object]] = {
    "kernel": lambda x: x + 1,
    "read": lambda x: x.tolist(),
    "stream": lambda x: SIM.current_stream().synchronize(),
    "device": lambda x: SIM.synchronize(),
    "event": lambda x: _event().synchronize(),
    "another stream": lambda x: _on_another_stream(x),
}


def _late(rank: int, world_size: int, name: str) -> None:
    group = dist.new_group(timeout=ranks.SHORT)
    dist.barrier(group=group)
    if rank == 0:
        x = _x()
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        work.wait()
        with pytest.raises(RuntimeError, match=r"all_reduce at .*test_stream_order.py:\d+ timed out: .*for rank 1"):
            _DUE[name](x)
        _store().set("seen", "")
    else:
        _store().wait(["seen"])
    ranks.leave()


@pytest.mark.parametrize("name", _DUE)
def test_a_missed_operation_times_out_where_its_result_is_due(name: str) -> None:
    ranks.run(2, _late, name)


def _page(rank: int, world_size: int) -> None:
    if rank == 1:
        _store().wait(["seen"])
        dist.all_reduce(_x())
        return
    page = Page()

    def read() -> None:
        x = _x()
        _reduce(x).wait()
        x.tolist()

    reading = threading.Thread(target=read)
    reading.start()
    told = page.only_entry(reading)
    assert (told.peer, told.operation) == (1, "all_reduce")
    assert Path(told.site.rpartition(":")[0]) == Path(__file__)
    # Its frame is in x.tolist(), which is no operation.
    (task,) = (task for task in threads._tasks(0) if task.tid == reading.native_id)
    assert task.operation is not None and task.operation.limit_s == told.until_s
    _store().set("seen", "")
    reading.join()
    assert not page.entries()


def test_the_page_of_waits_tells_what_a_read_waits_for() -> None:
    ranks.run(2, _page)


def _own_limit(rank: int, world_size: int) -> None:
    if rank == 0:
        work = _reduce(_x())
        with pytest.raises(RuntimeError, match=r"all_reduce.* timed out: it waited 1000 ms for rank 1"):
            work.wait(ranks.SHORT)
        _store().set("seen", "")
    else:
        _store().wait(["seen"])
    ranks.leave()


def test_wait_with_a_time_limit_keeps_it() -> None:
    ranks.run(2, _own_limit)


# --- futures and hooks ---


def _futures(rank: int, world_size: int) -> None:
    x, here = _x(), threading.get_ident()
    ran: list[int] = []

    def halve(done: torch.futures.Future[Any]) -> torch.Tensor:
        ran.append(threading.get_ident())
        assert SIM.current_stream() != SIM.default_stream()
        return done.value()[0] / 2

    if rank == 0:
        future = _reduce(x).get_future()
        assert future.done()
        future.wait()  # orders the stream
        _store().set("go", "")
        assert x.tolist() == [2.0] * 3
    else:
        _store().wait(["go"])
        _reduce(x).wait()
    halved = _reduce(x).get_future().then(halve)
    assert ran == [here] and halved.done()
    assert halved.wait().tolist() == [2.0] * 3


def test_futures_are_complete_once_launched_and_callbacks_run_on_the_thread_that_adds_them() -> None:
    ranks.run(2, _futures)


class _TwoRounds:
    """A hook that issues a second collective out of the first one's callback, as PowerSGD does."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def __call__(self, state: object, bucket: Any) -> Any:
        index = bucket.index()

        def second(done: torch.futures.Future[Any]) -> torch.Tensor:
            self.order.append(f"second of {index}")
            (mean,) = done.value()
            return _reduce(mean.div_(2)).get_future().wait()[0].div_(2)

        self.order.append(f"first of {index}")
        return _reduce(bucket.buffer()).get_future().then(second)


def _comm_hook(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to("sim")
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).to("sim"), bucket_cap_mb=0.0003)
    plain.load_state_dict(model.module.state_dict())
    hook = _TwoRounds()
    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    for step in range(3):
        inputs = [torch.full((2, 8), 1.0 + step + r, device="sim") for r in range(world_size)]
        model.zero_grad(), plain.zero_grad()
        model(inputs[rank]).square().mean().backward()
        (sum(plain(one).square().mean() for one in inputs) / world_size).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    everybody: list[Any] = [None] * world_size
    dist.all_gather_object(everybody, hook.order)
    assert everybody[0] == everybody[1] and len(hook.order) >= 12


def test_hooks_of_ddp_may_issue_collectives_from_their_callbacks() -> None:
    ranks.run(2, _comm_hook)


def _raising_hook(rank: int, world_size: int) -> None:
    group = c10d._get_default_group()

    def refuse(info: Any) -> None:
        raise ValueError("no hooks today")

    group._register_on_completion_hook(refuse)
    x = _x()
    work = _reduce(x)
    with pytest.raises(RuntimeError, match="no hooks today"):
        work.wait()
        x.tolist()
    assert work.is_completed() and x.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="no hooks today"):
        dist.all_reduce(x)
    assert x.tolist() == [4.0] * 3
    ranks.leave()


def test_a_completion_hook_that_raises_leaves_no_work_unfinished() -> None:
    ranks.run(2, _raising_hook)


def _reading_hook(rank: int, world_size: int) -> None:
    group, seen, x = c10d._get_default_group(), [], _x()
    group._register_on_completion_hook(lambda info: seen.append(x.tolist()))  # on the stream that waits for the work
    _reduce(x).wait()
    assert (x + 1).tolist() == [3.0] * 3 and seen == [[2.0] * 3]


def test_a_completion_hook_may_read_what_the_stream_waits_for() -> None:
    ranks.run(2, _reading_hook)


# --- what is held, and by whom ---


def _held(rank: int, world_size: int) -> None:
    mine, whole = _x(1.0, 1000), torch.empty(1000 * world_size, device="sim")
    before = SIM.memory_allocated()
    if rank == 0:
        work = dist.all_gather_into_tensor(whole, mine, async_op=True)
        assert work is not None
        del mine
        assert SIM.memory_allocated() == before  # until somebody waits
        work.wait()
        assert SIM.memory_allocated() == before  # and until it is over
        _store().set("go", "")
        SIM.synchronize()
        assert SIM.memory_allocated() < before
    else:
        _store().wait(["go"])
        work = dist.all_gather_into_tensor(whole, mine, async_op=True)
        assert work is not None
        SIM.synchronize()
        del mine
        assert SIM.memory_allocated() == before  # over, and nobody has waited
        work.wait()
        assert SIM.memory_allocated() < before


def test_tensors_are_held_until_the_wait_and_the_end() -> None:
    ranks.run(2, _held)


def _held_without_work(rank: int, world_size: int) -> None:
    before = SIM.memory_allocated()
    if rank == 0:
        dist.all_reduce(_x(1.0, 1000), async_op=True)
        assert SIM.memory_allocated() > before
        _store().set("go", "")
        SIM.synchronize()
    else:
        _store().wait(["go"])
        dist.all_reduce(_x(1.0, 1000))
    assert SIM.memory_allocated() == before


def test_tensors_of_a_work_that_was_dropped_are_held_until_its_end() -> None:
    ranks.run(2, _held_without_work)


def _threads(rank: int, world_size: int) -> None:
    dist.all_reduce(_x())
    before = len(os.listdir("/proc/self/task"))
    groups = [dist.new_group(backend="simccl") for _ in range(4)]
    works = [dist.all_reduce(_x(), group=group, async_op=True) for group in groups]
    for work in works:
        assert work is not None
        work.wait()
        work.get_future().then(lambda done: done.value()).wait()
    SIM.synchronize()
    assert len(os.listdir("/proc/self/task")) == before


def test_groups_have_no_threads() -> None:
    ranks.run(2, _threads, backend="simccl")


def _many_threads(rank: int, world_size: int) -> None:
    works = [(x, _reduce(x)) for x in (_x(float(i)) for i in range(40))]
    errors: list[BaseException] = []

    def read(mine: list[tuple[torch.Tensor, Any]], start: int) -> None:
        try:
            for number, (x, work) in enumerate(mine):
                work.wait()
                assert x.tolist() == [2.0 * (start + 4 * number)] * 3
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(works[start::4], start)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_several_threads_may_wait_on_one_stream() -> None:
    ranks.run(2, _many_threads)
