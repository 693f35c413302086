"""The parent half's view of a world: starts its ranks, handles their events, waits for their outcomes. Runs in the
parent half of a test; imports the standard library and its own layer only.
"""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_ext import machine_memory
from torch_ext.world import _os, provider, settings, threads, verdict, wording
from torch_ext.world._os import monotonic
from torch_ext.world.channel import (
    WRITE_TO_OWN,
    Callbacks,
    Channel,
    ChannelBrokenError,
    ChannelClosedError,
    close_all,
)
from torch_ext.world.files import Live, RankProcess, read_stacks, written_at_end
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.protocol import (
    STACK_SIGNAL,
    Collectives,
    Ended,
    LeftBehind,
    Notice,
    Phase,
    Progress,
    QueryProcesses,
    RankRequest,
    RankStatus,
    Receipt,
    Signal,
    Started,
    Ticket,
    Variables,
    Wait,
)
from torch_ext.world.settings import Limits, ProcessDeadline
from torch_ext.world.start import RankTask, ZygoteLostError, start_ranks
from torch_ext.world.tree import ZygoteClient
from torch_ext.world.watch import PARENT_HALF, Act, Measures, Step, Watch, silence_text

# Seconds for an answer; extra seconds for a rank that waits for a core, sampled once a second.
_ANSWER_S, _EXTRA_S = 1.0, 10.0
# Seconds after the loss of a rank in which others end because of it, or with it.
_LOSSES_S = 1.0


@dataclass(eq=False)
class World(contextlib.AbstractContextManager["World"]):
    """The ranks of one test, from their start until :meth:`close`, which kills live ranks. ``start_world()`` makes one.
    Not thread-safe. Owns its descriptors: close it, or use it as a context manager. ``group`` is the channel of the
    first child group (see Note [Zygote protocol]); receipts without ``ticket`` do not count. ``start``: how to start
    ranks.
    """

    zygote: ZygoteClient
    group: Channel
    processes: list[RankProcess]
    ticket: Ticket
    start: Callable[[Mapping[int, RankTask]], tuple[Channel, list[RankProcess]]] | None = None

    def __post_init__(self) -> None:
        self.started_s = monotonic()
        self._kills = machine_memory.kills()
        self._waits: dict[int, tuple[Wait, ...]] = {}
        self._looked: set[int] = set()
        self._delayed_s: dict[int, float] = {}  # during the test, until the last look
        self._delayed_before_s: dict[int, float] = {}
        self._phases: dict[int, Phase] = {}
        self._interrupted: set[int] = set()
        self.store: object = None  # the ranks' rendezvous, if this process serves it; kept alive with the world
        self._receipts: list[tuple[int, Receipt]] = []
        self._left: set[int] = set()
        self._collectives: dict[int, str] = {}
        self._ended: dict[int, Ended] = {}
        self._left_behind: list[LeftBehind] = []
        self._listeners: list[Watch] = []
        self._callbacks = Callbacks()
        self._groups: list[tuple[Channel, list[RankProcess]]] = []
        self._add(self.group, list(self.processes))
        verdict.record_started(self, len(self.processes))

    def _add(self, group: Channel, processes: list[RankProcess]) -> None:
        self._groups.append((group, processes))
        self._callbacks.watch(group, lambda: self._on_group(group, processes))
        for index, process in enumerate(processes):
            process._world, process._seat = self, (group, index)
            self._callbacks.watch(process._channel, functools.partial(self._on_rank, process))
            if process._capture.live is not None:
                self._callbacks.watch(process._capture.live, functools.partial(self._on_output, process))

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def took_s(self) -> float:
        """Seconds since the start of the ranks, or of their current test."""
        return monotonic() - self.started_s

    # Events

    @_os.with_room
    def pump(self, timeout_s: float = float("inf")) -> None:
        """Handle the pending events. If there are none, wait at most ``timeout_s`` seconds. Raises ZygoteLostError if
        the zygote died while ranks were running.
        """
        if self._callbacks.files:
            self._callbacks.call(timeout_s)

    def _on_group(self, group: Channel, processes: list[RankProcess]) -> None:
        if not group.poll():
            return
        try:
            message, _ = group.receive()
        except ChannelClosedError:
            self._callbacks.unwatch(group)
            if any(process._exit_code is None for process in processes):
                self.close()
                provider.forget(self.zygote)
                raise ZygoteLostError(
                    "the process that had started the ranks was killed while they ran, and they ended with it"
                ) from None
            return
        if isinstance(message, Started):
            if message.why_interpreter:
                wording.announce(f"{message.why_interpreter}; every rank gets a fresh interpreter, which takes seconds")
            for process, pid in zip(processes, message.pids, strict=True):
                process.pid = pid
            for process, host in zip(processes, message.hosts, strict=bool(message.hosts)):
                process.host, process.is_remote = host, True
        elif isinstance(message, Ended):
            self._left_behind += [replace(each, index=processes[each.index].rank) for each in message.left_behind]
            self._on_end(processes[message.index], message)

    def _on_end(self, process: RankProcess, message: Ended) -> None:
        self._drain(process)  # the last messages may arrive in the same round as the end
        self._on_output(process)
        process._exit_code = message.exit_code
        self._ended[process.rank] = message
        for watch in self._listeners:
            watch.ended(process.rank, message.exit_code, message.time_s)

    def _drain(self, process: RankProcess) -> None:
        while not process._channel.closed and process._channel.poll():
            self._on_rank(process)

    def _on_rank(self, process: RankProcess) -> None:
        # _on_end() may have read the message in the same round. A receive could then block forever: a process that the
        # rank has left behind may hold the channel open.
        if not process._channel.poll():
            return
        try:
            message, descriptors = process._channel.receive()
        except ChannelClosedError as error:
            self._callbacks.unwatch(process._channel)
            process._channel.close()
            if isinstance(error, ChannelBrokenError):
                self._handle_broken(process, error)
            return
        close_all(descriptors)
        if process.rank not in self._interrupted:  # otherwise the message is a consequence of our signal
            self._handle_message(process, message)

    def _handle_message(self, process: RankProcess, message: object) -> None:
        if isinstance(message, Receipt):
            self._record_receipt(process.rank, message)
        elif isinstance(message, Progress):
            self._record_progress(process.rank, message)
        elif isinstance(message, Collectives):
            self._collectives[process.rank] = message.json
        elif message is Phase.EXITING:
            self._left.add(process.rank)
            for watch in self._listeners:
                watch.left(process.rank)
        elif isinstance(message, Phase):
            self._phases[process.rank] = message
        elif isinstance(message, Notice):
            wording.announce(message.text)

    def _handle_broken(self, process: RankProcess, error: ChannelBrokenError) -> None:
        """Fail a rank whose channel is broken. See Note [Broken channels]."""
        who = f"the parent half of the test, at the end of rank {process.rank}," if error.own else "this rank"
        reason = f"{who} {error}"
        failed, pid = (RankStatus.FAILED, monotonic(), reason, f"{reason}. {WRITE_TO_OWN}\n"), process.pid or 0
        self._record_receipt(process.rank, Receipt(*failed, ticket=self.ticket, pid=pid))

    def _record_receipt(self, rank: int, receipt: Receipt) -> None:
        self._receipts.append((rank, receipt))
        self._waits.pop(rank, None)  # sampled during the body, out of date now
        for watch in self._listeners:
            watch.received(rank, receipt)

    def _record_progress(self, rank: int, progress: Progress) -> None:
        self._waits[rank] = progress.waits
        self._looked.discard(rank)
        for watch in self._listeners:
            watch.hangs.observed(rank, progress)

    def _pid_here(self, rank: int) -> int:
        """Return the pid of a live rank on this machine; 0 for any other."""
        process = self.processes[rank]
        return 0 if process.is_remote or rank in self._ended else process.pid or 0

    def _is_stopped(self, rank: int) -> bool:
        return (pid := self._pid_here(rank)) > 0 and _os.is_stopped(pid)

    def _on_output(self, process: RankProcess) -> None:
        live = process._capture.live
        if live is not None and not process._capture.pass_through():
            self._callbacks.unwatch(live)

    # Waiting

    def new_round(self, test: str, order: object) -> None:
        """Begin another test on the same ranks: earlier receipts no longer count. Sends each rank ``order`` with the
        ticket that its receipt must carry; see ``receipts.next_order``.
        """
        verdict.record_started(self, len(self.processes))
        self.started_s = monotonic()
        self.ticket = Ticket(test, self.ticket.attempt + 1)
        self._receipts.clear()
        self._collectives.clear()
        self._waits.clear()
        self._delayed_s.clear()
        self._delayed_before_s = {each.rank: self._measured(each.rank, _os.delayed_s) for each in self.processes}
        for process in self.processes:
            with contextlib.suppress(OSError):  # the rank died between two tests; its outcome reports that
                process.connections[0].send((self.ticket, order))

    @_os.with_room
    def wait(
        self,
        limits: Limits,
        expected_exit: int | None = None,
        any_exit: bool = False,
        keep: bool = False,
        on_hang: Callable[[list[Outcome]], object] = lambda outcomes: None,
        recover: Callable[[list[Outcome]], bool] | None = None,
    ) -> list[Outcome]:
        """Wait until every rank has ended, killing ranks that hang or wait for a dead peer; return all outcomes.

        With ``keep``, wait only until each has submitted a receipt or ended. If ranks hang but go on, call ``on_hang``
        with the outcomes so far. Call ``recover`` with the outcomes of ranks that failed or died: it restarts or drops
        each, or returns False; then their peers end as without it. The other arguments are :class:`Watch`'s. Raises
        what :meth:`pump` raises.
        """
        verdict.record_judged(self)
        pids = [process.pid or 0 for process in self.processes]
        measures = Measures(lambda rank: self._measured(rank, _os.cpu_time_s), self._starved_s, self._other_processes)
        how: dict[str, Any] = {
            "expected_exit": expected_exit,
            "any_exit": any_exit,
            "keep": keep,
            "ticket": self.ticket,
            "recovers": recover is not None,
        }
        watch = Watch(len(pids), limits, self.started_s, measures, pids=pids, **how)
        for rank, receipt in self._receipts:
            watch.received(rank, receipt)
        for rank in self._left:
            watch.left(rank)
        for rank, ended in self._ended.items():
            watch.ended(rank, ended.exit_code, ended.time_s)
        self._listeners.append(watch)
        stacks: dict[int, str] = {}
        try:
            while (recover is not None and self._recover(watch, recover, stacks)) or not watch.done:
                for step in self._advance(watch):
                    if step.act is Act.REPORT_HANG:
                        on_hang(self._hung_outcomes(watch, step.ranks))
                    elif step.act is Act.REPORT_SILENCE:
                        wording.show(silence_text(watch.hangs.reasons, self._stacks_of(step.ranks)))
                    else:
                        self._execute(step.act, step.ranks, stacks)
                if not watch.done:
                    self.pump(watch.deadline_s - monotonic())
        finally:
            self._listeners.remove(watch)
        return [self._complete(outcome, stacks) for outcome in watch.outcomes()]

    def _recover(self, watch: Watch, recover: Callable[[list[Outcome]], bool], stacks: dict[int, str]) -> bool:
        """Have ``recover`` settle the ranks that were lost, once those that end because of them have ended too."""
        if not watch.recovers or not watch.lost():
            return False
        end_s = monotonic() + _LOSSES_S
        while (left_s := end_s - monotonic()) > 0:
            self.pump(left_s)
        outcomes = watch.outcomes()
        lost = [self._complete(outcomes[rank], {}) for rank in watch.lost()]
        watch.recovers = recover(lost)
        if not watch.recovers:
            stacks.update({outcome.rank: outcome.stacks for outcome in lost})  # they can be read once
        return watch.recovers

    def restart(self, rank: int, task: RankTask) -> None:
        """Start a process in the place of a rank that has ended."""
        if self.start is None:
            raise AssertionError("start_world() has not made this world")
        group, processes = self.start({rank: task})
        self.processes[rank].detach()
        (self.processes[rank],) = processes
        self._add(group, processes)
        while processes[0].pid is None:
            self.pump()
        self._forget(rank, processes[0].pid)

    def drop(self, rank: int) -> None:
        """Count a rank that has ended as one that was not wanted any more."""
        self._forget(rank, 0)

    def _forget(self, rank: int, pid: int) -> None:
        self._receipts = [each for each in self._receipts if each[0] != rank]
        records: list[dict[int, Any]] = [self._waits, self._phases, self._collectives, self._delayed_s]
        for record in records + [self._ended] * bool(pid):
            record.pop(rank, None)
        for ranks in (self._looked, self._left, self._interrupted):
            ranks.discard(rank)
        for watch in self._listeners:
            watch.replaced(rank, pid)

    def set_variables(self, rank: int, values: dict[str, str]) -> None:
        """Set variables in the environment of a running rank."""
        self.processes[rank]._channel.try_send(Variables(values))

    def _advance(self, watch: Watch) -> list[Step]:
        if Phase.PROMPTING in self._phases.values():  # see Note [The terminal]
            self.pump()
            watch.hold(monotonic())
            return []
        if monotonic() >= watch.deadline_s:
            self._catch_up()
        return watch.advance(monotonic())

    def _catch_up(self) -> None:
        """Drain pending messages: this process may have been descheduled past a deadline that the ranks met."""
        for process in self.processes:
            self._drain(process)
        for group, processes in self._groups:
            while not group.closed and any(each._exit_code is None for each in processes) and group.poll():
                self._on_group(group, processes)

    def _starved_s(self, rank: int) -> float:
        return self._measured(rank, _os.starved_s)

    def _measured(self, rank: int, measure: Callable[[int], float]) -> float:
        pid = self._pid_here(rank)
        return measure(pid) if pid else 0.0

    def _execute(self, act: Act, ranks: Sequence[int], stacks: dict[int, str]) -> None:
        if act is Act.RELEASE and any(receipt.status is RankStatus.FAILED for _, receipt in self._receipts):
            # A rank that passed may have kept the failed one waiting; collect its record before releasing it.
            self._send(ranks, RankRequest.COLLECTIVES)
            self._await_collectives(ranks)
        if act is Act.RELEASE:
            self._send(ranks, RankRequest.RELEASE)
        elif act is Act.INSPECT:
            self._inspect(ranks, stacks)
        elif act is Act.STOP:
            for rank in ranks:
                self.send_signal(rank, signal.SIGKILL)
        elif act is Act.LOOK:
            for rank in ranks:
                self._request_progress(rank)
            self._record_progress(PARENT_HALF, threads.observe())

    def _other_processes(self) -> tuple[str, ...]:
        """Describe the processes that may act besides the ranks. See Note [Who else may act]."""
        ranks = [pid for each in self.processes if (pid := self._pid_here(each.rank))]
        return (*_os.other_children(ranks), *query_zygote(self.zygote, ranks))

    def _hung_outcomes(self, watch: Watch, ranks: Sequence[int]) -> list[Outcome]:
        """Return the outcomes so far; ``ranks`` hang and are not stopped."""
        stacks = self._stacks_of(ranks)
        self._collectives.clear()
        self._send(ranks, RankRequest.COLLECTIVES)
        self._await_collectives(ranks)
        outcomes = watch.outcomes()
        for rank in ranks:
            outcomes[rank].ending = Ending.HUNG
        return [self._complete(outcome, stacks) for outcome in outcomes]

    def _stacks_of(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the stacks of live ranks; empty for a rank that cannot answer."""
        self._send(ranks, RankRequest.STACKS)
        return {rank: wording.trim_stacks(text) for rank, text in self._read_stacks(ranks).items()}

    def _read_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        return read_stacks({rank: self.processes[rank]._stacks for rank in ranks}, _ANSWER_S, self._starved_s)

    def _request_progress(self, rank: int) -> None:
        """Ask a rank for its progress; answer on behalf of a rank that a signal has stopped."""
        if self._is_stopped(rank):
            wait = Wait("a stop: it was stopped by a signal, as by SIGSTOP")
            self._record_progress(rank, Progress(True, float("inf"), "stopped", (wait,)))
        elif rank not in self._looked:
            self._looked.add(rank)
            self._send([rank], RankRequest.PROGRESS)

    def _inspect(self, ranks: Sequence[int], stacks: dict[int, str]) -> None:
        for rank in ranks:
            self._send([rank], RankRequest.STACKS)
            self._request_progress(rank)
            self._send([rank], RankRequest.COLLECTIVES)
            delayed_s = self._measured(rank, _os.delayed_s)
            self._delayed_s[rank] = delayed_s - self._delayed_before_s.get(rank, 0.0)
        responsive = [rank for rank in ranks if not self._is_stopped(rank)]
        stacks.update(self._read_stacks(responsive))
        self._await_collectives([rank for rank in responsive if stacks[rank]])
        # Send signals last, and only to ranks that cannot answer, such as one that holds the GIL. A signal interrupts
        # system calls, so the rank may go on, and faulthandler crashes if a thread runs while it reads the frames.
        silent = [rank for rank in responsive if not stacks[rank]]
        self._interrupted.update(silent)
        for rank in silent:
            self.send_signal(rank, STACK_SIGNAL)
        stacks.update(read_stacks({rank: self.processes[rank]._stacks for rank in silent}) if silent else {})

    def _await_collectives(self, ranks: Sequence[int]) -> None:
        deadline = ProcessDeadline(_ANSWER_S, monotonic(), _EXTRA_S)
        while missing := [rank for rank in ranks if rank not in self._collectives and rank not in self._ended]:
            if deadline.is_over(monotonic(), sum(map(self._starved_s, missing))):
                return
            self.pump(deadline.look_s - monotonic())

    def _complete(self, outcome: Outcome, stacks: Mapping[int, str]) -> Outcome:
        text = stacks.get(outcome.rank, "")
        if not text and outcome.receipt is None and outcome.rank in self._ended:
            text = written_at_end(self.processes[outcome.rank]._stacks)
        outcome.stacks = wording.trim_stacks(text)
        waits = outcome.receipt.waits if outcome.receipt else ()
        # If the rank ended by itself, its last answer is out of date.
        outcome.waits = waits or (self._waits.get(outcome.rank, ()) if outcome.was_stopped else ())
        if not outcome.receipt or (outcome.was_stopped and outcome.receipt.status is RankStatus.PASSED):
            waits = self.processes[outcome.rank]._page.waits()
            outcome.waits += tuple(wait for wait in waits if wait not in outcome.waits)
        outcome.delayed_s = self._delayed_s.get(outcome.rank, 0.0)
        outcome.phase = self._phases.get(outcome.rank)
        outcome.host = self.processes[outcome.rank].host
        killed = outcome.ending is Ending.KILLED and outcome.exit_code == -signal.SIGKILL
        outcome.out_of_memory = killed and machine_memory.kills() > self._kills
        outcome.collectives = self._collectives.get(outcome.rank, "")
        outcome.output = wording.trim_stacks(self.processes[outcome.rank]._capture.tail())
        outcome.left_behind = [left.command for left in self._left_behind if left.index == outcome.rank]
        return outcome

    def _send(self, ranks: Sequence[int], message: RankRequest) -> None:
        for rank in ranks:
            self.processes[rank]._channel.try_send(message)

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank; no effect if the rank has ended or the world is closed."""
        if rank not in self._ended and (seat := self.processes[rank]._seat):
            group, index = seat
            group.try_send(Signal(index, number))

    def close(self) -> None:
        """Abandon the ranks: the zygote kills and reaps the live ones. Idempotent."""
        self.store = None
        for group, _ in self._groups:
            group.close()
        self._callbacks.close()  # so that pump() finds nothing
        for process in self.processes:
            process.detach()


def query_zygote(zygote: ZygoteClient, ranks: Collection[int]) -> tuple[str, ...]:
    """Ask a zygote for the processes that may act besides ``ranks`` (pids). No answer counts as one such process."""
    with (
        contextlib.suppress(OSError),
        contextlib.closing(zygote.channel.connect(QueryProcesses(tuple(ranks)))) as local,
    ):
        if local.poll(_ANSWER_S):
            return tuple(str(each) for each in local.receive()[0])
    return ("a process of the zygote, which does not answer",)


@_os.with_room
def start_world(
    zygote: ZygoteClient,
    tasks: Sequence[RankTask],
    *,
    spares: int = 0,  # number of processes that the zygote forks ahead for the next call
    show: bool | Live = False,  # also print the ranks' output; True: each line with its rank in front
    name: str = "process",  # name of each process, before its rank
    test: str = "",  # id of the ranks' first test, which their receipts must name
    own_address: bool = True,  # see Note [An address for each world]; not for ranks that meet over a network
) -> World:
    """Start one rank per task, in order, and return when all processes exist.

    The ranks get the environment, working directory, umask and ``sys.argv`` that this process has now. ``zygote`` has
    loaded the modules of the tasks.

    Raises:
        ZygoteLostError: the zygote is gone.
        OSError: the system lacks resources for the ranks, such as open files.
    """
    machine_memory.share()
    ticket = Ticket(test)
    cores = settings.threads_per_rank(len(tasks))
    start = functools.partial(start_ranks, zygote, ticket, show, name, own_address, cores)
    group, processes = start(dict(enumerate(tasks)), spares)
    world = World(zygote, group, processes, ticket, start)
    while processes and processes[0].pid is None:
        world.pump()
    return world
