"""The judgement over all ranks of a world. Pure functions of outcomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from torch_ext.world.blame import find_blame
from torch_ext.world.outcome import Ending, Outcome
from torch_ext.world.phrases import ranks_phrase, without_ranks
from torch_ext.world.protocol import Phase
from torch_ext.world.transport_errors import ran_out_of_time

__all__ = ["Judgement", "Verdict", "WorldReport", "judge"]

# How transports say that a peer is gone: gloo, TensorPipe, NCCL and the stores. Such a failure is a consequence if
# another rank ended badly for a reason of its own.
_PEER_IS_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused|reset|lost)|socket (is )?closed"
    r"|\beof\b|remote process (has )?exited|peer (is )?gone|recvValue failed|failed to recv|ncclRemoteError|pipe closed"
    r"|test termination event|\(process \d+\) (has )?ended\b"
    r"|has (destroyed|aborted) the group and (takes no part|sends nothing more)",
    re.IGNORECASE,
)

_BARRIER = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
# How simccl says who a message can no longer come from. No collective tells it, and where a device is waited for, the
# call that asked for the message is over.
_SENDER_LEFT = re.compile(r"\brank (\d+) has (?:destroyed|aborted) the group and sends nothing more")


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
        return _failure(outcomes, bad, expected_exit)
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
        if outcome.receipt is not None or outcome.ending in (Ending.TIMED_OUT, Ending.HUNG, Ending.STOPPED):
            return False
        return any_exit or (expected_exit is not None and outcome.exit_code == expected_exit)

    return acceptable


def _is_consequence(outcome: Outcome) -> bool:
    if outcome.ending is Ending.STOPPED:
        return outcome.phase is not Phase.ABORTING
    failure = outcome.transport_failure
    return failure is not None and bool(_PEER_IS_GONE.search(failure.reason + failure.trace))


def _ran_out_of_time(outcome: Outcome) -> bool:
    """Whether the rank waited for others in vain, until its own limit or the test's, or provably for ever."""
    if outcome.ending in (Ending.TIMED_OUT, Ending.HUNG):
        return outcome.receipt is None
    failure = outcome.transport_failure
    return failure is not None and ran_out_of_time(failure.reason)


def _failure(outcomes: Sequence[Outcome], bad: Sequence[Outcome], expected_exit: int | None) -> Verdict:
    # A death is reaped a little after the peers notice it, so what a failure says counts for more than when it was
    # said.
    own = sorted((o for o in bad if not _is_consequence(o)), key=lambda o: o.time_s)
    if not own:
        skipped = [o for o in outcomes if o.ending is Ending.SKIPPED]
        if skipped:
            return _disagreement(skipped, [o for o in outcomes if o not in skipped])
        own = sorted(bad, key=lambda o: (o.ending is Ending.STOPPED, o.time_s))[:1]
        blamed = _blamed(outcomes, own)
        if blamed and not set(blamed) & {o.rank for o in bad}:
            return _hang(outcomes, bad, own)  # somebody left before the others had met it
    if all(_ran_out_of_time(o) for o in own):
        return _hang(outcomes, bad, own)
    own = [o for o in own if not _ran_out_of_time(o)] + [o for o in own if _ran_out_of_time(o)]
    victims = tuple(o.rank for o in bad if o not in own)
    first, world_size = own[0], len(outcomes)
    expectation = f" (expected exit code {expected_exit})" if expected_exit is not None else ""
    alike = [o.rank for o in own if without_ranks(o.describe()) == without_ranks(first.describe())]
    summary = f"{ranks_phrase(alike)} of {world_size} {_plural(first.describe(), alike)}{expectation}"
    others = [o.rank for o in own if o.rank not in alike]
    if others:
        summary += (
            f"; {ranks_phrase(others)} went wrong in {'a way of its' if len(others) == 1 else 'ways of their'} own"
        )
    return Verdict(Judgement.FAILED, summary, tuple(o.rank for o in own), victims)


def _hang(outcomes: Sequence[Outcome], bad: Sequence[Outcome], own: Sequence[Outcome]) -> Verdict:
    """Judge a world in which ranks waited in vain; see Note [Who is to blame for a hang]."""
    guilty = list(_guilty(outcomes, own))
    ranks = [o.rank for o in own]
    alike = [o.rank for o in own if o.describe() == own[0].describe()]
    summary = f"{ranks_phrase(alike)} of {len(outcomes)} {_plural(own[0].describe(), alike)}"
    if guilty and set(guilty) != set(ranks):
        summary += f"; look at {ranks_phrase(guilty)} first"
    victims = tuple(o.rank for o in bad if guilty and o.rank not in guilty)
    return Verdict(Judgement.FAILED, summary, tuple(guilty or ranks), victims)


def _guilty(outcomes: Sequence[Outcome], own: Sequence[Outcome]) -> tuple[int, ...]:
    blamed = _blamed(outcomes, own)
    if blamed:
        return blamed
    # They waited for others, and nothing says for whom: then for all that did not wait.
    waited = {o.rank for o in own if o.ending is Ending.FAILED or any(wait.transport for wait in o.waits)}
    if len(waited) < len(own):
        return ()
    return tuple(o.rank for o in outcomes if o.rank not in waited)


def _blamed(outcomes: Sequence[Outcome], own: Sequence[Outcome]) -> tuple[int, ...]:
    """Return the ranks that the transport names as the cause of what ``own`` failed with, or those that never came."""
    for outcome in own:
        found = _BARRIER.search(_reason(outcome))
        failure = outcome.transport_failure
        if found is None and failure is not None:
            found = _SENDER_LEFT.search(failure.reason)
        if found is not None:
            return tuple(int(rank) for rank in re.findall(r"\d+", found[1]))
    blame = find_blame(outcomes)
    return blame.ranks if blame is not None else ()


def _reason(outcome: Outcome) -> str:
    return outcome.receipt.reason if outcome.receipt is not None else ""


def _plural(words: str, ranks: Sequence[int]) -> str:
    return words if len(ranks) == 1 else re.sub("^was ", "were ", words)


def _disagreement(skipped: Sequence[Outcome], others: Sequence[Outcome]) -> Verdict:
    reason = skipped[0].receipt.reason if skipped[0].receipt else ""
    summary = (
        f"the ranks disagree on skipping: {ranks_phrase([o.rank for o in skipped])} skipped ({reason}), "
        f"{ranks_phrase([o.rank for o in others])} did not. Make the condition the same on every rank."
    )
    return Verdict(Judgement.FAILED, summary, tuple(o.rank for o in skipped))
