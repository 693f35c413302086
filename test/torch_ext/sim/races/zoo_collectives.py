"""Programs of two ranks: collectives and transfers without the wait for their end, or for their inputs."""

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from test.torch_ext.sim.races.stage import SIM, in_a_thread, pair, rows

# A collective or transfer of a small tensor and one of twice its size, its operator; a use of one of them, likewise.
UNWAITED = {
    "result_read": (
        ("all_reduce", lambda x, two: dist.all_reduce(x, async_op=True)),
        ("mul", lambda x, two: x.mul(3)),
    ),
    "broadcast_overwritten": (
        ("broadcast", lambda x, two: dist.broadcast(x, 0, async_op=True)),
        ("zero_", lambda x, two: x.zero_()),
    ),
    "input_overwritten": (
        ("_all_gather_base", lambda x, two: dist.all_gather_into_tensor(two, x, async_op=True)),
        ("zero_", lambda x, two: x.zero_()),
    ),
    "gathered_read": (
        ("_all_gather_base", lambda x, two: dist.all_gather_into_tensor(two, x, async_op=True)),
        ("sum", lambda x, two: two[256:].sum()),
    ),
    "scattered_read": (
        ("_reduce_scatter_base", lambda x, two: dist.reduce_scatter_tensor(x, two, async_op=True)),
        ("sum", lambda x, two: x.sum()),
    ),
    "all_to_all_read": (
        ("all_to_all", lambda x, two: dist.all_to_all_single(two[:256], x, async_op=True)),
        ("sum", lambda x, two: two[:256].sum()),
    ),
    "sent_and_overwritten": (
        ("send", lambda x, two: dist.batch_isend_irecv(_exchange(x, two))),
        ("zero_", lambda x, two: x.zero_()),
    ),
    "received_and_read": (
        ("recv", lambda x, two: dist.batch_isend_irecv(_exchange(x, two))),
        ("mul", lambda x, two: two[:256].mul(3)),
    ),
}


# The waits for an all-reduce, in the twin only.
WAITS = {
    "wait_on_another_stream": lambda on, work, fixed: on.within(on.main if fixed else on.side, work.wait),
    "wait_in_a_thread_on_another_stream": lambda on, work, fixed: in_a_thread(
        lambda: on.within(on.main if fixed else on.side, work.wait)
    ),
    "device_synchronized_instead": lambda on, work, fixed: fixed and SIM.synchronize(),
}


@rows(WAITS)
def waited(on, fixed, wait):
    x = on.tensor()
    work = dist.all_reduce(x, async_op=True)  # earlier: all_reduce
    wait(on, work, fixed)
    del work
    x.mul(3)  # later: mul


def _exchange(sent, received):
    peer = 1 - dist.get_rank()
    return [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received[:256], peer)]


@rows(UNWAITED, "earlier", "later")
def unwaited(on, fixed, launch, use):
    x, two = on.tensor(), on.tensor(512)
    launched = launch(x, two)
    works = launched if isinstance(launched, list) else [launched]
    for work in works if fixed else []:
        work.wait()
    use(x, two)
    for work in works:
        work.wait()


# The side stream's use of a tensor, and the main one's, which waits in the twin.
ON_TWO = {
    "launched_before_its_input_is_there": (
        ("fill_", lambda x: x.fill_(2)),
        ("all_reduce", lambda x: dist.all_reduce(x, async_op=True).wait()),
    ),
    "synchronous_on_the_side": (("all_reduce", lambda x: dist.all_reduce(x)), ("mul", lambda x: x.mul(3))),
}


@rows(ON_TWO, "earlier", "later")
def on_two(on, fixed, first, second):
    x = on.tensor()
    with on.on(on.side):
        first(x)
    on.join(fixed)
    second(x)


@pair
def functional_collective_without_wait_tensor(on, fixed):
    # As in pytorch#152534.
    x = on.tensor()
    group = dist.group.WORLD
    raw = torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)  # earlier: all_reduce
    if fixed:
        raw = torch.ops._c10d_functional.wait_tensor(raw)
    raw.mul(3)  # later: mul
    functional.wait_tensor(raw)


@pair
def coalesced_and_read_before_wait(on, fixed):
    x, y = on.tensor(), on.tensor()
    with dist._coalescing_manager(device=on.device, async_ops=True) as together:  # earlier: allreduce_coalesced
        dist.all_reduce(x)
        dist.all_reduce(y)
    if fixed:
        together.wait()
    y.mul(3)  # later: mul
    together.wait()


# Operations that read a tensor, which the program then frees. A work holds it until `wait`, and no longer: how late the
# peer is must not matter. After `wait`, only the stream that waits may use the memory again.
HOLDING = {
    "gathered": (("_all_gather_base", lambda x, two: dist.all_gather_into_tensor(two, x, async_op=True)),),
    "scattered": (("_reduce_scatter_base", lambda x, two: dist.reduce_scatter_tensor(two[:128], x, async_op=True)),),
    # As in Megatron-LM#4047.
    "sent": (("send", lambda x, two: dist.batch_isend_irecv(_exchange(x, two))[0]),),
}


@rows({f"{name}_freed_after_a_wait_on_another_stream": row for name, row in HOLDING.items()}, "earlier")
def freed_after_a_wait(on, fixed, launch):
    x, two = on.tensor(), on.tensor(512)
    work = launch(x, two)
    with on.on(on.main if fixed else on.side):
        work.wait()
    del x
    torch.zeros(256, device=on.device)  # later: zero_
    work.wait()


HELD = {f"{name}_freed_before_the_wait": (*row, True) for name, row in HOLDING.items()}
HELD |= {f"{name}_freed_without_a_wait": (*row, False) for name, row in HOLDING.items()}


@rows(HELD, "earlier")
def freed_while_held(on, fixed, launch, waits):
    x, two = on.tensor(), on.tensor(512)
    work = launch(x, two)
    if not fixed:
        x.untyped_storage().resize_(0)  # which the work cannot prevent
    if not waits:
        del work
    del x
    torch.zeros(256, device=on.device)  # later: zero_
    work.wait() if waits else SIM.synchronize()


@pair
def freed_without_a_wait_while_a_stream_reads(on, fixed):
    x, two = on.tensor(), on.tensor(512)
    with on.on(on.other):
        x.mul(3)  # earlier: mul
    work = dist.all_gather_into_tensor(two, x, async_op=True)
    if fixed:
        on.main.wait_stream(on.other)
    del work, x
    torch.zeros(256, device=on.device)  # later: zero_


@pair
def coalesced_and_freed_after_a_wait_on_another_stream(on, fixed):
    x, two = on.tensor(), on.tensor(512)
    group = dist._coalescing_manager(device=on.device, async_ops=True)
    with group as together:  # earlier: all_gather_into_tensor_coalesced
        dist.all_gather_into_tensor(two, x)
    with on.on(on.main if fixed else on.side):
        together.wait()
    del x
    torch.zeros(256, device=on.device)  # later: zero_
    together.wait()


@pair
def freed_and_recorded_for_one_of_two_streams(on, fixed):
    x, two = on.tensor(), on.tensor(512)
    with on.on(on.other):
        x.mul(3)  # earlier: mul
    with on.on(on.side):
        work = dist.all_gather_into_tensor(two, x, async_op=True)
        work.wait()
    x.record_stream(on.side)
    if fixed:
        x.record_stream(on.other)
    del x
    torch.zeros(256, device=on.device)  # later: zero_


@pair
def synchronous_and_freed_on_another_stream(on, fixed):
    x, two = on.tensor(), on.tensor(512)
    with on.on(on.side):
        dist.all_gather_into_tensor(two, x)  # earlier: _all_gather_base
    on.join(fixed)
    del x
    torch.zeros(256, device=on.device)  # later: zero_


@pair
def value_of_a_callback_read_before_its_future(on, fixed):
    x = on.tensor()
    future = dist.all_reduce(x, async_op=True).get_future()
    twice = future.then(lambda done: done.value()[0].mul(2))  # earlier: mul
    if fixed:
        twice.wait()
    twice.value().add(1)  # later: add
    twice.wait()


@pair
def overwritten_while_a_callback_reads(on, fixed):
    x = on.tensor()
    work = dist.all_reduce(x, async_op=True)
    twice = work.get_future().then(lambda done: done.value()[0].mul(2))  # earlier: mul
    work.wait()
    if fixed:
        twice.wait()
    x.zero_()  # later: zero_
    twice.wait()


@pair
def freed_while_a_callback_reads(on, fixed):
    # As in torch's powerSGD_hook.
    def hook(x, copy):
        def error(done):
            if fixed:
                copy.record_stream(SIM.current_stream())
            return done.value()[0] - copy  # earlier: sub

        return dist.all_reduce(x, async_op=True).get_future().then(error)

    future = hook(on.tensor(), on.tensor())
    torch.zeros(256, device=on.device)  # later: zero_
    future.wait()


@pair
def input_of_a_coalesced_gather_overwritten(on, fixed):
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
def barrier_is_no_wait_for_a_copy(on, fixed):
    x, host = on.tensor(), on.pinned()
    with on.on(on.side):
        host.copy_(x, non_blocking=True)  # earlier: copy_
    dist.barrier()
    if fixed:
        on.side.synchronize()
    host.sum()  # later: sum
    SIM.synchronize()


@pair
def pinned_memory_gathered_as_an_object_too_early(on, fixed):
    x, host = on.tensor(), on.pinned()
    host.copy_(x, non_blocking=True)  # earlier: copy_
    if fixed:
        on.main.synchronize()
    dist.all_gather_object([None, None], host)  # later: save
