"""The judgement over all ranks of a world. Pure functions of outcomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from torch_ext.world.collectives import first_mismatch, read_record
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.phrases import ranks_phrase

__all__ = ["Judgement", "Verdict", "WorldReport", "judge"]

# How transports say that a peer is gone: gloo, TensorPipe, NCCL and the stores. Such a failure is a consequence if
# another rank ended badly for a reason of its own.
_PEER_IS_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused|reset|lost)|socket (is )?closed"
    r"|\beof\b|remote process (has )?exited|peer (is )?gone|recvValue failed|failed to recv|ncclRemoteError|pipe closed"
    r"|test termination event",
    re.IGNORECASE,
)


class Judgement(Enum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Verdict:
    """The judgement over a world.

    Attributes:
        judgement: what the test counts as.
        summary: one line that names the guilty rank of a failure, or the reason of a skip.
        culprits: ranks that ended badly for a reason of their own, the first one first.
        victims: ranks that ended badly because of those.
    """

    judgement: Judgement
    summary: str = ""
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()


@dataclass(frozen=True)
class WorldReport:
    """A world that was judged, as data: what the report of a failure is made of.

    Attributes:
        outcomes: one per rank.
        took_s: seconds from the start of the ranks to the end of the last one.
        details: paragraphs of the test's own, shown below the summary.
    """

    outcomes: tuple[Outcome, ...]
    verdict: Verdict
    took_s: float
    details: tuple[str, ...] = ()


def judge(outcomes: Sequence[Outcome], expected_exit: int | None = None, any_exit: bool = False) -> Verdict:
    """Judge a world. It passes only if every rank handed in a receipt that says so; one without ranks is skipped.

    Args:
        outcomes: one per rank.
        expected_exit: the code with which ranks without a receipt must have ended; negative for a signal.
        any_exit: it does not matter how ranks without a receipt ended. Failures that were handed in still count.
    """
    if not outcomes:
        return Verdict(Judgement.SKIPPED, "no rank was started, because the test's world_size is 0")
    acceptable = _acceptable(expected_exit, any_exit)
    bad = [outcome for outcome in outcomes if not acceptable(outcome)]
    if bad:
        return _failure(bad, len(outcomes), expected_exit)
    skipped = [outcome for outcome in outcomes if outcome.ending is Ending.SKIPPED]
    if not skipped:
        return Verdict(Judgement.PASSED)
    if len(skipped) < len(outcomes):
        return _disagreement(skipped, [outcome for outcome in outcomes if outcome not in skipped])
    reasons = dict.fromkeys(outcome.receipt.reason for outcome in skipped if outcome.receipt)
    return Verdict(Judgement.SKIPPED, "; ".join(reasons))


def _acceptable(expected_exit: int | None, any_exit: bool) -> Callable[[Outcome], bool]:
    def acceptable(outcome: Outcome) -> bool:
        if outcome.ok:
            return True
        if outcome.receipt is not None or outcome.ending in (Ending.TIMED_OUT, Ending.STOPPED):
            return False
        return any_exit or (expected_exit is not None and outcome.exit_code == expected_exit)

    return acceptable


def _is_consequence(outcome: Outcome) -> bool:
    if outcome.ending is Ending.STOPPED:
        return True
    return (
        outcome.ending is Ending.FAILED
        and outcome.receipt is not None
        and bool(_PEER_IS_GONE.search(outcome.receipt.reason + outcome.receipt.trace))
    )


def _failure(bad: Sequence[Outcome], world_size: int, expected_exit: int | None) -> Verdict:
    # A death is reaped a little after the peers notice it, so what a failure says counts for more than when it was
    # said.
    own = sorted((o for o in bad if not _is_consequence(o)), key=lambda o: o.time_s)
    if not own:
        own = sorted(bad, key=lambda o: (o.ending is Ending.STOPPED, o.time_s))[:1]
    victims = tuple(o.rank for o in bad if o not in own)
    if all(o.ending is Ending.TIMED_OUT for o in own):
        return _hang(own, victims, world_size)
    first = own[0]
    expectation = f" (expected exit code {expected_exit})" if expected_exit is not None else ""
    alike = [o.rank for o in own if o.describe() == first.describe()]
    how = first.describe() if len(alike) == 1 else re.sub("^was ", "were ", first.describe())
    summary = f"{ranks_phrase(alike)} of {world_size} {how}{expectation}"
    others = [o.rank for o in own if o.rank not in alike]
    if others:
        summary += (
            f"; {ranks_phrase(others)} went wrong in {'a way of its' if len(others) == 1 else 'ways of their'} own"
        )
    return Verdict(Judgement.FAILED, summary, tuple(o.rank for o in own), victims)


def _hang(hung: Sequence[Outcome], victims: tuple[int, ...], world_size: int) -> Verdict:
    """Judge a world that ran out of time: if the ranks' collectives tell who kept whom waiting, those are to blame."""
    mismatch = first_mismatch({o.rank: read_record(o.collectives) for o in hung if o.collectives})
    ranks = [o.rank for o in hung]
    guilty = [rank for rank in mismatch.ranks if rank in ranks] if mismatch else []
    summary = f"{ranks_phrase(ranks)} of {world_size} timed out"
    if guilty:
        summary += f"; look at {ranks_phrase(guilty)} first"
        victims += tuple(rank for rank in ranks if rank not in guilty)
    return Verdict(Judgement.FAILED, summary, tuple(guilty or ranks), victims)


def _disagreement(skipped: Sequence[Outcome], others: Sequence[Outcome]) -> Verdict:
    reason = skipped[0].receipt.reason if skipped[0].receipt else ""
    summary = (
        f"the ranks disagree on skipping: {ranks_phrase([o.rank for o in skipped])} skipped ({reason}), "
        f"{ranks_phrase([o.rank for o in others])} did not. Make the condition the same on every rank."
    )
    return Verdict(Judgement.FAILED, summary, tuple(o.rank for o in skipped))
