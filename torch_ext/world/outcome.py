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

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from torch_ext.world._os import signal_name
from torch_ext.world.frames import place_in
from torch_ext.world.protocol import Phase, Receipt, Said, Wait

__all__ = ["Ending", "Outcome", "may_be_expected"]


class Ending(Enum):
    """How a rank ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    EXITED = "exited"
    KILLED = "killed"
    SILENT = "exited early"
    TIMED_OUT = "timed out"
    HUNG = "hung"
    STOPPED = "stopped"


# What faulthandler writes above the stacks of a process that dies, and how the name of an exception looks.
_FATAL = "Fatal Python error:"
_EXCEPTION = re.compile(r"[^\W\d][\w.<>]*")
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
        started_s: when its world was asked for, or its test (``time.monotonic``).
        ended_s: when its process had ended (``time.monotonic``); 0 if it lives on.
        host: where it ran, in words, if the test asked for several hosts.
        out_of_memory: SIGKILL ended it, and the kernel has killed processes meanwhile for want of memory.
        died_at: :attr:`place`, if ``output`` no longer holds what tells of it.
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
    started_s: float = 0.0
    ended_s: float = 0.0
    host: str = ""
    out_of_memory: bool = False
    delayed_s: float = 0.0
    died_at: str = ""

    @property
    def transport_failure(self) -> Receipt | None:
        """What it said of a failure that a process group, a store or RPC raised; None if it did not fail by one."""
        return self.receipt if self.ending is Ending.FAILED and self.receipt and self.receipt.transport else None

    @property
    def sub_tests(self) -> tuple[str, ...]:
        """The sub-tests that failed, or skipped if no part failed."""
        return tuple(part.sub_test for part in self.receipt.parts if part.sub_test) if self.receipt else ()

    @property
    def who(self) -> str:
        """The rank in words, with its host if there are several.

        >>> Outcome(2, Ending.PASSED).who, Outcome(2, Ending.PASSED, host="host 1").who
        ('rank 2', 'rank 2 on host 1')
        """
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @property
    def was_stopped(self) -> bool:
        return self.ending in (Ending.TIMED_OUT, Ending.HUNG, Ending.STOPPED)

    @property
    def ok(self) -> bool:
        return self.ending in (Ending.PASSED, Ending.SKIPPED)

    @property
    def place(self) -> str:
        """Where in the user's code the rank was when it ended or was stopped, such as ``"at test_a.py:31"``; empty if
        it is not known.
        """
        if self.receipt is not None and self.receipt.said is Said.FAILED:
            return f"at {self.receipt.place}" if self.receipt.place else ""
        fatal = self.output.rpartition(_FATAL)[2] if self.ending is Ending.KILLED and _FATAL in self.output else ""
        return self.died_at or place_in(self.stacks) or place_in(fatal)

    def describe(self) -> str:
        """Say in a few words how the rank ended, and where in the user's code.

        >>> Outcome(1, Ending.KILLED, exit_code=-11).describe()
        'was killed by SIGSEGV'
        >>> Outcome(0, Ending.EXITED, exit_code=3).describe()
        'exited with code 3 before its test was over'
        >>> Outcome(0, Ending.FAILED, receipt=Receipt(Said.FAILED, 1.0, "ValueError: no", place="a.py:7")).describe()
        'raised ValueError at a.py:7: no'
        """
        if self.ending is Ending.PASSED:
            return "passed"
        if self.ending is Ending.SKIPPED:
            return f"skipped: {_shorten(self.receipt.reason) if self.receipt else ''}"
        if self.ending is Ending.FAILED:
            return self._failure()
        place = f" {self.place}" if self.place else ""
        if self.ending is Ending.KILLED:
            by = ", most likely by the kernel's out-of-memory killer" if self.out_of_memory else ""
            return f"was killed by {signal_name(-(self.exit_code or 0))}{by}{place}{self._when('')}"
        if self.ending in (Ending.EXITED, Ending.SILENT):
            early = "by os._exit() or the like, before" if not self.exit_code and not place else "before"
            return f"exited with code {self.exit_code or 0}{place}{self._when(f'{early} its {self.task} was over')}"
        if self.ending in (Ending.TIMED_OUT, Ending.HUNG):
            importing = "while it was importing" if self.phase is None and self.receipt is None else ""
            return f"{self.ending.value}{place}{self._when(importing)}"
        return f"was stopped{place}{self._when(f'while its {self.task} was running')}"

    def _failure(self) -> str:
        reason = _shorten(self.receipt.reason) if self.receipt else ""
        error, _, message = reason.partition(": ")
        if not _EXCEPTION.fullmatch(error):
            return f"failed: {reason}"
        where = f" {self.place}" if self.place else ""
        if error.startswith("torch_ext.world."):  # a name that says nothing to a user
            return f"failed{where}: {message}"
        error = error.rpartition(".")[2] if error.startswith("torch_ext.") else error
        return f"raised {error}{where}: {message}" if message else f"raised {error}{where}"

    def _when(self, otherwise: str) -> str:
        """Return how far the test was, with a space before it."""
        if self.receipt is not None:
            return f" after its {self.task} had {self.receipt.said.value}"
        if self.phase is Phase.SETTLING:
            return f" after its {self.task} had ended, in a thread or an exit function that it had left"
        return f" {otherwise}" if otherwise else ""


def may_be_expected(outcomes: Iterable[Outcome]) -> bool:
    """Whether ranks ended in a way in which they may where the test is expected to fail: one that fails is enough. None
    may hang or die, no cleanup or thread may fail, and no rank may skip alone.

    >>> may_be_expected([Outcome(0, Ending.PASSED), Outcome(1, Ending.FAILED)])
    True
    >>> may_be_expected([Outcome(0, Ending.FAILED), Outcome(1, Ending.SKIPPED)])
    False
    """
    outcomes = list(outcomes)
    endings = {outcome.ending for outcome in outcomes}
    failed = [outcome.receipt for outcome in outcomes if outcome.ending is Ending.FAILED and outcome.receipt]
    if not all(part.expectable for receipt in failed for part in receipt.parts):
        return False
    skips_alone = Ending.SKIPPED in endings and len(endings) > 1
    return endings.issubset(_EXPECTABLE) and not skips_alone


def _shorten(text: str, limit: int = 160) -> str:
    """Keep the beginning of a long line; the whole of it stands in the traceback.

    >>> _shorten("x" * 10, 5)
    'xxxxx...'
    """
    return text if len(text) <= limit else text[:limit].rstrip() + "..."
