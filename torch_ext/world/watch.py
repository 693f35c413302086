"""What to do while waiting for a world: when to release ranks, when to ask for stacks, when to stop whom. No I/O, no
clock.

Tell it what happened (:meth:`Watch.received`, :meth:`Watch.ended`) and what time it is (:meth:`Watch.advance`), and do
what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from signal import SIGABRT

from torch_ext.world.hangs import Finding, HangWatch, Measures
from torch_ext.world.limits import MORE_S, Limits, Patience
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.protocol import NO_TICKET, Receipt, Said, Ticket

__all__ = ["Act", "Step", "Watch"]

# How much longer than their grace peers get that wait for a core, in seconds.
_STARVED_S = 5.0


class Act(Enum):
    """What the watch wants done to some ranks."""

    RELEASE = "tell the rank that it may end"
    LOOK = "ask what the rank waits for"
    REPORT_HANG = "report a hang of ranks that go on"
    REPORT_SILENCE = "report that there is no progress"
    INSPECT = "collect stacks and collectives"
    STOP = "kill the process"


@dataclass(frozen=True)
class Step:
    act: Act
    ranks: tuple[int, ...]


class Watch:
    """Follows one world from its start to its last ending.

    Args:
        world_size: how many ranks there are.
        limits: how long to wait.
        started_s: when they were started, by the clock that :meth:`advance` is given.
        measures: what can be asked about their processes.
        expected_exit: an exit code with which ranks are meant to end without a receipt; such an ending is no trouble.
        any_exit: no ending without a receipt is trouble.
        keep: the ranks live on after this test: it is over when each has handed in a receipt or ended.
        ticket: the run of the test; a receipt about another one counts for nothing.
        pids: the process of each rank; a receipt from another one counts for nothing.

    Attributes:
        hangs: whether the ranks hang; fed by :attr:`Act.LOOK`.
    """

    def __init__(
        self,
        world_size: int,
        limits: Limits,
        started_s: float,
        measures: Measures = Measures(),  # noqa: B008  # frozen
        *,
        expected_exit: int | None = None,
        any_exit: bool = False,
        keep: bool = False,
        ticket: Ticket = NO_TICKET,
        pids: Sequence[int] = (),
    ) -> None:
        self._ticket = ticket
        self._pids = tuple(pids) or (0,) * world_size
        self._left: set[int] = set()
        self._world_size = world_size
        self._keep = keep
        self._limits = limits
        self._expected_exit = expected_exit
        self._any_exit = any_exit
        self._receipts: dict[int, Receipt] = {}
        self._ended: dict[int, tuple[int, float]] = {}
        self._stopped: dict[int, Ending] = {}
        self._released = False
        self._measures = measures
        self._leaving: Patience | None = None  # once all are released
        self._grace: Patience | None = None  # once one has failed
        self._deadline_s, self._deadline_ending = started_s + limits.test_s, Ending.TIMED_OUT
        self._test_deadline_s = self._deadline_s
        self.hangs = HangWatch(limits, started_s, measures)

    def received(self, rank: int, receipt: Receipt) -> None:
        """A receipt came on the line of ``rank``. It counts if it is from that process and about this run of the test.

        What a rank says after it was told to stop counts for nothing either: stopping it may have made it fail.
        """
        if (receipt.ticket, receipt.pid) == (self._ticket, self._pids[rank]) and rank not in self._stopped:
            self._receipts.setdefault(rank, receipt)
            self.hangs.forget()

    def left(self, rank: int) -> None:
        """Rank ``rank`` is about to end as the harness ends it."""
        self._left.add(rank)

    def ended(self, rank: int, exit_code: int, time_s: float) -> None:
        """The process of ``rank`` ended."""
        self._ended.setdefault(rank, (exit_code, time_s))
        self.hangs.forget()

    @property
    def done(self) -> bool:
        return len(self._ended) == self._world_size or (self._keep and self._all_settled())

    @property
    def deadline_s(self) -> float:
        """When :meth:`advance` wants to be called again if nothing happens until then."""
        return min(self._deadline_s, self.hangs.next_s if self._unsettled() else float("inf"))

    def advance(self, now_s: float) -> list[Step]:
        """Return what is to be done now, in order. Call it after every event and at :attr:`deadline_s`."""
        steps = []
        if not self._keep and not self._released and self._all_settled():
            self._released = True
            waiting = tuple(rank for rank in self._alive() if self._receipts[rank].said is not Said.FAILED)
            if waiting:
                steps.append(Step(Act.RELEASE, waiting))
            self._bring_forward(now_s + self._limits.exit_s, Ending.TIMED_OUT)
            # Whoever watches the whole test gives it little more than its limit.
            more_s = min(MORE_S, self._test_deadline_s + self._limits.exit_s - self._deadline_s)
            self._leaving = Patience(self._deadline_s - now_s, now_s, more_s)
        if self._trouble():
            if self._leaving is not None and self._deadline_ending is Ending.TIMED_OUT:
                self._leaving, self._deadline_s = None, float("inf")  # nobody is only slow any more
            if self._bring_forward(now_s + self._limits.grace_s, Ending.STOPPED):
                starved_s = sum(map(self._measures.starved_s, self._alive()))
                self._grace = Patience(self._limits.grace_s, now_s, _STARVED_S, starved_s)
        unsettled = self._unsettled()
        # Where one has failed or died, the others wait for it: they are stopped in their turn.
        found = self.hangs.judge(now_s) if unsettled and not self._trouble() else None
        if found is Finding.HUNG and self._limits.end_hangs:
            self._bring_forward(now_s, Ending.HUNG)
        elif found is not None:
            act = Act.REPORT_HANG if found is Finding.HUNG else Act.REPORT_SILENCE
            steps.append(Step(act, unsettled))
        if now_s >= self._deadline_s and not self.done and not self._may_go_on_ending(now_s):
            steps += self._stop_the_living()
            self._deadline_s = self.hangs.next_s = float("inf")
        elif unsettled and now_s >= self.hangs.next_s:
            # Those whose test is over as well: a thread that it has left may act.
            living = tuple(rank for rank in self._alive() if rank not in self._stopped)
            if self.hangs.look(living, now_s):
                steps.append(Step(Act.LOOK, living))
        return steps

    def _may_go_on_ending(self, now_s: float) -> bool:
        """Whether the ranks that have not ended in time are slow, and do not hang."""
        alive = self._alive()
        patience, computed_s = None, 0.0
        if self._deadline_ending is Ending.TIMED_OUT and self._leaving is not None:
            patience, computed_s = self._leaving, sum(map(self._measures.computed_s, alive))
        elif self._deadline_ending is Ending.STOPPED and self._grace is not None:
            patience, computed_s = self._grace, sum(map(self._measures.starved_s, alive))
        if patience is None or patience.is_over(now_s, computed_s):
            return False
        self._deadline_s = patience.look_s
        return True

    def _unsettled(self) -> tuple[int, ...]:
        """The live ranks whose test is not over."""
        return tuple(rank for rank in self._alive() if rank not in self._receipts and rank not in self._stopped)

    def outcomes(self) -> list[Outcome]:
        """Return what became of each rank. Call it when :attr:`done`."""
        return [self._outcome(rank) for rank in range(self._world_size)]

    def _bring_forward(self, deadline_s: float, ending: Ending) -> bool:
        if deadline_s < self._deadline_s:
            self._deadline_s, self._deadline_ending = deadline_s, ending
            return True
        return False

    def _alive(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank not in self._ended]

    def _all_settled(self) -> bool:
        return all(rank in self._receipts for rank in self._alive())

    def _trouble(self) -> bool:
        """Whether some rank failed or died, so that its peers may wait for it in vain."""
        if any(receipt.said is Said.FAILED for receipt in self._receipts.values()):
            return True
        return any(not self._expected(rank, code) for rank, (code, _) in self._ended.items())

    def _expected(self, rank: int, code: int) -> bool:
        return (
            (rank in self._receipts and rank in self._left and code == 0)
            or self._any_exit
            or code == self._expected_exit
        )

    def _stop_the_living(self) -> list[Step]:
        alive = tuple(
            rank for rank in self._alive() if rank not in self._stopped and not (self._keep and rank in self._receipts)
        )
        for rank in alive:
            self._stopped[rank] = self._deadline_ending
        if not alive:
            return []
        return [Step(Act.INSPECT, alive), Step(Act.STOP, alive)]

    def _outcome(self, rank: int) -> Outcome:
        code, time_s = self._ended.get(rank, (None, 0.0))
        receipt = self._receipts.get(rank)
        return Outcome(
            rank, self._ending(rank, code or 0, receipt), code, receipt.time_s if receipt else time_s, receipt
        )

    def _ending(self, rank: int, code: int, receipt: Receipt | None) -> Ending:
        if receipt is not None and receipt.said is Said.FAILED:
            return Ending.FAILED
        # One that was stopped just after it had ended by itself, as it should, was not stopped.
        left = code == 0 and receipt is not None and rank in self._left and rank in self._ended
        if rank in self._stopped and not left and code != -SIGABRT:
            return self._stopped[rank]
        if code < 0:
            return Ending.KILLED
        if code > 0:
            return Ending.EXITED
        if receipt is None:
            return Ending.SILENT
        # A rank that is to live on has no reason to end, and any other one says farewell.
        if rank in self._ended and (self._keep or rank not in self._left):
            return Ending.EXITED
        return Ending.PASSED if receipt.said is Said.PASSED else Ending.SKIPPED
