"""How a world takes in what its ranks and their zygote tell, in whatever order and company that comes, and how long it
waits for them to tell it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from torch_ext.world import _os, channel, files, follow
from torch_ext.world.channel import Channel, channel_pair
from torch_ext.world.files import Capture, RankProcess, read_stacks
from torch_ext.world.follow import RankTask, World, ZygoteLostError, start_world
from torch_ext.world.operations import WaitPage
from torch_ext.world.outcome import Ending
from torch_ext.world.protocol import Ask, Collectives, Ended, Farewell, Phase, Receipt, Said, Ticket
from torch_ext.world.settings import Limits
from torch_ext.world.verdict import WorldReport, judge, render

# Seconds, far above what a pump takes.
DEADLINE_S = 30
# No process has it: Linux gives none above 2 ** 22.
NO_PROCESS = 2**30
TICKET = Ticket("test", 0)


@contextlib.contextmanager
def scripted_world(size: int) -> Iterator[tuple[World, Channel, list[Channel]]]:
    """A world without processes, with the zygote's end of its channel and the ranks' ends of theirs."""
    zygote, _zygotes = channel_pair()
    group, zygotes_group = channel_pair()
    lines = [channel_pair() for _ in range(size)]
    with tempfile.TemporaryFile() as output:
        processes = []
        for rank, (line, _) in enumerate(lines):
            stacks, write = os.pipe()
            os.close(write)  # they are at their end, as those of a rank that has gone
            processes.append(RankProcess(rank, f"rank {rank}", line, Capture(0, output, None), stacks, WaitPage()))
        with World(zygote, group, processes, TICKET) as world:
            for process in processes:
                process.pid = NO_PROCESS

            def signalled(rank: int, number: int) -> None:
                if number == signal.SIGKILL:
                    zygotes_group.send(Ended(rank, -number, 1000.0))

            world.send_signal = signalled  # type: ignore[method-assign]
            yield world, zygotes_group, [ranks for _, ranks in lines]
        for channel in (zygote, _zygotes, zygotes_group, *(ranks for _, ranks in lines)):
            channel.close()


class Clock:
    """A clock that only waiting moves on, and what happens at which of its times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._left = 1000
        self._to_come: list[tuple[float, Callable[[], object]]] = []

    def at(self, time_s: float, happens: Callable[[], object]) -> None:
        self._to_come = sorted([*self._to_come, (time_s, happens)], key=lambda each: each[0])

    def wait(self, timeout_s: float) -> None:
        """Wait until something happens, for at most ``timeout_s``."""
        self._left -= 1
        assert self._left, "it waits over and over"
        end_s = self.now_s + timeout_s
        if self._to_come and self._to_come[0][0] <= end_s:
            end_s, happens = self._to_come.pop(0)
            happens()
        self.now_s = end_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which a world waits."""
    clock = Clock()

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
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
def pipes(count: int) -> Iterator[tuple[dict[int, int], list[int]]]:
    """Pipes by rank, and the ends to write into."""
    ends = [os.pipe() for _ in range(count)]
    try:
        yield {rank: read for rank, (read, _) in enumerate(ends)}, [write for _, write in ends]
    finally:
        for end in ends:
            for descriptor in end:
                os.close(descriptor)


def test_channel_that_outlives_its_rank_holds_nobody_up() -> None:
    """The rank's end and its last words come in one round, and a process that it has left behind keeps the channel."""
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


def test_what_was_told_before_the_limit_counts_however_late_it_is_heard() -> None:
    """Whoever waits for the ranks may itself have been kept from its core until their limit was over."""
    with scripted_world(2) as (world, zygote, ranks):
        for rank, line in enumerate(ranks):
            line.send(Phase.RUNNING)
            line.send(Receipt(Said.PASSED, 0.5, ticket=TICKET, pid=NO_PROCESS))
            line.send(Farewell())
            zygote.send(Ended(rank, 0, 0.6))
        world.started_s = time.monotonic() - 1000
        assert [outcome.ending for outcome in world.wait(Limits(test_s=5))] == [Ending.PASSED] * 2


def test_receipts_that_were_there_before_the_limit_count_where_ranks_live_on() -> None:
    with scripted_world(2) as (world, _zygote, ranks):
        for line in ranks:
            line.send(Phase.RUNNING)
            line.send(Receipt(Said.PASSED, 0.5, ticket=TICKET, pid=NO_PROCESS))
        world.started_s = time.monotonic() - 1000
        assert [outcome.ending for outcome in world.wait(Limits(test_s=5), keep=True)] == [Ending.PASSED] * 2


def test_deaths_that_were_told_before_the_limit_are_no_timeouts() -> None:
    with scripted_world(2) as (world, zygote, _ranks):
        for rank in (0, 1):
            zygote.send(Ended(rank, -signal.SIGSEGV, 0.5))
        world.started_s = time.monotonic() - 1000
        assert [outcome.ending for outcome in world.wait(Limits(test_s=5))] == [Ending.KILLED] * 2


@pytest.mark.parametrize(("number", "later", "named"), [(9, 5, True), (9, 4, False), (11, 5, False)])
def test_a_kill_for_want_of_memory_is_named(
    number: int, later: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_ext.machine_memory.kills", lambda: 4)
    with scripted_world(1) as (world, zygote, _ranks):
        zygote.send(Ended(0, -number, 0.5))
        monkeypatch.setattr("torch_ext.machine_memory.kills", lambda: later)
        outcomes = world.wait(Limits(test_s=5))
    text = render(WorldReport(tuple(outcomes), judge(outcomes), 1.0))
    assert ("most likely by the kernel's out-of-memory killer" in text) is named
    assert ("--memory, which bounds each simulated device" in text) is named


def test_what_was_not_told_is_not_made_up_when_the_limit_is_over(clock: Clock) -> None:
    with scripted_world(2) as (world, zygote, ranks):
        ranks[0].send(Receipt(Said.PASSED, 0.5, ticket=TICKET, pid=NO_PROCESS))
        ranks[0].send(Farewell())
        zygote.send(Ended(0, 0, 0.6))
        ranks[1].send(Phase.RUNNING)
        clock.now_s = 1000
        assert [outcome.ending for outcome in world.wait(Limits(test_s=5))] == [Ending.PASSED, Ending.TIMED_OUT]


def test_zygote_that_was_lost_before_the_limit_is_told_as_lost() -> None:
    with scripted_world(1) as (world, zygote, _ranks):
        zygote.close()
        world.started_s = time.monotonic() - 1000
        with pytest.raises(ZygoteLostError, match="the process that had started the ranks was killed"):
            world.wait(Limits(test_s=5))


def test_silent_rank_that_waits_for_no_core_is_given_up_at_the_second_look(clock: Clock) -> None:
    with pipes(2) as (readers, _):
        assert read_stacks(readers, 1.0, lambda rank: 0.0) == {0: "", 1: ""}
    assert clock.now_s == 2


def test_nobody_is_waited_for_longer_of_whom_it_is_not_known_whether_he_waits_for_a_core(clock: Clock) -> None:
    with pipes(1) as (readers, _):
        assert read_stacks(readers, 1.0) == {0: ""}
    assert clock.now_s == 1


def test_stacks_of_a_rank_that_waits_for_a_core_are_waited_for(clock: Clock) -> None:
    with pipes(2) as (readers, (first, second)):
        clock.at(0.5, lambda: os.write(first, b"one"))
        clock.at(7.5, lambda: os.write(second, b"two"))
        starved = {0: 0.0, 1: 0.5}
        assert read_stacks(readers, 1.0, lambda rank: clock.now_s * starved[rank]) == {0: "one", 1: "two"}


def test_rank_that_gets_no_core_at_all_is_given_up_in_the_end(clock: Clock) -> None:
    with pipes(1) as (readers, _):
        assert read_stacks(readers, 1.0, lambda rank: clock.now_s) == {0: ""}
    assert clock.now_s == 11


def test_rank_that_has_told_its_stacks_buys_the_silent_ones_no_time(clock: Clock) -> None:
    """Only the time counts in which a silent one waits for a core."""
    with pipes(2) as (readers, (first, _)):
        os.write(first, b"one")
        assert read_stacks(readers, 1.0, lambda rank: clock.now_s if rank == 0 else 0.0) == {0: "one", 1: ""}
    assert clock.now_s == 2


def test_stacks_are_read_to_their_end_and_then_no_longer_waited_for(clock: Clock) -> None:
    with pipes(1) as (readers, (write,)):
        for tenths, part in enumerate((b"a", b"b", b"c")):
            clock.at(tenths / 10, lambda part=part: os.write(write, part))  # type: ignore[misc]
        assert read_stacks(readers, 3.0) == {0: "abc"}
    assert clock.now_s == pytest.approx(0.4)  # the last part, and the quiet that ends it


class TestCollectivesOfRanks:
    """How long a world waits for what its ranks have called, once it has asked them."""

    @pytest.fixture
    def starved(self, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> dict[int, float]:
        """Which share of the time each process waits for a core, by rank."""
        starved: dict[int, float] = {}
        monkeypatch.setattr(_os, "starved_s", lambda pid: clock.now_s * starved.get(pid - NO_PROCESS, 0.0))
        return starved

    @pytest.fixture
    def world(self, clock: Clock) -> Iterator[tuple[World, Channel, list[Channel]]]:
        with scripted_world(2) as (world, zygote, ranks):
            for rank, process in enumerate(world.processes):
                process.pid = NO_PROCESS + rank
            yield world, zygote, ranks

    def test_are_taken_as_soon_as_all_have_told(
        self, clock: Clock, starved: dict[int, float], world: tuple[World, Channel, list[Channel]]
    ) -> None:
        here, _, ranks = world
        for rank, line in enumerate(ranks):
            clock.at(0.25 + rank / 4, lambda line=line: line.send(Collectives("{}")))  # type: ignore[misc]
        here._await_collectives([0, 1])
        assert (sorted(here._collectives), clock.now_s) == ([0, 1], 0.5)

    def test_are_waited_for_where_a_rank_waits_for_a_core(
        self, clock: Clock, starved: dict[int, float], world: tuple[World, Channel, list[Channel]]
    ) -> None:
        here, _, ranks = world
        ranks[0].send(Collectives("{}"))
        starved[1] = 0.5
        clock.at(7.5, lambda: ranks[1].send(Collectives("{}")))
        here._await_collectives([0, 1])
        assert (sorted(here._collectives), clock.now_s) == ([0, 1], 7.5)

    @pytest.mark.parametrize(("share", "end_s"), [(0.0, 2), (1.0, 11)])
    def test_are_done_without_in_the_end(
        self,
        clock: Clock,
        starved: dict[int, float],
        world: tuple[World, Channel, list[Channel]],
        share: float,
        end_s: int,
    ) -> None:
        here, _, ranks = world
        ranks[0].send(Collectives("{}"))
        starved.update({0: 1.0, 1: share})  # that of the one that has told does not count
        here._await_collectives([0, 1])
        assert (sorted(here._collectives), clock.now_s) == ([0], end_s)

    def test_are_not_waited_for_from_a_rank_that_has_ended(
        self, clock: Clock, starved: dict[int, float], world: tuple[World, Channel, list[Channel]]
    ) -> None:
        here, zygote, ranks = world
        ranks[0].send(Collectives("{}"))
        clock.at(0.25, lambda: zygote.send(Ended(1, -9, 0.25)))
        here._await_collectives([0, 1])
        assert (sorted(here._collectives), clock.now_s) == ([0], 0.25)

    def test_are_asked_for_before_those_that_passed_are_let_go(
        self, clock: Clock, starved: dict[int, float], world: tuple[World, Channel, list[Channel]]
    ) -> None:
        here, _, ranks = world
        here._receipts = [
            (0, Receipt(Said.FAILED, 0.1, ticket=TICKET, pid=NO_PROCESS)),
            (1, Receipt(Said.PASSED, 0.1, ticket=TICKET, pid=NO_PROCESS + 1)),
        ]
        ranks[1].send(Collectives("{}"))
        here._take(follow.Act.RELEASE, [1], {})
        told = []
        while ranks[1].poll():
            told.append(ranks[1].receive()[0])
        assert told == [Ask.COLLECTIVES, Ask.RELEASE]
        assert sorted(here._collectives) == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the rank that was being prepared
def test_too_many_ranks_for_the_open_files_are_refused_and_leave_none_open() -> None:
    zygote, zygotes = channel_pair()
    files, limits = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, files)) + 60, limits[1]))
    expected = (
        r"Too many open files for 50 ranks, at rank \d+: start fewer, or let processes open more files \(ulimit -n\)"
    )
    try:
        with pytest.raises(OSError, match=expected):
            start_world(zygote, [RankTask(os.getpid)] * 50)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) < len(files) + 12  # one rank
    zygote.close(), zygotes.close()
