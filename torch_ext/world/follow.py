"""Following the ranks of a world: events, waiting, what became of each. Runs wherever a test's parent half runs;
imports the standard library and its own layer only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic  # as it is now: a test may put a clock of its own in its place

from torch_ext.world import _os, frames, notices, outsiders, rank_times
from torch_ext.world.callbacks import Callbacks
from torch_ext.world.channel import Channel, ChannelClosedError
from torch_ext.world.outcome import Outcome
from torch_ext.world.output import Capture
from torch_ext.world.patience import Patience
from torch_ext.world.protocol import (
    STACK_SIGNAL,
    Ask,
    Collectives,
    Ended,
    Farewell,
    LeftBehind,
    Notice,
    Phase,
    Progress,
    Receipt,
    Said,
    Signal,
    Started,
    Ticket,
    Wait,
)
from torch_ext.world.wait_page import WaitPage
from torch_ext.world.watch import Act, Limits, Watch

__all__ = ["RankProcess", "World", "ZygoteLostError", "read_stacks"]

# How long a rank has to write its stacks once asked, and how long its pipe must be silent to count as done, in seconds.
_STACKS_S, _QUIET_S = 3.0, 0.2
# How long a rank has to answer, in seconds; then it is looked at for one more whether it waits for a core, and how much
# longer one has that does.
_ANSWER_S, _MORE_S = 1.0, 10.0


class ZygoteLostError(RuntimeError):
    """The process that starts and reaps ranks is gone, and with it the ranks and all knowledge about them."""


class RankProcess:
    """One rank as its parent half sees it. Behaves like a ``multiprocessing.Process`` that has been started.

    Attributes:
        host: where it runs, in words, if its test asked for several hosts.
        is_far: it may run on another machine, where its pid means something else.
    """

    def __init__(self, rank: int, name: str, channel: Channel, capture: Capture, stacks: int, page: WaitPage) -> None:
        self.rank = rank
        self.name = name
        self.pid: int | None = None
        self.connections: list[Connection] = []
        self._world: World | None = None  # set by the world that it joins
        self._channel = channel
        self._capture = capture
        self._stacks = stacks
        self._page = page
        self._exit_code: int | None = None
        self.host = ""
        self.is_far = False

    @property
    def has_page(self) -> bool:
        """Whether it was given a page of waits."""
        return self._page.descriptor >= 0

    @property
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self._exit_code is None and self._world is not None:
            self._world.pump(0)
        return self._exit_code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most ``timeout`` seconds."""
        end = float("inf") if timeout is None else monotonic() + timeout
        while self._world and self._exit_code is None and (left := end - monotonic()) > 0:
            self._world.pump(None if left == float("inf") else left)

    def terminate(self) -> None:
        self._send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: int) -> None:
        if self._world is not None:
            self._world.send_signal(self.rank, number)

    def close(self) -> None:
        """Nothing is held for a single rank; the world closes as one."""


class World:
    """The ranks of one test, from their start until :meth:`close`, which ends those that still live.

    Not thread-safe. Owns its descriptors: close it, or use it as a context manager. ``start_world()`` makes one.

    Args:
        zygote: the command channel through which the ranks are started.
        group: the channel of their child group (see Note [Zygote protocol]).
        processes: the ranks, in order.
        ticket: of the first test. Receipts with another one count for nothing.

    Attributes:
        store: what the ranks meet at, if this process serves it; it lives as long as the world.
    """

    def __init__(self, zygote: Channel, group: Channel, processes: Sequence[RankProcess], ticket: Ticket) -> None:
        self.started_s = monotonic()
        self.zygote = zygote
        self.ticket = ticket
        self._waits: dict[int, tuple[Wait, ...]] = {}
        self._looked: set[int] = set()
        self._delayed_s: dict[int, float] = {}  # at the last look; and before the test
        self._delayed_before_s: dict[int, float] = {}
        self._phases: dict[int, Phase] = {}
        self._interrupted: set[int] = set()
        self.why_interpreter = ""
        self.store: object = None
        self.processes = list(processes)
        self._receipts: list[tuple[int, Receipt]] = []
        self._left: set[int] = set()
        self._collectives: dict[int, str] = {}
        self._ended: dict[int, Ended] = {}
        self._left_behind: list[LeftBehind] = []
        self._listeners: list[Watch] = []
        self._group = group
        self._callbacks = Callbacks()
        self._callbacks.watch(group, self._on_group)
        for process in self.processes:
            self._add(process)

    def _add(self, process: RankProcess) -> None:
        process._world = self
        self._callbacks.watch(process._channel, lambda: self._on_ready(process))
        if process._capture.live is not None:
            self._callbacks.watch(process._capture.live, lambda: self._on_output(process))

    def wait_started(self) -> None:
        """Wait until every rank's process exists.

        Raises:
            ZygoteLostError: the zygote died meanwhile.
        """
        while self.processes and self.processes[0].pid is None:
            self.pump(None)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def took_s(self) -> float:
        """Seconds since the ranks, or the test that they run now, began."""
        return monotonic() - self.started_s

    # Events

    def pump(self, timeout_s: float | None) -> None:
        """Handle what has happened. If nothing has, wait for at most ``timeout_s`` seconds; without limit if None.

        Raises:
            ZygoteLostError: the zygote died while ranks were running.
        """
        if len(self._callbacks):
            self._callbacks.call(timeout_s)

    def _on_group(self) -> None:
        try:
            message, _ = self._group.receive()
        except ChannelClosedError:
            self._callbacks.unwatch(self._group)
            if len(self._ended) < len(self.processes):
                self.close()
                raise ZygoteLostError(
                    "the zygote was killed while ranks were running; they ended with it, and their fate is not known"
                ) from None
            return
        if isinstance(message, Started):
            self.why_interpreter = message.why_interpreter
            for process, pid in zip(self.processes, message.pids, strict=True):
                process.pid = pid
            for process, host in zip(self.processes, message.hosts, strict=bool(message.hosts)):
                process.host, process.is_far = host, True
        elif isinstance(message, Ended):
            self._on_end(message)

    def _on_end(self, message: Ended) -> None:
        process = self.processes[message.index]
        self._drain(process)  # its last messages may have come together with its end
        process._exit_code = message.exit_code
        self._ended[message.index] = message
        self._left_behind += message.left_behind
        for watch in self._listeners:
            watch.ended(message.index, message.exit_code, message.time_s)

    def _drain(self, process: RankProcess) -> None:
        while not process._channel.closed and process._channel.poll():
            self._on_rank(process)
        self._on_output(process)

    def _on_ready(self, process: RankProcess) -> None:
        # What was there may have been read with the rank's end, in the same round. Nothing more may ever come, and the
        # channel may stay open: the rank may have left a process behind that has it.
        if process._channel.poll():
            self._on_rank(process)

    def _on_rank(self, process: RankProcess) -> None:
        try:
            message, _ = process._channel.receive()
        except Exception:  # it has closed the channel, or a test has written to it: what it says no longer counts
            self._callbacks.unwatch(process._channel)
            process._channel.close()
            return
        if process.rank in self._interrupted:
            return  # what it says now is what the signal has made it do
        if isinstance(message, Receipt):
            self._take_receipt(process.rank, message)
        elif isinstance(message, Progress):
            self._take_progress(process.rank, message)
        elif isinstance(message, Collectives):
            self._collectives[process.rank] = message.json
        elif isinstance(message, Phase):
            self._phases[process.rank] = message
            for watch in self._listeners:
                self._tell_phase(watch, process.rank, message)
        elif isinstance(message, Farewell):
            self._left.add(process.rank)
            for watch in self._listeners:
                watch.left(process.rank)
        elif isinstance(message, Notice):
            notices.announce(message.text)

    @staticmethod
    def _tell_phase(watch: Watch, rank: int, phase: Phase) -> None:
        if phase is Phase.ABORTING:
            watch.aborting(rank)

    def _take_receipt(self, rank: int, receipt: Receipt) -> None:
        self._receipts.append((rank, receipt))
        for watch in self._listeners:
            watch.received(rank, receipt)

    def _take_progress(self, rank: int, progress: Progress) -> None:
        if progress.enders and self.processes[rank].is_far:  # whose numbers mean something else here
            waits = tuple(replace(wait, enders=()) for wait in progress.waits)
            progress = replace(progress, blocked=False, waits=waits, enders=())
        if progress.reachable and outsiders.may_act(self._pids_here()):
            progress = replace(progress, blocked=False)
        known = {wait.words: wait for wait in self._waits.get(rank, ()) if wait.enders}
        # Who can end a wait is not always seen, as when some process of the machine is just sending a descriptor.
        found = (wait if wait.enders else known.get(wait.words, wait) for wait in progress.waits)
        self._waits[rank] = tuple(self._with_peers(rank, wait) for wait in found)
        self._looked.discard(rank)
        for watch in self._listeners:
            watch.observed(rank, progress)

    def _pids_here(self) -> list[int]:
        """Return the processes of the ranks that live on this machine."""
        return [each.pid for each in self.processes if each.pid and not each.is_far and each.rank not in self._ended]

    def _with_peers(self, rank: int, wait: Wait) -> Wait:
        """Name the other ranks among the processes that can end ``wait``."""
        peers = (each.rank for each in self.processes if each.pid in wait.enders and each.rank != rank)
        return replace(wait, peers=tuple(peers)) if wait.enders else wait

    def _on_output(self, process: RankProcess) -> None:
        live = process._capture.live
        if live is not None and not process._capture.pass_through():
            self._callbacks.unwatch(live)

    # Waiting

    def new_round(self, test: str) -> Ticket:
        """Begin another test on the same ranks: what they have handed in so far no longer counts.

        Returns:
            The ticket that the ranks must be given; see :meth:`~torch_ext.world.rank.Rank.begin`.
        """
        self.started_s = monotonic()
        self.ticket = Ticket(test, self.ticket.attempt + 1)
        self._receipts.clear()
        self._collectives.clear()
        self._waits.clear()
        self._delayed_s.clear()
        self._delayed_before_s = {each.rank: self._measured(each.rank, _os.delayed_s) for each in self.processes}
        return self.ticket

    def wait(
        self, limits: Limits, expected_exit: int | None = None, any_exit: bool = False, keep: bool = False
    ) -> list[Outcome]:
        """Wait until every rank has ended, stopping those that must be stopped; return what became of each.

        With ``keep``, wait only until each has handed in a receipt or ended. The other arguments are :class:`Watch`'s.

        Raises:
            ZygoteLostError: the zygote died meanwhile.
        """
        pids = [process.pid or 0 for process in self.processes]
        watch = Watch(
            len(pids),
            limits,
            self.started_s,
            expected_exit,
            any_exit,
            keep,
            self.ticket,
            pids,
            self._computed_s,
            self._starved_s,
        )
        for rank, receipt in self._receipts:
            watch.received(rank, receipt)
        for rank in self._left:
            watch.left(rank)
        for rank, phase in self._phases.items():
            self._tell_phase(watch, rank, phase)
        for ended in self._ended.values():
            watch.ended(ended.index, ended.exit_code, ended.time_s)
        self._listeners.append(watch)
        stacks: dict[int, str] = {}
        try:
            while not watch.done:
                if monotonic() >= watch.deadline_s:
                    self._catch_up()
                for step in watch.advance(monotonic()):
                    self._take(step.act, step.ranks, stacks)
                if not watch.done:
                    left = watch.deadline_s - monotonic()
                    self.pump(None if left == float("inf") else max(0.0, left))
        finally:
            self._listeners.remove(watch)
        outcomes = [self._complete(outcome, stacks) for outcome in watch.outcomes()]
        rank_times.keep(outcomes, self.started_s)
        return outcomes

    def _catch_up(self) -> None:
        """Take in all that was told before now: this process may have been kept from listening until a limit was over
        that its ranks have kept.
        """
        for process in self.processes:
            while not process._channel.closed and process._channel.poll():
                self._on_rank(process)
        while not self._group.closed and len(self._ended) < len(self.processes) and self._group.poll():
            self._on_group()

    def _computed_s(self, rank: int) -> float:
        return self._measured(rank, _os.computed_s)

    def _starved_s(self, rank: int) -> float:
        return self._measured(rank, _os.starved_s)

    def _measured(self, rank: int, measure: Callable[[int], float]) -> float:
        process = self.processes[rank]
        known = process.pid is not None and not process.is_far and rank not in self._ended
        return measure(process.pid or 0) if known else 0.0

    def _take(self, act: Act, ranks: Sequence[int], stacks: dict[int, str]) -> None:
        if act is Act.RELEASE and any(receipt.said is Said.FAILED for _, receipt in self._receipts):
            # Those that passed may have kept the one that failed waiting; once released they are gone.
            for rank in ranks:
                self._tell(rank, Ask.COLLECTIVES)
            self._await_collectives(ranks)
        for rank in ranks:
            if act is Act.RELEASE:
                self._tell(rank, Ask.RELEASE)
            elif act is Act.STOP:
                self.send_signal(rank, signal.SIGKILL)
            elif act is Act.LOOK:
                self._look_at(rank)
        if act is Act.INSPECT:
            self._inspect(ranks, stacks)

    def _look_at(self, rank: int) -> None:
        """Ask a rank what it waits for; one that has been stopped by a signal cannot answer, and is seen to be."""
        if self._is_stopped(rank):
            self._take_progress(rank, Progress(True, float("inf"), "stopped", (Wait("was stopped by a signal"),)))
        elif rank not in self._looked:
            self._looked.add(rank)
            self._tell(rank, Ask.PROGRESS)

    def _is_stopped(self, rank: int) -> bool:
        process = self.processes[rank]
        return process.pid is not None and not process.is_far and _os.is_stopped(process.pid)

    def _inspect(self, ranks: Sequence[int], stacks: dict[int, str]) -> None:
        for rank in ranks:
            self._tell(rank, Ask.STACKS)
            self._look_at(rank)
            self._tell(rank, Ask.COLLECTIVES)
            delayed_s = self._measured(rank, _os.delayed_s)
            self._delayed_s[rank] = delayed_s - self._delayed_before_s.get(rank, 0.0)
        able = [rank for rank in ranks if not self._is_stopped(rank)]
        stacks.update(read_stacks({rank: self.processes[rank]._stacks for rank in able}, _ANSWER_S, self._starved_s))
        self._await_collectives([rank for rank in able if stacks[rank]])
        # Only those that cannot answer, as one that holds the GIL, and last: a signal cuts system calls short, so that
        # a rank goes on; and faulthandler crashes if a thread runs while its handler reads the frames.
        silent = [rank for rank in able if not stacks[rank]]
        self._interrupted.update(silent)
        for rank in silent:
            self.send_signal(rank, STACK_SIGNAL)
        stacks.update(read_stacks({rank: self.processes[rank]._stacks for rank in silent}) if silent else {})

    def _await_collectives(self, ranks: Sequence[int]) -> None:
        patience = Patience(_ANSWER_S, monotonic(), _MORE_S)
        while missing := [rank for rank in ranks if rank not in self._collectives and rank not in self._ended]:
            if patience.is_over(monotonic(), sum(map(self._starved_s, missing))):
                return
            self.pump(max(0.0, patience.look_s - monotonic()))

    def _complete(self, outcome: Outcome, stacks: Mapping[int, str]) -> Outcome:
        outcome.stacks = frames.trim_stacks(stacks.get(outcome.rank, ""))
        told = outcome.receipt.waits if outcome.receipt else ()
        outcome.waits = told or self._waits.get(outcome.rank, ())
        if not outcome.receipt:
            told = self.processes[outcome.rank]._page.waits()
            outcome.waits += tuple(wait for wait in told if wait not in outcome.waits)
        outcome.delayed_s = self._delayed_s.get(outcome.rank, 0.0)
        outcome.phase = self._phases.get(outcome.rank)
        outcome.host = self.processes[outcome.rank].host
        outcome.collectives = self._collectives.get(outcome.rank, "")
        outcome.output = frames.trim_stacks(self.processes[outcome.rank]._capture.tail())
        if outcome.rank in self._ended:
            outcome.ended_s = self._ended[outcome.rank].time_s
        outcome.left_behind = [left.command for left in self._left_behind if left.index == outcome.rank]
        return outcome

    def _tell(self, rank: int, message: Ask) -> None:
        channel = self.processes[rank]._channel
        with contextlib.suppress(ChannelClosedError, OSError):
            if not channel.closed:
                channel.send(message)

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank; nothing happens if it has ended or the world is closed."""
        with contextlib.suppress(ChannelClosedError, OSError):
            if not self._group.closed and rank not in self._ended:
                self._group.send(Signal(rank, number))

    def close(self) -> None:
        """Let go of the ranks: the zygote ends and reaps those that still live. Idempotent."""
        self.store = None
        self._group.close()
        self._callbacks.close()  # so that pump() finds nothing
        for process in self.processes:
            process._channel.close()
            process._capture.close()
            process._page.close()
            if process._stacks >= 0:
                os.close(process._stacks)
                process._stacks = -1
            for connection in process.connections:
                connection.close()


def read_stacks(
    pipes: Mapping[int, int], most_s: float = _STACKS_S, starved_s: Callable[[int], float] | None = None
) -> dict[int, str]:
    """Read what faulthandler writes into each pipe until all have been quiet for a moment, for at most ``most_s``.

    If told for how many seconds a rank has waited for a core (``starved_s``), wait longer for the silent ones that do.
    """
    texts = dict.fromkeys(pipes, b"")
    patience = Patience(most_s, monotonic(), _MORE_S if starved_s else 0.0)
    with selectors.DefaultSelector() as ready:
        for rank, pipe in pipes.items():
            ready.register(pipe, selectors.EVENT_READ, rank)
        while ready.get_map():
            silent = [rank for rank, text in texts.items() if not text]
            if patience.is_over(monotonic(), sum(map(starved_s, silent)) if starved_s else 0.0):
                break
            left = max(0.0, patience.look_s - monotonic())
            events = ready.select(left if silent else min(left, _QUIET_S))
            if not events and not silent:
                break
            for key, _ in events:
                part = os.read(key.fd, 1 << 16)
                texts[key.data] += part
                if not part:
                    ready.unregister(key.fd)
    return {rank: text.decode(errors="replace") for rank, text in texts.items()}
