"""What became of one rank: the typed endings. Standard library and own layer only.

Glossary
~~~~~~~~
- *world*: the set of ranks of one test. *World size*: how many there are.
- *rank*: one of these processes (or threads), and its number.
- *task*: what a rank is told to run. *Body*: the test method that runs as part of it.
- *receipt*: the rank's own statement about its body, handed in before the rank ends.
- *ending*: what became of the rank, as established from its receipt and from how its process ended.
- *outcome*: everything known about one rank. *Verdict*: the judgement over all outcomes of a world.
- *supervisor*: the process that the user started. It loads no torch. *Zygote*: a process that has loaded what ranks
  need and forks them.
- *parent half*: the part of a test that runs beside its ranks and waits for them, in the *class process*.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from torch_ext.world._os import signal_name
from torch_ext.world.protocol import Phase, Receipt, Wait

__all__ = ["Ending", "Outcome", "may_be_expected"]


class Ending(Enum):
    """How a rank ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    EXITED = "exited"
    KILLED = "killed"
    SILENT = "left without a receipt"
    TIMED_OUT = "timed out"
    HUNG = "hung"
    STOPPED = "stopped by the harness"


_EXPECTABLE = (Ending.PASSED, Ending.FAILED, Ending.SKIPPED, Ending.STOPPED)


@dataclass
class Outcome:
    """Everything known about one rank at its end.

    Attributes:
        rank: its number.
        ending: the state in which it ended.
        exit_code: of its process; negative for a signal; None if it was never started.
        time_s: when it ended as seen by the harness, or when it said so itself if it did (``time.monotonic``).
        receipt: what it said, if anything.
        phase: how far it was; None if it had not loaded what its task needs.
        stacks: Python stacks of its threads, taken before it was stopped.
        waits: what its threads waited for then.
        collectives: its record of collectives, as :class:`~torch_ext.world.protocol.Collectives` carries it, taken at
            the same time.
        output: the end of its own stdout and stderr.
        left_behind: command lines of processes that it left running.
        task: what it ran, in a word.
        ended_s: when its process had ended (``time.monotonic``); 0 if it lives on.
        host: where it ran, in words, if the test asked for several hosts.
        delayed_s: for how many seconds of its test it could have run, and waited for a core, until it was stopped.
    """

    rank: int
    ending: Ending
    exit_code: int | None = None
    time_s: float = 0.0
    receipt: Receipt | None = None
    phase: Phase | None = Phase.RUNNING
    stacks: str = ""
    waits: tuple[Wait, ...] = ()
    collectives: str = ""
    output: str = ""
    left_behind: list[str] = field(default_factory=list)
    task: str = "test"
    ended_s: float = 0.0
    host: str = ""
    delayed_s: float = 0.0

    @property
    def transport_failure(self) -> Receipt | None:
        """What it said of a failure that a process group, a store or RPC raised; None if it did not fail by one."""
        return self.receipt if self.ending is Ending.FAILED and self.receipt and self.receipt.transport else None

    @property
    def who(self) -> str:
        """The rank in words, with its host if there are several.

        >>> Outcome(2, Ending.PASSED).who, Outcome(2, Ending.PASSED, host="host 1").who
        ('rank 2', 'rank 2 on host 1')
        """
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @property
    def ok(self) -> bool:
        return self.ending in (Ending.PASSED, Ending.SKIPPED)

    def describe(self) -> str:
        """Say in a few words how the rank ended.

        >>> Outcome(1, Ending.KILLED, exit_code=-11).describe()
        'was killed by SIGSEGV'
        >>> Outcome(0, Ending.EXITED, exit_code=3).describe()
        'exited with code 3 without a receipt'
        """
        reason = _shorten(self.receipt.reason) if self.receipt else ""
        after = f" after its {self.task} had {self.receipt.said.value}" if self.receipt else ""
        if not after and self.phase is Phase.SETTLING:
            body = "body" if self.task == "test" else self.task
            after = f" after its {body} was over, in what that left to be done,"
        if self.ending is Ending.PASSED:
            return "passed"
        if self.ending is Ending.FAILED:
            return f"failed with {reason}"
        if self.ending is Ending.SKIPPED:
            return f"skipped: {reason}"
        if self.ending is Ending.KILLED:
            return f"was killed by {signal_name(-(self.exit_code or 0))}{after}".rstrip(",")
        if self.ending is Ending.EXITED:
            before = (
                " without a receipt" if self.task == "test" else "" if after else f" before its {self.task} was over"
            )
            return f"exited with code {self.exit_code}{after}{'' if self.receipt else before}".rstrip(",")
        if self.ending is Ending.SILENT:
            if self.task != "test":
                early = after or f" before its {self.task} was over"
                return f"left with code 0, by os._exit() or the like,{early}".rstrip(",")
            return f"left with code 0{after} without a receipt: something ended the process before its test was over"
        if self.ending in (Ending.TIMED_OUT, Ending.HUNG):
            importing = " while it was importing" if self.phase is None and self.receipt is None else ""
            return f"{self.ending.value}{after or importing}".rstrip(",")
        if self.phase is Phase.ABORTING:
            return "was ending by SIGABRT when the harness stopped it"
        return f"was stopped by the harness{after or f' while its {self.task} was running'}"


def may_be_expected(outcomes: Iterable[Outcome]) -> bool:
    """Whether ranks ended in a way in which they may where the test is expected to fail: one that fails is enough. None
    may hang or die, and a disagreement about skipping is no failure of what the test is about.

    >>> may_be_expected([Outcome(0, Ending.PASSED), Outcome(1, Ending.FAILED)])
    True
    >>> may_be_expected([Outcome(0, Ending.PASSED), Outcome(1, Ending.SKIPPED)])
    False
    """
    endings = {outcome.ending for outcome in outcomes}
    disagree = Ending.SKIPPED in endings and len(endings) > 1 and Ending.FAILED not in endings
    return endings.issubset(_EXPECTABLE) and not disagree


def _shorten(text: str, limit: int = 160) -> str:
    """Keep the beginning of a long line; the whole of it stands in the traceback.

    >>> _shorten("x" * 10, 5)
    'xxxxx...'
    """
    return text if len(text) <= limit else text[:limit].rstrip() + "..."
