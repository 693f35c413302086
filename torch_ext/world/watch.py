"""Decides, while a world runs, when to release ranks, to collect stacks and to kill, and detects hangs (see Note
[Provable hangs]). No I/O, no clock: report events to :meth:`Watch.received`, :meth:`Watch.left` and
:meth:`Watch.ended`, and the time to :meth:`Watch.advance`; execute the steps that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from signal import SIGABRT

from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.protocol import NO_TICKET, Progress, RankStatus, Receipt, Ticket
from torch_ext.world.settings import EXTRA_S, Limits, ProcessDeadline
from torch_ext.world.wording import ranks_phrase, without_ranks

# The parent half among ranks.
PARENT_HALF = -1
# Seconds without progress after which a message explains why no hang is proven.
SILENCE_S = 60.0
# A rank makes progress if it computes for this share of the time.
_COMPUTES = 0.05
# Looks until a hang is proven.
_LOOKS = 8
_MAX_REASONS = 3


@dataclass(frozen=True)
class Measures:
    """Measurements of a world: the CPU time of a rank, the time for which its threads have waited for a core, both in
    seconds, and descriptions of other processes and threads that may act: neither ranks nor the parent half's threads.
    """

    cpu_time_s: Callable[[int], float] = lambda rank: 0.0
    starved_s: Callable[[int], float] = lambda rank: 0.0
    others: Callable[[], Sequence[str]] = tuple


class Finding(Enum):
    HUNG = "no rank can go on, and no other process can end their waits"
    SILENT = "there is no progress, and no proof either"


class HangWatch:
    """Watches one world from ``started_s`` on. Reports a hang if every rank was blocked at each look for
    ``limits.hang_s`` seconds, no thread has run in that time, and no other process may act.
    """

    def __init__(self, limits: Limits, started_s: float, measures: Measures) -> None:
        self._limits = limits
        self._every_s = limits.hang_s / _LOOKS if limits.hang_s else float("inf")
        self._deadline_s = started_s + limits.test_s
        self._measures = measures
        self.next_s = started_s + self._every_s  # time of the next look
        self.reasons: tuple[str, ...] = ()  # why the last look proves nothing, in words
        self._answers: dict[int, Progress | None] = {}
        self._before: Mapping[int, Progress | None] = {}
        self._looked_s = started_s
        self._since_s: float | None = None  # time of the first of the consecutive looks at which all were blocked
        self._progress_s = started_s
        self._moved = False
        self._is_judged = False
        self._reported_hang = self._reported_silence = False  # reset when the hang or silence ends
        self._used_s: dict[int, float] = {}

    def forget(self) -> None:
        """Discard earlier looks after an event, since ranks may react to it."""
        self._moved, self._since_s, self._answers, self._before = True, None, {}, {}

    def look(self, ranks: Collection[int], now_s: float) -> bool:
        """Begin a look at ``ranks``; pass each rank's answer to :meth:`observed`. Return False while the last look
        lacks an answer.
        """
        if self._moved or self._computes(ranks, now_s - (self.next_s - self._every_s)):
            self._note_progress(now_s)
        self.next_s = now_s + self._every_s
        if not self._is_complete():
            return False
        self._before, self._answers = self._answers, dict.fromkeys((*ranks, PARENT_HALF))
        self._looked_s, self._is_judged = now_s, False
        return True

    def observed(self, rank: int, progress: Progress) -> None:
        """Record the answer of ``rank``."""
        if rank in self._answers:
            self._answers[rank] = progress

    def judge(self, now_s: float) -> Finding | None:
        """Return a new finding of the looks so far; None if there is none, or it was already returned."""
        if not self._answers or self._moved:
            return None
        is_complete = self._is_complete()
        if not is_complete:
            silent = [rank for rank, progress in self._answers.items() if progress is None]
            self.reasons = (f"{_phrase(silent)}, which cannot answer",)
        elif not self._is_judged:
            self._evaluate(now_s)
        if self._since_s is None:
            self._reported_hang = False
        # A look without all answers proves nothing, however long ago the last one found all ranks blocked.
        if is_complete and self._since_s is not None:
            if self._looked_s - self._since_s >= self._limits.hang_s and not self._reported_hang:
                self._reported_hang = True
                return Finding.HUNG
        elif now_s - self._progress_s >= SILENCE_S and not self._reported_silence:
            self._reported_silence = True
            return Finding.SILENT
        return None

    def _is_complete(self) -> bool:
        return all(progress is not None for progress in self._answers.values())

    def _evaluate(self, now_s: float) -> None:
        answers = {rank: progress for rank, progress in self._answers.items() if progress is not None}
        before = {rank: progress for rank, progress in self._before.items() if progress is not None}
        if any(rank in before and before[rank].record != each.record for rank, each in answers.items()):
            self._note_progress(now_s)
        self.reasons = tuple(self._reasons(answers))
        ran = any(rank not in before or before[rank].fingerprint != each.fingerprint for rank, each in answers.items())
        if self.reasons:
            self._since_s = None
        elif ran or self._since_s is None:
            self._since_s, self._reported_hang = now_s, False
        self._is_judged = True

    def _reasons(self, answers: Mapping[int, Progress]) -> list[str]:
        endless_s, raises_later_s = (
            min(self._deadline_s, self._looked_s + each)
            for each in (self._limits.endless_s, self._limits.raises_later_s)
        )
        found = []
        for rank, each in answers.items():
            if not each.blocked:
                found += [f"{word} of {_phrase([rank])}" for word in each.may_act[:_MAX_REASONS]] or [_phrase([rank])]
            elif each.until_s < endless_s or each.raises_s < raises_later_s:
                left_s = max(0.0, min(each.until_s, each.raises_s) - self._looked_s)
                found.append(f"a wait of {_phrase([rank])}, which ends by itself in {left_s:.0f} s")
        ranks = [each for rank, each in answers.items() if rank != PARENT_HALF]
        if not found and not all(each.among_ranks for each in ranks):
            found += list(self._measures.others())
        return found

    def _computes(self, ranks: Collection[int], time_s: float) -> bool:
        used_s = {rank: self._measures.cpu_time_s(rank) for rank in ranks}
        change_s = [abs(used_s[rank] - self._used_s[rank]) for rank in ranks if rank in self._used_s]
        self._used_s = used_s
        return any(each > _COMPUTES * time_s for each in change_s)

    def _note_progress(self, now_s: float) -> None:
        self._progress_s, self._moved, self._reported_silence = now_s, False, False


def _phrase(ranks: Sequence[int]) -> str:
    of_world = sorted(rank for rank in ranks if rank != PARENT_HALF)
    words = [ranks_phrase(of_world)] if of_world else []
    return " and ".join(words + ["the parent half"] * (PARENT_HALF in ranks))


def silence_text(reasons: Sequence[str], stacks: Mapping[int, str]) -> str:
    """Return the message about missing progress: why no hang is proven, and the stacks of the ranks."""
    because = "; ".join(reasons[:_MAX_REASONS]) or "a rank"
    more = f"; and {len(reasons) - _MAX_REASONS} more" if len(reasons) > _MAX_REASONS else ""
    lines = [f"no progress for {SILENCE_S:.0f} s; not proven to hang, because these may act: {because}{more}"]
    alike: dict[str, tuple[list[int], str]] = {}
    for rank, text in sorted(stacks.items()):
        alike.setdefault(without_ranks(text), ([], text))[0].append(rank)
    for ranks, text in alike.values():
        shown = text.rstrip() or "(cannot be shown)"
        lines += [f"Stacks of {ranks_phrase(ranks)}:", *(f"    {line}" for line in shown.splitlines())]
    return "\n".join(lines)


# Extra seconds of grace for peers that wait for a core.
_STARVED_S = 5.0


class Act(Enum):
    """An action on some ranks."""

    RELEASE = "allow the rank to end"
    LOOK = "request the waits of the rank"
    REPORT_HANG = "report a hang of ranks that go on"
    REPORT_SILENCE = "report that there is no progress"
    INSPECT = "collect stacks and collectives"
    STOP = "kill the process"


@dataclass(frozen=True)
class Step:
    act: Act
    ranks: tuple[int, ...]


@dataclass(eq=False)
class Watch:
    """Follows one world from its start to its last ending. Times are by the clock of :meth:`advance`."""

    world_size: int
    limits: Limits
    started_s: float  # the start of the ranks
    measures: Measures = Measures()  # of their processes
    _: KW_ONLY
    expected_exit: int | None = None  # a rank without a receipt may end with this exit code
    any_exit: bool = False  # a rank without a receipt may end in any way
    keep: bool = False  # ranks survive this test, which is over when each has submitted a receipt or ended
    ticket: Ticket = NO_TICKET  # the run of the test; receipts with other tickets do not count
    pids: list[int] = field(default_factory=list)  # of each rank; receipts of other processes do not count
    recovers: bool = False  # the caller settles each of `lost()`, so that no peer is stopped for it

    def __post_init__(self) -> None:
        self._left: set[int] = set()
        self._receipts: dict[int, Receipt] = {}
        self._ended: dict[int, tuple[int, float]] = {}
        self._stopped: dict[int, Ending] = {}
        self._released = False
        # More time for ranks that are slow rather than hung at the deadline, and the measure that tells them apart.
        self._extra: tuple[ProcessDeadline, Callable[[int], float]] | None = None
        self._deadline_s, self._deadline_ending = self.started_s + self.limits.test_s, Ending.TIMED_OUT
        self._test_deadline_s = self._deadline_s
        self.hangs = HangWatch(self.limits, self.started_s, self.measures)

    def received(self, rank: int, receipt: Receipt) -> None:
        """Record a receipt. Ignores receipts of another run or process, and those of a rank that we have begun to stop,
        since stopping may make it fail.
        """
        expected = self.ticket, self.pids[rank] if self.pids else 0
        if (receipt.ticket, receipt.pid) == expected and rank not in self._stopped:
            self._receipts.setdefault(rank, receipt)
            self.hangs.forget()

    def left(self, rank: int) -> None:
        """Record that ``rank`` is ending through the harness's own code."""
        self._left.add(rank)

    def hold(self, now_s: float) -> None:
        """Record that a rank has prompted the user until now: it gets the grace of a failure anew."""
        self._deadline_s = max(self._deadline_s, now_s + self.limits.grace_s)
        self.hangs.forget()

    def ended(self, rank: int, exit_code: int, time_s: float) -> None:
        """Record that the process of ``rank`` has ended."""
        self._ended.setdefault(rank, (exit_code, time_s))
        self.hangs.forget()

    def lost(self) -> list[int]:
        """Return the ranks that failed or died by themselves, once they have ended."""
        if self._stopped:
            return []
        return sorted(rank for rank, (code, _) in self._ended.items() if not self._expected(rank, code))

    def replaced(self, rank: int, pid: int) -> None:
        """Record that process ``pid`` takes the place of a rank that has ended; 0: none does."""
        _, time_s = self._ended.pop(rank)
        self._receipts.pop(rank, None)
        self._left.discard(rank)
        self.pids[rank] = pid
        if not pid:
            self._ended[rank] = self.expected_exit or 0, time_s
        self.hangs.forget()

    @property
    def done(self) -> bool:
        return len(self._ended) == self.world_size or (self.keep and self._all_settled())

    @property
    def deadline_s(self) -> float:
        """Call :meth:`advance` again at this time, or after an event."""
        return min(self._deadline_s, self.hangs.next_s if self._unsettled() else float("inf"))

    def advance(self, now_s: float) -> list[Step]:
        """Return the steps to execute now, in order."""
        steps = []
        if not self.keep and not self._released and self._all_settled():
            self._released = True
            waiting = tuple(rank for rank in self._alive() if self._receipts[rank].status is not RankStatus.FAILED)
            if waiting:
                steps.append(Step(Act.RELEASE, waiting))
            self._bring_forward(now_s + self.limits.exit_s, Ending.TIMED_OUT)
            if self._deadline_ending is Ending.TIMED_OUT:
                # The supervisor kills the class process soon after the test's limit.
                extra_s = min(EXTRA_S, self._test_deadline_s + self.limits.exit_s - self._deadline_s)
                deadline = ProcessDeadline(self._deadline_s - now_s, now_s, extra_s)
                self._extra = deadline, self.measures.cpu_time_s
        if self._has_failure():
            self._begin_grace(now_s)
        unsettled = self._unsettled()
        # After a failure or death, peers wait for that rank: the grace ends them, not hang detection.
        found = self.hangs.judge(now_s) if unsettled and not self._has_failure() else None
        if found is Finding.HUNG and self.limits.end_hangs:
            self._bring_forward(now_s, Ending.HUNG)
        elif found is not None:
            act = Act.REPORT_HANG if found is Finding.HUNG else Act.REPORT_SILENCE
            steps.append(Step(act, unsettled))
        if now_s >= self._deadline_s and not self.done and not self._is_slow_to_end(now_s):
            steps += self._stop_alive()
            self._deadline_s = self.hangs.next_s = float("inf")
        elif unsettled and now_s >= self.hangs.next_s:
            # Include ranks whose test is over: their threads may act.
            living = tuple(rank for rank in self._alive() if rank not in self._stopped)
            if self.hangs.look(living, now_s):
                steps.append(Step(Act.LOOK, living))
        return steps

    def _begin_grace(self, now_s: float) -> None:
        if self._extra is not None and self._deadline_ending is Ending.TIMED_OUT:
            self._extra, self._deadline_s = None, float("inf")  # no rank is merely slow
        if self._bring_forward(now_s + self.limits.grace_s, Ending.STOPPED):
            starved_s = sum(map(self.measures.starved_s, self._alive()))
            deadline = ProcessDeadline(self.limits.grace_s, now_s, _STARVED_S, starved_s)
            self._extra = deadline, self.measures.starved_s

    def _is_slow_to_end(self, now_s: float) -> bool:
        """Whether the ranks that have missed the deadline are slow rather than hung."""
        if self._extra is None:
            return False
        deadline, measure = self._extra
        if deadline.is_over(now_s, sum(map(measure, self._alive()))):
            return False
        self._deadline_s = deadline.look_s
        return True

    def _unsettled(self) -> tuple[int, ...]:
        """The live ranks whose test is not over."""
        return tuple(rank for rank in self._alive() if rank not in self._receipts and rank not in self._stopped)

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each rank. Call it when :attr:`done`."""
        found = []
        for rank in range(self.world_size):
            code, time_s = self._ended.get(rank, (None, 0.0))
            receipt = self._receipts.get(rank)
            ending = self._ending(rank, code or 0, receipt)
            found.append(Outcome(rank, ending, code, receipt.time_s if receipt else time_s, receipt))
        return found

    def _bring_forward(self, deadline_s: float, ending: Ending) -> bool:
        if deadline_s < self._deadline_s:
            self._deadline_s, self._deadline_ending, self._extra = deadline_s, ending, None
            return True
        return False

    def _alive(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self._ended]

    def _all_settled(self) -> bool:
        return all(rank in self._receipts for rank in self._alive())

    def _has_failure(self) -> bool:
        """Whether some rank failed or died, so that its peers may wait for it forever. An expected failure is no
        trouble: the peers' endings decide whether the test may pass.
        """
        if self.recovers:
            return False
        if any(receipt.status is RankStatus.FAILED and not receipt.is_expected for receipt in self._receipts.values()):
            return True
        return any(not self._expected(rank, code) for rank, (code, _) in self._ended.items())

    def _expected(self, rank: int, code: int) -> bool:
        return (
            (rank in self._receipts and rank in self._left and code == 0)
            or (rank in self._receipts and self._receipts[rank].is_expected)
            or self.any_exit
            or code == self.expected_exit
        )

    def _stop_alive(self) -> list[Step]:
        alive = tuple(
            rank for rank in self._alive() if rank not in self._stopped and not (self.keep and rank in self._receipts)
        )
        for rank in alive:
            self._stopped[rank] = self._deadline_ending
        if not alive:
            return []
        return [Step(Act.INSPECT, alive), Step(Act.STOP, alive)]

    def _ending(self, rank: int, code: int, receipt: Receipt | None) -> Ending:
        if receipt is not None and receipt.status is RankStatus.FAILED:
            return Ending.FAILED
        # A rank that exited cleanly before our SIGKILL counts as passed.
        left = code == 0 and receipt is not None and rank in self._left and rank in self._ended
        if rank in self._stopped and not left and code != -SIGABRT:
            return self._stopped[rank]
        if code < 0:
            return Ending.KILLED
        if code > 0:
            return Ending.EXITED
        if receipt is None:
            return Ending.SILENT
        # With `keep`, a rank must not end; without, a rank that ends through the harness sends ``Phase.EXITING`` first.
        if rank in self._ended and (self.keep or rank not in self._left):
            return Ending.EXITED
        return Ending.PASSED if receipt.status is RankStatus.PASSED else Ending.SKIPPED
