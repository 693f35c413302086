"""The clock against a short simulator: random programs of streams, events, copies and collectives have equal times."""

import random

import pytest
import torch
import torch.distributed as dist

from test.torch_ext.sim import ranks

SIM = torch.get_device_module("sim")
STREAMS, EVENTS, WORLD, LAUNCH, POLL = 3, 3, 3, 2, 1000
KINDS = ("kernel", "sleep", "record", "wait", "sync_event", "query", "query_stream", "sync_stream", "sync_device")
KINDS += ("copy", "item", "collective", "collective", "send", "work_wait", "work_query")
GROUPS = {"all": (0, 1, 2), "some": (0, 2)}


def drawn_program(seed):
    """Return steps, each an operation and the ranks that take part. Ranks run the steps that are theirs, in order."""
    draw = random.Random(seed)
    steps, works = [], 0
    for _ in range(60):
        rank, stream, event = draw.randrange(WORLD), draw.randrange(STREAMS), draw.randrange(EVENTS)
        what = draw.choice(KINDS)
        if what == "collective":
            name = draw.choice(tuple(GROUPS))
            sizes = draw.choice(["all_reduce", "all_gather", "barrier"]), 4 * draw.randrange(1, 40)
            on = {rank: draw.randrange(STREAMS) for rank in GROUPS[name]}
            steps.append((what, GROUPS[name], (name, *sizes, draw.random() < 0.6, on)))
            works += 1
        elif what == "send":
            peer = (rank + 1) % WORLD
            steps.append((what, (rank, peer), (4 * draw.randrange(1, 40), {rank: stream, peer: event})))
            works += 1
        elif what.startswith("work"):
            if works:
                steps.append((what, (rank,), (draw.randrange(works), stream, draw.random() < 0.3)))
        else:
            amount = draw.randrange(1, 50)
            steps.append((what, (rank,), (stream, event, amount, draw.random() < 0.5, draw.random() < 0.5)))
    return steps


def simulate(steps):  # noqa: C901 - a branch for each kind of step
    """Return for each rank the host's times after its steps and the answers to its queries, and the times of events."""
    host, log = [0] * WORLD, [[] for _ in range(WORLD)]
    free, ends, events, works, engines = {}, {}, {}, [], {}

    def launch(rank, stream):
        host[rank] += LAUNCH
        return max(host[rank], free.get((rank, stream), 0))

    def ask(rank, end):
        log[rank].append((what, end <= host[rank]))
        host[rank] += 0 if end <= host[rank] else POLL

    for what, members, details in steps:
        if what == "collective":  # starts when the last rank is ready
            group, kind, size, is_async, on = details
            ready = max(launch(rank, on[rank]) for rank in members)
            peers = len(members) - 1
            sent = {"all_reduce": 2 * peers * size, "all_gather": peers * size}
            end = ends[group] = max(ready, ends.get(group, 0)) + sent.get(kind, 0)
            works.append({rank: end for rank in members if is_async and kind != "barrier"})
            for rank in members:
                if kind == "barrier":
                    host[rank] = max(host[rank], end)
                if kind == "barrier" or not is_async:
                    free[rank, on[rank]] = max(free.get((rank, on[rank]), 0), end)
        elif what == "send":
            (sender, receiver), (size, on) = members, details
            start = max(launch(sender, on[sender]), ends.get((sender, receiver), 0))
            arrives = ends[sender, receiver] = start + size
            end = ends["receive", receiver] = max(
                launch(receiver, on[receiver]), arrives, ends.get(("receive", receiver), 0)
            )
            works.append({sender: arrives, receiver: end})
        elif what.startswith("work"):
            (rank,), (work, stream, blocks) = members, details
            if rank in works[work] and what == "work_query":
                ask(rank, works[work][rank])
            elif rank in works[work]:
                host[rank] = max(host[rank], works[work][rank] if blocks else 0)
                free[rank, stream] = max(free.get((rank, stream), 0), works[work][rank])
        else:
            (rank,), (stream, event, amount, to_device, blocks) = members, details
            if what in ("kernel", "sleep"):
                free[rank, stream] = launch(rank, stream) + (1 if what == "kernel" else amount)
            elif what in ("copy", "item"):
                way, size = (to_device, 4 * amount) if what == "copy" else (False, 4)
                end = max(launch(rank, stream), engines.get((rank, way), 0)) + size
                free[rank, stream] = engines[rank, way] = end
                host[rank] = max(host[rank], end if blocks or what == "item" else 0)
            elif what == "record":
                events[rank, event] = max(host[rank], free.get((rank, stream), 0))
            elif what == "wait":
                free[rank, stream] = max(free.get((rank, stream), 0), events.get((rank, event), 0))
            elif what == "sync_event":
                host[rank] = max(host[rank], events.get((rank, event), 0))
            elif what == "query":
                ask(rank, events.get((rank, event), 0))
            elif what == "query_stream":
                ask(rank, free.get((rank, stream), 0))
            elif what == "sync_stream":
                host[rank] = max(host[rank], free.get((rank, stream), 0))
            else:
                # A device waits for all that its process has launched, but the host's time moves by its streams alone.
                host[rank] = max([host[rank], *(free.get((rank, each), 0) for each in range(STREAMS))])
        for rank in members:
            log[rank].append((what, host[rank]))
    return [(log[rank], [events.get((rank, event)) for event in range(EVENTS)]) for rank in range(WORLD)]


class Machine:
    """Runs a rank's steps on the device."""

    def __init__(self, rank, groups):
        self.rank, self.groups = rank, groups
        self.streams = [SIM.Stream() for _ in range(STREAMS)]
        self.events = [SIM.Event(enable_timing=True) for _ in range(EVENTS)]
        self.works, self.log = [], []

    def run(self, steps):
        for what, members, details in steps:
            if self.rank in members:
                getattr(self, what)(*details)
                self.log.append((what, SIM.clock.now_ns()))
            elif what in ("collective", "send"):
                self.works.append(None)
        return self.log

    def ends_after(self, zero):
        recorded = [event if event.event_id else None for event in self.events]
        return [event and round(zero.elapsed_time(event) * 1e6) for event in recorded]

    def collective(self, name, kind, size, is_async, on):
        group = self.groups[name]
        options = {"group": group, "async_op": is_async}
        with SIM.stream(self.streams[on[self.rank]]):
            if kind == "barrier":
                work = dist.barrier(**{**options, "async_op": False})
            elif kind == "all_reduce":
                work = dist.all_reduce(torch.empty(size * len(GROUPS[name]) // 4, device="sim"), **options)
            else:
                whole = torch.empty(size * len(GROUPS[name]) // 4, device="sim")
                work = dist.all_gather_into_tensor(whole, torch.empty(size // 4, device="sim"), **options)
        self.works.append(work)

    def send(self, size, on):
        x = torch.empty(size // 4, device="sim")
        sender, receiver = on
        with SIM.stream(self.streams[on[self.rank]]):
            work = dist.isend(x, receiver) if self.rank == sender else dist.irecv(x, sender)
        self.works.append(work)

    def work_wait(self, number, stream, blocks):
        if (work := self.works[number]) is not None:
            with SIM.stream(self.streams[stream]):
                work.wait(ranks.GROUP_TIMEOUT) if blocks else work.wait()

    def work_query(self, number, *_):
        if (work := self.works[number]) is not None:
            self.log.append(("work", work.is_completed()))

    def kernel(self, stream, *_):
        x = torch.empty(3, device="sim")
        with SIM.stream(self.streams[stream]):
            x.fill_(1)

    def sleep(self, stream, _event, amount, *_):
        with SIM.stream(self.streams[stream]):
            SIM._sleep(amount)

    def copy(self, stream, _event, amount, to_device, blocks):
        host, device = torch.empty(amount, pin_memory=True), torch.empty(amount, device="sim")
        to, source = (device, host) if to_device else (host, device)
        with SIM.stream(self.streams[stream]):
            to.copy_(source, non_blocking=not blocks)

    def item(self, stream, *_):
        x = torch.empty(1, device="sim")
        with SIM.stream(self.streams[stream]):
            x.item()

    def record(self, stream, event, *_):
        self.events[event].record(self.streams[stream])

    def wait(self, stream, event, *_):
        self.streams[stream].wait_event(self.events[event])

    def sync_event(self, _stream, event, *_):
        self.events[event].synchronize()

    def query(self, _stream, event, *_):
        self.log.append(("event", self.events[event].query()))

    def query_stream(self, stream, *_):
        self.log.append(("stream", self.streams[stream].query()))

    def sync_stream(self, stream, *_):
        self.streams[stream].synchronize()

    def sync_device(self, *_):
        SIM.synchronize()


@pytest.mark.parametrize("first", range(0, 60, 20))
@ranks.world_of(WORLD, backend="simccl")
def test_random_programs_have_the_times_of_the_simulator(rank, world_size, first):
    groups = {"all": dist.group.WORLD, "some": dist.new_group(list(GROUPS["some"]))}
    for seed in range(first, first + 20):
        steps = drawn_program(seed)
        with SIM.clock.measure("unit", launch_ns=LAUNCH):
            zero = SIM.current_stream().record_event(SIM.Event(enable_timing=True))
            machine = Machine(rank, groups)
            log = machine.run(steps)
            SIM.synchronize()
            ends = machine.ends_after(zero)
        expected, expected_ends = simulate(steps)[rank]
        assert ends == expected_ends
        wrong = [(got, one) for got, one in zip(log, expected, strict=True) if got[1:] != one[1:]]
        assert not wrong, f"seed {seed}: rank {rank}: {wrong[0]} of {steps}"
