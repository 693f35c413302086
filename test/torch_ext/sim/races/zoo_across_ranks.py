"""Programs of two ranks that race on symmetric memory, each with its mend.

Every program runs on both ranks with a :class:`Place` of its own and ``mended``. Comments mark the two lines that race,
by rank, with the operator: ``# rank 0: fill_``. Which of the two a rank reports depends on which comes second, so a
program has a pair of places, not a first and a second one.
"""

import functools
import inspect
import re

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from torch_ext.sim._name import NAME

SIM = torch.get_device_module(NAME)
SIZE = 256
_MARK = re.compile(r"# rank (\d): (\w+)")
PROGRAMS = {}  # by name: the program, and the (rank, operator, line) of its two accesses


class Place:
    """What a rank has in a program: its own symmetric buffer, that of its peer, their handle, and a second stream."""

    def __init__(self):
        self.rank = dist.get_rank()
        self.is_first = self.rank == 0
        self.device = torch.device(NAME, SIM.current_device())
        self.own = symm_mem.empty(SIZE, device=self.device)
        self.handle = symm_mem.rendezvous(self.own, dist.group.WORLD)
        self.peer = self.handle.get_buffer(1 - self.rank, (SIZE,), torch.float32)
        self.main, self.side = SIM.current_stream(), SIM.Stream()
        self.other = torch.ones(SIZE, device=self.device)
        self.group = dist.group.WORLD.group_name

    def put(self, channel=0, stream=None):
        with SIM.stream(stream or self.main):
            self.handle.put_signal(1 - self.rank, channel)

    def wait(self, channel=0):
        self.handle.wait_signal(1 - self.rank, channel)

    def meet(self):
        symm_mem.rendezvous(symm_mem.empty(4, device=self.device), dist.group.WORLD)

    def barrier(self, unless=False):
        if not unless:
            self.handle.barrier()


@functools.cache
def on_the_host():
    """A group of gloo, which both ranks make on first use."""
    return dist.new_group(backend="gloo")


def program(function, name=""):
    lines, first = inspect.getsourcelines(function)
    marks = ((number, mark) for number, line in enumerate(lines, first) for mark in _MARK.findall(line))
    expected = frozenset((int(rank), operator, number) for number, (rank, operator) in marks)
    assert len(expected) == 2, f"{function.__name__} marks {expected}"
    PROGRAMS[name or function.__name__] = (function, expected)
    return function


# Rank 0 writes to the buffer of rank 1, which reads it. What rank 0 does after its write, and rank 1 before it reads.
ORDERS = {
    "put_without_its_wait": (lambda at, mended: at.put(), lambda at, mended: mended and at.wait()),
    "signal_put_on_another_stream": (
        lambda at, mended: (mended and at.side.wait_stream(at.main), at.put(stream=at.side)),
        lambda at, mended: at.wait(),
    ),
    "broadcast_from_the_reader": (lambda at, mended: dist.broadcast(at.other, 0 if mended else 1),) * 2,
    "reduce_to_the_writer": (lambda at, mended: dist.reduce(at.other, 1 if mended else 0),) * 2,
    "transfer_from_the_reader": (
        lambda at, mended: (dist.send if mended else dist.recv)(at.other, 1),
        lambda at, mended: (dist.recv if mended else dist.send)(at.other, 0),
    ),
    "collective_without_its_wait": (
        lambda at, mended: dist.all_reduce(at.other),
        lambda at, mended: setattr(at, "work", dist.all_reduce(at.other, async_op=True)) or (mended and at.work.wait()),
    ),
    "barrier_of_hosts_without_a_device_wait": (
        lambda at, mended: (mended and SIM.synchronize(), dist.barrier(on_the_host())),
        lambda at, mended: dist.barrier(on_the_host()),
    ),
    "rendezvous_without_a_device_wait": (
        lambda at, mended: (mended and SIM.synchronize(), at.meet()),
        lambda at, mended: at.meet(),
    ),
    "host_broadcast_from_the_reader": (
        lambda at, mended: (SIM.synchronize(), dist.broadcast(torch.ones(2), 0 if mended else 1, on_the_host())),
        lambda at, mended: dist.broadcast(torch.ones(2), 0 if mended else 1, on_the_host()),
    ),
}


def write_then_read(at, mended, after_write, before_read):
    if at.is_first:
        at.peer.fill_(1)  # rank 0: fill_
        after_write(at, mended)
    else:
        before_read(at, mended)
        at.own.sum()  # rank 1: sum


for name, (after_write, before_read) in ORDERS.items():
    program(write_then_read, name)
    _, expected = PROGRAMS[name]
    form = functools.partial(write_then_read, after_write=after_write, before_read=before_read)
    PROGRAMS[name] = (form, expected)


@program
def signal_before_the_write(at, mended):
    if at.is_first:
        at.put(1)
        at.peer.fill_(1)  # rank 0: fill_
        at.put(2)
    else:
        at.wait(2 if mended else 1)
        at.own.sum()  # rank 1: sum
        at.wait(1 if mended else 2)


@program
def write_again_without_an_answer(at, mended):
    if at.is_first:
        at.peer.fill_(1)
        at.put()
        if mended:
            at.wait()
        at.peer.zero_()  # rank 0: zero_
    else:
        at.wait()
        at.own.sum()  # rank 1: sum
        if mended:
            at.put()


@program
def loop_without_an_answer(at, mended):
    for _ in range(3):
        if at.is_first:
            at.peer.fill_(1)  # rank 0: fill_
            at.put(1)
        else:
            at.wait(1)
            at.own.sum()  # rank 1: sum
        at.barrier(unless=not mended)


@program
def barrier_before_the_write(at, mended):
    at.barrier(unless=mended)
    if at.is_first:
        at.own.fill_(1)  # rank 0: fill_
    at.barrier(unless=not mended)
    if not at.is_first:
        at.other.copy_(at.peer)  # rank 1: copy_


@program
def writer_on_a_stream_that_the_barrier_leaves_out(at, mended):
    if at.is_first:
        with SIM.stream(at.side):
            at.own.fill_(1)  # rank 0: fill_
        if mended:
            at.main.wait_stream(at.side)
    at.barrier()
    if not at.is_first:
        at.peer.sum()  # rank 1: sum


@program
def reader_on_a_stream_that_the_barrier_leaves_out(at, mended):
    if at.is_first:
        at.own.fill_(1)  # rank 0: fill_
    at.barrier()
    if mended:
        at.side.wait_stream(at.main)
    if not at.is_first:
        with SIM.stream(at.side):
            at.peer.sum()  # rank 1: sum


@program
def event_recorded_before_the_wait(at, mended):
    event = SIM.Event()
    if at.is_first:
        at.peer.fill_(1)  # rank 0: fill_
        at.put()
        return
    event.record()
    at.wait()
    if mended:
        event.record()
    at.side.wait_event(event)
    with SIM.stream(at.side):
        at.own.sum()  # rank 1: sum


@program
def slices_that_overlap(at, mended):
    if at.is_first:
        at.peer[: 128 if mended else 160].fill_(1)  # rank 0: fill_
    else:
        at.own[128:].zero_()  # rank 1: zero_


@program
def columns_that_overlap(at, mended):
    matrix = (at.peer if at.is_first else at.own).view(16, 16)
    if at.is_first:
        matrix[:, 3].fill_(1)  # rank 0: fill_
    else:
        matrix[:, 4 if mended else 2 : 6].sum()  # rank 1: sum


@program
def result_of_a_peers_collective(at, mended):
    dist.all_reduce(at.own if at.is_first else at.other)  # rank 0: all_reduce
    at.barrier(unless=not mended)
    if not at.is_first:
        at.peer.sum()  # rank 1: sum


@program
def input_of_a_peers_collective(at, mended):
    gathered, given = torch.empty(2 * SIZE, device=at.device), at.own if at.is_first else at.other
    work = dist.all_gather_into_tensor(gathered, given, async_op=True)  # rank 0: _all_gather_base
    if mended:
        work.wait()
    if not at.is_first:
        at.peer.zero_()  # rank 1: zero_
    work.wait()


@program
def input_of_a_low_contention_all_gather(at, mended):
    result = torch.ops.symm_mem._low_contention_all_gather(at.own, at.group)  # rank 1: copy_
    if mended:
        torch.ops._c10d_functional.wait_tensor(result)
    if at.is_first:
        at.own.zero_()  # rank 0: zero_
    torch.ops._c10d_functional.wait_tensor(result)


@program
def input_of_a_one_shot_all_reduce(at, mended):
    if at.is_first:
        with SIM.stream(at.side):
            at.own.fill_(1)  # rank 0: fill_
        if mended:
            at.main.wait_stream(at.side)
    torch.ops.symm_mem.one_shot_all_reduce(at.own, "sum", at.group)  # rank 1: copy_


@program
def word_written_without_a_barrier(at, mended):
    words = at.handle.get_buffer(0, (SIZE,), torch.uint32)
    if at.is_first:
        torch.ops.symm_mem.memset32_(words, 3, 1, 2)  # rank 0: fill_
    at.barrier(unless=not mended)
    if not at.is_first:
        words[4:].view(torch.int32).sum()  # rank 1: sum
