"""The judgement over all ranks of a world, the text of its report, and checks that no rank escapes it. No I/O.

Note [Judged once]
~~~~~~~~~~~~~~~~~~
A test can end without waiting for its ranks in many ways: a second start drops the first ranks, a replaced method runs
beside them, a skip ends the test while they run. So :func:`record_started` records each start of ranks, or of a test on
ranks that live on, until a caller takes their outcomes; a test that ends before that has failed. The cleanup of each
base class calls :func:`check`, and so does the runner with each result.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from textwrap import indent

from torch_ext.world.blame import blame_absent, find_blame, find_disagreement
from torch_ext.world.outcome import (
    Ending,
    Mismatch,
    Outcome,
    disagreement,
    may_be_expected,
    ran_out_of_time,
    read_record,
)
from torch_ext.world.wording import FATAL, left_behind, ranks_by, ranks_phrase, without_ranks

# Messages of gloo, TensorPipe, NCCL and stores about a peer that is gone: consequences of another rank's end.
_PEER_IS_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused|reset|lost)|socket (is )?closed"
    r"|\beof\b|remote process (has )?exited|peer (is )?gone|recvValue failed|failed to recv|ncclRemoteError|pipe closed"
    r"|test termination event|\(process \d+\) (has )?ended\b"
    r"|has (destroyed|aborted) the group and (takes no part|sends nothing more)",
    re.IGNORECASE,
)

_BARRIER = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
# Messages about a peer that has left, of simccl's transfers and of symmetric memory's signals. The flight record has
# neither, and the receiver's call may be over by the time it waits for the device.
_SENDER_LEFT = re.compile(
    r"\brank (\d+) (?:has (?:destroyed|aborted) the group and sends nothing more|\(process \d+\) has ended\. Rank \d)"
)


class Judgement(Enum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Verdict:
    """The judgement over a world."""

    judgement: Judgement
    summary: str = ""  # one line that names the guilty rank of a failure, or the reason of a skip
    culprits: tuple[int, ...] = ()  # ranks that failed for their own reason, the first one first
    victims: tuple[int, ...] = ()  # ranks that failed because of the culprits
    collectives: str = ""  # a sentence about the first collective at which the ranks diverge, if any
    is_cause: bool = False  # the summary says what the ranks did to each other, rather than what one raised


@dataclass(frozen=True)
class WorldReport:
    """The data of a failure's report: an outcome per rank, the verdict, the seconds from the start of the ranks to the
    end of the last one (``took_s``), and paragraphs of the test, shown last (``details``).
    """

    outcomes: tuple[Outcome, ...]
    verdict: Verdict
    took_s: float
    details: tuple[str, ...] = ()


def judge(outcomes: Sequence[Outcome], expected_exit: int | None = None, any_exit: bool = False) -> Verdict:
    """Judge a world. It passes only if every rank's receipt says so; a world without ranks is skipped.

    Ranks without a receipt may end with ``expected_exit`` (negative for a signal) or, with ``any_exit``, in any way.
    """
    if not outcomes:
        return Verdict(Judgement.SKIPPED, "no rank was started, because the test's world_size is 0")

    def excused(outcome: Outcome) -> bool:
        may_end = outcome.receipt is None and not outcome.was_stopped
        return may_end and (any_exit or (expected_exit is not None and outcome.exit_code == expected_exit))

    bad = [outcome for outcome in outcomes if not outcome.ok and not excused(outcome)]
    if bad:
        return _failure(outcomes, bad, expected_exit)
    skipped = [outcome for outcome in outcomes if outcome.ending is Ending.SKIPPED]
    if not skipped:
        return Verdict(Judgement.PASSED)
    if len(skipped) < len(outcomes):
        return _disagreement(skipped, [outcome for outcome in outcomes if outcome not in skipped])
    alike = [outcome for outcome in skipped if outcome.sub_tests == skipped[0].sub_tests]
    if len(alike) < len(skipped):
        return _disagreement(alike, [outcome for outcome in skipped if outcome not in alike])
    reasons = dict.fromkeys(outcome.receipt.reason for outcome in skipped if outcome.receipt)
    return Verdict(Judgement.SKIPPED, "; ".join(reasons))


def _is_consequence(outcome: Outcome) -> bool:
    if outcome.ending is Ending.STOPPED:
        return True
    failure = outcome.transport_failure
    return failure is not None and bool(_PEER_IS_GONE.search(failure.reason + failure.trace))


def _ran_out_of_time(outcome: Outcome) -> bool:
    """Whether the rank waited for absent peers, until a time limit or in a provable hang."""
    if outcome.ending in (Ending.TIMED_OUT, Ending.HUNG):
        return outcome.receipt is None or any(wait.transport for wait in outcome.waits)
    failure = outcome.transport_failure
    return failure is not None and ran_out_of_time(failure.reason)


def _failure(outcomes: Sequence[Outcome], bad: Sequence[Outcome], expected_exit: int | None) -> Verdict:
    if any(o.receipt is not None and o.receipt.is_expected for o in bad):
        bad = [o for o in bad if not may_be_expected([o])] or bad
    # Peers notice a death before the zygote reaps the rank, so a failure's message counts for more than its time.
    own = sorted((o for o in bad if not _is_consequence(o)), key=lambda o: o.time_s)
    acted = [o for o in own if not _ran_out_of_time(o)]
    skipped = [o for o in outcomes if o.ending is Ending.SKIPPED]
    if not own and skipped:
        return _disagreement(skipped, [o for o in outcomes if o not in skipped])
    disagree = [o for o in acted if o.transport_failure is not None and any(disagreement(o.reason))]
    found = find_blame(outcomes)
    cause = None
    if acted and acted[0] in disagree:
        cause = find_disagreement(disagree)
    elif not acted:
        waited = own or bad
        cause = _blame_by_transport(outcomes, waited) or found or _blame_nonwaiting(outcomes, waited)
    detail = found.sentence if found is not None else ""
    if cause is not None and cause.cause:
        guilty = cause.ranks or tuple(sorted(rank for ranks, _ in cause.calls for rank in ranks))
        victims = tuple(o.rank for o in bad if o.rank not in guilty)
        return Verdict(Judgement.FAILED, cause.cause, guilty, victims, "" if cause.differ else detail, is_cause=True)
    first = (acted or own or sorted(bad, key=lambda o: (o.ending is Ending.STOPPED, o.time_s)))[0]
    own = [*(acted or [first]), *(o for o in own if o not in acted and o is not first)]
    alike = [o.rank for o in own if without_ranks(o.describe()) == without_ranks(first.describe())]
    expectation = f" (expected exit code {expected_exit})" if expected_exit is not None else ""
    words = first.describe() if len(alike) == 1 else re.sub("^was ", "were ", first.describe())
    summary = f"{ranks_phrase(alike)} {words}{expectation}"
    others = [o.rank for o in own if o.rank not in alike]
    if others:
        summary += f"; {ranks_phrase(others)} failed in another way"
    culprits = (*alike, *others)
    return Verdict(Judgement.FAILED, summary, culprits, tuple(o.rank for o in bad if o.rank not in culprits), detail)


def _blame_by_transport(outcomes: Sequence[Outcome], waited: Sequence[Outcome]) -> Mismatch | None:
    """Blame the ranks that the transport names as the cause of the failures of ``waited``; None if it names none."""
    for outcome in waited:
        found = _BARRIER.search(outcome.reason)
        failure = outcome.transport_failure
        if found is None and failure is not None:
            found = _SENDER_LEFT.search(failure.reason)
        if found is not None:
            ranks = [int(rank) for rank in re.findall(r"\d+", found[1])]
            return blame_absent(outcomes, ranks, [o for o in waited if o.rank not in ranks])
    return None


def _blame_nonwaiting(outcomes: Sequence[Outcome], bad: Sequence[Outcome]) -> Mismatch | None:
    """Blame all ranks that did not wait, if all ranks in ``bad`` waited for unknown ranks; where these only learned
    that a connection was closed, only ranks that destroyed their group.
    """
    waited = [o for o in bad if o.ending is Ending.FAILED or any(wait.transport for wait in o.waits)]
    ranks = [o.rank for o in outcomes if o not in waited]
    found = blame_absent(outcomes, ranks, waited) if bad and ranks and len(waited) == len(bad) else None
    return found if found is not None and (found.sentence or not all(map(_is_consequence, bad))) else None


def _disagreement(skipped: Sequence[Outcome], others: Sequence[Outcome]) -> Verdict:
    reason = skipped[0].reason
    what = "".join(f" sub-test {name}" for name in skipped[0].sub_tests)
    first, rest = [o.rank for o in skipped], [o.rank for o in others]
    text = f"{ranks_phrase(first)} skipped{what} ({reason}), and {ranks_phrase(rest)} did not"
    if len(rest) < len(first):
        first, rest = rest, first
        text = f"{ranks_phrase(first)} did not skip{what}, and {ranks_phrase(rest)} did ({reason})"
    return Verdict(Judgement.FAILED, f"{text}: make the condition the same on every rank", tuple(first))


_unjudged: dict[int, tuple[object, int]] = {}  # by the identity of the owner, which stays alive with this


class UnjudgedRanksError(AssertionError):
    """A test has ended, and no caller has taken the outcomes of its ranks."""


def record_started(owner: object, ranks: int) -> None:
    """Record that ``owner``, such as a world, has started a test on ``ranks`` ranks."""
    if ranks:
        _unjudged[id(owner)] = owner, ranks


def record_judged(owner: object) -> None:
    """Record that a caller takes the outcomes of the ranks of ``owner``."""
    _unjudged.pop(id(owner), None)


def check() -> None:
    """Raise UnjudgedRanksError if no caller has taken the outcomes of some ranks; forget these ranks."""
    left = [ranks for _, ranks in _unjudged.values()]
    _unjudged.clear()
    if left:
        raise UnjudgedRanksError(
            f"{ranks_phrase(range(max(left)))} ran and this test ended without waiting for them, so it has not passed. "
            "Start the ranks once in a test, skip before they start, and leave the test method of the instance as it "
            "is: it waits for them."
        )


_REMEDY = "Write it as a plain function, or in a subclass of unittest.IsolatedAsyncioTestCase as `async def`."
_FIXTURE_REMEDY = (
    "Write it as a plain function. unittest awaits asyncSetUp() and asyncTearDown() of IsolatedAsyncioTestCase alone."
)
_sound: set[type] = set()
_FIXTURES = ("setUpClass", "setUp", "tearDown", "tearDownClass")


def check_ran(returned: object, name: str) -> None:
    """Raise TypeError if function ``name``, whose call returned ``returned``, has not run its body.

    Calling an ``async def`` function or a generator function only returns an object to await or iterate. Closes that
    object.

    >>> check_ran(None, "test_a")
    >>> try:
    ...     check_ran((number for number in range(3)), "test_a")
    ... except TypeError as error:
    ...     print(str(error).partition(". ")[0])
    test_a() returned a generator, so its body has not run
    """
    kind = _kind(returned, _RESULTS).format(type(returned).__name__)
    if not kind:
        return
    if inspect.iscoroutine(returned) or inspect.isgenerator(returned):
        returned.close()  # otherwise Python later warns about a coroutine that was never awaited
    remedy = _FIXTURE_REMEDY if name.startswith(("setUp", "tearDown")) else _REMEDY
    raise TypeError(f"{name}() returned {kind}, so its body has not run. {remedy}")


def check_fixtures(cls: type) -> None:
    """Raise TypeError if a fixture of test class ``cls`` or of a base is an ``async def`` or generator function.

    Inspects definitions, because a call such as ``super().setUpClass()`` drops its result.
    """
    if cls in _sound:
        return
    for base in cls.__mro__:
        for name in _FIXTURES:
            found = vars(base).get(name)
            kind = _kind(getattr(found, "__func__", found), _DEFINITIONS)
            if kind:
                raise TypeError(f"{name}() of {base.__name__} is {kind}, so calling it runs nothing. {_FIXTURE_REMEDY}")
    _sound.add(cls)


_DEFINITIONS: dict[Callable[[object], bool], str] = {
    inspect.iscoroutinefunction: "`async def`",
    inspect.isasyncgenfunction: "an asynchronous generator function",
    inspect.isgeneratorfunction: "a generator function",
}
_RESULTS: dict[Callable[[object], bool], str] = {
    inspect.isgenerator: "a generator",
    inspect.isasyncgen: "an asynchronous generator",
    inspect.iscoroutine: "a coroutine",
    inspect.isawaitable: "an awaitable ({})",
}


def _kind(value: object, kinds: Mapping[Callable[[object], bool], str]) -> str:
    return next((words for is_kind, words in kinds.items() if is_kind(value)), "")


_CAUSE = (FATAL, "terminate called", "Windows fatal exception:")
_OUTPUT_LINES = 20
_MARGIN = 4 * " "
_COLLECTIVES = 3
# Report the delay of a rank that timed out if it has waited for a core for this share of its time.
_DELAYED = 0.25


class WorldFailure(RuntimeError):
    """A test failed in its ranks. ``report`` has the outcomes; ``str()`` renders it."""

    def __init__(self, report: WorldReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return render(self.report)


def render(report: WorldReport) -> str:
    """Return the text of a failed world: the verdict, every rank's ending, tracebacks and output."""
    outcomes, verdict = report.outcomes, report.verdict
    parts = [verdict.summary]
    if verdict.collectives:
        parts.append(f"Collectives: {verdict.collectives}.")
    parts.append(_endings(outcomes, verdict, report.took_s))
    failed = ranks_by((name, o.rank) for o in outcomes if o.ending is Ending.FAILED for name in o.sub_tests)
    if failed:
        lines = (f"{_MARGIN}{name} on {ranks_phrase(ranks)}" for name, ranks in failed.items())
        parts.append("\n".join(("Sub-tests that failed:", *lines)))
    if any(_delay(outcome, report.took_s) for outcome in outcomes):
        parts.append("This machine was overloaded: run fewer tests at once (-j, --slots), or raise --timeout.")
    if any(outcome.out_of_memory for outcome in outcomes):
        parts.append(
            "The kernel killed processes for lack of memory while these ranks ran: use fewer ranks "
            "at once, smaller tensors on the host, or --memory, which bounds each simulated device."
        )
    parts += [*_by_rank(outcomes, verdict), *report.details]
    return "\n\n".join(parts)


def _by_rank(outcomes: Sequence[Outcome], verdict: Verdict) -> list[str]:
    """Return tracebacks, stacks and output, culprits first, each distinct text once."""
    in_order = sorted(outcomes, key=lambda o: (o.rank not in verdict.culprits, o.time_s))
    first = next((outcome for outcome in outcomes if outcome.rank in verdict.culprits[:1]), None)
    is_known = first is not None and not first.was_stopped  # then peers that waited show only where

    def trace(outcome: Outcome) -> str:
        told = outcome.transport_failure and (outcome.rank in verdict.victims or verdict.is_cause)
        return outcome.receipt.trace.rstrip() if outcome.receipt and not told else ""

    texts: dict[str, Callable[[Outcome], str]] = {
        "Traceback": trace,
        "Stacks": lambda o: "" if is_known and o.ending is Ending.STOPPED else o.stacks.rstrip(),
        "Output": lambda o: "\n".join(end_of_output(o.output, died=o.ending is Ending.KILLED)),
    }
    parts = []
    for title, text_of in texts.items():
        grouped: dict[str, tuple[list[int], str]] = {}
        for outcome in in_order:
            if text := text_of(outcome):
                # Output may contain numbers that look like ranks: compare it literally.
                key = text if title == "Output" else without_ranks(text)
                grouped.setdefault(key, ([], text))[0].append(outcome.rank)
        parts += [f"{title} of {ranks_phrase(ranks)}:\n{indent(text, _MARGIN)}" for ranks, text in grouped.values()]
    return parts


def _endings(outcomes: Sequence[Outcome], verdict: Verdict, took_s: float) -> str:
    lines = [f"What each rank did in {took_s:.1f} s:"]
    for outcome in outcomes:
        word = "too early" if outcome.ending is Ending.PASSED else "first"
        role = f"  <- {word}" if outcome.rank in verdict.culprits[:1] and len(outcomes) > 1 else ""
        because = "  (because of that)" if outcome.rank in verdict.victims and outcome.ending is Ending.FAILED else ""
        lines.append(f"  {outcome.label} {outcome.describe()}{role}{because}")
        lines += [f"    {left_behind(each)}" for each in outcome.left_behind]
        lines += [f"    was in {wait.description}" for wait in outcome.waits if outcome.ending is not Ending.FAILED]
        if delay_s := _delay(outcome, took_s):
            lines.append(f"    waited for a core for {delay_s:.1f} s of that time")
        record = read_record(outcome.collectives)
        lines += [f"    {'called' if each.finished else 'was in'} {each}" for each in record[-_COLLECTIVES:]]
    return "\n".join(lines)


def _delay(outcome: Outcome, took_s: float) -> float:
    """Return the time for which a rank that timed out has waited for a core, in seconds; 0 if negligible."""
    return outcome.delayed_s if outcome.ending is Ending.TIMED_OUT and outcome.delayed_s >= _DELAYED * took_s else 0.0


def end_of_output(text: str, *, died: bool) -> list[str]:
    """Return the last lines of a process's output, below the number of omitted lines. If the process ``died``, its
    output is the only evidence: return more lines, and the cause above the stacks.
    """
    lines = text.rstrip().splitlines()
    most = 3 * _OUTPUT_LINES if died else _OUTPUT_LINES
    if len(lines) <= most:
        return lines
    # faulthandler writes the cause first, then stacks that may be long.
    cause = [line for line in lines[:-most] if line.startswith(_CAUSE)][-1:] if died else []
    return [*cause, f"... {len(lines) - most - len(cause)} lines before these", *lines[-most:]]
