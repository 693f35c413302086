"""How a world handles messages of its ranks and their zygote, in any order and combination, and how long it waits for
them.
"""

import contextlib
import os
import resource
import selectors
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from torch_ext.world import _os, channel, files, follow
from torch_ext.world.channel import channel_pair
from torch_ext.world.files import Capture, RankProcess, read_stacks
from torch_ext.world.follow import World, start_world
from torch_ext.world.operations import WaitPage
from torch_ext.world.outcome import Ending
from torch_ext.world.protocol import Collectives, Ended, Phase, RankRequest, RankStatus, Receipt, Ticket
from torch_ext.world.settings import Limits
from torch_ext.world.start import RankTask, ZygoteLostError
from torch_ext.world.tree import ZygoteClient
from torch_ext.world.verdict import WorldReport, judge, render

# Seconds, far above the duration of a pump.
DEADLINE_S = 30
# A pid of no process: Linux assigns none above 2 ** 22.
NO_PROCESS = 2**30
TICKET = Ticket("test", 0)


@contextlib.contextmanager
def scripted_world(size):
    """A world without processes, with the zygote's end of its channel and the ranks' ends of theirs."""
    zygote, _zygotes = channel_pair()
    group, zygotes_group = channel_pair()
    lines = [channel_pair() for _ in range(size)]
    with tempfile.TemporaryFile() as output:
        processes = []
        for rank, (line, _) in enumerate(lines):
            stacks, write = os.pipe()
            os.close(write)  # closed, as the ends of a rank that has ended
            processes.append(RankProcess(rank, f"rank {rank}", line, Capture(0, output, None), stacks, WaitPage()))
        with World(ZygoteClient(zygote), group, processes, TICKET) as world:
            for process in processes:
                process.pid = NO_PROCESS

            def signalled(rank, number):
                if number == signal.SIGKILL:
                    zygotes_group.send(Ended(rank, -number, 1000.0))

            world.send_signal = signalled
            yield world, zygotes_group, [ranks for _, ranks in lines]
        for channel in (zygote, _zygotes, zygotes_group, *(ranks for _, ranks in lines)):
            channel.close()


class Clock:
    """A clock that only waiting advances, with events at given times."""

    def __init__(self):
        self.now_s = 0.0
        self._left = 1000
        self._to_come: list[tuple[float, Callable[[], object]]] = []

    def at(self, time_s, happens):
        self._to_come = sorted([*self._to_come, (time_s, happens)], key=lambda each: each[0])

    def wait(self, timeout_s):
        """Wait until something happens, for at most ``timeout_s``."""
        self._left -= 1
        assert self._left, "it waits over and over"
        end_s = self.now_s + timeout_s
        if self._to_come and self._to_come[0][0] <= end_s:
            end_s, happens = self._to_come.pop(0)
            happens()
        self.now_s = end_s


@pytest.fixture
def clock(monkeypatch):
    """The clock by which a world waits."""
    clock = Clock()

    class Selector(selectors.DefaultSelector):
        def select(self, timeout=None):
            if not (events := super().select(0)):
                assert timeout is not None, "it would wait for ever"
                clock.wait(timeout)
                events = super().select(0)
            return events

    fake = SimpleNamespace(DefaultSelector=Selector, EVENT_READ=selectors.EVENT_READ)
    for module in (files, channel):
        monkeypatch.setattr(module, "selectors", fake)
    for module in (files, follow):
        monkeypatch.setattr(module, "monotonic", lambda: clock.now_s)
    return clock


@contextlib.contextmanager
def pipes(count):
    """Pipes by rank, and the ends to write into."""
    ends = [os.pipe() for _ in range(count)]
    try:
        yield {rank: read for rank, (read, _) in enumerate(ends)}, [write for _, write in ends]
    finally:
        for end in ends:
            for descriptor in end:
                os.close(descriptor)


def test_channel_that_outlives_its_rank_delays_no_result():
    """The rank's end and last message arrive in one round, and a process that it left behind keeps the channel."""
    with scripted_world(1) as (world, zygote, (ranks,)):
        zygote.send(Ended(0, 0, 1.0))
        ranks.send(Phase.RUNNING)
        pump = threading.Thread(target=world.pump, args=(DEADLINE_S,), daemon=True)
        pump.start()
        pump.join(DEADLINE_S)
        hung = pump.is_alive()
        ranks.close()
        pump.join(DEADLINE_S)
        assert not hung
        assert world.processes[0].exitcode == 0


@pytest.mark.parametrize("what", ["ends", "receipts of ranks that live on", "deaths"])
def test_receipt_sent_before_the_limit_counts_even_if_read_late(what):
    """The waiting process may itself have waited for a core until the ranks' limit was over."""
    with scripted_world(2) as (world, zygote, ranks):
        for rank, line in enumerate(ranks):
            if what != "deaths":
                line.send(Phase.RUNNING)
                line.send(Receipt(RankStatus.PASSED, 0.5, ticket=TICKET, pid=NO_PROCESS))
            if what == "ends":
                line.send(Phase.EXITING)
            if what != "receipts of ranks that live on":
                zygote.send(Ended(rank, 0 if what == "ends" else -signal.SIGSEGV, 0.6))
        world.started_s = time.monotonic() - 1000
        outcomes = world.wait(Limits(test_s=5), keep="live on" in what)
        assert [outcome.ending for outcome in outcomes] == [Ending.KILLED if what == "deaths" else Ending.PASSED] * 2


@pytest.mark.parametrize(("number", "later", "named"), [(9, 5, True), (9, 4, False), (11, 5, False)])
def test_out_of_memory_kill_is_named(number, later, named, monkeypatch):
    monkeypatch.setattr("torch_ext.machine_memory.kills", lambda: 4)
    with scripted_world(1) as (world, zygote, _ranks):
        zygote.send(Ended(0, -number, 0.5))
        monkeypatch.setattr("torch_ext.machine_memory.kills", lambda: later)
        outcomes = world.wait(Limits(test_s=5))
    text = render(WorldReport(tuple(outcomes), judge(outcomes), 1.0))
    assert ("most likely by the kernel's out-of-memory killer" in text) is named
    assert ("--memory, which bounds each simulated device" in text) is named


def test_missing_receipt_is_not_invented_at_the_limit(clock):
    with scripted_world(2) as (world, zygote, ranks):
        ranks[0].send(Receipt(RankStatus.PASSED, 0.5, ticket=TICKET, pid=NO_PROCESS))
        ranks[0].send(Phase.EXITING)
        zygote.send(Ended(0, 0, 0.6))
        ranks[1].send(Phase.RUNNING)
        clock.now_s = 1000
        assert [outcome.ending for outcome in world.wait(Limits(test_s=5))] == [Ending.PASSED, Ending.TIMED_OUT]


def test_zygote_lost_before_the_limit_is_reported_as_lost():
    with scripted_world(1) as (world, zygote, _ranks):
        zygote.close()
        world.started_s = time.monotonic() - 1000
        with pytest.raises(ZygoteLostError, match="the process that had started the ranks was killed"):
            world.wait(Limits(test_s=5))


@pytest.mark.parametrize(
    ("written_s", "shares", "found", "end_s"),
    [
        ([None, None], [0.0, 0.0], ["", ""], 2),  # the second look finds no progress
        ([None], None, [""], 1),  # no measure shows whether the process waits for a core
        ([0.5, 7.5], [0.0, 0.5], ["0", "1"], None),
        ([None], [1.0], [""], 11),  # the rank gets no core at all
        ([0.0, None], [1.0, 0.0], ["0", ""], 2),  # only the silent one's time counts
    ],
)
def test_stacks_are_awaited_while_a_silent_rank_waits_for_a_core(clock, written_s, shares, found, end_s):
    with pipes(len(written_s)) as (readers, writers):
        for rank, at_s in enumerate(written_s):
            if at_s is not None:
                clock.at(at_s, lambda rank=rank: os.write(writers[rank], str(rank).encode()))
        starved = (lambda rank: clock.now_s * shares[rank]) if shares is not None else None
        assert read_stacks(readers, 1.0, starved) == dict(enumerate(found))
    assert end_s is None or clock.now_s == end_s


def test_stacks_are_read_to_their_end_without_a_further_wait(clock):
    with pipes(1) as (readers, (write,)):
        for tenths, part in enumerate((b"a", b"b", b"c")):
            clock.at(tenths / 10, lambda part=part: os.write(write, part))
        assert read_stacks(readers, 3.0) == {0: "abc"}
    assert clock.now_s == pytest.approx(0.4)  # the last part, and the silence after it


# How long a world waits for the collectives of its ranks, once it has asked for them

COLLECTIVES = Collectives("{}")


@pytest.fixture
def asked(monkeypatch, clock):
    """A world of two ranks, and the share of the time for which each waits for a core, by rank."""
    starved = {}
    monkeypatch.setattr(_os, "starved_s", lambda pid: clock.now_s * starved.get(pid - NO_PROCESS, 0.0))
    with scripted_world(2) as (world, zygote, ranks):
        for rank, process in enumerate(world.processes):
            process.pid = NO_PROCESS + rank
        yield world, zygote, ranks, starved


@pytest.mark.parametrize(
    ("reports_s", "shares", "ends_s", "expected", "end_s"),
    [
        ((0.25, 0.5), (0.0, 0.0), None, [0, 1], 0.5),
        ((0.0, 7.5), (0.0, 0.5), None, [0, 1], 7.5),  # the second rank waits for a core
        ((0.0, None), (1.0, 0.0), None, [0], 2),  # the first rank's does not count: it has answered
        ((0.0, None), (1.0, 1.0), None, [0], 11),
        ((0.0, None), (0.0, 1.0), 0.25, [0], 0.25),
    ],
)
def test_collectives_are_awaited_unless_a_silent_rank_has_had_a_core(
    clock, asked, reports_s, shares, ends_s, expected, end_s
):
    world, zygote, ranks, starved = asked
    starved.update(enumerate(shares))
    for line, tell_s in zip(ranks, reports_s, strict=True):
        if tell_s is not None:
            clock.at(tell_s, lambda line=line: line.send(COLLECTIVES))
    if ends_s is not None:
        clock.at(ends_s, lambda: zygote.send(Ended(1, -9, ends_s)))
    world._await_collectives([0, 1])
    assert (sorted(world._collectives), clock.now_s) == (expected, end_s)
    expected_s = [0.0 if ends_s is not None and rank == 1 else end_s * share for rank, share in enumerate(shares)]
    assert [world._starved_s(rank) for rank in (0, 1)] == expected_s, "the pid of one that has ended is another's"


def test_collectives_are_requested_before_ranks_are_released(asked):
    world, _, ranks, _ = asked
    world._receipts = [
        (rank, Receipt(status, 0.1, ticket=TICKET, pid=NO_PROCESS + rank))
        for rank, status in enumerate((RankStatus.FAILED, RankStatus.PASSED))
    ]
    ranks[1].send(COLLECTIVES)
    world._execute(follow.Act.RELEASE, [1], {})
    requests = []
    while ranks[1].poll():
        requests.append(ranks[1].receive()[0])
    assert requests == [RankRequest.COLLECTIVES, RankRequest.RELEASE]
    assert sorted(world._collectives) == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised by the rank in preparation
def test_too_many_ranks_for_the_open_files_are_refused_and_leave_none_open():
    zygote, zygotes = channel_pair()
    files, limits = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, files)) + 60, limits[1]))
    expected = (
        r"Too many open files for 50 ranks, at rank \d+: start fewer, or let processes open more files \(ulimit -n\)"
    )
    try:
        with pytest.raises(OSError, match=expected):
            start_world(ZygoteClient(zygote), [RankTask(os.getpid)] * 50)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) < len(files) + 12  # one rank
    zygote.close(), zygotes.close()
