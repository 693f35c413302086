"""Programs of two ranks: collectives and transfers whose end, or whose inputs, nobody waited for."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from test.torch_ext.sim.races.stage import SIM, Stage, pair


@pair
def result_read_before_wait(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    work = dist.all_reduce(x, async_op=True)  # earlier: all_reduce
    if fixed:
        work.wait()
    x.mul(3)  # later: mul
    work.wait()


@pair
def input_overwritten_before_wait(on: Stage, fixed: bool) -> None:
    x, out = on.tensor(), on.tensor(512)
    work = dist.all_gather_into_tensor(out, x, async_op=True)  # earlier: _all_gather_base
    if fixed:
        work.wait()
    x.zero_()  # later: zero_
    work.wait()


@pair
def gathered_read_before_wait(on: Stage, fixed: bool) -> None:
    x, out = on.tensor(), on.tensor(512)
    work = dist.all_gather_into_tensor(out, x, async_op=True)  # earlier: _all_gather_base
    if fixed:
        work.wait()
    out[256:].sum()  # later: sum
    work.wait()


@pair
def scattered_read_before_wait(on: Stage, fixed: bool) -> None:
    x, out = on.tensor(512), on.tensor()
    work = dist.reduce_scatter_tensor(out, x, async_op=True)  # earlier: _reduce_scatter_base
    if fixed:
        work.wait()
    out.sum()  # later: sum
    work.wait()


@pair
def wait_on_another_stream(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    work = dist.all_reduce(x, async_op=True)  # earlier: all_reduce
    with on.on(on.main if fixed else on.side):
        work.wait()
    x.mul(3)  # later: mul


@pair
def launched_before_its_input_is_there(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        x.fill_(2)  # earlier: fill_
    if fixed:
        on.main.wait_stream(on.side)
    dist.all_reduce(x, async_op=True).wait()  # later: all_reduce


@pair
def synchronous_on_the_side(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    with on.on(on.side):
        dist.all_reduce(x)  # earlier: all_reduce
    if fixed:
        on.main.wait_stream(on.side)
    x.mul(3)  # later: mul


@pair
def broadcast_read_before_wait(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    work = dist.broadcast(x, 0, async_op=True)  # earlier: broadcast
    if fixed:
        work.wait()
    x.zero_()  # later: zero_
    work.wait()


@pair
def all_to_all_read_before_wait(on: Stage, fixed: bool) -> None:
    x, out = on.tensor(), on.tensor()
    work = dist.all_to_all_single(out, x, async_op=True)  # earlier: all_to_all
    if fixed:
        work.wait()
    out.sum()  # later: sum
    work.wait()


@pair
def bucket_overwritten_while_it_is_sent(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    peer = 1 - dist.get_rank()
    got = on.tensor()
    sends = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, got, peer)]
    works = dist.batch_isend_irecv(sends)  # earlier: send
    if fixed:
        for work in works:
            work.wait()
    x.zero_()  # later: zero_
    for work in works:
        work.wait()


@pair
def functional_collective_without_wait_tensor(on: Stage, fixed: bool) -> None:
    # As in pytorch#152534.
    x = on.tensor()
    group = dist.group.WORLD
    assert group is not None
    raw = torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)  # earlier: all_reduce
    if fixed:
        raw = torch.ops._c10d_functional.wait_tensor(raw)
    raw.mul(3)  # later: mul
    functional.wait_tensor(raw)


@pair
def device_synchronized_instead(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    work = dist.all_reduce(x, async_op=True)  # earlier: all_reduce
    if fixed:
        SIM.synchronize()
    x.mul(3)  # later: mul
    work.wait()


@pair
def coalesced_and_read_before_wait(on: Stage, fixed: bool) -> None:
    x, y = on.tensor(), on.tensor()
    with dist._coalescing_manager(device=on.device, async_ops=True) as together:  # earlier: allreduce_coalesced
        dist.all_reduce(x)
        dist.all_reduce(y)
    if fixed:
        together.wait()
    y.mul(3)  # later: mul
    together.wait()


@pair
def received_and_read_before_wait(on: Stage, fixed: bool) -> None:
    x, got = on.tensor(), on.tensor()
    peer = 1 - dist.get_rank()
    both = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, got, peer)]
    works = dist.batch_isend_irecv(both)  # earlier: recv
    if fixed:
        for work in works:
            work.wait()
    got.mul(3)  # later: mul
    for work in works:
        work.wait()


@pair
def freed_before_it_is_sent(on: Stage, fixed: bool) -> None:
    # As in Megatron-LM#4047.
    peer, got = 1 - dist.get_rank(), on.tensor()
    x = on.tensor()
    both = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, got, peer)]
    works = dist.batch_isend_irecv(both)  # earlier: send
    if fixed:
        for work in works:
            work.wait()
    x.untyped_storage().resize_(0)
    torch.zeros(256, device=on.device)  # later: zero_
    for work in works:
        work.wait()


@pair
def value_of_a_callback_read_before_its_future(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    future = dist.all_reduce(x, async_op=True).get_future()
    twice = future.then(lambda done: done.value()[0].mul(2))  # earlier: mul
    if fixed:
        twice.wait()
    twice.value().add(1)  # later: add
    twice.wait()


@pair
def overwritten_while_a_callback_reads(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    work = dist.all_reduce(x, async_op=True)
    twice = work.get_future().then(lambda done: done.value()[0].mul(2))  # earlier: mul
    work.wait()
    if fixed:
        twice.wait()
    x.zero_()  # later: zero_
    twice.wait()


@pair
def dropped_without_wait_and_read(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    work = dist.all_reduce(x, async_op=True)  # earlier: all_reduce
    if fixed:
        work.wait()
    del work
    x.mul(3)  # later: mul


@pair
def waited_for_in_a_thread_on_another_stream(on: Stage, fixed: bool) -> None:
    x = on.tensor()
    work = dist.all_reduce(x, async_op=True)  # earlier: all_reduce

    def wait() -> None:
        with on.on(on.main if fixed else on.side):
            work.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    x.mul(3)  # later: mul


@pair
def input_of_a_coalesced_gather_overwritten(on: Stage, fixed: bool) -> None:
    inputs, outputs = [on.tensor(8) for _ in range(2)], [on.tensor(16) for _ in range(2)]
    group = dist._coalescing_manager(device=on.device, async_ops=True)
    with group as manager:  # earlier: all_gather_into_tensor_coalesced
        for x, output in zip(inputs, outputs, strict=True):
            dist.all_gather_into_tensor(output, x)
    if fixed:
        manager.wait()
    inputs[1].add_(1)  # later: add
    manager.wait()


@pair
def ring_step_writes_what_is_still_sent(on: Stage, fixed: bool) -> None:
    other, mine, next_one = 1 - dist.get_rank(), on.tensor(), on.tensor()
    operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, next_one, other)]
    works = dist.batch_isend_irecv(operations)  # earlier: send
    if fixed:
        for work in works:
            work.wait()
    mine.add_(1)  # later: add
    for work in works:
        work.wait()


@pair
def barrier_is_no_wait_for_a_copy(on: Stage, fixed: bool) -> None:
    x, host = on.tensor(), on.pinned()
    with on.on(on.side):
        host.copy_(x, non_blocking=True)  # earlier: copy_
    dist.barrier()
    if fixed:
        on.side.synchronize()
    host.sum()  # later: sum
    SIM.synchronize()


@pair
def pinned_memory_gathered_as_an_object_too_early(on: Stage, fixed: bool) -> None:
    x, host = on.tensor(), on.pinned()
    host.copy_(x, non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    dist.all_gather_object([None, None], host)  # later: save
