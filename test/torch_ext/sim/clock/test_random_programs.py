"""The clock against a short simulator: random programs of streams, events, copies and collectives have equal times."""

import random
from collections import defaultdict

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
        else:
            amount = draw.randrange(max(works, 1)) if what.startswith("work") else draw.randrange(1, 50)
            if works or not what.startswith("work"):
                steps.append((what, (rank,), (stream, event, amount, draw.random() < 0.5, draw.random() < 0.5)))
    return steps


def simulate(steps):  # noqa: C901 - a branch for each kind of step
    """Return for each rank the host's times after its steps and the answers to its queries, and the times of events."""
    host, log = [0] * WORLD, [[] for _ in range(WORLD)]
    free, ends, engines, lanes = (defaultdict(int) for _ in range(4))
    events, works = {}, []

    def launch(rank, stream):
        host[rank] += LAUNCH
        return max(host[rank], free[rank, stream])

    def ask(rank, end):
        log[rank].append(end <= host[rank])
        host[rank] += 0 if end <= host[rank] else POLL

    for what, members, details in steps:
        if what == "collective":  # starts when the last rank is ready
            group, kind, size, is_async, on = details
            ready = max(launch(rank, on[rank]) for rank in members)
            peers = len(members) - 1
            sent = {"all_reduce": 2 * peers * size, "all_gather": peers * size}
            end = ends[group] = max(ready, ends[group]) + sent.get(kind, 0)
            works.append({rank: end for rank in members if is_async and kind != "barrier"})
            for rank in members:
                lanes[rank] = max(lanes[rank], end)
                if kind == "barrier":
                    host[rank] = max(host[rank], end)
                if kind == "barrier" or not is_async:
                    free[rank, on[rank]] = max(free[rank, on[rank]], end)
        elif what == "send":
            (sender, receiver), (size, on) = members, details
            start = max(launch(sender, on[sender]), ends[sender, receiver])
            arrives = ends[sender, receiver] = start + size
            end = ends["receive", receiver] = max(launch(receiver, on[receiver]), arrives, ends["receive", receiver])
            works.append({sender: arrives, receiver: end})
            lanes[sender], lanes[receiver] = max(lanes[sender], arrives), max(lanes[receiver], end)
        else:
            (rank,), (stream, event, amount, to_device, blocks) = members, details
            if what.startswith("work"):
                if (end := works[amount].get(rank)) is not None and what == "work_query":
                    ask(rank, end)
                elif end is not None:
                    host[rank] = max(host[rank], end if blocks else 0)
                    free[rank, stream] = max(free[rank, stream], end)
            elif what in ("kernel", "sleep"):
                free[rank, stream] = launch(rank, stream) + (1 if what == "kernel" else amount)
            elif what in ("copy", "item"):
                way, size = (to_device, 4 * amount) if what == "copy" else (False, 4)
                end = max(launch(rank, stream), engines[rank, way]) + size
                free[rank, stream] = engines[rank, way] = end
                host[rank] = max(host[rank], end if blocks or what == "item" else 0)
            elif what == "record":
                events[rank, event] = max(host[rank], free[rank, stream])
            elif what == "wait":
                free[rank, stream] = max(free[rank, stream], events.get((rank, event), 0))
            elif what == "sync_event":
                host[rank] = max(host[rank], events.get((rank, event), 0))
            elif what == "query":
                ask(rank, events.get((rank, event), 0))
            elif what == "query_stream":
                ask(rank, free[rank, stream])
            elif what == "sync_stream":
                host[rank] = max(host[rank], free[rank, stream])
            else:
                host[rank] = max([host[rank], lanes[rank], *(free[rank, each] for each in range(STREAMS))])
        for rank in members:
            log[rank].append(host[rank])
    return [(log[rank], [events.get((rank, event)) for event in range(EVENTS)]) for rank in range(WORLD)]


class Machine:
    """Runs a rank's steps on the device."""

    def __init__(self, rank, groups):
        self.rank, self.groups, self.x = rank, groups, torch.ones(50, device="sim")
        self.host = torch.ones(50, pin_memory=True)
        self.streams = [SIM.Stream() for _ in range(STREAMS)]
        self.events = [SIM.Event(enable_timing=True) for _ in range(EVENTS)]
        self.works, self.log = [], []

    def run(self, steps):
        for what, members, details in steps:
            if self.rank in members:
                run = {"collective": self.collective, "send": self.send}.get(what, self.local)
                run(what, *details)
                self.log.append(SIM.clock.now_ns())
            elif what in ("collective", "send"):
                self.works.append(None)
        return self.log

    def ends_after(self, zero):
        return [round(zero.elapsed_time(event) * 1e6) if event.event_id else None for event in self.events]

    def collective(self, _what, name, kind, size, is_async, on):
        options = {"group": self.groups[name], "async_op": is_async and kind != "barrier"}
        whole = self.x.new_empty(size * len(GROUPS[name]) // 4)
        calls = {
            "barrier": lambda: dist.barrier(**options),
            "all_reduce": lambda: dist.all_reduce(whole, **options),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, whole.new_empty(size // 4), **options),
        }
        with SIM.stream(self.streams[on[self.rank]]):
            self.works.append(calls[kind]())

    def send(self, _what, size, on):
        sender, receiver = on
        x = self.x.new_empty(size // 4)
        with SIM.stream(self.streams[on[self.rank]]):
            self.works.append(dist.isend(x, receiver) if self.rank == sender else dist.irecv(x, sender))

    def local(self, what, stream, event, amount, to_device, blocks):
        stream, event, work = self.streams[stream], self.events[event], None
        if what.startswith("work"):
            work = self.works[amount]
            if work is None:
                return
        to, source = (self.x, self.host) if to_device else (self.host, self.x)
        calls = {
            "kernel": lambda: self.x.fill_(1),
            "sleep": lambda: SIM._sleep(amount),
            "copy": lambda: to[:amount].copy_(source[:amount], non_blocking=not blocks),
            "item": lambda: self.x[0].item(),
            "record": event.record,
            "wait": lambda: stream.wait_event(event),
            "sync_event": event.synchronize,
            "sync_stream": stream.synchronize,
            "sync_device": SIM.synchronize,
            "query": event.query,
            "query_stream": stream.query,
            "work_wait": lambda: work.wait(ranks.GROUP_TIMEOUT) if blocks else work.wait(),
            "work_query": lambda: work.is_completed(),
        }
        with SIM.stream(stream):
            answer = calls[what]()
        if "query" in what:
            self.log.append(answer)


@pytest.mark.parametrize("first", range(0, 60, 20))
@ranks.world_of(WORLD, backend="simccl")
def test_random_programs_have_the_times_of_the_simulator(rank, world_size, first):
    groups = {"all": dist.group.WORLD, "some": dist.new_group(list(GROUPS["some"]))}
    for seed in range(first, first + 20):
        steps = drawn_program(seed)
        machine = Machine(rank, groups)
        with SIM.clock.measure("unit", launch_ns=LAUNCH):
            zero = SIM.current_stream().record_event(SIM.Event(enable_timing=True))
            log = machine.run(steps)
            SIM.synchronize()
            ends = machine.ends_after(zero)
        expected, expected_ends = simulate(steps)[rank]
        assert ends == expected_ends
        assert log == expected, f"seed {seed}"
